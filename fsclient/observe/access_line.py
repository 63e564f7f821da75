"""One line of the access log, written and read.

    2026.11.26 19:19:13.003330 [uid:0,gid:0,pid:4403,req:86] lookup (1,b'name'): OK (17) <0.000083>

Time of the answer in local time; the caller; `req` is the kernel's id of the request, as in log
records; the verb with its inode and arguments; the outcome; seconds. The form is that of JuiceFS.
Data of files and values of xattrs are never shown, only their lengths. Pure.
"""

from __future__ import annotations

import errno
import re
from datetime import datetime
from typing import Any, Final, NamedTuple

from fsclient.fuse.dispatch.dispatch import operation_name, operations
from fsclient.fuse.session.tap import ServedRequest
from fsclient.fuse.wire import abi
from fsclient.fuse.wire.protocol import Opcode
from fsclient.kernel.later import Later

ARGUMENT_MAX: Final = 300  # characters of a name that are shown
_TABLE: Final = operations(setxattr_ext=True)
_MAKES_ENTRY: Final = frozenset(
    (Opcode.LOOKUP, Opcode.CREATE, Opcode.MKNOD, Opcode.MKDIR, Opcode.SYMLINK, Opcode.LINK)
)
_LINE: Final = re.compile(
    r"\S+ \S+ \[uid:(\d+),gid:(\d+),pid:(\d+),req:(\d+)\] (\w+) \((\d+)(.*)\): "
    r"(\w+)(?: \((\d+)\))? <(\d+\.\d+)>"
)
_NAME: Final = re.compile(r""",(b(?:'[^']*'|"[^"]*"))""")


class Line(NamedTuple):
    """A line, parsed."""

    uid: int
    gid: int
    pid: int
    request: int
    verb: str
    ino: int
    name: str  # the first name among the arguments; "" where there is none
    outcome: str  # OK, LATER or an errno's name
    number: int  # bytes moved, or the inode that an entry leads to; 0 else
    seconds: float


def line_of(request: ServedRequest, now_ns: int) -> bytes:
    """The line about a request that was answered at `now_ns`."""
    second, rest = divmod(now_ns, 10**9)
    time = f"{datetime.fromtimestamp(second):%Y.%m.%d %H:%M:%S}.{rest // 1000:06}"
    caller = request.caller
    who = f"uid:{caller.uid},gid:{caller.gid},pid:{caller.pid},req:{request.unique}"
    what = f"{operation_name(request.opcode)} ({request.ino}{_arguments(request)})"
    return f"{time} [{who}] {what}: {_outcome(request)} <{request.seconds:.6f}>\n".encode()


def parse_line(text: str) -> Line | None:
    """What a line says; None where it is none, as a comment."""
    found = _LINE.match(text)
    if found is None:
        return None
    uid, gid, pid, unique, verb, ino, arguments, outcome, number, seconds = found.groups()
    name = _NAME.search(arguments)
    return Line(
        int(uid),
        int(gid),
        int(pid),
        int(unique),
        verb,
        int(ino),
        "" if name is None else name[1][2:-1],
        outcome,
        int(number or 0),
        float(seconds),
    )


def _arguments(request: ServedRequest) -> str:
    operation = _TABLE[request.opcode]
    if operation is None:
        return ""
    try:
        arguments = operation.fields(request.view, request.end)
    except Exception:  # noqa: BLE001  (of a kernel that we know less of: the log does without)
        return ",?"
    hidden = 1 if request.opcode == Opcode.SETXATTR else -1  # where the value is
    shown = (_argument(each, at == hidden) for at, each in enumerate(arguments))
    return "".join(f",{each}" for each in shown)


def _argument(value: Any, hidden: bool) -> str:
    if isinstance(value, memoryview) or hidden:
        return f"{len(value)} bytes"
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        fields = value._asdict().items()
        return " ".join(f"{name}={each}" for name, each in fields if each not in (None, False))
    return repr(value)[:ARGUMENT_MAX]


def _outcome(request: ServedRequest) -> str:
    answer = request.answer
    if isinstance(answer, int):
        return errno.errorcode.get(answer, f"E{answer}")
    if isinstance(answer, Later):
        return "LATER"
    if request.opcode in _MAKES_ENTRY and isinstance(answer, bytes):
        return f"OK ({int.from_bytes(answer[:8], 'little')})"
    if request.opcode == Opcode.READ and answer is not None:
        size = len(answer) if isinstance(answer, bytes) else sum(map(len, answer))
        return f"OK ({size})"
    if request.opcode == Opcode.WRITE and isinstance(answer, bytes):
        return f"OK ({abi.WRITE_OUT.unpack_from(answer)[0]})"
    return "OK"
