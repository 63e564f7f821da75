"""C3: how much of a run is fetched with its first page, and how much of that in vain."""

from __future__ import annotations

import random
from itertools import accumulate

from hypothesis import given, strategies as st

from fsdata.files.random_readahead import (
    KNOWN_MIN,
    LEARNING_BYTES,
    MORE_BYTES_MAX,
    OPEN_MAX,
    RUNS_MAX,
    VAIN_BYTES,
    VAIN_SHARE,
    RandomReadahead,
)
from fsmeta.types import BLOCK_BYTES_MAX

PAGE = 4096
VALUE = 26  # pages of a value of 100 KiB with its head
KNOWN = KNOWN_MIN + OPEN_MAX  # runs after which something may be expected
FAR = 1 << 30


class Handle:
    """A handle that counts, in pages, what a store without any cache would be asked for."""

    def __init__(self, block_bytes: int = BLOCK_BYTES_MAX) -> None:
        self.runs = RandomReadahead(block_bytes)
        self.here: set[int] = set()
        self.asked = self.fetched = self.requests = 0

    def page(self, number: int) -> None:
        more = self.runs.note(number * PAGE, PAGE)
        assert more % PAGE == 0
        self.asked += 1
        if number not in self.here:
            self.requests += 1
            brought = range(number, number + 1 + more // PAGE)
            self.fetched += len(brought)
            self.here.update(brought)
        self.here.discard(number)  # the kernel has it

    def run(self, first: int, pages: int) -> None:
        for number in range(first, first + pages):
            self.page(number)


def test_a_value_is_one_request_once_its_like_are_known() -> None:
    handle, dice = Handle(), random.Random(1)
    for turn in range(100):
        before = handle.requests
        handle.run(turn * FAR // PAGE + dice.randrange(900), VALUE)
        requests = handle.requests - before
        assert requests == 1 or turn < KNOWN, turn
        assert requests <= 6 or turn > 1, "before, each brings as much as was read"
    assert handle.fetched <= 1.01 * handle.asked


def test_single_pages_fetch_nothing_more() -> None:
    handle, dice = Handle(), random.Random(2)
    for _ in range(500):
        handle.page(dice.randrange(1 << 40) * 2)
    assert handle.fetched == handle.asked == handle.requests


def test_pages_of_a_tree_among_values() -> None:
    """A third of the runs is a single page: then the second page says what it is."""
    handle, dice = Handle(), random.Random(3)
    for turn in range(200):
        if turn == 30:
            handle.asked = handle.fetched = handle.requests = 0
        if turn % 2:
            handle.page(dice.randrange(1 << 20) * 2)
        handle.run((turn + 1) * FAR // PAGE, VALUE)
    assert handle.requests <= 85 + 2 * 170
    assert handle.fetched == handle.asked


def test_values_of_all_sizes_cost_a_few_requests() -> None:
    """A third and less of one for each page, and a twentieth more bytes."""
    for least, most, requests in ((20, 30, 4), (10, 60, 10), (2, 200, 30)):
        handle, dice = Handle(), random.Random(4)
        for turn in range(300):
            handle.run((turn + 1) * FAR // PAGE, dice.randrange(least, most))
        assert handle.requests < 300 * requests
        assert handle.fetched < 1.0625 * handle.asked


def test_threads_share_a_handle() -> None:
    """Their values are read page by page in turn."""
    handle = Handle()
    for turn in range(40):
        begins = [(turn * OPEN_MAX + each) * FAR // PAGE for each in range(OPEN_MAX)]
        if turn == 20:
            handle.requests = 0
        for page in range(VALUE):
            for begin in begins:
                handle.page(begin + page)
    assert handle.requests == 20 * OPEN_MAX
    assert handle.fetched <= handle.asked + LEARNING_BYTES // PAGE


def test_nothing_is_promised_beyond_the_block() -> None:
    handle = Handle(1 << 20)
    for turn in range(1, 30):
        first = (turn * FAR + (1 << 20)) // PAGE - 10
        handle.run(first, 6)
        handle.run(first + 6, VALUE - 6)
    runs = handle.runs
    assert runs.note(FAR // 2 - 10 * PAGE, PAGE) == 9 * PAGE
    assert runs.note(FAR // 2 - 9 * PAGE, 9 * PAGE) == 0
    assert runs.note(FAR // 2, PAGE) == (VALUE - 11) * PAGE


def test_what_was_long_ago_is_forgotten() -> None:
    """One who read values and now reads pages; and the other way round."""
    handle = Handle()
    for turn in range(60):
        handle.run(turn * FAR // PAGE, VALUE)
    for turn in range(60, 60 + RUNS_MAX + OPEN_MAX):
        handle.page(turn * FAR // PAGE)
    before = handle.fetched
    for turn in range(200, 260):
        handle.page(turn * FAR // PAGE)
    assert handle.fetched == before + 60
    assert handle.fetched - handle.asked <= (handle.asked // VAIN_SHARE) + VAIN_BYTES // PAGE


READS = st.lists(
    st.tuples(
        st.integers(0, 50),  # where a run begins
        st.integers(1, 40),  # how many reads it has
        st.sampled_from([1, 1, 1, 2, 8]),  # pages of each
    ),
    max_size=120,
)


@given(READS, st.sampled_from([1 << 16, 1 << 20, BLOCK_BYTES_MAX]))
def test_what_is_fetched_in_vain_is_bounded(
    reads: list[tuple[int, int, int]], block_bytes: int
) -> None:
    """Whatever a reader does, at every moment: nothing it expects is outside of the share."""
    runs = RandomReadahead(block_bytes)
    asked = promised = 0
    expected: set[int] = set()  # pages that were promised and not asked for yet
    for place, count, pages in reads:
        begins = accumulate([pages] * (count - 1), initial=place * 37)
        for first in begins:
            asked += pages * PAGE
            expected.difference_update(range(first, first + pages))
            more = runs.note(first * PAGE, pages * PAGE)
            assert 0 <= more <= MORE_BYTES_MAX
            end = (first + pages) * PAGE
            assert end + more <= -(-end // block_bytes) * block_bytes
            expected.update(range(first + pages, first + pages + more // PAGE))
            promised = max(promised, more)
            assert len(expected) * PAGE <= asked // VAIN_SHARE + VAIN_BYTES
