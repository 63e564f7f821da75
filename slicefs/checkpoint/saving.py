"""One save of one step: its files, their digests, and the moment when it is published.

Where a store renames directories in one operation (directories, volumes), files are written to
`.saving-stepN-TOKEN`, the manifest last, and the directory is renamed to `stepN`. In a bucket,
files are written to `stepN/save-TOKEN/`, and the manifest `stepN/.slicefs-checkpoint.json` names
that folder. Two savers of one step never share a folder. A save that ends early leaves the
published steps as they are.

Threading: files of one save may be written by several threads, each file by one.
"""

from __future__ import annotations

import errno
from collections.abc import Mapping
from types import TracebackType
from typing import Final, NamedTuple, Self

from slicefs.checkpoint.dedupe import DedupeBase, DedupingWriter
from slicefs.checkpoint.layout import DATA, MANIFEST, step_name
from slicefs.checkpoint.manifest import Digester, FileEntry, StepManifest, safe_name
from slicefs.checkpoint.step import Step, joined, load_step, url_below
from slicefs.stores.tree import Buffer, RangeWriter, Tree, Writer

BUCKETS: Final = ("s3://", "r2://", "gs://")  # there a directory is moved file by file
LATEST: Final = ".slicefs-latest"  # names the newest step, for shell scripts


class Draft(NamedTuple):
    """What a save is of."""

    step: int
    token: str
    run: str
    ephemeral: bool


def renames(tree: Tree) -> bool:
    """Whether a tree moves a directory in one operation."""
    return not tree.url.startswith(BUCKETS)


class DigestingWriter:
    """A file of a save: a `Writer` that also digests."""

    def __init__(
        self,
        writer: Writer,
        name: str,
        entries: dict[str, FileEntry],
        deduping: DedupingWriter | None = None,
    ) -> None:
        """`deduping`: what passes on bytes to the writer, if not all of them are written."""
        self._writer = writer
        self._name = name
        self._entries = entries
        self._deduping = deduping
        self._digester = Digester()
        self.closed = False

    def write(self, data: Buffer, /) -> int:
        """Take all of `data`."""
        view = memoryview(data).cast("B")
        self._digester.update(view)
        if self._deduping is None:
            self._writer.write(view)
        else:
            self._deduping.write(view)
        return len(view)

    def tell(self) -> int:
        """How much was written."""
        return self._digester.entry().size

    def flush(self) -> None:
        """Nothing is promised before `close`."""

    def writable(self) -> bool:
        """Yes."""
        return True

    def close(self) -> None:
        """Make the file part of the save; durable when this returns."""
        if not self.closed:
            self.closed = True
            entry = self._digester.entry()
            if self._deduping is not None:
                try:
                    self._deduping.finish()
                except BaseException:
                    self._writer.abort()
                    raise
                entry = entry._replace(pieces=tuple(self._deduping.pieces))
            self._writer.close()
            self._entries[self._name] = entry

    def abort(self) -> None:
        """Leave nothing."""
        if not self.closed:
            self.closed = True
            self._writer.abort()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.abort()


class Saving:
    """A save in progress. Leaving a `with` block publishes it, or leaves nothing after an error."""

    def __init__(
        self, tree: Tree, draft: Draft, dedupe: bool = False, base: Step | None = None
    ) -> None:
        """`dedupe`: what `base` has is not written again, where the tree can share it."""
        self.tree = tree
        self._draft = draft
        self._dedupe = dedupe
        self._base = base
        self._deduping: list[DedupingWriter] = []
        self._entries: dict[str, FileEntry] = {}
        self._step_folder = step_name(draft.step)
        self._ended = False
        if renames(tree):
            self._data = ""
            self.folder = f".saving-{self._step_folder}-{draft.token}"
        else:
            self._data = f"{DATA}{draft.token}"
            self.folder = joined(self._step_folder, self._data)

    @property
    def token(self) -> str:
        """What other ranks give to `CheckpointManager.join`."""
        return self._draft.token

    @property
    def url(self) -> str:
        """Where the files are while the save is in progress."""
        return url_below(self.tree.url, self.folder)

    @property
    def entries(self) -> Mapping[str, FileEntry]:
        """The files that have been closed so far; other ranks send them to the first one."""
        return dict(self._entries)

    def open(self, name: str, *, size: int | None = None) -> DigestingWriter:
        """Begin a file; `name` is a relative path, `size` a hint. Raises: FileExistsError."""
        safe_name(name)
        if name in self._entries or name == MANIFEST:
            raise FileExistsError(errno.EEXIST, "the save has such a file already", name)
        writer = self.tree.writer(joined(self.folder, name), size=size)
        if not self._dedupe or not isinstance(writer, RangeWriter):
            return DigestingWriter(writer, name, self._entries)
        base, step = None, self._base
        if step is not None and step.manifest.files.get(name) is not None:
            base = DedupeBase(joined(step.data, name), step.manifest.files[name])
        deduping = DedupingWriter(writer, base)
        self._deduping.append(deduping)
        return DigestingWriter(writer, name, self._entries, deduping)

    @property
    def reused_bytes(self) -> int:
        """How much of what was written here was taken from an earlier step."""
        return sum(each.reused_bytes for each in self._deduping)

    def put(self, name: str, data: Buffer) -> None:
        """Write a whole file."""
        with self.open(name, size=len(data)) as file:
            file.write(data)

    def add(self, entries: Mapping[str, FileEntry]) -> None:
        """Count files that other ranks have written in the same save."""
        self._entries.update({safe_name(name): entry for name, entry in entries.items()})

    def publish(self) -> Step:
        """Make the step visible, whole. Raises: FileExistsError, EIO where a file is not there."""
        draft = self._draft
        manifest = StepManifest(
            draft.step, draft.token, draft.run, self._data, draft.ephemeral, self.entries
        )
        missing = next(Step(self.tree, self.folder, manifest._replace(data="")).problems(), None)
        if missing is not None:
            raise OSError(errno.EIO, f"step {draft.step} is not published: {missing}")
        self._publish(manifest)
        self._ended = True
        self.tree.write_atomic(LATEST, [f"{self._step_folder}\n".encode()])
        return Step(self.tree, self._step_folder, manifest)

    def _publish(self, manifest: StepManifest) -> None:
        target = joined(self._step_folder, MANIFEST)
        if renames(self.tree):
            refuse_taken(self.tree, manifest.step)
            self.tree.write_atomic(joined(self.folder, MANIFEST), [manifest.encode()])
            try:
                self.tree.rename(self.folder, self._step_folder)
            except OSError as error:
                if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                    raise _taken(manifest.step) from error
                raise
            return
        refuse_taken(self.tree, manifest.step)
        self.tree.write_atomic(target, [manifest.encode()])
        published = load_step(self.tree, self._step_folder)
        if published is None or published.manifest.owner != manifest.owner:
            raise _taken(manifest.step)

    def abort(self) -> None:
        """Leave nothing. Does nothing after `publish`."""
        if not self._ended:
            self._ended = True
            self.tree.remove_tree(self.folder)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is not None or self._ended:
            self.abort()
            return
        try:
            self.publish()
        except BaseException:
            self.abort()
            raise


def refuse_taken(tree: Tree, number: int) -> None:
    """Raises: FileExistsError where a step is published, or its directory is another's."""
    folder = step_name(number)
    taken = tree.exists(folder) if renames(tree) else tree.exists(joined(folder, MANIFEST))
    if taken:
        raise _taken(number)


def _taken(number: int) -> FileExistsError:
    return FileExistsError(
        errno.EEXIST, "the step is there already: remove it, or save another", step_name(number)
    )
