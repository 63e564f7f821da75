"""O5: `slicefs objbench` as a command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.faults.program import succeed


@pytest.mark.parametrize("skip", [False, True])
def test_o5_skip_functional_tests_only_measures(tmp_path: Path, skip: bool) -> None:
    place = tmp_path / "bucket"
    words = ("--storage", "file", "--bucket", str(place), "--blocks", "1", "--small-objects", "2")
    more = ("--skip-functional-tests",) if skip else ()
    found = json.loads(succeed("objbench", *words, "--block-size", "64KiB", "--json", *more))
    assert [each["right"] for each in found["functional"]] == [True] * len(found["functional"])
    assert bool(found["functional"]) != skip
    assert found["speed"]
    assert not place.exists()
