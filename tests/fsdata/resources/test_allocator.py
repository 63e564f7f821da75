"""The allocator's settings are taken and keep memory small, in processes of their own."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

MIB = 1 << 20
GLIBC = platform.libc_ver()[0] == "glibc"

# four threads, one after the other, fill so many MiB and free them; none of them ends
_TURNS = """
import re, sys, threading
from fsdata.resources.malloc import keep_freed_memory

size = int(sys.argv[1])
keep_freed_memory(size << 20)
end = threading.Event()


def fill(filled):
    blocks = [bytearray(b"x") * (4 << 20) for _ in range(size // 4)]
    del blocks
    filled.set()
    end.wait()


for _ in range(4):
    filled = threading.Event()
    threading.Thread(target=fill, args=(filled,)).start()
    filled.wait()
end.set()
print(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1])
"""


def test_glibc_takes_the_settings() -> None:
    code = (
        "import platform; from fsdata.resources.malloc import keep_freed_memory; "
        "assert keep_freed_memory(300 << 20) == (platform.libc_ver()[0] == 'glibc')"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.skipif(not GLIBC, reason="the settings are glibc's")
def test_what_one_thread_freed_another_uses() -> None:
    """Each thread had a heap of its own: a mount took twice its `--buffer-size`."""

    def peak_bytes(size_mib: int) -> int:
        command = [sys.executable, "-c", _TURNS, str(size_mib)]
        return int(subprocess.run(command, check=True, capture_output=True).stdout) * 1024

    assert peak_bytes(64) - peak_bytes(4) < 80 * MIB
