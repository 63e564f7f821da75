"""The command's side of `slicefs warmup`: finds files, asks their mounts, and adds up.

The command walks and the mount fetches (`fsclient/control/warmup_server`). Requests are under way
for as many parts of files as there are threads, a part being a chunk of a large file; nothing is
remembered of files that are done, so memory does not grow with their number.

Threading: `WarmupRun.run` is called once, and has threads of its own; what they share is guarded by
`_cond`. `done` is called by one of them at a time.
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from fsclient.control.warmup_server import WARM_XATTR, Why
from fsclient.kernel.xattr_names import ATTACHED_XATTR
from fsmeta.errors import ConfigError
from fsmeta.runtime import Runtime
from fsmeta.types import CHUNK_BYTES

QUEUED: Final = 4  # parts that wait for each thread
BUSY_S: Final = 0.05  # between two tries where a mount has no room for more
BUSY_S_MAX: Final = 120.0  # then it is stuck
READ_BYTES: Final = 1 << 20  # the kernel's largest request
BLOCK_UNIT: Final = 512  # of st_blocks, stat(2)
DEAD: Final = (errno.ENOTCONN, errno.ECONNABORTED)
_GONE: Final = (errno.ENOENT, errno.ESTALE)
WHY: Final[Mapping[str, str]] = {
    Why.ROOM: "no room on the cache disk",
    Why.DISK: "its cache disk is put aside",
    Why.CHANGED: "its object has changed: run `slicefs attach` again",
    Why.BUCKET: "this mount can't read its bucket: see the mount's keys",
    Why.MISSING: "an object is missing: see `slicefs fsck`",
    Why.DAMAGED: "an object is damaged: see `slicefs scrub`",
}
NO_MEMORY: Final = "the mount has no memory for it"


class CachedShare(NamedTuple):
    """A file to be warmed."""

    path: str
    size: int
    dense: bool  # not much of it is holes
    device: int


class WarmedFile(NamedTuple):
    """What became of a file; `counts` are those of the mount's answers, added up."""

    found: CachedShare
    counts: dict[str, int]
    disks: dict[str, int]
    why: str  # "" where all went well


class Gone(Exception):
    """The mount or its store is away: to go on is no use."""


# --- finding files -------------------------------------------------------------------------------


def pattern(glob: str) -> re.Pattern[str]:
    """What a pattern means for a path below a directory.

    Without a slash it is for names at any depth; `**` matches any directories.
    """
    if not glob.strip("/"):
        raise ConfigError(f"--glob {glob!r}: a pattern like '*.tar' or 'train/**'")
    anchored = glob.lstrip("/")
    out = "" if "/" in glob.rstrip("/") else "(?:.*/)?"
    at = 0
    while at < len(anchored):
        if anchored.startswith("**/", at):
            out, at = out + "(?:.*/)?", at + 3
        elif anchored.startswith("**", at):
            out, at = out + ".*", at + 2
        elif anchored[at] == "[" and (end := anchored.find("]", at + 2)) > 0:
            inner = anchored[at + 1 : end].replace("\\", "\\\\")
            out += "[" + ("^" + inner[1:] if inner[0] == "!" else inner) + "]"
            at = end + 1
        else:
            out += {"*": "[^/]*", "?": "[^/]"}.get(anchored[at]) or re.escape(anchored[at])
            at += 1
    try:
        return re.compile(out, re.DOTALL)
    except re.error as error:
        raise ConfigError(f"--glob {glob!r}: {error}") from error


def walk(
    top: str, patterns: Sequence[re.Pattern[str]], failed: Callable[[str, str], None]
) -> Iterator[CachedShare]:
    """The plain files at and below a path, on its mount. A file that is named needs no pattern.

    Raises: OSError where the path itself can't be looked at.
    """
    first = os.stat(top)
    if not stat.S_ISDIR(first.st_mode):
        if stat.S_ISREG(first.st_mode):
            yield _found(top, first)
        else:
            failed(top, "is no plain file")
        return
    todo = [""]
    while todo:
        below = todo.pop()
        try:
            with os.scandir(os.path.join(top, below)) as entries:
                for entry in entries:
                    name = os.path.join(below, entry.name)
                    if entry.is_dir(follow_symlinks=False):
                        if entry.stat(follow_symlinks=False).st_dev == first.st_dev:
                            todo.append(name)
                    elif entry.is_file(follow_symlinks=False) and (
                        not patterns or any(each.fullmatch(name) for each in patterns)
                    ):
                        found = _entry(entry)
                        if found is not None:
                            yield found
        except OSError as error:
            if error.errno in DEAD:
                raise
            if error.errno not in _GONE or not below:
                failed(os.path.join(top, below), error.strerror or str(error))


def _entry(entry: os.DirEntry[str]) -> CachedShare | None:
    """A file of a directory, unless it has just gone."""
    try:
        return _found(entry.path, entry.stat(follow_symlinks=False))
    except FileNotFoundError:
        return None


def _found(path: str, what: os.stat_result) -> CachedShare:
    dense = 2 * BLOCK_UNIT * what.st_blocks >= what.st_size or (
        not what.st_blocks and what.st_size > CHUNK_BYTES and _is_attached(path)
    )
    return CachedShare(path, what.st_size, dense, what.st_dev)


def _is_attached(path: str) -> bool:
    """Whether a file that takes no space has bytes elsewhere."""
    try:
        return bool(os.getxattr(path, ATTACHED_XATTR))
    except OSError:
        return False


# --- asking --------------------------------------------------------------------------------------


def caches(path: str) -> dict[str, Any]:
    """What caches the mount of `path` has. Raises: ConfigError, OSError."""
    try:
        found: dict[str, Any] = json.loads(os.getxattr(path, WARM_XATTR))
    except OSError as error:
        if error.errno in (errno.ENODATA, errno.EOPNOTSUPP):
            raise ConfigError(
                f"{path} is not on a SliceFS mount, or its client is older than this command: "
                "see `findmnt -t fuse.slicefs`"
            ) from error
        if error.errno in DEAD:
            raise ConfigError(_dead(path)) from error
        raise
    return found


def _dead(path: str) -> str:
    return f"{path} is on a mount whose client has died: `slicefs umount` it and mount again"


def ask(path: str, verb: str, begin: int, end: int) -> dict[str, Any]:
    """Have the mount do something with a part of a file. Raises: OSError."""
    name = b"%b.%b.%d.%d" % (WARM_XATTR, verb.encode(), begin, end)
    answer: dict[str, Any] = json.loads(os.getxattr(path, name))
    return answer


def look(path: str, size: int) -> tuple[dict[str, int], dict[int, int]]:
    """What share of one file is cached: counts, and bytes by number of disk. Raises: OSError."""
    counts: dict[str, int] = {}
    disks: dict[int, int] = {}
    begin: int | None = 0
    while begin is not None and begin < size:
        answer = ask(path, "check", begin, size)
        begin = answer.pop("next")
        answer.pop("busy", None)
        for number, count in answer.pop("disks", {}).items():
            disks[int(number)] = disks.get(int(number), 0) + count
        for name, count in answer.items():
            counts[name] = counts.get(name, 0) + count
    return counts, disks


def where(counts: Mapping[str, int]) -> dict[str, int]:
    """Of counts: how much data there is, and how much of it is cached, and in memory."""
    return {name: counts.get(name, 0) for name in ("data", "cached", "memory")}


def share(part: int, whole: int) -> str:
    """Per cent, rounded down: 100 is all of it."""
    return f"{100 * part // whole if whole else 100} %"


class _File:
    """A file under way."""

    def __init__(self, found: CachedShare, parts: int) -> None:
        self.found = found
        self.left = parts
        self.counts: dict[str, int] = {}
        self.disks: dict[str, int] = {}
        self.why = ""


class _FileRange(NamedTuple):
    file: _File
    begin: int
    end: int


class WarmupRun:
    """Files on their way through a mount."""

    def __init__(
        self,
        runtime: Runtime,
        verb: Callable[[int], str],
        threads: int,
        roots: Callable[[int], Sequence[str]],
        done: Callable[[WarmedFile], None],
        pages: bool = False,
    ) -> None:
        """`verb(device)`: see `control/warmup_server`; "" asks that mount nothing. `roots(device)`:
        the names of that mount's cache disks, for "check". `pages`: warm the kernel's cache, too.
        """
        self._runtime = runtime
        self._verb = verb
        self._roots = roots
        self._done = done
        self._pages = pages
        self._threads = threads
        self._cond = runtime.condition()
        self._parts: deque[_FileRange] = deque()  # guarded by _cond, as all below
        self._flying = 0
        self._ended = False
        self._stopped = ""  # why nothing more is to be begun
        self._error: OSError | None = None  # of `done`
        self.bytes = 0  # asked for and answered; read without the lock, as is `passed`
        self.passed = 0  # bytes of files that are through, whatever became of them

    def run(self, files: Iterable[CachedShare], show: Callable[[], None]) -> None:
        """Take all files through; `show` is called now and then. Raises: Gone, what `files` does.

        Interrupted, or when the mount is gone, it ends with what is under way.
        """
        threads = [self._runtime.spawn(f"warmup-{n}", self._work) for n in range(self._threads)]
        try:
            for found in files:
                self._add(found, show)
                if self._stopped:
                    break
            self._wait(lambda: not self._parts and not self._flying, show)
        except BaseException:
            self._stop("interrupted")
            raise
        finally:
            with self._cond:
                self._ended = True
                self._cond.notify_all()
            for thread in threads:
                thread.join()
        if self._error is not None:
            raise self._error
        if self._stopped:
            raise Gone(self._stopped)

    def _add(self, found: CachedShare, show: Callable[[], None]) -> None:
        step = CHUNK_BYTES if found.dense else max(found.size, 1)
        begins = range(0, found.size, step)
        file = _File(found, len(begins))
        if not begins:
            with self._cond:
                self._finish(file)
        for begin in begins:
            part = _FileRange(file, begin, min(found.size, begin + step))
            self._wait(lambda: len(self._parts) < QUEUED * self._threads, show)
            with self._cond:
                self._parts.append(part)
                self._cond.notify_all()

    def _wait(self, condition: Callable[[], bool], show: Callable[[], None]) -> None:
        """Until the condition is met, or all has stopped."""
        show()
        with self._cond:
            while not condition() and not self._stopped:
                self._cond.wait(0.5)
                show()

    def _stop(self, why: str) -> None:
        with self._cond:
            self._stopped = self._stopped or why
            self._parts.clear()
            self._cond.notify_all()

    def _work(self) -> None:
        buffer = bytearray(READ_BYTES if self._pages else 0)
        while (part := self._next()) is not None:
            try:
                self._take(part, buffer)
            except Gone as error:
                self._stop(str(error))
            try:
                self._leave(part)
            except OSError as error:  # the reader of the output has gone (EPIPE)
                self._error = error
                self._stop("told")

    def _leave(self, part: _FileRange) -> None:
        """A part is through. Raises: what `done` does."""
        with self._cond:
            self._flying -= 1
            self.passed += part.end - part.begin
            part.file.left -= 1
            self._cond.notify_all()
            if not part.file.left:
                self._finish(part.file)

    def _next(self) -> _FileRange | None:
        with self._cond:
            while not self._parts:
                if self._ended or self._stopped:
                    return None
                self._cond.wait()
            self._flying += 1
            self._cond.notify_all()
            return self._parts.popleft()

    def _finish(self, file: _File) -> None:
        """The caller holds the lock."""
        if not self._stopped:
            self._done(WarmedFile(file.found, file.counts, file.disks, file.why))

    def _take(self, part: _FileRange, buffer: bytearray) -> None:
        """Have one part done. Raises: Gone."""
        verb = self._verb(part.file.found.device)
        asking = bool(verb)
        try:
            if asking:
                self._ask(part, verb)
            asking = False
            if self._pages and not part.file.why:
                self._touch_pages(part, verb, buffer)
        except OSError as error:
            path = part.file.found.path
            if error.errno in DEAD:
                raise Gone(_dead(path)) from error
            if asking and error.errno == errno.EIO:  # of the metadata: others would wait as long
                raise Gone(f"{path}: {error.strerror}: see the mount's log") from error
            if error.errno not in _GONE:  # a file may go while we are at it
                self._fail(part.file, error.strerror or str(error))

    def _fail(self, file: _File, why: str) -> None:
        with self._cond:
            file.why = file.why or why

    def _ask(self, part: _FileRange, verb: str) -> None:
        """Ask until the mount is through with it. Raises: OSError, Gone."""
        path, begin = part.file.found.path, part.begin
        give_up = self._runtime.monotonic() + BUSY_S_MAX
        while begin < part.end and not self._stopped:
            answer = ask(path, verb, begin, part.end)
            following = answer.pop("next")
            busy = answer.pop("busy", 0)
            self._add_up(part.file, answer)
            if answer.get("why") == Why.STORE:
                raise Gone("the object store does not answer: see the mount's log; run it again")
            if following is None:
                return
            if following > begin:
                begin, give_up = following, self._runtime.monotonic() + BUSY_S_MAX
            elif busy and self._runtime.monotonic() > give_up:
                self._fail(part.file, NO_MEMORY)
                return
            if busy:
                self._runtime.sleep(BUSY_S)

    def _add_up(self, file: _File, answer: dict[str, Any]) -> None:
        with self._cond:
            disks = answer.pop("disks", {})
            roots = self._roots(file.found.device) if disks else ()
            for number, count in disks.items():
                root = roots[int(number)]
                file.disks[root] = file.disks.get(root, 0) + count
            for name, count in answer.items():
                if name == "why":
                    file.why = file.why or WHY.get(count, count)
                else:
                    file.counts[name] = file.counts.get(name, 0) + count
                    self.bytes += count if name in ("fetched", "there", "evicted") else 0

    def _touch_pages(self, part: _FileRange, verb: str, buffer: bytearray) -> None:
        """Have the kernel keep the pages, or let go of them. Raises: OSError."""
        fd = os.open(part.file.found.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            if verb == "evict":
                os.posix_fadvise(fd, part.begin, part.end - part.begin, os.POSIX_FADV_DONTNEED)
                return
            with memoryview(buffer) as view:
                self._read(fd, part, view)
        finally:
            os.close(fd)

    def _read(self, fd: int, part: _FileRange, view: memoryview) -> None:
        """Read what is data, and no holes: of those there may be any amount. Raises: OSError."""
        at = stop = part.begin
        while not self._stopped:
            if at >= stop:
                at, stop = _data(fd, at, part.end)
                if at >= stop:
                    return
            got = os.preadv(fd, [view[: stop - at]], at)
            if not got:
                return
            at += got
            with self._cond:
                part.file.counts["pages"] = part.file.counts.get("pages", 0) + got


def _data(fd: int, begin: int, end: int) -> tuple[int, int]:
    """Where the next data in `begin..end` are; nowhere where the two are the same.

    Raises: OSError.
    """
    try:
        at = os.lseek(fd, begin, os.SEEK_DATA)
        return min(at, end), min(os.lseek(fd, at, os.SEEK_HOLE), end)
    except OSError as error:
        if error.errno != errno.ENXIO:
            raise
        return end, end
