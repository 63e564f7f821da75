"""What a bucket lets pass, and how mounts divide a limit, for any requests."""

from __future__ import annotations

from math import inf, isclose

from hypothesis import given, strategies as st

from fsclient.qos.bucket import BURST_S, TokenBucket
from fsclient.qos.fair_share import HEADROOM, fair_share, need_of

RATES = st.integers(1, 10**9)
REQUESTS = st.lists(st.tuples(st.floats(0, 5), st.integers(1, 4 << 20)), min_size=1, max_size=50)


@given(rate=RATES, requests=REQUESTS)
def test_no_more_passes_than_the_rate_allows(rate: int, requests: list[tuple[float, int]]) -> None:
    """In each stretch of time: what the rate makes of it, the burst, and one request."""
    bucket, now = TokenBucket(rate), 1000.0
    begun: list[tuple[float, int]] = []
    for pause, tokens in requests:
        now += pause
        begin = max(now, bucket.reserve(tokens, now))
        assert not begun or begin >= begun[-1][0], "requests begin in the order of their arrival"
        begun.append((begin, tokens))
    for first in range(len(begun)):
        for last in range(first + 1, len(begun)):
            stretch_s = begun[last][0] - begun[first][0]
            passed = sum(tokens for _, tokens in begun[first:last])
            assert passed <= rate * (stretch_s + BURST_S) * (1 + 1e-9) + 1


@given(rate=RATES, requests=REQUESTS)
def test_a_bucket_keeps_nobody_waiting_without_need(
    rate: int, requests: list[tuple[float, int]]
) -> None:
    """The last request waits as long as all before it take, at most."""
    bucket, now = TokenBucket(rate), 1000.0
    for _, tokens in requests:
        begin = bucket.reserve(tokens, now)
    before = sum(tokens for _, tokens in requests[:-1])
    assert begin <= now + before / rate + 1e-6


def test_what_is_refunded_was_never_taken() -> None:
    bucket = TokenBucket(100)
    bucket.reserve(1000, 50.0)
    assert bucket.reserve(1, 50.0) > 59.0
    bucket.refund(1)
    bucket.refund(1000)
    assert bucket.reserve(1, 50.0) < 50.0
    assert bucket.take_demand() == (1, True)
    assert bucket.take_demand() == (0, False)
    bucket.refund(1)
    assert bucket.take_demand() == (0, False), "it was told of before"


NEEDS = st.lists(st.one_of(st.just(inf), st.floats(0, 1e9)), max_size=20)


@given(limit=RATES, needs=NEEDS)
def test_a_limit_is_divided_whole_and_no_further(limit: int, needs: list[float]) -> None:
    share = fair_share(limit, needs)
    parts = [min(need, share) for need in needs]
    assert isclose(share + sum(parts), limit, rel_tol=1e-6)
    assert share >= limit / (len(needs) + 1) * (1 - 1e-9)


def test_an_idle_mount_leaves_its_part_to_others() -> None:
    assert fair_share(100, [need_of(0, hungry=False)]) == 100
    assert fair_share(100, [need_of(50, hungry=True)]) == 50
    assert fair_share(100, [need_of(8, hungry=False), inf]) == (100 - 8 * HEADROOM) / 2
