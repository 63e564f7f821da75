"""A3: each sample exactly once, in one order for any number of ranks and workers."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given, settings, strategies as st

from slicefs.data.order import Reader, SampleOrder, permuted, windows_of


@given(st.integers(0, 200), st.text(max_size=5))
@settings(max_examples=40)
def test_a_permutation_takes_each_place_once(count: int, key: str) -> None:
    assert sorted(permuted(value, count, key) for value in range(count)) == list(range(count))


def test_a_permutation_moves_neighbours_apart_and_follows_its_key() -> None:
    one = [permuted(value, 1000, "a") for value in range(1000)]
    other = [permuted(value, 1000, "b") for value in range(1000)]
    assert sum(x == y for x, y in zip(one, other, strict=True)) < 20
    assert sum(abs(x - y) == 1 for x, y in pairwise(one)) < 20


@given(
    count=st.integers(0, 200),
    world=st.integers(1, 5),
    workers=st.integers(1, 4),
    block=st.integers(1, 7),
    window=st.integers(1, 100),
    shuffle=st.booleans(),
)
@settings(max_examples=60)
def test_readers_take_each_sample_once(
    count: int, world: int, workers: int, block: int, window: int, shuffle: bool
) -> None:
    windows = windows_of([1] * count, window) if shuffle else None
    order = SampleOrder(count, 7, 3, windows)
    taken: Counter[int] = Counter()
    shares = []
    for rank in range(world):
        readers = [Reader(rank, world, worker, workers, block) for worker in range(workers)]
        own = [sample for reader in readers for sample in order.samples(reader)]
        shares.append(len(own))
        taken.update(own)
    assert taken == Counter(range(count))
    assert max(shares) - min(shares) <= 1
    even = [list(order.samples(Reader(rank, world), 0, True)) for rank in range(world)]
    assert {len(each) for each in even} == {count // world}


@given(
    count=st.integers(1, 200),
    first=st.tuples(st.integers(1, 4), st.integers(1, 3)),
    second=st.tuples(st.integers(1, 4), st.integers(1, 3)),
    batches=st.integers(0, 10),
)
@settings(max_examples=60)
def test_an_epoch_goes_on_with_other_readers(
    count: int, first: tuple[int, int], second: tuple[int, int], batches: int
) -> None:
    """Batches come from a rank's workers in turn, as a DataLoader takes them."""
    block, seen = 3, list[int]()
    order = SampleOrder(count, 1, 0, windows_of([1] * count, 20))
    world, workers = first
    steps = min(batches, count // world // block)
    for rank in range(world):
        streams = [
            order.samples(Reader(rank, world, worker, workers, block)) for worker in range(workers)
        ]
        for step in range(steps):
            stream = streams[step % workers]
            seen += [next(stream) for _ in range(block)]
    done = steps * block * world
    assert sorted(seen) == sorted(order.sample(position) for position in range(done))
    world, workers = second
    for rank in range(world):
        for worker in range(workers):
            seen += order.samples(Reader(rank, world, worker, workers, block), done)
    assert sorted(seen) == list(range(count))


def test_a_reader_goes_on_behind_what_it_has_taken() -> None:
    order, reader = SampleOrder(100, 1, 0, windows_of([1] * 100, 10)), Reader(1, 2, 1, 3, 4)
    whole = list(order.samples(reader))
    for taken in range(len(whole) + 1):
        assert list(order.samples(reader, 0, False, taken)) == whole[taken:]


def test_windows_hold_about_their_size() -> None:
    assert windows_of([], 10) == [0]
    assert windows_of([5, 5, 5, 20, 1], 10) == [0, 2, 3, 4, 5]
    order = SampleOrder(1000, 1, 0, windows_of([1] * 1000, 100))
    at = [order.sample(position) // 100 for position in range(1000)]
    assert all(len(set(at[begin : begin + 100])) == 1 for begin in range(0, 1000, 100))


def test_epochs_and_seeds_differ() -> None:
    windows = windows_of([1] * 50, 25)
    orders = [
        tuple(SampleOrder(50, seed, epoch, windows).samples(Reader()))
        for seed in (1, 2)
        for epoch in (0, 1)
    ]
    assert len(set(orders)) == 4
    with pytest.raises(IndexError):
        SampleOrder(3).sample(3)
    with pytest.raises(ValueError, match="below their counts"):
        Reader(2, 2).require_valid()
