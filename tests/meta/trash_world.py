"""A client of a volume with a trash, and what lies in it: for the tests of trash and restore."""

from __future__ import annotations

from fsmeta.engine import Meta
from fsmeta.trash_hours import hours
from fsmeta.types import ROOT_CALLER, ROOT_INO, Caller, Ino, Slice
from tests.meta.engines import Engine

ROOT = ROOT_CALLER
USER = Caller(1000, 1000)


def trashing_client(engine: Engine) -> Meta:
    """One that keeps what is deleted for a day."""
    meta = engine.meta()
    meta.format = meta.format._replace(trash_days=1)
    return meta


def small_file(meta: Meta, name: bytes, parent: Ino = ROOT_INO, caller: Caller = ROOT) -> Ino:
    """A file of 5000 bytes."""
    ino = meta.create(caller, parent, name, 0o100644).ino
    piece = Slice(0, meta.new_slice_id(), 5000, 0, 5000)
    meta.write_slices(ino, [(0, piece)], 5000, 1)
    return ino


def all_in_trash(meta: Meta) -> list[tuple[Ino, bytes]]:
    """Everything in the trash."""
    return [(hour, name) for hour in hours(meta) for name, _, _ in sorted(meta.names(hour)[0])]
