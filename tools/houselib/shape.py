"""The shape of one file: sizes, docstrings, bare excepts and TODOs."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from typing import TypeAlias

from tools.houselib.tree import Finding, SourceFile

FUNCTION_LINES_MAX = 70  # one screen
FILE_LINES_MAX = 500
LINE_CHARS_MAX = 100
TODO_WORDS_MIN = 4  # "what is missing" does not fit in fewer

Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef

_MARK = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b(.*)")
_COMMENT = {".lua": "--", ".sh": "#", ".c": r"//|/\*|^\s*\*", ".h": r"//|/\*|^\s*\*", ".go": "//"}


def check_sizes(source: SourceFile) -> Iterator[Finding]:
    """Lines, files and functions that are too long for one screen and one thought."""
    lines = source.text.splitlines()
    if len(lines) > FILE_LINES_MAX:
        message = f"{len(lines)} lines; at most {FILE_LINES_MAX}"
        yield Finding(source.path, FILE_LINES_MAX + 1, "file-length", message)
    for number, line in enumerate(lines, 1):
        if len(line) > LINE_CHARS_MAX:
            message = f"{len(line)} characters; at most {LINE_CHARS_MAX}"
            yield Finding(source.path, number, "line-length", message)
    for node in source.nodes:
        if isinstance(node, Function):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > FUNCTION_LINES_MAX:
                message = f"{node.name} has {length} lines; at most {FUNCTION_LINES_MAX}"
                yield Finding(source.path, node.lineno, "function-length", message)


def check_excepts(source: SourceFile) -> Iterator[Finding]:
    """`except:` without a class, which also catches KeyboardInterrupt."""
    for node in source.nodes:
        if isinstance(node, ast.ExceptHandler) and node.type is None:
            yield Finding(source.path, node.lineno, "bare-except", "name what is caught")


def check_todos(source: SourceFile) -> Iterator[Finding]:
    """Marks other than TODO, and TODOs that do not say what is missing."""
    for number, comment in _comments(source):
        marked = _MARK.search(comment)
        if not marked:
            continue
        mark, rest = marked.groups()
        if mark != "TODO":
            yield Finding(source.path, number, "todo", f"write TODO instead of {mark}")
        elif not rest.startswith(":") or len(rest[1:].split()) < TODO_WORDS_MIN:
            message = "say `TODO: what is missing and what breaks without it`"
            yield Finding(source.path, number, "todo", message)


def protocol_methods(sources: Iterable[SourceFile]) -> frozenset[str]:
    """Names of the methods that a documented Protocol of the tree declares."""
    names: set[str] = set()
    for source in sources:
        for node in source.nodes:
            if isinstance(node, ast.ClassDef) and _is_protocol(node) and ast.get_docstring(node):
                names |= {item.name for item in node.body if isinstance(item, Function)}
    return frozenset(names)


def check_docstrings(source: SourceFile, contracts: frozenset[str]) -> Iterator[Finding]:
    """Modules, public classes and public functions that do not say what they are.

    A method named in `contracts` is documented by its Protocol. Tests need only the module's and
    the classes' docstrings.
    """
    if source.tree is None:
        return
    if not ast.get_docstring(source.tree):
        yield Finding(source.path, 1, "docstring", "the module has no docstring")
    yield from _undocumented(source, source.tree, contracts)


def _undocumented(
    source: SourceFile, scope: ast.Module | ast.ClassDef, contracts: frozenset[str]
) -> Iterator[Finding]:
    for node in scope.body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            if not ast.get_docstring(node):
                message = f"class {node.name} has no docstring"
                yield Finding(source.path, node.lineno, "docstring", message)
            yield from _undocumented(source, node, contracts)
        elif isinstance(node, Function) and _needs_docstring(source, scope, node, contracts):
            message = f"{node.name} has no docstring"
            yield Finding(source.path, node.lineno, "docstring", message)


def _needs_docstring(
    source: SourceFile, scope: ast.Module | ast.ClassDef, node: Function, contracts: frozenset[str]
) -> bool:
    if source.top == "tests" or node.name.startswith("_") or ast.get_docstring(node):
        return False
    decorators = {ast.unparse(item).split(".")[-1] for item in node.decorator_list}
    if decorators & {"overload", "setter", "deleter"}:
        return False
    return not (isinstance(scope, ast.ClassDef) and node.name in contracts)


def _is_protocol(node: ast.ClassDef) -> bool:
    names = {ast.unparse(base).split("[")[0].split(".")[-1] for base in node.bases}
    return "Protocol" in names


def _comments(source: SourceFile) -> Iterator[tuple[int, str]]:
    """The comments of a file, as line number and text; docstrings are not comments."""
    if source.tree is not None:
        yield from source.comments
        return
    opening = re.compile(_COMMENT["." + source.path.rsplit(".", 1)[-1]])
    for number, line in enumerate(source.text.splitlines(), 1):
        begin = opening.search(line)
        if begin:
            yield number, line[begin.start() :]
