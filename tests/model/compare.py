"""The judge: runs the same steps on several drivers and demands equal answers and equal trees.

The first driver is right by definition. A failure shows every step up to the first difference;
`minimise` throws away the steps that a difference does not need, which works because steps name
their paths literally.
"""

from __future__ import annotations

import posixpath
import re
import stat
from collections.abc import Callable, Sequence
from typing import NamedTuple

from tests.model import ops as o
from tests.model.drivers import Driver, ModelDriver
from tests.model.ops import ROOT, Op, Result, StampValue, StatValue, Step, paths_of

SNAPSHOT_FILE_BYTES = 1 << 22  # read of one file at once; generated files are far smaller


class Difference(AssertionError):
    """Two drivers disagree."""


class Node(NamedTuple):
    """One name of a snapshot, as root sees it."""

    status: Result
    content: Result | None  # bytes, symlink target or sorted names
    xattrs: tuple[tuple[bytes, Result], ...]
    same_as: bytes | None  # the first name of the same inode, if that is another one


def snapshot(driver: Driver) -> dict[bytes, Node]:
    """The whole tree of `driver`, by path."""
    tree: dict[bytes, Node] = {}
    first_names: dict[int, bytes] = {}
    todo = [b"/"]
    while todo:
        path = todo.pop()
        stamp = driver.run(ROOT, o.Stamp(path)).value
        assert isinstance(stamp, StampValue), path
        first = first_names.setdefault(stamp.ino, path)
        status = driver.run(ROOT, o.Stat(path, follow=False))
        content = _content(driver, path, status)
        tree[path] = Node(status, content, _xattrs(driver, path), first if first != path else None)
        if content and isinstance(content.value, tuple):
            names = (name for name in reversed(content.value) if isinstance(name, bytes))
            todo.extend(posixpath.join(path, name) for name in names)
    return tree


def _content(driver: Driver, path: bytes, status: Result) -> Result | None:
    assert isinstance(status.value, StatValue), status
    match status.value.type:
        case stat.S_IFDIR:
            return driver.run(ROOT, o.Listdir(path))
        case stat.S_IFREG:
            return driver.run(ROOT, o.Read(path, 0, SNAPSHOT_FILE_BYTES))
        case stat.S_IFLNK:
            return driver.run(ROOT, o.Readlink(path))
        case _:
            return None


def _xattrs(driver: Driver, path: bytes) -> tuple[tuple[bytes, Result], ...]:
    names = driver.run(ROOT, o.ListXattr(path, follow=False)).value
    if not isinstance(names, tuple):
        return ()
    return tuple(
        (name, driver.run(ROOT, o.GetXattr(path, name, follow=False)))
        for name in names
        if isinstance(name, bytes)
    )


def _watched(op: Op) -> list[bytes]:
    """The names whose times `op` may change: what it names, and the directories around."""
    found: dict[bytes, None] = {}
    for path in paths_of(op):
        bare = path.rstrip(b"/")
        found[path] = None
        found[posixpath.dirname(bare) or b"/"] = None
    return list(found)


def _stamps(driver: Driver, paths: Sequence[bytes]) -> list[StampValue | None]:
    values = [driver.run(ROOT, o.Stamp(path)).value for path in paths]
    return [value if isinstance(value, StampValue) else None for value in values]


def _moved(before: StampValue | None, after: StampValue | None) -> str:
    """Which times of a name changed while it stayed the same inode."""
    if before is None or after is None or before.ino != after.ino:
        return "-"
    m = "m" if before.mtime_ns != after.mtime_ns else ""
    return m + ("c" if before.ctime_ns != after.ctime_ns else "")


def _run_timed(driver: Driver, step: Step) -> tuple[Result, dict[bytes, str]]:
    paths = _watched(step.op)
    before = _stamps(driver, paths)
    result = driver.run(*step)
    moved = map(_moved, before, _stamps(driver, paths))
    return result, dict(zip(paths, moved, strict=True))


def _times_open(driver: Driver) -> bool:
    return isinstance(driver, ModelDriver) and driver.model.times_open


def _differences(drivers: Sequence[Driver], step: Step, times: bool) -> tuple[str, str]:
    """What the first driver says, and what others say instead."""
    if times:
        told = [_run_timed(driver, step) for driver in drivers]
    else:
        told = [(driver.run(*step), {}) for driver in drivers]
    right, right_times = told[0]
    wrong = ""
    for driver, (result, moved) in zip(drivers[1:], told[1:], strict=True):
        if result != right:
            wrong += f"\n      {driver.name} says {result}"
        if moved != right_times and not any(map(_times_open, drivers)):
            wrong += f"\n      {driver.name} changes times {moved}, expected {right_times}"
    return str(right), wrong


def run_equal(steps: Sequence[Step], drivers: Sequence[Driver], times: bool = False) -> None:
    """Run `steps` on all of `drivers`, from empty trees.

    With `times`, whether mtime and ctime change at each step is compared too; that needs clocks
    finer than the steps (Linux 6.13 on tmpfs and ext4).

    Raises: Difference, with the log of all steps.
    """
    for driver in drivers:
        driver.reset()
    log: list[str] = []
    for number, step in enumerate(steps):
        right, wrong = _differences(drivers, step, times)
        log.append(f"{number:4} uid {step.user.uid:<5} {step.op} → {right}{wrong}")
        if wrong:
            raise Difference(_text(drivers, log))
    _compare_trees(drivers, log)


def _compare_trees(drivers: Sequence[Driver], log: list[str]) -> None:
    right = snapshot(drivers[0])
    for driver in drivers[1:]:
        found = snapshot(driver)
        for path in sorted(right.keys() | found.keys()):
            if right.get(path) != found.get(path):
                log.append(f"     in the end, {path!r} should be {right.get(path)}")
                log.append(f"      {driver.name} has {found.get(path)}")
                raise Difference(_text(drivers, log))


def _text(drivers: Sequence[Driver], log: list[str]) -> str:
    """The log, with long runs of one character shortened to `c{×count}`."""
    text = f"right by definition: {drivers[0].name}\n" + "\n".join(log)
    return re.sub(r"([^ ])\1{39,}", lambda run: f"{run[1]}{{×{len(run[0])}}}", text)


def minimise(
    steps: Sequence[Step], fails: Callable[[Sequence[Step]], Difference | None]
) -> tuple[list[Step], Difference]:
    """The steps that a difference needs, and that difference; `steps` must fail."""
    kept = list(steps)
    found = fails(kept)
    assert found is not None, "these steps don't fail"
    size = len(kept) // 2
    while size:
        begin = 0
        while begin < len(kept):
            fewer = kept[:begin] + kept[begin + size :]
            difference = fails(fewer)
            if difference is None:
                begin += size
            else:
                kept, found = fewer, difference
        size //= 2
    return kept, found


def demand_equal(steps: Sequence[Step], drivers: Sequence[Driver], times: bool = False) -> None:
    """`run_equal`, and where it fails the shortest log that still does.

    Raises: Difference.
    """

    def fails(fewer: Sequence[Step]) -> Difference | None:
        try:
            run_equal(fewer, drivers, times)
        except Difference as difference:
            return difference
        return None

    if fails(steps) is not None:
        raise minimise(steps, fails)[1]
