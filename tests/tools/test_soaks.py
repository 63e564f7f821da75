"""What is left out without `--soak` is there to be run with it."""

from __future__ import annotations

import re

from tests.soaks import ALL_ENGINES, HERE, MORE_OF_THE_SAME, is_more_of_the_same


def test_each_name_is_that_of_a_test() -> None:
    for file, names in MORE_OF_THE_SAME.items():
        found = re.findall(r"^ *def (test_\w+)\(", (HERE / file).read_text(), re.MULTILINE)
        assert set(names) <= set(found), file
    assert all((HERE / place).exists() for place in ALL_ENGINES)


def test_engines_are_told_by_their_parameter() -> None:
    clone, contract = (
        HERE / "fsmeta/ops/trees/test_clone.py",
        HERE / "fsmeta/store/test_contract.py",
    )
    assert is_more_of_the_same(clone, "test_a_clone_is_the_same[tikv]")
    assert is_more_of_the_same(clone, "test_a_clone_is_the_same[3-cluster-True]")
    assert not is_more_of_the_same(clone, "test_a_clone_is_the_same[redis]")
    assert not is_more_of_the_same(contract, "test_anything[tikv]")
