"""Mounting and unmounting: by mount(2) as root, through fusermount3 as anyone else.

Called by the mount and umount commands. What can go wrong is the user's to put right, so every
failure is a ConfigError that names the thing and the remedy.

As root the flags are exactly what the options say (like mount(8): without `nosuid` and `nodev`,
set-uid programs and device nodes work) and everyone may enter (`allow_other`). fusermount3 always
adds `nosuid,nodev`, and `allow_other` needs `user_allow_other` in /etc/fuse.conf. The kernel checks
permissions (`default_permissions`) in both, unless the mount squashes.
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
import shutil
import socket
import stat
import subprocess
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Final, NamedTuple

from fsclient.fuse.mount.mount_options import MountOptions, parse_options
from fsclient.kernel.xattr_names import REMOUNTED_XATTR
from fsmeta.errors import ConfigError

FUSE_TYPE: Final = "fuse.slicefs"
DEVICE: Final = "/dev/fuse"
FUSE_CONF: Final = "/etc/fuse.conf"
MTAB: Final = "/etc/mtab"
FUSERMOUNT: Final = "fusermount3"
FUSERMOUNT_WAIT_S: Final = 60  # it only asks the kernel; longer means that something hangs
READAHEAD_KIB: Final = 1024  # measured: 512 to 1024 read fastest, 128 and 4096 half as fast
_MOUNT_NAMESPACE: Final = "mnt:["
_MNT_DETACH: Final = 2
_UMOUNT_NOFOLLOW: Final = 8
_MS_REMOUNT: Final = 32
_GIVEN_BACK: Final = frozenset(("user_id", "group_id"))  # by mount(8), from what it saw mounted

_libc: Final = ctypes.CDLL(None, use_errno=True)


class Mounted(NamedTuple):
    """A mount that waits to be served from `fd`."""

    fd: int
    mountpoint: str


class MountInfo(NamedTuple):
    """A line of /proc/self/mountinfo."""

    id: int
    device: str  # MAJOR:MINOR
    mountpoint: str
    fstype: str
    source: str


class MountHolder(NamedTuple):
    """A process that sees a mount."""

    pid: str  # or "self"
    name: str
    mountpoint: str  # as the process sees it

    @property
    def path(self) -> str:
        """The mount, as we can reach it."""
        return self.mountpoint if self.pid == "self" else f"/proc/{self.pid}/root{self.mountpoint}"

    def __str__(self) -> str:
        """What to do about it."""
        if self.pid == "self":
            return f"it is mounted on {self.mountpoint}, too: unmount that as well"
        return (
            f"process {self.pid} ({self.name}) has it on {self.mountpoint} in another mount "
            "namespace: unmount it there, or end what runs there"
        )


def mount(
    mountpoint: str, source: str, options: Iterable[str] = (), kernel_judges: bool = True
) -> Mounted:
    """Mount `source` (the volume's name) on the directory `mountpoint`.

    `kernel_judges`: it checks permissions before it asks (`default_permissions`).

    Raises: ConfigError.
    """
    parsed = parse_options(options)
    path = _checked_mountpoint(mountpoint)
    if os.geteuid() == 0:
        return Mounted(_mount_as_root(path, source, parsed, kernel_judges), path)
    return Mounted(_mount_as_user(path, source, parsed, kernel_judges), path)


def remount(mountpoint: str, options: Iterable[str]) -> None:
    """`mount -o remount`: change the kernel's flags of a mount, `ro` and the like; ours stay.

    Raises: ConfigError.
    """
    path = _without_asking(mountpoint)
    info = find_mount(mountpoint)
    if info is None or info.fstype != FUSE_TYPE:
        raise ConfigError(f"{path} is no mount of SliceFS")
    kept = [word for word in options if word.partition("=")[0] not in _GIVEN_BACK]
    flags = parse_options(kept).flags | _MS_REMOUNT
    arguments = (info.source.encode(), os.fsencode(path), FUSE_TYPE.encode())
    if _libc.mount(*arguments, ctypes.c_ulong(flags), None) != 0:
        number = ctypes.get_errno()
        why = "files are open for writing" if number == errno.EBUSY else os.strerror(number)
        raise ConfigError(f"can't remount {path}: {why}")
    with suppress(OSError):  # the serving client may be of another version
        os.getxattr(path, REMOUNTED_XATTR)


def umount(mountpoint: str, lazy: bool = False) -> None:
    """Unmount; `lazy` detaches at once and ends when no process uses it any more.

    Raises: ConfigError where it is busy or not a mount.
    """
    path = _without_asking(mountpoint)
    if os.geteuid() == 0:
        flags = _UMOUNT_NOFOLLOW | (_MNT_DETACH if lazy else 0)
        if _libc.umount2(os.fsencode(path), flags) != 0:
            raise _umount_error(path, ctypes.get_errno())
        return
    command = [_fusermount(), "-u", *(["-z"] if lazy else []), "--", path]
    done = subprocess.run(command, capture_output=True, check=False, timeout=FUSERMOUNT_WAIT_S)
    if done.returncode != 0:
        hint = f"; {_IN_USE.format(path=path)}" if b"busy" in done.stderr else ""
        raise ConfigError(f"can't unmount {path}: {_last_line(done.stderr)}{hint}")


def find_mount(mountpoint: str) -> MountInfo | None:
    """The topmost mount on `mountpoint`, without asking the file system itself."""
    path = _without_asking(mountpoint)
    found = None
    for info in _mounts("self"):
        if info.mountpoint == path:
            found = info
    return found


def real_path(mountpoint: str) -> str:
    """The path of a directory, links resolved; what is mounted there is not asked."""
    path = _without_asking(mountpoint)
    return path if find_mount(path) is not None else os.path.realpath(mountpoint)


def find_flags(mountpoint: str) -> tuple[str, ...]:
    """What /proc/self/mountinfo says of the topmost mount there: `rw`, `relatime` and the like."""
    path = _without_asking(mountpoint)
    found: tuple[str, ...] = ()
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as lines:
        for line in lines:
            if parse_mountinfo(line).mountpoint == path:
                fields = line.split()
                found = (*fields[5].split(","), *fields[-1].split(","))
    return found


def _mounts(pid: str) -> Iterator[MountInfo]:
    """The mounts that a process sees. Raises: OSError."""
    with open(f"/proc/{pid}/mountinfo", encoding="utf-8", errors="surrogateescape") as lines:
        yield from map(parse_mountinfo, lines)


def parse_mountinfo(line: str) -> MountInfo:
    """One line as proc(5) describes it; spaces and the like are octal escapes there."""
    fields = line.split()
    dash = fields.index("-")
    return MountInfo(
        int(fields[0]),
        fields[2],
        _unescape(fields[4]),
        fields[dash + 1],
        _unescape(fields[dash + 2]),
    )


def find_servers(info: MountInfo) -> list[int]:
    """The processes that may serve a mount, found without asking it: mostly one.

    None before Linux 6.11 or so, and where we may not look at it. More than one where a mount has
    gone and its client not yet: the number of the connection, which is all that we see, may have
    been given to another mount since.
    """
    found = []
    wanted = f"fuse_connection:\t{info.device.partition(':')[2]}\n"
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            for fd in os.listdir(f"/proc/{pid}/fd"):
                if os.readlink(f"/proc/{pid}/fd/{fd}") == DEVICE:
                    with open(f"/proc/{pid}/fdinfo/{fd}", encoding="ascii") as lines:
                        if wanted in lines:
                            found.append(int(pid))
                            break
        except OSError:
            continue  # it has ended, or is another user's
    return found


def find_holders(info: MountInfo) -> dict[int, MountHolder]:
    """Processes that see a file system, as far as we may look, by the ids of its mounts.

    A bind mount keeps it, and every mount namespace that was made meanwhile has a copy of its own:
    containers, services with PrivateMounts, unshare(1). Its device number may be given to another
    once it has gone: only ids that were there before are its own.
    """
    found: dict[int, MountHolder] = {}
    for pid in ("self", *filter(str.isdigit, os.listdir("/proc"))):
        try:
            for each in _mounts(pid):
                if each.device == info.device and each.id not in found:
                    with open(f"/proc/{pid}/comm", encoding="utf-8", errors="replace") as name:
                        found[each.id] = MountHolder(pid, name.read().strip(), each.mountpoint)
        except OSError:
            continue  # it has ended, or is another user's
    return found


def find_pins() -> list[str]:
    """What keeps mount namespaces in which no process runs, and all that is mounted there.

    That is open files, `/proc/PID/ns/mnt` as a rule, and places where one is mounted. A process
    must enter such a namespace to see what is mounted there.
    """
    inhabited: set[str] = set()
    held: dict[str, str] = {}
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            inhabited.add(os.readlink(f"/proc/{pid}/ns/mnt"))
            for fd in os.listdir(f"/proc/{pid}/fd"):
                link = os.readlink(f"/proc/{pid}/fd/{fd}")
                if link.startswith(_MOUNT_NAMESPACE) and link not in held:
                    with open(f"/proc/{pid}/comm", encoding="utf-8", errors="replace") as name:
                        held[link] = f"process {pid} ({name.read().strip()}) has it open"
        except OSError:
            continue  # it has ended, or is another user's
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as lines:
        for fields in map(str.split, lines):
            if fields[3].startswith(_MOUNT_NAMESPACE):
                held.setdefault(fields[3], f"it is mounted on {_unescape(fields[4])}")
    return [
        f"the mount namespace {link} may still have it, in which no process runs: {why}"
        for link, why in held.items()
        if link not in inhabited
    ]


def raise_readahead(mountpoint: str, kib: int = READAHEAD_KIB) -> bool:
    """Let the kernel read ahead `kib` KiB; False where we may not or it can't be found.

    Call after the session's `start`: INIT sets it back to at most what the kernel began with.
    """
    info = find_mount(mountpoint)
    if info is None:
        return False
    try:
        with open(f"/sys/class/bdi/{info.device}/read_ahead_kb", "w", encoding="ascii") as setting:
            setting.write(str(kib))
    except OSError:
        return False
    return True


def _checked_mountpoint(mountpoint: str) -> str:
    """Its absolute path. Raises: ConfigError where nothing can be mounted there."""
    held = find_mount(mountpoint)
    path = _without_asking(mountpoint) if held is not None else os.path.realpath(mountpoint)
    if held is None:
        held = find_mount(path)
    if held is not None and held.fstype == FUSE_TYPE:
        raise ConfigError(
            f"{path} is mounted already ({held.source}): `slicefs umount {path}` first"
        )
    if held is not None:
        raise ConfigError(
            f"{path} is a mount of {held.fstype}: mount on an empty directory instead"
        )
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist: `mkdir -p {path}` first") from None
    except OSError as error:
        raise ConfigError(f"can't mount on {path}: {error.strerror}") from error
    if not stat.S_ISDIR(mode):
        raise ConfigError(f"{path} is not a directory: mount on a directory")
    return path


def _without_asking(mountpoint: str) -> str:
    """Its real path, without touching it: a mount whose server is gone would not answer."""
    parent, name = os.path.split(os.path.abspath(mountpoint))
    return os.path.join(os.path.realpath(parent), name)


_JUDGES: Final = "default_permissions"


def _mount_as_root(path: str, source: str, options: MountOptions, judges: bool) -> int:
    fd = _open_device()
    words = [
        f"fd={fd},rootmode=40000,user_id=0,group_id=0",
        f"max_read={options.max_read_bytes}",
    ]
    if judges:
        words.append(_JUDGES)
    if options.allow_other is not False:
        words.append("allow_other")
    data = ",".join(words).encode()
    arguments = (source.encode(), os.fsencode(path), FUSE_TYPE.encode())
    if _libc.mount(*arguments, ctypes.c_ulong(options.flags), data) != 0:
        number = ctypes.get_errno()
        os.close(fd)
        raise _mount_error(path, number)
    return fd


def _open_device() -> int:
    try:
        return os.open(DEVICE, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        raise ConfigError(
            f"no {DEVICE}: `modprobe fuse`, or give the container the device"
        ) from None
    except OSError as error:
        raise ConfigError(f"can't open {DEVICE}: {error.strerror}") from error


def _mount_error(path: str, number: int) -> ConfigError:
    remedies = {
        errno.EPERM: "this root lacks CAP_SYS_ADMIN: run privileged, or as a user with fusermount3",
        errno.EBUSY: "it is busy: mount on another directory",
        errno.ENODEV: "the kernel has no FUSE: `modprobe fuse`",
    }
    return ConfigError(f"can't mount on {path}: {remedies.get(number, os.strerror(number))}")


_IN_USE: Final = "`fuser -vm {path}` shows by whom; --lazy detaches it anyway"


def _umount_error(path: str, number: int) -> ConfigError:
    remedies = {
        errno.EINVAL: "not a mount point",
        errno.ENOENT: "no such directory",
        errno.EBUSY: f"it is in use: {_IN_USE.format(path=path)}",
        errno.EPERM: "only root may",
    }
    return ConfigError(f"can't unmount {path}: {remedies.get(number, os.strerror(number))}")


def _mount_as_user(path: str, source: str, options: MountOptions, judges: bool) -> int:
    """Have fusermount3 mount, and take the descriptor that it sends over _FUSE_COMMFD."""
    if options.allow_other and not user_allow_other():
        raise ConfigError(
            f"allow_other: root must put `user_allow_other` in {FUSE_CONF}, or leave the option out"
        )
    if not os.path.exists(DEVICE):
        raise ConfigError(f"no {DEVICE}: `modprobe fuse`, or give the container the device")
    if not os.access(DEVICE, os.R_OK | os.W_OK):
        raise ConfigError(f"you may not open {DEVICE}: as root run `chmod 666 {DEVICE}`")
    if not os.path.exists(MTAB):
        raise ConfigError(
            f"no {MTAB}, without which {FUSERMOUNT} unmounts nothing: as root run "
            f"`ln -s /proc/self/mounts {MTAB}`"
        )
    words = [
        f"fsname={_escaped(source)}",
        f"subtype={FUSE_TYPE.partition('.')[2]}",
        f"max_read={options.max_read_bytes}",
        *options.words(),
    ]
    if judges:
        words.append(_JUDGES)
    if options.allow_other:
        words.append("allow_other")
    ours, theirs = socket.socketpair()
    with ours, theirs:
        command = [_fusermount(), "-o", ",".join(words), "--", path]
        done = subprocess.run(
            command,
            env={**os.environ, "_FUSE_COMMFD": str(theirs.fileno())},
            pass_fds=(theirs.fileno(),),
            capture_output=True,
            check=False,
            timeout=FUSERMOUNT_WAIT_S,
        )
        if done.returncode != 0:
            raise ConfigError(f"can't mount on {path}: {_last_line(done.stderr)}")
        return _received_fd(ours, path)


def _received_fd(channel: socket.socket, path: str) -> int:
    _, fds, _, _ = socket.recv_fds(channel, 1, 1)
    if not fds:
        raise ConfigError(f"can't mount on {path}: {FUSERMOUNT} sent no descriptor")
    os.set_inheritable(fds[0], False)
    return fds[0]


def user_allow_other() -> bool:
    """Whether /etc/fuse.conf lets users give others access."""
    try:
        with open(FUSE_CONF, encoding="utf-8") as lines:
            return any(line.strip() == "user_allow_other" for line in lines)
    except OSError:
        return False


def _fusermount() -> str:
    found = shutil.which(FUSERMOUNT)
    if found is None:
        raise ConfigError(f"no {FUSERMOUNT}: install the package fuse3, or run as root")
    return found


def _escaped(source: str) -> str:
    return source.replace("\\", "\\\\").replace(",", "\\,")


def _unescape(field: str) -> str:
    """Undo the kernel's octal escapes, which stand for bytes of the path."""
    raw = os.fsencode(field)
    return os.fsdecode(re.sub(rb"\\([0-7]{3})", lambda match: bytes((int(match[1], 8),)), raw))


def _last_line(output: bytes) -> str:
    lines = output.decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else "no reason given"
