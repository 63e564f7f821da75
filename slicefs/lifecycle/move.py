"""Moving a run, or one entry of it: a rename where one store holds both, else verified copies.

The source goes only after every file was copied and read back, and only files that are as they
were when they were copied. A move that was interrupted is run again: what is there is skipped.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from glob import glob
from typing import NamedTuple

from fsmeta.errors import ConfigError
from slicefs.checkpoint.saving import renames
from slicefs.checkpoint.step import load_step
from slicefs.client.parallel import RUNTIME
from slicefs.client.volumes import snapshot_path
from slicefs.lifecycle.transfer import Copier, CopyReport, TransferEnd, refuse_overlap
from slicefs.stores.opening import open_tree
from slicefs.stores.tree import Info, Tree


class MoveReport(NamedTuple):
    """What a move has done."""

    renamed: bool
    copy: CopyReport
    removed: int  # files of the source
    left: tuple[str, ...]  # files of the source that changed meanwhile


_NOTHING = CopyReport(0, 0, 0, ())


class OpenTrees:
    """The buckets, volumes and disks that URLs lead to, each opened once.

    Two directories of one store share a tree, so that the store itself can copy between them.
    Threading: any method from any thread; the lock is held while a store is opened.
    """

    def __init__(self) -> None:
        self._lock = RUNTIME.lock()
        self._trees: dict[str, Tree] = {}  # guarded by _lock

    def endpoint(self, url: str) -> TransferEnd:
        """A directory by its URL. Raises: ConfigError."""
        root, path = _split(url)
        with self._lock:
            if root not in self._trees:
                self._trees[root] = open_tree(root)
            return TransferEnd(self._trees[root], path)

    def endpoints(self, source: str, target: str) -> tuple[TransferEnd, TransferEnd]:
        """Two directories, neither within the other. Raises: ConfigError."""
        refuse_overlap(source, target)
        return self.endpoint(source), self.endpoint(target)

    def close(self) -> None:
        """Let go of connections."""
        for tree in self._trees.values():
            tree.close()
            client = getattr(tree, "client", None)
            if client is not None:
                client.close()
        self._trees.clear()

    def __enter__(self) -> OpenTrees:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()


def _split(url: str) -> tuple[str, str]:
    scheme, separator, rest = url.partition("://")
    if not separator or scheme == "file":
        return "file:///", os.path.abspath(rest if separator else url).strip("/")
    if scheme in ("s3", "r2", "gs"):
        bucket, _, path = rest.partition("/")
        return f"{scheme}://{bucket}", path.strip("/")
    if scheme == "slicefs":
        volume, _, path = rest.partition("/")
        return f"{scheme}://{volume}", snapshot_path(path.strip("/"))
    meta, _, path = url.partition("#")
    return meta, path.strip("/")


def move(
    source: TransferEnd,
    target: TransferEnd,
    copier: Copier,
    *,
    keep_src: bool = False,
    entry: str = "",
) -> MoveReport:
    """Move everything, or `entry`, a name directly below the source. Raises: OSError."""
    files = [info for info in source.files() if _belongs(info.path, entry)]
    if not files:
        what = f"{source.path}/{entry}" if entry else source.path or source.tree.url
        raise ConfigError(f"{what}: has no files: name the directory of a run")
    same = source.tree is target.tree
    if same and not (keep_src or entry) and renames(source.tree) and _rename(source, target):
        return MoveReport(True, _NOTHING, len(files), ())
    report = copier.copy(files)
    if keep_src or report.failures:
        return MoveReport(False, report, 0, ())
    removed, left = _remove(source, files)
    return MoveReport(False, report, removed, left)


def move_logs(globs: Sequence[str], target: TransferEnd, *, keep: bool = False) -> int:
    """Move local files to `logs` below the target; how many. Each goes once it was read back.

    Raises: ConfigError for two files of one name; OSError.
    """
    paths = sorted({path for each in globs for path in glob(each) if os.path.isfile(path)})
    names = [os.path.basename(path) for path in paths]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ConfigError(f"--with-logs: two files are named {twice!r}: move them one by one")
    for path in paths:
        folder, file = os.path.split(os.path.abspath(path))
        source = TransferEnd(open_tree(folder))
        info = source.tree.stat(file)
        report = Copier(source, TransferEnd(target.tree, target.at("logs")), jobs=1).copy([info])
        if report.failures:
            raise OSError(errno.EIO, report.failures[0], path)
        if not keep:
            os.unlink(path)
    return len(paths)


def _belongs(path: str, entry: str) -> bool:
    return not entry or path == entry or path.startswith(f"{entry}/")


def _rename(source: TransferEnd, target: TransferEnd) -> bool:
    """Rename in one operation, where nothing is at the target and both are on one disk."""
    if target.tree.exists(target.path):
        return False
    try:
        source.tree.rename(source.path, target.path)
    except OSError as error:
        if error.errno == errno.EXDEV:
            return False
        raise
    return True


def _remove(source: TransferEnd, files: list[Info]) -> tuple[int, tuple[str, ...]]:
    now = {info.path: info for info in source.files()}
    left = [info.path for info in files if now.get(info.path, info) != info]
    going = [info.path for info in files if now.get(info.path) == info]
    for path in going:
        source.tree.remove(source.at(path))
    if not set(now) - set(going):
        source.tree.remove_tree(source.path)  # the empty directories
    return len(going), tuple(left)


def export(source: TransferEnd, make: Callable[[TransferEnd], Copier]) -> CopyReport:
    """Copy a directory as plain files; of a published step, the files that its manifest names."""
    step = load_step(source.tree, source.path)
    if step is None:
        return make(source).copy()
    problem = next(step.problems(digest=True), None)
    if problem is not None:
        raise OSError(errno.EIO, f"is not exported: {problem}", source.path)
    data = TransferEnd(source.tree, step.data)
    return make(data).copy([Info(name, each.size) for name, each in step.manifest.files.items()])
