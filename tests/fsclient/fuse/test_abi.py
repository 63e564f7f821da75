"""Our structs and constants against the C header, where a compiler and the header are."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from fsclient.fuse.wire import abi, protocol
from fsclient.fuse.wire.abi import SIZES, align8
from fsclient.fuse.wire.protocol import Init, Opcode

HEADER = Path("/usr/include/linux/fuse.h")
# What came after the headers of common distributions: looked at from these minors on.
STRUCT_MINORS = {
    "fuse_statx_in": 39,
    "fuse_statx_out": 39,
    "fuse_backing_map": 40,
    "fuse_copy_file_range_out": 45,
}
OPCODE_MINORS = {Opcode.STATX: 39, Opcode.COPY_FILE_RANGE_64: 45}
NOTIFY_MINORS = {"NOTIFY_RESEND": 40, "NOTIFY_INC_EPOCH": 44}
PREFIXES = ("FATTR_", "FOPEN_")
CONSTANTS = (
    "GETATTR_FH",
    "WRITE_CACHE",
    "WRITE_KILL_SUIDGID",
    "OPEN_KILL_SUIDGID",
    "FSYNC_FDATASYNC",
)
OFFSETS = {  # of the fields behind padding, where a wrong `x` would show
    "fuse_setattr_in": {"uid": 76, "atimensec": 56, "mode": 68},
    "fuse_init_out": {"max_pages": 28, "flags2": 32},
    "fuse_in_header": {"total_extlen": 36},
    "fuse_write_in": {"write_flags": 20, "flags": 32},
    "fuse_flush_in": {"lock_owner": 16},
    "fuse_fallocate_in": {"mode": 24},
    "fuse_lseek_in": {"whence": 16},
    "fuse_attr": {"blksize": 80, "rdev": 76, "mode": 60},
    "fuse_kstatfs": {"namelen": 44, "frsize": 48},
    "fuse_direntplus": {"dirent": 128},
}


def checks() -> list[str]:
    """C static assertions, guarded by the header's version where they must be."""
    lines = []
    for name, (_, size) in SIZES.items():
        line = f"CHECK(sizeof(struct {name}) == {size});"
        lines.append(since(STRUCT_MINORS.get(name, 0), line))
    for struct, fields in OFFSETS.items():
        lines += [f"CHECK(offsetof(struct {struct}, {f}) == {at});" for f, at in fields.items()]
    for opcode in Opcode:
        line = f"CHECK(FUSE_{opcode.name} == {opcode.value});"
        lines.append(since(OPCODE_MINORS.get(opcode, 0), line))
    for flag in Init:
        lines.append(if_defined(f"FUSE_{flag.name}", flag.value & 0xFFFFFFFFFFFFFFFF))
    for name in ("DEV_IOC_BACKING_OPEN", "DEV_IOC_BACKING_CLOSE"):
        lines.append(if_defined(f"FUSE_{name}", getattr(abi, name)))
    for name, value in vars(protocol).items():
        if name.startswith(PREFIXES):
            lines.append(if_defined(name, value))
        elif name in (*CONSTANTS, "EXPIRE_ONLY"):
            lines.append(if_defined(f"FUSE_{name}", value))
        elif name.startswith("NOTIFY_"):
            lines.append(since(NOTIFY_MINORS.get(name, 0), f"CHECK(FUSE_{name} == {value});"))
    return lines


def since(minor: int, line: str) -> str:
    return f"#if FUSE_KERNEL_MINOR_VERSION >= {minor}\n{line}\n#endif"


def if_defined(name: str, value: int) -> str:
    # Through 32 bits: some flags are plain ints in C, and bit 31 would be its sign.
    return f"#ifdef {name}\nCHECK(((unsigned long long){name} ^ {value}ULL) == 0);\n#endif"


@pytest.mark.skipif(
    shutil.which("gcc") is None or not HEADER.exists(), reason="needs gcc and linux/fuse.h"
)
def test_matches_the_c_header(tmp_path: Path) -> None:
    source = tmp_path / "check.c"
    source.write_text(
        "#include <stddef.h>\n#include <linux/ioctl.h>\n#include <linux/fuse.h>\n"
        "#define CHECK(what) _Static_assert(what, #what)\n" + "\n".join(checks()) + "\n"
    )
    done = subprocess.run(
        ["gcc", "-fsyntax-only", str(source)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_every_flag_is_one_bit() -> None:
    assert all(flag.value.bit_count() == 1 for flag in Init)


def test_align8() -> None:
    assert [align8(n) for n in (0, 1, 7, 8, 9)] == [0, 8, 8, 8, 16]
