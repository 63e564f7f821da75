"""Can the backups of the metadata be restored? The last part of `slicefs fsck`.

A backup that was never completed is left over from a client that was killed, or is being made; one
that lacks a part is of no use. Memory: the keys of all backups, a few dozen of them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import NamedTuple

from fsclient.background.backup import END, Backup, backups
from fsdata.format.block_v1 import decode
from fsdata.objects.contract import ObjectStore
from fsmeta.errors import ObjectDamaged, ObjectMissing


class BackupVerdict(NamedTuple):
    """What was found of the backups, and removed."""

    problems: list[str]
    unfinished: int  # without an end
    removed: list[str]  # a line for each


def verify_backups(objects: ObjectStore, remove: bool) -> BackupVerdict:
    """Look whether each backup is whole; with `remove` those that are not go.

    Removing wants a volume that no client uses. Raises: Unavailable, OSError.
    """
    problems: list[str] = []
    removed: list[str] = []
    unfinished = 0
    for each in backups(objects):
        if each.complete:
            wrong = next(_wrong(objects, each), "")
            said = f"the backup {each.name} {wrong}: removed"
        else:
            wrong = ""
            unfinished += 1
            said = f"the backup {each.name} was never completed: removed"
        if remove and (wrong or not each.complete):
            for key in sorted(each.keys, reverse=True):  # `end` first: half a backup is none
                objects.delete(key)
            removed.append(said)
            unfinished -= not each.complete
        elif wrong:
            problems.append(f"the backup {each.name} {wrong}: it can't be restored")
    return BackupVerdict(problems, unfinished, removed)


def _wrong(objects: ObjectStore, backup: Backup) -> Iterator[str]:
    """Why a backup can't be restored."""
    try:
        parts = int(json.loads(bytes(decode(objects.get(f"{backup.prefix}/{END}"))))["parts"])
    except ObjectMissing:
        return  # it has been let go meanwhile
    except (ObjectDamaged, ValueError, KeyError, TypeError) as error:
        yield f"has an end that can't be read ({error})"
        return
    there = set(backup.keys)
    for number in range(parts):
        key = f"{backup.prefix}/{number:06d}"
        if key not in there and objects.head(key) is None:
            yield f"lacks {key}"
