"""A client of a volume with a trash, and what lies in it: for the tests of trash and restore."""

from __future__ import annotations

from fsmeta.admin.trash_expiry import hours
from fsmeta.meta.meta import Meta
from fsmeta.runtime import SystemRuntime
from fsmeta.types import ROOT_CALLER, ROOT_INO, Caller, Ino, Slice
from tests.fsmeta.engines import RUNTIME, Engine

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


class Clocks(SystemRuntime):
    """A host whose clocks are where the test wants them."""

    def __init__(self, behind_ns: int = 0) -> None:
        super().__init__()
        self.passed_s = 0.0
        self.now_ns = lambda: RUNTIME.now_ns() - behind_ns
        self.monotonic = lambda: RUNTIME.monotonic() + self.passed_s

    def pass_for(self, meta: Meta) -> None:
        """What passes here passes for the store of `meta`, too."""

        def now_ns() -> int:
            return RUNTIME.now_ns() + int(self.passed_s * 1e9)

        meta.now_ns = now_ns  # type: ignore[method-assign]
