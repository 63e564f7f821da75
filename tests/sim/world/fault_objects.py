"""An object store behind a bad network, with late puts and damaged bytes.

See `faults` for the network. What a put that "failed" may do later is the point of `late`: the
object appears although the writer was told that it did not, perhaps after the writer deleted it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, NoReturn

from fsdata.objects.contract import Buffer, ObjectInfo, ObjectStore, Range, fill
from fsmeta.errors import StoreError, Unavailable
from tests.sim.world.faults import Faults, Network
from tests.sim.world.scheduler import SimRuntime


class Damage(NamedTuple):
    """How often stored bytes come back wrong; probabilities of one read."""

    flipped: float = 0.0  # one bit differs
    shortened: float = 0.0  # the end is missing


class FaultObjects:
    """An `ObjectStore` behind a `Network`. `late` of `Faults` is that of puts and deletes."""

    def __init__(
        self,
        store: ObjectStore,
        sim: SimRuntime,
        seed: int,
        faults: Faults | None = None,
        damage: Damage | None = None,
    ) -> None:
        self.network = Network(sim, seed, faults or Faults())
        self.damage = damage or Damage()
        self._store = store
        self._sim = sim

    def heal(self) -> None:
        """From now on all goes well."""
        self.network.heal()
        self.damage = Damage()

    def put(self, key: str, pieces: Sequence[Buffer]) -> None:
        if self._delayed():
            whole = b"".join(pieces)  # the caller's buffers are its own again after this
            self._later("late put", lambda: self._store.put(key, [whole]))
        self.network.ask(lambda: self._store.put(key, pieces))

    def delete(self, *keys: str) -> None:
        if self._delayed():
            self._later("late delete", lambda: self._store.delete(*keys))
        if len(keys) > 1 and self._delayed():
            self._store.delete(*keys[: len(keys) // 2])
            raise Unavailable("simulated: half of it deleted")
        self.network.ask(lambda: self._store.delete(*keys))

    def _delayed(self) -> bool:
        return self.network.happens(self.network.faults.late)

    def _later(self, what: str, apply: Callable[[], None]) -> NoReturn:
        """Report failure now, and do it afterwards all the same."""
        net = self.network
        net.travel()

        def body() -> None:
            self._sim.sleep(net.draw(net.faults.late_s))
            try:
                apply()
            except StoreError:
                pass  # nobody waits for this answer any more

        self._sim.spawn_in(None, what, body)
        raise Unavailable(f"simulated: {what}")

    def get(self, key: str, begin: int = 0, end: int | None = None) -> bytes:
        return self._damaged(self.network.ask(lambda: self._store.get(key, begin, end)))

    def get_ranges(self, key: str, ranges: Sequence[Range]) -> list[bytes]:
        return [self.get(key, begin, end) for begin, end in ranges]

    def get_into(self, key: str, pieces: Sequence[memoryview]) -> int:
        data = self.get(key, 0, sum(map(len, pieces)))
        return fill(pieces, data)

    def _damaged(self, data: bytes) -> bytes:
        net = self.network
        if data and net.happens(self.damage.shortened):
            return data[: int(net.draw(len(data)))]
        if data and net.happens(self.damage.flipped):
            wrong = bytearray(data)
            wrong[int(net.draw(len(data)))] ^= 1 << int(net.draw(8))
            return bytes(wrong)
        return data

    def head(self, key: str) -> ObjectInfo | None:
        return self.network.ask(lambda: self._store.head(key))

    def list(self, prefix: str, after: str = "") -> Iterator[ObjectInfo]:
        yield from self.network.ask(lambda: [*self._store.list(prefix, after)])

    def sync(self, keys: Iterable[str]) -> None:
        self.network.ask(lambda: self._store.sync(keys))

    def close(self) -> None:
        self._store.close()


def _conforms(store: FaultObjects) -> ObjectStore:
    return store
