"""Reads Prometheus' text format strictly: what a server would refuse fails here."""

from __future__ import annotations

import re
from typing import NamedTuple

_NAME = r"[a-zA-Z_:][a-zA-Z0-9_:]*"
_SAMPLE = re.compile(rf'({_NAME})(\{{(?:{_NAME}="[^"\\]*",?)*\}})? (\S+)')


class Family(NamedTuple):
    """The samples of one name, by their whole name."""

    kind: str
    help: str
    samples: dict[str, float]


def parse(text: str) -> dict[str, Family]:
    """The families of a page; asserts what the format asks for."""
    assert text.endswith("\n")
    families: dict[str, Family] = {}
    current, helped = "", ""
    for line in text.splitlines():
        if line.startswith("# HELP "):
            current, helped = line[len("# HELP ") :].split(" ", 1)
            assert current not in families, f"{current} is not in one piece"
        elif line.startswith("# TYPE "):
            name, kind = line[len("# TYPE ") :].split(" ")
            assert name == current, "TYPE follows HELP"
            families[name] = Family(kind, helped, {})
        else:
            found = _SAMPLE.fullmatch(line)
            assert found is not None, line
            name, labels, value = found.groups()
            family = families[current]
            suffixes = ("_bucket", "_sum", "_count") if family.kind == "histogram" else ("",)
            assert name.removeprefix(current) in suffixes, line
            sample = name + (labels or "")
            assert sample not in family.samples
            family.samples[sample] = float(value)
    for name, family in families.items():
        if family.kind == "histogram":
            _check_histogram(name, family)
    return families


def _check_histogram(name: str, family: Family) -> None:
    """Buckets of each label set grow, and the last one is the count."""
    rows: dict[str, list[float]] = {}
    for sample, value in family.samples.items():
        if sample.startswith(f"{name}_bucket"):
            rows.setdefault(re.sub(r',?le="[^"]*"', "", sample[len(name) + 7 :]), []).append(value)
    assert rows, f"{name} has no buckets"
    for labels, counts in rows.items():
        assert counts == sorted(counts), f"{name}{labels}"
        assert counts[-1] == family.samples[f"{name}_count{labels}"]
