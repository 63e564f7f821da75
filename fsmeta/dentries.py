"""`Dentries`: names of a directory in columns, as listings pass on thousands of them.

A `Dentry` for each name would cost more than to read and to pack it. So names, inodes and types lie
in three columns, which are cut and picked together; as a sequence they are `Dentry` tuples, made
when one is asked for. Nothing changes a column once it is made.

Made by `schema/keys.unpack_dentries`; called by all that lists. Threading: any thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final, overload

from fsmeta.types import FILE_TYPES, Dentry, Ino

_new: Final = tuple.__new__  # makes a NamedTuple in half the time of its constructor


class Dentries(Sequence[Dentry]):
    """Names, the inodes that they lead to, and a byte for each with its type."""

    __slots__ = ("inos", "kinds", "names")

    def __init__(self, names: list[bytes], inos: list[Ino], kinds: bytes) -> None:
        self.names = names
        self.inos = inos
        self.kinds = kinds

    @classmethod
    def of(cls, dentries: Iterable[Dentry]) -> Dentries:
        """From names one by one."""
        if isinstance(dentries, Dentries):
            return dentries
        names, inos, kinds = [], [], bytearray()
        for name, ino, kind in dentries:
            names.append(name)
            inos.append(ino)
            kinds.append(kind)
        return cls(names, inos, bytes(kinds))

    def __len__(self) -> int:
        return len(self.names)

    def __iter__(self) -> Iterator[Dentry]:
        for name, ino, kind in zip(self.names, self.inos, self.kinds, strict=True):
            yield _new(Dentry, (name, ino, FILE_TYPES[kind]))

    @overload
    def __getitem__(self, at: int) -> Dentry: ...
    @overload
    def __getitem__(self, at: slice) -> Dentries: ...
    def __getitem__(self, at: int | slice) -> Dentry | Dentries:
        if isinstance(at, slice):
            return Dentries(self.names[at], self.inos[at], self.kinds[at])
        return Dentry(self.names[at], self.inos[at], FILE_TYPES[self.kinds[at]])

    def __add__(self, others: Dentries) -> Dentries:
        return Dentries(
            self.names + others.names, self.inos + others.inos, self.kinds + others.kinds
        )

    def __repr__(self) -> str:
        return f"Dentries({list(self)!r})"

    def pick(self, positions: Sequence[int]) -> Dentries:
        """Some of them, in that order."""
        names, inos, kinds = self.names, self.inos, self.kinds
        if kinds.count(kinds[:1]) != len(kinds):
            kinds = bytes([kinds[at] for at in positions])
        return Dentries(
            [names[at] for at in positions],
            [inos[at] for at in positions],
            kinds[: len(positions)],
        )


NO_NAMES: Final = Dentries([], [], b"")
