"""What `BlockStore` needs of a cache of objects below it: `DiskCache`."""

from __future__ import annotations

from typing import Protocol


class Copies(Protocol):
    """What `BlockStore` needs of a cache of objects below it."""

    def suspect(self, key: str) -> None:
        """Bytes of an object were wrong: from now until `settle` they come from the store."""

    def settle(self, key: str, right: bool) -> None:
        """The store had the object right, or not."""

    def keeps(self, key: str) -> bool:
        """Whether a range that is fetched now will be found later."""

    def lacks(self, key: str, size: int) -> bool | None:
        """Whether a whole object that is fetched now finds room; None: it is here."""

    def read(self, key: str, begin: int, end: int) -> bytes | None:
        """Bytes of an object that are here, and no disk needs to be waited for; else None."""

    def is_near(self, key: str) -> bool:
        """Whether `read` would give all of an object."""

    def has(self, key: str, at: int) -> bool:
        """Whether byte `at` of an object is here."""
