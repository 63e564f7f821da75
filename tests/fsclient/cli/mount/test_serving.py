"""Which processes `umount` waits for, by what the kernel and the mount say."""

from __future__ import annotations

from typing import Any

import pytest

from fsclient.cli.mount import umount
from fsclient.fuse.mount import mount as kernel
from fsclient.fuse.mount.mount import MountInfo

PARENTS = {11: 10, 12: 10, 21: 20, 31: 1}
SUPERVISED = {"supervisor": 10, "pid": 11}


@pytest.mark.parametrize(
    ("found", "config", "expected"),
    [
        ([31], {"pid": 31}, (31, 31)),
        ([31], {}, (31, 31)),
        ([10, 11], SUPERVISED, (10, 11)),
        ([10, 11], {}, (10, 11)),  # it did not answer
        ([10, 11], {"supervisor": 1, "pid": 7}, (10, 11)),  # a container's ids
        ([20, 21, 31], {"pid": 31}, (31, 31)),  # the others are of a mount that has gone
        ([20, 21, 10, 11], SUPERVISED, (10, 11)),
        ([20, 21, 10, 11], {}, None),
        ([], {}, None),
    ],
)
def test_the_processes_of_a_mount(
    monkeypatch: pytest.MonkeyPatch,
    found: list[int],
    config: dict[str, Any],
    expected: tuple[int, int] | None,
) -> None:
    def find_servers(_: MountInfo) -> list[int]:
        return found

    def parent(pid: int) -> int:
        return PARENTS.get(pid, 1)

    monkeypatch.setattr(kernel, "find_servers", find_servers)
    monkeypatch.setattr(umount, "_parent", parent)
    info = kernel.find_mount("/proc")
    assert info is not None
    assert umount._serving(info, config) == expected
