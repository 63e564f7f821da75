"""Copying trees: skip what is the same, verify each copy, repeat what a busy store refuses.

Called by `move`, `export` and the pipeline. A copy is verified by reading it back; only then may
its source go. Threading: files are copied by `jobs` threads.
"""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from fsmeta.errors import ConfigError
from fsmeta.runtime import Runtime, SystemRuntime
from slicefs.checkpoint.step import joined
from slicefs.client.parallel import Readers
from slicefs.stores.tree import Info, Tree

PIECE_BYTES: Final = 8 << 20
ATTEMPTS: Final = 8  # of one file; with the pauses below, two minutes of a store that is too busy
PAUSE_S: Final = 0.5  # doubled after each attempt
PAUSE_MAX_S: Final = 30.0
_BUSY: Final = ("slowdown", "serviceunavailable", "reduce your", "throttl", "too many", "503")
_FINAL: Final = frozenset(
    {errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT}
)


class CopyReport(NamedTuple):
    """What became of the files of one copy."""

    copied: int
    copied_bytes: int
    skipped: int
    failures: tuple[str, ...]

    def told(self) -> dict[str, object]:
        """What scripts are told, as `slicefs sync` has it."""
        return {
            "copied": self.copied,
            "bytes": self.copied_bytes,
            "same": self.skipped,
            "failures": list(self.failures),
        }


class TransferEnd(NamedTuple):
    """A directory in a tree."""

    tree: Tree
    path: str = ""

    @property
    def prefix(self) -> str:
        """What the paths below it begin with."""
        return f"{self.path}/" if self.path else ""

    def at(self, name: str) -> str:
        """The path of a file below it."""
        return joined(self.path, name)

    def files(self) -> list[Info]:
        """The files below it, with names relative to it."""
        cut = len(self.prefix)
        return [info._replace(path=info.path[cut:]) for info in self.tree.list(self.prefix)]


class Copier:
    """Copies files between two directories."""

    def __init__(
        self,
        source: TransferEnd,
        target: TransferEnd,
        *,
        jobs: int = 4,
        runtime: Runtime | None = None,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._source = source
        self._target = target
        self._threads = Readers(jobs)
        self._runtime = runtime or SystemRuntime()
        self._say = say

    def plan(self, names: Sequence[Info] | None = None) -> tuple[int, int]:
        """How many files and bytes a copy would send; sizes are compared, contents are not."""
        wanted = self._source.files() if names is None else names
        there = {info.path: info.size for info in self._target.files()}
        left = [info for info in wanted if there.get(info.path) != info.size]
        return len(left), sum(info.size for info in left)

    def copy(self, names: Sequence[Info] | None = None) -> CopyReport:
        """Copy all files, or those; a failure of one does not stop the others."""
        wanted = list(self._source.files() if names is None else names)
        there = {info.path: info.size for info in self._target.files()}
        outcomes: list[tuple[Info, str]] = []

        def one(info: Info) -> None:
            try:
                outcome = self._one(info, there.get(info.path))
            except OSError as error:
                outcome = f"{info.path}: {error.strerror or error}"
            outcomes.append((info, outcome))
            self._say(f"{len(outcomes)} of {len(wanted)} files")

        self._threads.run(wanted, one)
        copied = [info for info, outcome in outcomes if outcome == _COPIED]
        skipped = sum(outcome == _SKIPPED for _, outcome in outcomes)
        failures = sorted(outcome for _, outcome in outcomes if outcome not in (_COPIED, _SKIPPED))
        return CopyReport(len(copied), sum(info.size for info in copied), skipped, tuple(failures))

    def _one(self, info: Info, there: int | None) -> str:
        """Copy one file, several times if the store is too busy. Raises: OSError."""
        pause_s = PAUSE_S
        for attempt in range(1, ATTEMPTS + 1):
            try:
                if there == info.size and self._same(info):
                    return _SKIPPED
                self._send(info)
                return _COPIED
            except OSError as error:
                if attempt == ATTEMPTS or not is_busy(error):
                    raise
            self._runtime.sleep(pause_s * (0.5 + self._runtime.random()))
            pause_s = min(2 * pause_s, PAUSE_MAX_S)
        raise AssertionError("the last attempt returns or raises")

    def _same(self, info: Info) -> bool:
        source = digest_file(self._source.tree, self._source.at(info.path), info.size)
        return source == digest_file(self._target.tree, self._target.at(info.path), info.size)

    def _send(self, info: Info) -> None:
        source, target = self._source.at(info.path), self._target.at(info.path)
        digest = hashlib.sha256()
        if self._source.tree is self._target.tree:
            self._source.tree.copy(source, target)
            sent = digest_file(self._source.tree, source, info.size)
        else:
            with self._target.tree.writer(target, size=info.size) as writer:
                for begin in range(0, info.size, PIECE_BYTES):
                    end = min(begin + PIECE_BYTES, info.size)
                    piece = self._source.tree.read(source, begin, end)
                    if len(piece) != end - begin:
                        raise OSError(errno.ESTALE, "the file has changed meanwhile", info.path)
                    digest.update(piece)
                    writer.write(piece)
            sent = digest.hexdigest()
        if sent != digest_file(self._target.tree, target, info.size):
            raise OSError(errno.EIO, "the copy is not what was read", info.path)


_COPIED: Final = "\0copied"
_SKIPPED: Final = "\0skipped"


def is_busy(error: OSError) -> bool:
    """Whether a store asks for fewer requests, so that repeating later helps."""
    if error.errno in _FINAL:
        return False
    text = f"{error} {error.__cause__}".lower()
    return error.errno in (errno.EAGAIN, errno.EBUSY) or any(word in text for word in _BUSY)


def digest_file(tree: Tree, path: str, size: int) -> str:
    """SHA-256 of a file of `size` bytes, read in pieces. Raises: EIO where it is shorter."""
    digest = hashlib.sha256()
    for begin in range(0, size, PIECE_BYTES):
        end = min(begin + PIECE_BYTES, size)
        piece = tree.read(path, begin, end)
        if len(piece) != end - begin:
            raise OSError(errno.EIO, f"has fewer than {size} bytes", path)
        digest.update(piece)
    return digest.hexdigest()


def refuse_overlap(source: str, target: str) -> None:
    """Raises: ConfigError where one URL is the other, or lies below it, however it is spelled."""
    one, two = _canonical(source), _canonical(target)
    if one == two:
        raise ConfigError(f"{target}: is the source itself: name another destination")
    if two.startswith(f"{one.rstrip('/')}/"):
        raise ConfigError(f"{target}: lies inside the source: name a destination outside of it")
    if one.startswith(f"{two.rstrip('/')}/"):
        raise ConfigError(f"{source}: lies inside the destination: name another destination")


def _canonical(url: str) -> str:
    """One spelling of a URL: links resolved, no double slashes, one form for volumes."""
    scheme, separator, rest = url.partition("://")
    if not separator or scheme == "file":
        return f"file://{os.path.realpath(rest if separator else url)}"
    if "#" in rest:
        base, _, path = rest.partition("#")
        return f"{scheme}://{base.rstrip('/')}#/{_words(path)}".rstrip("/")
    host, _, path = rest.partition("/")
    if scheme in ("s3", "r2", "gs"):
        return f"{scheme}://{host}/{_words(path)}".rstrip("/")
    return f"{scheme}://{rest.rstrip('/')}#"


def _words(path: str) -> str:
    return "/".join(word for word in path.split("/") if word not in ("", "."))
