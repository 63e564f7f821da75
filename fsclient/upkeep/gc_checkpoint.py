"""How far a garbage collection is, kept in files, so that one that was killed can go on.

    FILE         JSON: the volume, the phase, where in it, and what was found so far
    FILE.used    the slices that chunks refer to, as `SliceBitmap` has them
    FILE.dead    those that wait for deletion

The marks of an earlier run stay good as long as no other gc has begun to read the chunks before it
was through, and the metadata have not gone back behind it (`ops/data/gc`): `is_good` asks. One
thread.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from typing import Any, Final

from fsclient.upkeep.slice_bitmap import SliceBitmap
from fsmeta.errors import ConfigError
from fsmeta.meta.meta import Meta
from fsmeta.ops.data import gc as marks
from fsmeta.runtime import Runtime
from fsmeta.txn.txn import Txn

SAVE_EVERY_S: Final = 5.0  # what is lost by a kill; a save writes 16 MiB of marks at most
COMPACT: Final = "compact"
PACK: Final = "pack"
MARK: Final = "mark"
SWEEP: Final = "sweep"
_PHASES: Final = (COMPACT, PACK, MARK, SWEEP)
_USED: Final = "used"
_DEAD: Final = "dead"
_SETS: Final = (_USED, _DEAD)


class GcCheckpoint:
    """Where a run is. Without a file nothing is kept."""

    def __init__(self, runtime: Runtime, file: str | None = None, uuid: str = "") -> None:
        """Raises: ConfigError where the file is none of ours, or another volume's."""
        self._runtime = runtime
        self._file = file
        self._uuid = uuid
        self._saved = runtime.monotonic()
        self.phase = COMPACT
        self.at = ""  # where in the phase: a cursor of the walk in hexadecimal, or a key
        self.run = b""  # the name of this run; none before it has begun to mark
        self.floor = 0
        self.store_epoch = b""
        self.counts: dict[str, Any] = {}  # of the phases so far, as the counting phase wants them
        self.used, self.dead = SliceBitmap(), SliceBitmap()
        if file is not None:
            try:
                self._open(self._load(file) if os.path.exists(file) else {})
            except ConfigError:
                self.close()
                raise

    @property
    def is_kept(self) -> bool:
        """Whether there is a file."""
        return self._file is not None

    @property
    def walk_from(self) -> bytes:
        """Where a walk of the inodes goes on."""
        return bytes.fromhex(self.at)

    def enter(self, phase: str) -> None:
        """A phase begins; what was before is done."""
        assert _PHASES.index(phase) >= _PHASES.index(self.phase), "a run goes on, not back"
        self.phase, self.at = phase, ""
        self.save()

    def begin(self, floor: int, store_epoch: bytes) -> bytes:
        """Forget all marks, and call the run something new; returns its name.

        It counts from the next `save` on; what was kept before counts no more.
        """
        if self._file is not None:
            with suppress(FileNotFoundError):
                os.unlink(self._file)  # it says where in the other files old marks are
        self.used.clear()
        self.dead.clear()
        self.phase, self.at, self.counts = MARK, "", {}
        self.floor, self.store_epoch = floor, store_epoch
        self.run = b"%x" % int(self._runtime.random() * (1 << 53))
        return self.run

    def is_good(self, meta: Meta) -> bool:
        """Whether the marks that were kept still say what may be deleted."""
        if not self.run or self.store_epoch != meta.deletion.store_epoch():
            return False

        def ask(txn: Txn) -> bool:
            same = self.phase == SWEEP or marks.collecting(txn) == self.run
            return same and marks.void_below(txn) >= self.floor

        return meta.transactor.view(ask)

    def step(self, at: bytes | str) -> None:
        """All before `at` is done."""
        self.at = at if isinstance(at, str) else at.hex()
        if self.is_kept and self._runtime.monotonic() - self._saved >= SAVE_EVERY_S:
            self.save()

    def save(self) -> None:
        """From here on a later run goes on. Raises: OSError."""
        if self._file is None:
            return
        self.used.flush()
        self.dead.flush()
        kept = {
            "volume": self._uuid,
            "phase": self.phase,
            "at": self.at,
            "run": self.run.decode(),
            "floor": self.floor,
            "lineage": self.store_epoch.hex(),
            "counts": self.counts,
            "used": list(self.used.slots.items()),
            "dead": list(self.dead.slots.items()),
        }
        with open(f"{self._file}.new", "w", encoding="utf-8") as stream:
            json.dump(kept, stream)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(f"{self._file}.new", self._file)
        self._saved = self._runtime.monotonic()

    def _load(self, file: str) -> dict[str, dict[int, int]]:
        """Where a run was; and where in the other files its marks are."""
        try:
            with open(file, encoding="utf-8") as stream:
                kept: dict[str, Any] = json.load(stream)
            self.phase, self.at = kept["phase"], str(kept["at"])
            if self.phase not in _PHASES:
                raise ValueError(self.phase)
            if self.phase != SWEEP:
                bytes.fromhex(self.at)
            self.run, self.floor = kept["run"].encode(), int(kept["floor"])
            self.store_epoch, self.counts = bytes.fromhex(kept["lineage"]), dict(kept["counts"])
            slots = {name: {int(n): int(at) for n, at in kept[name]} for name in _SETS}
            uuid = kept["volume"]
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"--cursor {file} can't be read: remove it to start again") from error
        if uuid != self._uuid:
            raise ConfigError(f"--cursor {file} is of another volume: name another file")
        return slots

    def _open(self, slots: dict[str, dict[int, int]]) -> None:
        """The sets in files of their own. Raises: ConfigError."""
        self.close()
        try:
            self.used = SliceBitmap(path=f"{self._file}.{_USED}", slots=slots.get(_USED))
            self.dead = SliceBitmap(path=f"{self._file}.{_DEAD}", slots=slots.get(_DEAD))
        except OSError as error:
            text = f"--cursor {self._file}: {error.strerror}: {error.filename}"
            raise ConfigError(f"{text}; remove it to start again, or name another") from error

    def close(self) -> None:
        """Let go of the files; what was saved stays."""
        self.used.close()
        self.dead.close()

    def remove(self) -> None:
        """All is done; the next run begins anew."""
        self.close()
        if self._file is not None:
            for path in (self._file, *(f"{self._file}.{name}" for name in _SETS)):
                with suppress(FileNotFoundError):
                    os.unlink(path)
