"""Imports between folders: the ranks of `docs/ARCHITECTURE.md`, the runtime seam and cycles.

Every import counts, wherever it stands: in a function, under TYPE_CHECKING, or as a literal given
to `import_module`. Importing `a.b.c` also runs `a/__init__.py` and `a/b/__init__.py`, so these are
edges too, unless the importer lives in that package and it is loading already.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from tools.houselib.tree import Finding, SourceFile

# `fsmeta/__init__.py` is of rank 0 because importing `fsmeta.types` runs it.
FOUNDATION = frozenset(
    {
        "fsmeta",
        "fsmeta.types",
        "fsmeta.errors",
        "fsmeta.runtime",
        "fsmeta.latency",
        "fsmeta.spans",
        "fsmeta.slices",
    }
)
OURS = frozenset({"fsmeta", "fsdata", "fsclient", "slicefs", "csi", "tools", "tests"})
MAY_IMPORT: Mapping[str, frozenset[str]] = {
    "fsmeta": frozenset({"fsmeta"}),
    "fsdata": frozenset({"fsdata"}),
    "fsclient": frozenset({"fsmeta", "fsdata", "fsclient"}),
    "slicefs": frozenset({"fsmeta", "fsdata", "fsclient", "slicefs"}),
    "csi": frozenset({"csi"}),
    "tools": OURS - {"tests"},
    "tests": OURS,
}
SEAM = "fsmeta.runtime"
SEAM_ONLY = frozenset({"threading", "_thread", "time", "random"})
SEAM_EXEMPT = frozenset({"examples", "tests", "tools"})
SUPERVISOR = "fsclient.survival.supervisor"  # a program of its own, which stays small


class Import(NamedTuple):
    """`target` is imported at `line`; a module where the tree has one of that name."""

    target: str
    line: int


def imports_of(source: SourceFile, modules: frozenset[str]) -> list[Import]:
    """Every import in `source`, with names resolved to submodules found in `modules`."""
    if source.tree is None:
        return []
    found: list[Import] = []
    for node in source.nodes:
        for target in _targets(node, source, modules):
            found.append(Import(target, getattr(node, "lineno", 1)))
    return found


def _targets(node: ast.AST, source: SourceFile, modules: frozenset[str]) -> Iterator[str]:
    match node:
        case ast.Import(names=names):
            yield from (alias.name for alias in names)
        case ast.ImportFrom(module=module, names=names, level=level):
            base = _absolute(source, module or "", level)
            for alias in names:
                submodule = f"{base}.{alias.name}"
                yield submodule if submodule in modules else base
        case ast.Call(func=func, args=[ast.Constant(value=str(name)), *_]):
            called = func.attr if isinstance(func, ast.Attribute) else getattr(func, "id", "")
            if called in ("import_module", "__import__") and not name.startswith("."):
                yield name


def _absolute(source: SourceFile, module: str, level: int) -> str:
    if level == 0:
        return module
    parts = source.module.split(".")
    up = level - 1 if source.is_package else level
    return ".".join(parts[: len(parts) - up] + ([module] if module else []))


def check_ranks(sources: Iterable[SourceFile], modules: frozenset[str]) -> Iterator[Finding]:
    """Imports that go upward or sideways, and rank 0 importing more than the stdlib."""
    for source in sources:
        for imported in imports_of(source, modules):
            why = _misplaced(source, imported.target)
            if why:
                yield Finding(source.path, imported.line, "rank", why)


def _misplaced(source: SourceFile, target: str) -> str | None:
    top = target.split(".")[0]
    if source.module in FOUNDATION:
        foreign = top not in sys.stdlib_module_names and target not in FOUNDATION
        return f"rank 0 imports {target}; only the stdlib is below it" if foreign else None
    allowed = MAY_IMPORT.get(source.top)
    if allowed is None or top not in OURS or top in allowed:
        return None
    if target in FOUNDATION and source.top == "fsdata":
        return None
    return f"{source.top} may not import {target}"


def check_seam(sources: Iterable[SourceFile], modules: frozenset[str]) -> Iterator[Finding]:
    """Time, chance and threads that do not come from the runtime seam."""
    for source in sources:
        if source.module in (SEAM, SUPERVISOR) or source.top in SEAM_EXEMPT:
            continue
        for imported in imports_of(source, modules):
            if imported.target.split(".")[0] in SEAM_ONLY:
                message = f"{imported.target} is imported only by fsmeta/runtime.py; use a Runtime"
                yield Finding(source.path, imported.line, "seam", message)


Graph = Mapping[str, Mapping[str, int]]  # module → what it imports → the line


def import_graph(sources: Iterable[SourceFile], modules: frozenset[str]) -> Graph:
    """Edges between modules of the tree, the packages that an import runs included."""
    graph: dict[str, dict[str, int]] = {}
    for source in sources:
        edges = graph.setdefault(source.module, {})
        own = source.module + "."
        for imported in imports_of(source, modules):
            parts = imported.target.split(".")
            for count in range(len(parts), 0, -1):
                target = ".".join(parts[:count])
                loading = count < len(parts) and own.startswith(target + ".")
                if target in modules and target != source.module and not loading:
                    edges.setdefault(target, imported.line)
    return graph


def check_cycles(sources: Iterable[SourceFile], modules: frozenset[str]) -> Iterator[Finding]:
    """One finding for each knot of modules that import each other."""
    by_module = {source.module: source for source in sources}
    graph = import_graph(by_module.values(), modules)
    done: set[str] = set()
    for start in sorted(graph):
        if start in done:
            continue
        cycle = _shortest_cycle(graph, start)
        if cycle:
            reach = _reachable(graph, start)
            done |= {module for module in reach if start in _reachable(graph, module)}
            line = graph[start][cycle[1]]
            yield Finding(by_module[start].path, line, "cycle", " → ".join(cycle))


def _reachable(graph: Graph, start: str) -> set[str]:
    seen: set[str] = set()
    queue = [start]
    while queue:
        new = set(graph.get(queue.pop(), {})) - seen
        seen |= new
        queue.extend(new)
    return seen


def _shortest_cycle(graph: Graph, start: str) -> list[str]:
    """The modules from `start` back to `start`, both ends named; empty where there is none."""
    paths = [[start]]
    seen: set[str] = set()
    while paths:
        longer: list[list[str]] = []
        for path in paths:
            for target in graph.get(path[-1], {}):
                if target == start:
                    return [*path, start]
                if target not in seen:
                    seen.add(target)
                    longer.append([*path, target])
        paths = longer
    return []
