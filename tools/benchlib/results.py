"""Measurements, their medians over repeats, ratios, and the table that is printed."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

RATE = "MB/s"
OF_RAW = "of raw"  # a speed, as a share of what the bare disk gives
MORE_IS_BETTER = (RATE, OF_RAW)


class Metric(NamedTuple):
    """One number of one run. `operation` tells it from the others of its workload."""

    operation: str
    value: float
    unit: str  # what `value` counts: µs/op, MB/s, CPU s/GB, MiB, B/file


@dataclass
class Row:
    """An operation and what each system needed for it, one value a repeat."""

    workload: str
    operation: str
    unit: str
    values: dict[str, list[float]] = field(default_factory=dict)

    def spread(self, system: str) -> str:
        """The least and the most of a system, where it ran more than once."""
        values = self.values.get(system, [])
        return f"{number(min(values))}..{number(max(values))}" if len(values) > 1 else ""

    def median(self, system: str) -> float | None:
        """The median over repeats, or None where the system did not run."""
        values = self.values.get(system)
        return statistics.median(values) if values else None


class Results:
    """Rows in the order in which their operations first came."""

    def __init__(self) -> None:
        self._rows: dict[tuple[str, str, str], Row] = {}

    @property
    def rows(self) -> list[Row]:
        """All rows so far."""
        return list(self._rows.values())

    def add(self, workload: str, system: str, metric: Metric) -> None:
        """Note one measurement."""
        key = (workload, metric.operation, metric.unit)
        row = self._rows.setdefault(key, Row(*key))
        row.values.setdefault(system, []).append(metric.value)


def times_better(unit: str, ours: float | None, peer: float | None) -> float | None:
    """How many times better `ours` is; below 1 the peer is. None where one is missing or zero."""
    if not ours or not peer:
        return None
    return ours / peer if unit in MORE_IS_BETTER else peer / ours


def number(value: float | None) -> str:
    """Three significant digits, or a dash."""
    if value is None:
        return "-"
    if value >= 100:
        return f"{value:,.0f}"
    if value >= 10:
        return f"{value:.1f}"
    return f"{value:.2f}"


def table(rows: Sequence[Row], ours: str, peers: Sequence[str]) -> str:
    """The rows as aligned text, medians and how many times better than each peer ours is."""
    columns = [word for peer in peers for word in (peer, "spread", "× better")]
    lines: list[tuple[str, ...]] = [("operation", "unit", ours, "spread", *columns)]
    workload = ""
    for row in rows:
        if row.workload != workload:
            workload = row.workload
            lines.append((f"-- {workload}", "", "", "", *[""] * len(columns)))
        mine = row.median(ours)
        cells = []
        for peer in peers:
            other = row.median(peer)
            better = number(times_better(row.unit, mine, other))
            cells += [number(other), row.spread(peer), better]
        lines.append((row.operation, row.unit, number(mine), row.spread(ours), *cells))
    widths = [max(len(line[column]) for line in lines) for column in range(4 + len(columns))]
    return "\n".join(_aligned(line, widths) for line in lines)


def _aligned(line: tuple[str, ...], widths: Sequence[int]) -> str:
    texts = [cell.ljust(width) for cell, width in zip(line[:2], widths[:2], strict=True)]
    numbers = [cell.rjust(width) for cell, width in zip(line[2:], widths[2:], strict=True)]
    return "  ".join(texts + numbers).rstrip()


def as_json(rows: Sequence[Row], ours: str, peers: Sequence[str]) -> list[Mapping[str, object]]:
    """The rows with every value, for later comparison."""
    return [
        {
            "workload": row.workload,
            "operation": row.operation,
            "unit": row.unit,
            "values": row.values,
            "medians": {system: row.median(system) for system in row.values},
            "times_better": {
                peer: times_better(row.unit, row.median(ours), row.median(peer)) for peer in peers
            },
        }
        for row in rows
    ]
