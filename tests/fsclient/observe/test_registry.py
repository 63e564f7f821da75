"""The registry: histograms, `.stats` text and Prometheus text say the same."""

from __future__ import annotations

import pytest

from fsclient.observe.registry import Metrics, Series, parse
from fsmeta.latency import Histogram, HistogramReading, summed, upper_bound
from tests.fsclient.observe import prometheus


def _filled(*seconds: float) -> Histogram:
    histogram = Histogram()
    for each in seconds:
        histogram.add(each)
    return histogram


@pytest.mark.parametrize("seconds", [0.0, 1e-7, 1e-6, 3e-5, 0.25, 70.0, 1e9])
def test_a_bucket_holds_what_is_below_its_bound(seconds: float) -> None:
    reading = _filled(seconds).reading()
    (index,) = (n for n, count in enumerate(reading.buckets) if count)
    assert seconds < upper_bound(index)
    assert index == 0 or seconds >= upper_bound(index - 1)
    assert reading.quantile(0.5) == reading.quantile(0.99) == upper_bound(index)


def test_quantiles_and_sums() -> None:
    fast, slow = _filled(*[0.0001] * 98), _filled(0.1, 0.1)
    both = summed([fast.reading(), slow.reading()])
    assert both.requests == 100
    assert both.seconds == pytest.approx(0.2098)
    assert both.quantile(0.5) < 0.0002
    assert 0.1 < both.quantile(0.99) < 0.2
    assert summed([]).requests == 0
    assert summed([]).quantile(0.5) == 0


def test_both_texts_have_the_same_numbers() -> None:
    metrics = Metrics()
    metrics.add(lambda: {'operations_total{op="read"}': 3, "open_handles": 1})
    metrics.add(lambda: {'operations_total{op="write"}': 4})
    reading: HistogramReading = _filled(0.001, 0.004, 100.0).reading()
    metrics.add_latencies(
        lambda: [
            Series("operation_duration_seconds", 'op="read"', reading),
            Series("operation_duration_seconds", 'op="write"', Histogram().reading()),
        ]
    )
    numbers = parse(metrics.text().decode())
    assert numbers['operations_total{op="write"}'] == 4
    assert 0.004 < numbers['operation_duration_p50_seconds{op="read"}'] < 0.009
    families = prometheus.parse(metrics.prometheus().decode())
    assert families["slicefs_operations_total"].kind == "counter"
    assert families["slicefs_open_handles"].kind == "gauge"
    for name, family in families.items():
        if family.kind != "histogram":
            for sample, value in family.samples.items():
                assert numbers[sample.removeprefix("slicefs_")] == value, name
    samples = families["slicefs_operation_duration_seconds"].samples
    assert samples['slicefs_operation_duration_seconds_count{op="read"}'] == 3
    assert samples['slicefs_operation_duration_seconds_sum{op="read"}'] == pytest.approx(100.005)
    assert 'slicefs_operation_duration_seconds_count{op="write"}' not in samples
