"""The check of what is below some inodes: `slicefs fsck --path`.

It walks down from them and judges what can be judged by that alone: inodes, names, links, slices
ACLs, and the quotas of directories: what counts in one has a name below it. Tables of the volume,
its counters, quotas of users and groups, orphans and the trash need all inodes, and are left out.
Memory is that of a whole check; directories that are still to be read wait in a table.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Final

from fsmeta.check.check import ROWS_AT_ONCE, Checked, Examination, Progress
from fsmeta.check.findings import Findings, Known
from fsmeta.check.names import DirTree, NamesCheck
from fsmeta.check.quotas import audit_below
from fsmeta.check.tables import Tables
from fsmeta.rules.settings import VolumeFormat
from fsmeta.schema import keys
from fsmeta.schema.inode_rows import read_inodes
from fsmeta.store.contract import Store
from fsmeta.types import NO_PARENT, FileType, Ino

_FOUND: Final = "SELECT ino FROM name UNION SELECT ino FROM below ORDER BY ino"


class SubtreeExamination(Examination):
    """One run below `tops`."""

    def __init__(self, store: Store, tops: Sequence[Ino], progress: Progress) -> None:
        super().__init__(store, progress)
        self._tops = frozenset(tops)

    def run(self) -> Checked:
        """Read what is below, then check. Raises: NoVolume, Unavailable; ENOSPC for the tables."""
        notes = self.notes
        tables = Tables(self._store, notes)
        self._check_format()
        self._read_acls(tables)
        self._read_names()
        self._read_found()
        self._progress("comparing names, links and slices")
        judge = _SubtreeNamesCheck(notes, self._tops)
        for known in notes.inodes():
            judge.inode(known)
        judge.end()
        tables.judge_inodes()
        if self.settings is not None:
            self._judge_quotas(self.settings)
        return self._outcome()

    def _judge_quotas(self, settings: VolumeFormat) -> None:
        notes = self.notes
        parents = {ino: known.parent for ino in self._tops if (known := notes.inode(ino))}
        tops = [ino for ino, parent in parents.items() if not notes.has("below", parent)]
        tree = DirTree(notes, tops)
        for known in notes.inodes():
            if known.is_dir:
                tree.place(known)
        audit_below(self._store, settings, notes)

    def _note_name(self, parent: Ino, name: bytes, ino: Ino, kind: FileType) -> None:
        super()._note_name(parent, name, ino, kind)
        if kind is FileType.DIR:
            self.notes.spill.add("queue", ino)

    def _read_names(self) -> None:
        spill = self.notes.spill
        for ino in self._tops:
            spill.add("queue", ino)
        count = 0
        while waiting := list(spill.rows("SELECT ino FROM queue LIMIT ?", ROWS_AT_ONCE)):
            for (ino,) in waiting:
                spill.run("DELETE FROM queue WHERE ino = ?", ino)
                if not self.notes.has("below", ino):  # a ring of directories ends here
                    spill.run("INSERT INTO below VALUES(?)", ino)
                    self._read_dir(keys.dir_row(Ino(ino)))
                    count += 1
            self._progress(f"{count} directories read")

    def _read_found(self) -> None:
        count = 0
        found = (keys.inode_row(Ino(ino)) for (ino,) in self.notes.spill.rows(_FOUND))
        while batch := list(islice(found, ROWS_AT_ONCE)):
            for row, inode in zip(batch, read_inodes(self._store, batch), strict=True):
                if inode.fields:  # else its name leads nowhere, which is judged by its name
                    self._note_inode(row, inode)
            count += len(batch)
            self._progress(f"{count} inodes read")


class _SubtreeNamesCheck(NamesCheck):
    """Names above the tops, and other names of a file elsewhere, are not known."""

    def __init__(self, notes: Findings, tops: frozenset[Ino]) -> None:
        super().__init__(notes)
        self._tops = tops

    def _judge_file(
        self, known: Known, names: dict[Ino, int], counted: dict[Ino, int], orphan: bool
    ) -> None:
        del orphan  # what has a name is none
        if known.ino in self._tops:
            return
        ino, parent = known.ino, known.parent
        if parent != NO_PARENT:
            if names != {parent: 1} or known.nlink != 1:
                self._report(
                    ino, f"has {known.nlink} links and parent {parent}, its names are in {names}"
                )
            return
        if known.nlink != sum(counted.values()):
            self._report(ino, f"has {known.nlink} links and counts {sum(counted.values())} names")
        if known.mark == self._notes.epoch != 0 and known.home not in counted:
            self._report(ino, f"counts in {known.home}, where it has no name")
        here = {above: count for above, count in counted.items() if self._notes.has("below", above)}
        if here != names:
            self._report(ino, f"counts names {here}, there are {names}")

    def _judge_names_of_dir(self, known: Known, names: dict[Ino, int], building: bool) -> None:
        if known.ino not in self._tops:
            super()._judge_names_of_dir(known, names, building)
