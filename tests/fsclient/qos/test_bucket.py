"""What a bucket lets pass, and how mounts divide a limit, for any requests."""

from __future__ import annotations

from math import inf, isclose

from hypothesis import given, strategies as st

from fsclient.qos.bucket import BURST_S, DEBT_S, TokenBucket
from fsclient.qos.fair_share import HEADROOM, fair_share, need_of

RATES = st.integers(1, 10**9)
REQUESTS = st.lists(st.tuples(st.floats(0, 5), st.integers(1, 4 << 20)), min_size=1, max_size=50)


def begun(bucket: TokenBucket, requests: list[tuple[float, int]]) -> list[tuple[float, int]]:
    """When each of some requests begins, which wait for each other."""
    now, found = 1000.0, []
    for pause, tokens in requests:
        now += pause
        while (ready := bucket.ready_at(now)) > now:
            now = ready
        bucket.take(tokens, now)
        found.append((now, tokens))
    return found


@given(rate=RATES, requests=REQUESTS)
def test_no_more_passes_than_the_rate_allows(rate: int, requests: list[tuple[float, int]]) -> None:
    """In each stretch of time: what the rate makes of it, the burst, and one request."""
    found = begun(TokenBucket(rate, 1000.0), requests)
    for first in range(len(found)):
        for last in range(first + 1, len(found)):
            stretch_s = found[last][0] - found[first][0]
            passed = sum(tokens for _, tokens in found[first:last])
            assert passed <= rate * (stretch_s + BURST_S) * (1 + 1e-6) + 1


@given(rate=RATES, requests=REQUESTS)
def test_a_bucket_keeps_requests_waiting_no_longer_than_need_be(
    rate: int, requests: list[tuple[float, int]]
) -> None:
    """The last one waits as long as all before it take, at most."""
    found = begun(TokenBucket(rate, 1000.0), [(0.0, tokens) for _, tokens in requests])
    before = sum(tokens for _, tokens in found[:-1])
    assert found[-1][0] <= 1000.0 + (before / rate) * (1 + 1e-6) + 1e-3


def test_a_debt_is_made_good_at_the_rate_that_holds() -> None:
    bucket = TokenBucket(100, 50.0)
    bucket.take(1000, 50.0)
    assert bucket.ready_at(50.0) > 59.0
    bucket.set_rate(10_000, 50.0)
    assert bucket.ready_at(50.0) < 50.2
    assert bucket.take_demand(50.0) == (1000, True)
    assert bucket.take_demand(51.0) == (0, False)


def test_requests_that_do_not_wait_leave_little_behind() -> None:
    bucket = TokenBucket(100, 50.0)
    for _ in range(1000):
        bucket.take_out_of_turn(1000, 50.0)
    assert bucket.ready_at(50.0) == 50.0 + DEBT_S
    bucket.take(10_000, 50.0)
    before = bucket.ready_at(50.0)
    bucket.take_out_of_turn(1000, 50.0)
    assert bucket.ready_at(50.0) == before, "what was owed is owed"


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
