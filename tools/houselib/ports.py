"""Callbacks are arguments of constructors: `other.on_change = …` binds one late.

Called by `tools/house.py`. An object that can be used before it knows whom to tell has a time when
it tells nothing; a reader of its class can't say when that ends. Tests may replace what they watch.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tools.houselib.tree import Finding, SourceFile

PREFIX = "on_"
REMEDY = "pass it to the constructor, or make what both need first"


def check_callbacks(source: SourceFile) -> Iterator[Finding]:
    """Assignments to `on_…` of another object than `self`."""
    if source.tree is None or source.top == "tests":
        return
    for node in source.nodes:
        if not isinstance(node, ast.Assign | ast.AnnAssign):
            continue
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        for target in targets:
            if _is_late(target):
                message = f"{ast.unparse(target)} is set from outside: {REMEDY}"
                yield Finding(source.path, node.lineno, "late-callback", message)


def _is_late(target: ast.expr) -> bool:
    if not isinstance(target, ast.Attribute) or not target.attr.startswith(PREFIX):
        return False
    return not (isinstance(target.value, ast.Name) and target.value.id == "self")
