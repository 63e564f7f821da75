"""The words of the corner tables: who does what, and what that must answer.

The tables are `corners_names` and `corners_files`; `test_corners` runs them.
"""

from __future__ import annotations

import os
from typing import NamedTuple, TypeAlias

from tests.model.ops import ROOT, Op, Open, Result, StatValue, User, Value


class Shows(NamedTuple):
    """Some attributes that a Stat must show; -1: any."""

    perm: int = -1
    nlink: int = -1
    uid: int = -1
    gid: int = -1
    size: int = -1
    mtime: int | None = -1  # None: a clock's


Expected: TypeAlias = Result | Shows
Line: TypeAlias = tuple[User, Op, Expected]

OK = Result(0)


def fits(result: Result, expected: Expected) -> bool:
    """Whether `result` is what a line expects."""
    if expected == OK:
        return result.errno == 0
    if isinstance(expected, Result):
        return result == expected
    value = result.value
    if not isinstance(value, StatValue):
        return False
    shown = Shows(value.perm, value.nlink, value.uid, value.gid, value.size, value.mtime)
    return all(want in (-1, got) for want, got in zip(expected, shown, strict=True))


def ok(op: Op, user: User = ROOT) -> Line:
    return user, op, OK


def no(code: int, op: Op, user: User = ROOT) -> Line:
    return user, op, Result(code)


def gives(value: Value, op: Op, user: User = ROOT) -> Line:
    return user, op, Result(0, value)


def shows(shows: Shows, op: Op, user: User = ROOT) -> Line:
    return user, op, shows


CREATE = os.O_CREAT | os.O_RDWR
FILE = Open(0, b"/f", CREATE, 0o644)
