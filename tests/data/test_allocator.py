"""The allocator's settings are taken, in a process of its own."""

from __future__ import annotations

import subprocess
import sys


def test_glibc_takes_the_settings() -> None:
    code = (
        "import platform; from fsdata.allocator import keep_freed_memory; "
        "assert keep_freed_memory(300 << 20) == (platform.libc_ver()[0] == 'glibc')"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
