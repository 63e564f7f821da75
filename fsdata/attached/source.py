"""What a place of attached objects answers, and how it says that an object has changed."""

from __future__ import annotations

import errno
from typing import Protocol

from fsmeta.types import AttachedObject


class AttachedSource(Protocol):
    """A bucket or a directory. Threading: any method from any thread."""

    @property
    def place(self) -> str:
        """Its address, as this client's environment has it."""
        ...

    @property
    def on_disks(self) -> bool:
        """Whether cache disks may have copies of what is read."""
        ...

    def get(self, found: AttachedObject, begin: int, end: int) -> bytes:
        """Bytes of the object as it was when it was attached.

        Raises: ESTALE where it is another one now, EIO, Unavailable.
        """
        ...

    def close(self) -> None:
        """Let go of connections; later reads fail."""
        ...


def changed(name: str, how: str) -> OSError:
    """An object that is not the one that was attached."""
    return OSError(errno.ESTALE, f"{name} {how}: run `slicefs attach` again", name)
