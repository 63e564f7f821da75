"""The error tree. What users see is an `OSError` with an errno; the rest are the store's.

    OSError                   a POSIX answer: ENOENT, EEXIST, …; goes to the kernel as it is
    └── ShowsObject           an attached file's bytes are not its own: copy them, then do it again
    StoreError                anything wrong below the verbs
    ├── Conflict              a commit's reads are no longer true: run the verb again
    ├── NotEmpty              a row that must be empty is not, everything else being true
    ├── Unavailable           the store can't be reached or answered "busy": nothing was applied
    │   └── Refused           the store does not take such a request, however often it is sent
    ├── Ambiguous             a commit was sent and its answer lost: send the same commit again
    ├── Fenced                another client has ended this client's session: it may not write
    ├── Voided                what this relies on ended with a session that another client ended
    ├── Outdated              the volume's settings have changed: read them, run the verb again
    ├── Rewound               the store went back to an older state: this client may not write
    ├── LimitExceeded         an `add` would pass its limit; carries which one
    ├── StoreFull             the store itself has no room
    ├── Corrupt               a stored value does not decode; carries the row and field
    ├── ObjectMissing         an object that metadata points to is gone
    └── ObjectDamaged         an object's bytes are not what was written
    ConfigError               bad input to a command: one line that names the thing and the remedy
    └── NoVolume              there is no volume there

Only `txn/retry` catches Conflict, Outdated and Ambiguous; only the kernel edge turns the other
errors into errnos.
"""

from __future__ import annotations

import errno
from typing import NamedTuple


class ShowsObject(OSError):
    """A verb would change the bytes of an attached file, which are an object's."""

    def __init__(self, ino: int) -> None:
        super().__init__(errno.EROFS, f"inode {ino} shows an object: copy its bytes first")


class StoreError(Exception):
    """Root of what a metadata or object store can raise."""


class Conflict(StoreError):
    """A value that the transaction read has changed since."""


class NotEmpty(StoreError):
    """All checks of a commit hold, but a row it requires to be empty has a field."""


class Unavailable(StoreError):
    """The store did not take the request; repeating it is safe."""


class Refused(Unavailable):
    """The store does not take what the request asks for; others may be taken."""


class Doubt(NamedTuple):
    """A commit whose answer never came: by this the store knows what became of it."""

    fence: bytes  # row of the session
    worker: bytes  # field of it that remembers the last commit of a worker
    number: int


class Ambiguous(StoreError):
    """The request may have been applied; only an identical repeat is safe.

    With a `doubt` it can be found out later what became of it: `Transactor.fate`.
    """

    def __init__(self, text: str, doubt: Doubt | None = None) -> None:
        super().__init__(text)
        self.doubt = doubt


class Fenced(StoreError):
    """The session that commits no longer exists in the store."""


class Voided(StoreError):
    """It was begun in a session that another client ended; what it relies on may be gone since.

    That is the objects of a slice, which gc may have deleted, or what became of a commit, which
    the store has forgotten.
    """


class Outdated(StoreError):
    """The commit was made under settings of the volume that its session may follow no more."""


class StoreRolledBack(StoreError):
    """The store holds an older state than one this client has been answered from."""


class LimitExceeded(StoreError):
    """An addition would have passed its limit; nothing was applied.

    `tag` is the word the verb gave the addition, so that it can name the errno.
    """

    def __init__(self, tag: str) -> None:
        super().__init__(tag)
        self.tag = tag


class StoreFull(StoreError):
    """The store refused a write for want of memory or disk."""


class Corrupt(StoreError):
    """A stored value is not what its format says."""

    def __init__(self, row: bytes, field: bytes, why: str) -> None:
        super().__init__(f"corrupt metadata at row {row!r} field {field!r}: {why}")
        self.row = row
        self.field = field
        self.why = why


class ConfigError(Exception):
    """Bad input: the message is one line that names the thing and what to do about it."""


class NoVolume(ConfigError):
    """There is no volume in a metadata store that could be reached."""

    def __init__(self) -> None:
        super().__init__("there is no volume here: run `slicefs format` first")


class ObjectMissing(StoreError):
    """An object that metadata points to is not in the object store."""


class ObjectDamaged(StoreError):
    """An object's bytes are not what was written: wrong magic, length or CRC."""
