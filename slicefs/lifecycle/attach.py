"""Adopting a bucket or a directory: its objects appear as files of a volume; nothing is copied.

A scan lists the objects below a prefix, or the files below a directory of the host, and makes what
is missing in a directory of a mount, or of a volume by its URL: directories, and attached files in
commits of many. A further scan compares ETags: new objects appear, files of changed ones are
replaced, and files whose objects are gone are removed. What is in the directory and shows no object
below the prefix is left alone.

A file whose object has changed is replaced by a rename: readers see the old file or the new one,
and those that have the old one open get ESTALE. Files that were written have bytes of their own and
are kept, also those that a client writes in the moment of the rename.

Threading: one scan is one thread's.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import chain
from typing import Any, Final, NamedTuple, Protocol, TypeAlias
from uuid import uuid4

from fsclient.kernel.xattr_names import ATTACH_XATTR, ATTACHED_XATTR
from fsdata.objects.contract import ObjectInfo
from fsmeta.errors import ConfigError
from fsmeta.ops.names.attach import REPLACEMENT, replacement_name
from fsmeta.types import NAME_MAX, AttachedObject
from slicefs.client.client import Client
from slicefs.client.volumes import is_volume_url, split_volume_url
from slicefs.lifecycle.attach_sources import ScanSource, is_on_slicefs, open_source

FILES_A_REQUEST: Final = 50  # a value of an xattr has 64 KiB, and a key up to 1 KiB
TEMPORARY: Final = REPLACEMENT.decode()
SKIPPED_NAMED: Final = 20
_NOT_ATTACHED: Final = (errno.ENODATA, errno.EOPNOTSUPP)
Say: TypeAlias = Callable[[str], object]


class AttachTarget(Protocol):
    """What a scan needs of a mount (`os`) or of a volume (`Client`)."""

    def makedirs(self, name: str, mode: int = 0o777, exist_ok: bool = False) -> None: ...
    def listdir(self, path: str) -> list[str]: ...
    def lstat(self, path: str) -> os.stat_result: ...
    def getxattr(self, path: str, attribute: str) -> bytes: ...
    def setxattr(self, path: str, attribute: str, value: bytes) -> None: ...
    def replace(self, src: str, dst: str) -> None: ...
    def unlink(self, path: str) -> None: ...
    def rmdir(self, path: str) -> None: ...


class AttachReport(NamedTuple):
    """What a scan has done."""

    made: int
    replaced: int
    removed: int
    same: int
    skipped: int  # keys that can be no paths, symlinks and devices, names of directories
    examples: tuple[str, ...]  # of those
    kept: int = 0  # files of the volume's own that have an object's name
    kept_examples: tuple[str, ...] = ()


class _Folder(NamedTuple):
    """Objects of one directory, by name."""

    path: str
    objects: dict[str, ObjectInfo]
    folders: set[str]


def attach(url: str, path: str, say: Say = bool) -> AttachReport:
    """Let the objects below `url` be files in the directory `path`.

    `url` is s3://BUCKET/PREFIX, or file:///DIR for a directory that each mount's host has.
    `path` is on a mount, or slicefs://VOLUME/PATH, or META-URL#PATH. Only root may.
    Raises: ConfigError, OSError.
    """
    source = open_source(url)
    try:
        if not is_volume_url(path):
            if not is_on_slicefs(os.path.realpath(path)):
                raise _no_target(path)
            return _Scan(source, os, os.path.abspath(path), say).run()
        meta, inside = split_volume_url(path)
        with Client(meta) as client:
            return _Scan(source, client, "/" + inside.strip("/"), say).run()
    finally:
        source.close()


class _Scan:
    """One run."""

    def __init__(self, source: ScanSource, place: Any, top: str, say: Say) -> None:
        self._source = source
        self._from = source.place
        self._place: AttachTarget = place
        self._top = top
        self._say = say
        self._made = self._replaced = self._removed = self._same = self._skipped = 0
        self._kept = 0
        self._kept_examples: list[str] = []
        self._examples: list[str] = []

    def run(self) -> AttachReport:
        """See `attach`."""
        folders = self._folders()
        first = next(folders)  # the top is always one: where nothing can be listed nothing is made
        with suppress(FileExistsError):
            self._place.makedirs(self._top, exist_ok=True)
        listed: set[str] = set()
        for folder in chain([first], folders):
            self._fill(folder)
            listed.add(folder.path)
        self._sweep("", listed)
        return AttachReport(
            self._made, self._replaced, self._removed, self._same, self._skipped,
            tuple(self._examples), self._kept, tuple(self._kept_examples),
        )  # fmt: skip

    def _at(self, path: str, name: str = "") -> str:
        return os.path.join(self._top, *filter(None, (path, name)))

    def _skip(self, what: str) -> None:
        self._skipped += 1
        if len(self._examples) < SKIPPED_NAMED:
            self._examples.append(what)

    def _keep(self, path: str) -> None:
        self._kept += 1
        if len(self._kept_examples) < SKIPPED_NAMED:
            self._kept_examples.append(path)

    # --- the bucket ------------------------------------------------------------------------------

    def _folders(self) -> Iterator[_Folder]:
        """The directories of the listing, one after the other: each is left before it is given.

        Objects of one directory, and of what is below it, come together. What a directory has is
        kept until the listing leaves it.
        """
        stack = [_Folder("", {}, set())]
        for path, info in self._source.listed():
            words = path.split("/")
            if words[-1] == "":
                words.pop()  # what consoles make for a directory
                is_marker = True
            else:
                is_marker = False
            if info is None or not all(_is_usable(word) for word in words):
                self._skip(path)
                continue
            if not words:
                continue
            way = words if is_marker else words[:-1]
            while stack[-1].path and not _is_in("/".join(way), stack[-1].path):
                yield stack.pop()
            depth = len(stack[-1].path.split("/")) if stack[-1].path else 0
            for at in range(depth, len(way)):
                stack[-1].folders.add(way[at])
                stack.append(_Folder("/".join(way[: at + 1]), {}, set()))
            if not is_marker:
                stack[-1].objects[words[-1]] = info
        while stack:
            yield stack.pop()

    # --- the directory ---------------------------------------------------------------------------

    def _fill(self, folder: _Folder) -> None:
        """Make a directory what the bucket has."""
        path = self._at(folder.path)
        try:
            self._place.makedirs(path, exist_ok=True)
        except (FileExistsError, NotADirectoryError):  # a file has the name
            for info in folder.objects.values():
                self._skip(info.key)
            return
        there = set(self._place.listdir(path))
        fresh: list[tuple[str, ObjectInfo]] = []
        for name, info in folder.objects.items():
            if name in folder.folders:
                self._skip(info.key)
            elif name not in there:
                fresh.append((name, info))
            else:
                self._renew(folder.path, name, info)
        for begin in range(0, len(fresh), FILES_A_REQUEST):
            part = fresh[begin : begin + FILES_A_REQUEST]
            self._make(path, part)
            self._made += len(part)
            self._say(f"{self._made} files made, {self._same} as they were")
        for name in there - folder.objects.keys() - folder.folders:
            self._clear(folder.path, name)

    def _make(self, path: str, files: Sequence[tuple[str, ObjectInfo]]) -> None:
        wish = {
            "endpoint": self._from.endpoint,
            "region": self._from.region,
            "bucket": self._from.bucket,
            "files": [
                (name, info.key, info.etag, info.size, info.mtime_ns) for name, info in files
            ],
        }
        value = json.dumps(wish, ensure_ascii=True).encode()
        try:
            self._place.setxattr(path, ATTACH_XATTR.decode(), value)
        except OSError as error:
            raise _why(error, path) from error

    def _shown(self, path: str) -> AttachedObject | None:
        """The object that a file shows; None where it shows none."""
        try:
            value = self._place.getxattr(path, ATTACHED_XATTR.decode())
        except OSError as error:
            if error.errno in _NOT_ATTACHED:
                return None
            raise
        return AttachedObject(**json.loads(value))

    def _is_ours(self, shown: AttachedObject) -> bool:
        """Whether an object is one below the prefix."""
        return shown.bucket == self._from.bucket and shown.key.startswith(self._from.prefix)

    def _renew(self, folder: str, name: str, info: ObjectInfo) -> None:
        """A name of the bucket that is there: the file may show an older object."""
        path = self._at(folder, name)
        if not stat.S_ISREG(self._place.lstat(path).st_mode):
            self._skip(info.key)
            return
        shown = self._shown(path)
        if shown is None:
            self._keep(path)
        elif not self._is_ours(shown):
            self._skip(info.key)
        elif (shown.key, shown.etag) == (info.key, info.etag):
            self._same += 1
        else:
            self._replace(folder, path, shown, info)

    def _replace(self, folder: str, path: str, shown: AttachedObject, info: ObjectInfo) -> None:
        """Have a file show what its object is now, unless it is written in this moment."""
        temporary = replacement_name(shown, uuid4().hex).decode()
        self._make(self._at(folder), [(temporary, info)])
        try:
            self._place.replace(self._at(folder, temporary), path)
        except OSError as error:
            self._place.unlink(self._at(folder, temporary))
            if error.errno != errno.EBUSY:
                raise
            self._keep(path)
        else:
            self._replaced += 1

    def _clear(self, folder: str, name: str) -> None:
        """A name that the bucket has not in this directory: its object may be gone.

        A file of another attachment, or one that was moved, shows an object of another path.
        """
        path, is_temporary = self._at(folder, name), name.startswith(TEMPORARY)
        if not stat.S_ISREG(self._place.lstat(path).st_mode):
            return
        shown = self._shown(path)
        key = self._source.key_of(f"{folder}/{name}" if folder else name)
        if shown is None or not self._is_ours(shown):
            return
        if is_temporary or shown.key == key:
            self._place.unlink(path)
            self._removed += not is_temporary

    def _sweep(self, folder: str, listed: set[str]) -> None:
        """Directories without any object in the bucket lose their attached files."""
        path = self._at(folder)
        for name in self._place.listdir(path):
            below = f"{folder}/{name}" if folder else name
            if not stat.S_ISDIR(self._place.lstat(self._at(below)).st_mode):
                if folder not in listed:
                    self._clear(folder, name)
                continue
            before = self._removed
            self._sweep(below, listed)
            if below not in listed and self._removed > before:
                with suppress(OSError):  # it may have other files
                    self._place.rmdir(self._at(below))


def _is_in(path: str, folder: str) -> bool:
    return path == folder or path.startswith(f"{folder}/")


def _is_usable(word: str) -> bool:
    """Whether a part of a key can be a name."""
    return word not in ("", ".", "..") and len(os.fsencode(word)) <= NAME_MAX and "\0" not in word


def _why(error: OSError, path: str) -> Exception:
    """Why a client makes no attached files."""
    match error.errno:
        case errno.EPERM:
            return ConfigError(f"{path}: only root attaches objects")
        case errno.EOPNOTSUPP:
            return _no_target(path)
        case _:
            return error


def _no_target(path: str) -> ConfigError:
    return ConfigError(
        f"{path}: is not on a SliceFS mount, or on one that writes back: "
        "name the volume by its URL, META-URL#PATH"
    )
