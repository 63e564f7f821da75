"""The registry of a mount's numbers: `.stats`, the Prometheus endpoint and the web page read it.

Each part keeps its own counters and histograms; the registry asks for them when they are wanted, so
that counting costs a request a few additions. Names follow Prometheus: `_total` counts, `_seconds`
are seconds, `_bytes` are bytes; labels stand in the name, as `operations_total{op="read"}`.

Threading: sources are added before the mount serves; the rest from any thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final, NamedTuple, TypeAlias

from fsclient.observe.catalog import help_of, kind_of
from fsmeta.latency import HistogramReading, upper_bound

Numbers: TypeAlias = Mapping[str, float]
PREFIX: Final = "slicefs_"
CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
_SHORTEST: Final = 5  # the first bound shown is 32 µs: nothing through the kernel is quicker
_LONGEST: Final = 26  # and the last 67 s; what takes longer is in +Inf
_SHARES: Final = (0.5, 0.99)
_WORDS: Final = ("p50", "p99")


class Series(NamedTuple):
    """A histogram by name and labels."""

    name: str
    labels: str  # `op="read"`
    reading: HistogramReading


class MetricSample(NamedTuple):
    """What one source says at one moment."""

    numbers: Numbers
    latencies: Iterable[Series] = ()


class Metrics:
    """Collects from the sources that are registered."""

    def __init__(self) -> None:
        self._sources: list[Callable[[], MetricSample]] = []

    def add(self, source: Callable[[], Numbers]) -> None:
        """Have `source` asked whenever the numbers are wanted."""
        self._sources.append(lambda: MetricSample(source()))

    def add_latencies(self, source: Callable[[], Iterable[Series]]) -> None:
        """The same, of histograms."""
        self._sources.append(lambda: MetricSample({}, source()))

    def add_samples(self, source: Callable[[], MetricSample]) -> None:
        """The same, of numbers and histograms that come from one count."""
        self._sources.append(source)

    def collect(self) -> dict[str, float]:
        """Every number, by name; of histograms two quantiles since the mount began."""
        out: dict[str, float] = {}
        quantiles: dict[str, float] = {}
        for source in self._sources:
            numbers, latencies = source()
            out.update(numbers)
            for name, labels, reading in latencies:
                stem = name.removesuffix("_seconds")
                for word, value in zip(_WORDS, reading.quantiles(_SHARES), strict=True):
                    if value:  # 0: it has counted nothing
                        quantiles[f"{stem}_{word}_seconds{{{labels}}}"] = value
        return out | quantiles

    def latencies(self) -> list[Series]:
        """Every histogram that has counted something."""
        found = (series for source in self._sources for series in source().latencies)
        return [series for series in found if series.reading.requests]

    def text(self) -> bytes:
        """The content of `.stats`."""
        lines = (f"{PREFIX}{name} {value:.15g}\n" for name, value in self.collect().items())
        return "".join(lines).encode()

    def prometheus(self) -> bytes:
        """The same numbers and whole histograms in Prometheus' text format 0.0.4."""
        families: dict[str, list[str]] = {}
        histograms: dict[str, list[str]] = {}
        for source in self._sources:
            numbers, latencies = source()
            for name, value in numbers.items():
                family = name.partition("{")[0]
                families.setdefault(family, []).append(f"{PREFIX}{name} {value:.15g}\n")
            for series in latencies:
                if series.reading.requests:
                    histograms.setdefault(series.name, []).extend(_histogram(series))
        kinds = {family: kind_of(family) for family in families}
        kinds.update(dict.fromkeys(histograms, "histogram"))
        families.update(histograms)
        parts: list[str] = []
        for family, lines in families.items():
            parts.append(f"# HELP {PREFIX}{family} {help_of(family)}\n")
            parts.append(f"# TYPE {PREFIX}{family} {kinds[family]}\n")
            parts += lines
        return "".join(parts).encode()


def _histogram(series: Series) -> Iterator[str]:
    """The lines of one histogram: buckets add up, as Prometheus has them."""
    name, buckets = f"{PREFIX}{series.name}", series.reading.buckets
    seen = sum(buckets[:_SHORTEST])
    for index in range(_SHORTEST, _LONGEST + 1):
        seen += buckets[index]
        yield f'{name}_bucket{{{series.labels},le="{upper_bound(index):.9g}"}} {seen}\n'
    count = series.reading.requests
    yield f'{name}_bucket{{{series.labels},le="+Inf"}} {count}\n'
    yield f"{name}_sum{{{series.labels}}} {series.reading.seconds:.15g}\n"
    yield f"{name}_count{{{series.labels}}} {count}\n"


def parse(text: str) -> dict[str, float]:
    """`.stats` as numbers by name, without the prefix. Raises: ValueError."""
    pairs = (line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    return {name.removeprefix(PREFIX): float(value) for name, value in pairs}
