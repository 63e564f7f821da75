"""Limits that have a list of exceptions: the length of a class, and parameters of a function.

Called by `tools/house.py`. `exceptions.txt` names each class and function over a limit, one a line:
`path: Class.function`, and after `#` the reason where the exception is to stay. An entry that is no
longer needed is a finding, so the list only shrinks. Tests have neither limit: parameters of a test
are its fixtures, and a state machine of hypothesis is one class.

Keyword-only parameters of public functions of `slicefs`, the library, do not count: its users name
options one by one, as those of `open` and DataLoader, and know no records of ours.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final, NamedTuple

from tools.houselib.shape import Function
from tools.houselib.tree import Finding, SourceFile

CLASS_LINES_MAX = 300  # what a reader holds in mind at once
PARAMETERS_MAX = 7  # more of them are one record that has no name yet
LIBRARY: Final = "slicefs"  # what programs import
EXCEPTIONS: Final = "tools/houselib/exceptions.txt"

_SPLIT: Final = "move a part with state of its own to a class beside it"
_RECORD: Final = "pass a frozen dataclass or NamedTuple"


class _Excess(NamedTuple):
    """A class or function over its limit; `name` is dotted from the module."""

    path: str
    name: str
    finding: Finding


def check_limits(root: Path, sources: Iterable[SourceFile]) -> Iterator[Finding]:
    """Classes and functions over a limit that have no exception, and exceptions without use."""
    listed = _exceptions(root / EXCEPTIONS)
    used: set[tuple[str, str]] = set()
    for source in sources:
        if source.tree is None or source.top == "tests":
            continue
        for excess in _excesses(source.path, source.tree, "", source.top == LIBRARY):
            if excess[:2] in listed:
                used.add(excess[:2])
            else:
                yield excess.finding
    for (path, name), number in listed.items():
        if (path, name) not in used:
            message = f"{path}: {name} keeps its limit: remove this line"
            yield Finding(EXCEPTIONS, number, "exception", message)


def _exceptions(file: Path) -> dict[tuple[str, str], int]:
    """Path and name of each exception, and its line; none where there is no such file."""
    listed: dict[tuple[str, str], int] = {}
    text = file.read_text(encoding="utf-8") if file.is_file() else ""
    for number, line in enumerate(text.splitlines(), 1):
        path, colon, name = line.partition("#")[0].partition(":")
        if colon:
            listed[path.strip(), name.strip()] = number
    return listed


def _excesses(path: str, scope: ast.AST, prefix: str, public: bool) -> Iterator[_Excess]:
    """`public`: what has no underscore in `scope` is for users of the library."""
    for node in ast.iter_child_nodes(scope):
        inside, seen = prefix, public
        if isinstance(node, Function | ast.ClassDef):
            name = prefix + node.name
            inside = name + "."
            seen = public and _is_public(node.name)
            message = _too_long(node) if isinstance(node, ast.ClassDef) else _too_many(node, seen)
            if message:
                rule, says = message
                yield _Excess(path, name, Finding(path, node.lineno, rule, f"{name} has {says}"))
            seen = seen and isinstance(node, ast.ClassDef)  # a function's own are not seen
        yield from _excesses(path, node, inside, seen)


def _is_public(name: str) -> bool:
    return not name.startswith("_") or (name.startswith("__") and name.endswith("__"))


def _too_long(node: ast.ClassDef) -> tuple[str, str] | None:
    lines = (node.end_lineno or node.lineno) - node.lineno + 1
    if lines <= CLASS_LINES_MAX:
        return None
    return "class-length", f"{lines} lines, at most {CLASS_LINES_MAX}: {_SPLIT}"


def _too_many(node: Function, named_are_free: bool) -> tuple[str, str] | None:
    given = node.args
    named = () if named_are_free else given.kwonlyargs
    names = [each.arg for each in (*given.posonlyargs, *given.args, *named)]
    names += [each.arg for each in (given.vararg, given.kwarg) if each is not None]
    count = len(names) - (names[:1] in (["self"], ["cls"]))
    if count <= PARAMETERS_MAX:
        return None
    return "parameters", f"{count} parameters, at most {PARAMETERS_MAX}: {_RECORD}"
