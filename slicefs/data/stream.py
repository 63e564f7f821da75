"""A stream of samples: one reader's part of an epoch, read ahead, with a state to go on from.

`slicefs.torch.IterableDataset` is this with torch's names. A stream pickles before it is iterated:
each worker process has its copy.

Threading: one thread iterates; another one reads the next batch of samples meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from itertools import islice
from typing import Any, Final

from slicefs.client.parallel import RUNTIME
from slicefs.data.order import Reader, SampleOrder, windows_of
from slicefs.data.source import UNKNOWN, Sample, SampleSource

STATE_VERSION: Final = 1
FETCH_SAMPLES: Final = 64  # of one batch of reads: enough to keep every connection busy
WINDOW_BYTES: Final = 128 << 20  # fits into the memory of a client: each block is fetched once
FETCH_BYTES: Final = 32 << 20  # and this is enough memory: two batches are held
FIRST_UNKNOWN: Final = 8  # samples of the first batch where no size is known


class SampleStream:
    """Samples of a source, in the order of an epoch."""

    def __init__(
        self,
        source: SampleSource,
        *,
        shuffle: bool = False,
        seed: int = 0,
        window_bytes: int = WINDOW_BYTES,
        drop_uneven: bool = False,
        fetch_bytes: int = FETCH_BYTES,
    ) -> None:
        self._source = source
        self._seed = seed
        self._drop = drop_uneven
        self._fetch_bytes = fetch_bytes
        self._windows = windows_of(source.sizes(), window_bytes) if shuffle else None
        self.epoch = 0
        self._done = 0  # samples of the epoch's order that were given before this stream began
        self._taken = 0  # samples that this reader has given since
        self._reader = Reader()
        self._guess = max(1, fetch_bytes // FIRST_UNKNOWN)
        self._usual = self._guess  # bytes of a sample of no known size

    def __len__(self) -> int:
        return len(self._source)

    def set_epoch(self, epoch: int) -> None:
        """Go to the begin of an epoch; the one that a state was loaded for goes on."""
        if epoch != self.epoch:
            self.epoch, self._done, self._taken = epoch, 0, 0

    def order(self) -> SampleOrder:
        """The order of the current epoch."""
        return SampleOrder(len(self._source), self._seed, self.epoch, self._windows)

    def read(self, reader: Reader) -> Iterator[Sample]:
        """What a reader has still to give of the epoch. Raises: ValueError, OSError."""
        reader.require_valid()
        if self._taken and reader != self._reader:
            raise ValueError(
                f"the state is of {self._reader} and not of {reader}: "
                "load `state_dict(consumed)` of the main process on another number of readers"
            )
        self._reader = reader
        indexes = self.order().samples(reader, self._done, self._drop, self._taken)
        for samples in self._ahead(indexes):
            for sample in samples:
                self._taken += 1
                yield sample
        self.epoch, self._done, self._taken = self.epoch + 1, 0, 0

    def _ahead(self, indexes: Iterator[int]) -> Iterator[Sequence[Sample]]:
        """Batches of samples, of which the next is read while one is used."""
        following = self._fetch(indexes)
        while following is not None:
            ready = following.result()
            self._usual = sum(len(sample.data) or self._guess for sample in ready) // len(ready)
            following = self._fetch(indexes)
            yield ready

    def _fetch(self, indexes: Iterator[int]) -> Future[list[Sample]] | None:
        """Begin to read the next batch; None behind the last.

        A sample of no known size counts as the mean of the batch before. What came without bytes
        counts there as at first: a source may have left them for later.
        """
        batch, size = [], 0
        for index in islice(indexes, FETCH_SAMPLES):
            batch.append(index)
            listed = self._source.objects[index][1]
            size += self._usual if listed == UNKNOWN else listed
            if size >= self._fetch_bytes:
                break
        if not batch:
            return None
        done: Future[list[Sample]] = Future()

        def run() -> None:
            try:
                done.set_result(self._source.read(batch))
            except BaseException as error:  # noqa: BLE001  (raised in the iterating thread)
                done.set_exception(error)

        RUNTIME.spawn("slicefs-fetch", run)
        return done

    # --- state -----------------------------------------------------------------------------------

    def state_dict(self, consumed: int | None = None, world: int = 1) -> dict[str, Any]:
        """Where the epoch stands, for `load_state_dict` here or on any number of readers.

        `consumed`: how many samples each of `world` ranks has taken since the stream was made or
        loaded; None: as this stream has counted, which is its own reader's part.
        """
        state: dict[str, Any] = {
            "version": STATE_VERSION,
            "epoch": self.epoch,
            "seed": self._seed,
            "samples": self._source.fingerprint(),
            "done": self._done,
        }
        if consumed is not None:
            if consumed < 0:
                raise ValueError(f"consumed {consumed}: a number of samples")
            state["done"] = min(len(self._source), self._done + consumed * world)
        elif self._taken and self._reader.world * self._reader.workers == 1:
            state["done"] = self._done + self._taken
        elif self._taken:
            state |= {"taken": self._taken, "reader": list(self._reader)}
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where a state was taken. Raises: ValueError where it is of another data set."""
        if state.get("version") != STATE_VERSION:
            raise ValueError(f"a state of version {state.get('version')}: upgrade slicefs")
        if state["samples"] != self._source.fingerprint():
            raise ValueError("the state is of another list of samples: start the epoch again")
        if state["seed"] != self._seed:
            raise ValueError(f"the state has seed {state['seed']}, this data set {self._seed}")
        self.epoch, self._done = int(state["epoch"]), int(state["done"])
        self._taken = int(state.get("taken", 0))
        if self._taken:
            self._reader = Reader(*state["reader"])
