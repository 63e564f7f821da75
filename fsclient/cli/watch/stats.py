"""`slicefs stats`: the numbers of a mount as they change, a line each interval."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import click

from fsclient.cli.options.options import SecondsType
from fsclient.cli.options.tell import tell_line
from fsclient.cli.watch.source import STATS, ending_well, read_numbers, require_mount
from fsclient.volume.units import format_size
from fsmeta.runtime import SystemRuntime

EVERY: Final = 20  # lines between two headings
_EXAMPLES: Final = """\b
Examples:
  slicefs stats /data
  slicefs stats /data --interval 10 --count 6 --json"""

Numbers = Mapping[str, float]
_Column = Callable[[Numbers, Numbers, float], float]  # before, now, seconds between


def _rate(*prefixes: str) -> _Column:
    """What all counters that begin so have grown in a second."""

    def column(before: Numbers, now: Numbers, seconds: float) -> float:
        found = [name for name in now if name.startswith(prefixes)]
        return sum(now[name] - before.get(name, 0) for name in found) / seconds

    return column


def _mean_seconds(total: str, count: str) -> _Column:
    """What each of them took."""

    def column(before: Numbers, now: Numbers, seconds: float) -> float:
        spent, done = _rate(total)(before, now, seconds), _rate(count)(before, now, seconds)
        return spent / done if done else 0.0

    return column


def _value(name: str) -> _Column:
    return lambda _before, now, _seconds: now.get(name, 0.0)


_META: Final = "meta_round_trips_total"
# heading, name in JSON, width, unit (B: bytes), and how
_COLUMNS: Final[tuple[tuple[str, str, int, str, _Column], ...]] = (
    ("ops/s", "operations_per_second", 8, "", _rate("operations_total{")),
    ("err/s", "errors_per_second", 7, "", _rate("operation_errors_total{")),
    (
        "ms/op",
        "operation_seconds",
        7,
        "ms",
        _mean_seconds("operation_seconds_total{", "operations_total{"),
    ),
    ("read/s", "read_bytes_per_second", 9, "B", _rate('operation_bytes_total{op="read"}')),
    ("write/s", "write_bytes_per_second", 9, "B", _rate('operation_bytes_total{op="write"}')),
    ("meta/s", "metadata_requests_per_second", 8, "", _rate(_META)),
    ("mem/s", "memory_hits_per_second", 7, "", _rate("cache_hits_total")),
    ("disk/s", "disk_hits_per_second", 7, "", _rate("disk_cache_hits_total")),
    ("get/s", "object_gets_per_second", 7, "", _rate("object_get_count_total")),
    ("put/s", "object_puts_per_second", 7, "", _rate("object_put_count_total")),
    ("buffer", "buffer_bytes", 9, "B", _value("buffer_writing_bytes")),
    ("queued", "staging_bytes", 9, "B", _value("staging_bytes")),
    ("lag s", "staging_lag_seconds", 7, "s", _value("staging_lag_seconds")),
)


@click.command(epilog=_EXAMPLES)
@click.argument("mountpoint", type=click.Path())
@click.option(
    "--interval",
    type=SecondsType(0.1, 3600),
    default=1.0,
    show_default=True,
    help="Seconds between two lines.",
)
@click.option(
    "--count",
    type=click.IntRange(1),
    default=None,
    help="Number of lines; by default until Ctrl-C.",
)
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object a line.")
def stats(mountpoint: str, interval: float, count: int | None, as_json: bool) -> None:
    """Show what the mount on MOUNTPOINT does, a line each interval.

    Requests, errors and milliseconds a request; bytes that programs read and write; requests to the
    metadata store; reads answered by the memory and the disk cache; requests to the object store;
    write buffers; with write-back, bytes not uploaded yet and the age of the oldest change.
    """
    path = require_mount(mountpoint, STATS)
    runtime = SystemRuntime()
    with ending_well(mountpoint):
        before, begun = read_numbers(path), runtime.monotonic()
        printed = 0
        while count is None or printed < count:
            runtime.sleep(interval)
            now, at = read_numbers(path), runtime.monotonic()
            row = {name: column(before, now, at - begun) for _, name, _, _, column in _COLUMNS}
            if as_json:
                tell_line(_numbers(row), mountpoint=mountpoint)
            else:
                if printed % EVERY == 0:
                    click.echo(" ".join(f"{head:>{width}}" for head, _, width, _, _ in _COLUMNS))
                click.echo(_row(row))
            before, begun, printed = now, at, printed + 1


def _numbers(row: Numbers) -> dict[str, float]:
    """Sizes are whole bytes; times to the microsecond."""
    sizes = {name for _, name, _, _, _ in _COLUMNS if name.endswith("_bytes")}
    return {name: int(value) if name in sizes else round(value, 6) for name, value in row.items()}


def _row(row: Mapping[str, float]) -> str:
    cells = []
    for _, name, width, unit, _ in _COLUMNS:
        value = row[name]
        if unit == "ms":
            value *= 1000
        shown = f"{value:.2f}" if unit in ("ms", "s") else f"{value:.0f}"
        cells.append(f"{format_size(int(value)) if unit == 'B' else shown:>{width}}")
    return " ".join(cells)
