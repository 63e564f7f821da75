"""What the documents point at is there: tests, files of tests, links and their anchors.

Called by `tools/house.py`. SEMANTICS names a test for each clause; a test that was renamed would
leave the clause without proof, unnoticed.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Final

from tools.houselib.tree import Finding, SourceFile

_QUOTED: Final = re.compile(r"`([^`\s]+)`")
_TEST: Final = re.compile(r"(…[\w./-]*|[\w./-]+\.py)::([\w:]+)(\[.+\])?")
_FILE: Final = re.compile(r"[\w.-]+/[\w./-]*\.py")
_LINK: Final = re.compile(r"\]\(([^)\s]+)\)|^\[[^\]]+\]: (\S+)$")
_HEADING: Final = re.compile(r"^#+ (.*)$", re.MULTILINE)
_ROOMS: Final = ("", "tests/")  # where documents may mean a file to be

Names = Mapping[str, frozenset[str]]  # a file's path → the functions in it, methods as Class::name


def check_prose(
    root: Path, paths: Sequence[str], sources: Iterable[SourceFile]
) -> Iterator[Finding]:
    """Tests and links of every Markdown file among `paths` that lead nowhere."""
    there = frozenset(paths)
    names = {source.path: _functions(source) for source in sources if source.top == "tests"}
    texts = {
        path: (root / path).read_text(encoding="utf-8")
        for path in paths
        if path.endswith(".md") and (root / path).is_file()
    }
    for path, text in texts.items():
        yield from _tests(path, text, there, names)
        yield from _links(path, text, there, texts)


def _functions(source: SourceFile) -> frozenset[str]:
    if source.tree is None:
        return frozenset()
    found: set[str] = set()
    for node in source.tree.body:
        if isinstance(node, ast.FunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.ClassDef):
            inside = (item.name for item in node.body if isinstance(item, ast.FunctionDef))
            found |= {node.name, *(f"{node.name}::{name}" for name in inside)}
    return frozenset(found)


def _tests(path: str, text: str, there: frozenset[str], names: Names) -> Iterator[Finding]:
    """`…::name` is in the file that was named last."""
    file = "…"
    for number, line in enumerate(text.splitlines(), 1):
        for quoted in _QUOTED.findall(line):
            test = _TEST.fullmatch(quoted)
            if not test and not _FILE.fullmatch(quoted):
                continue
            name = test[1] if test else quoted
            if name != "…":
                file = next((room + name for room in _ROOMS if room + name in there), "")
            if not file:
                yield Finding(path, number, "doc-test", f"{name} is not there")
            elif test and test[2] not in names.get(file, ()):
                yield Finding(path, number, "doc-test", f"there is no {test[2]} in {file}")


def _links(
    path: str, text: str, there: frozenset[str], texts: Mapping[str, str]
) -> Iterator[Finding]:
    for number, line in enumerate(text.splitlines(), 1):
        for inline, below in _LINK.findall(line):
            link = inline or below
            if ":" in link:  # of another site
                continue
            name, _, anchor = link.partition("#")
            target = _joined(path, name) if name else path
            if target not in there and not any(each.startswith(target + "/") for each in there):
                yield Finding(path, number, "doc-link", f"{link} is not there")
            elif anchor and anchor not in _anchors(texts.get(target, "")):
                yield Finding(path, number, "doc-link", f"{link}: there is no such heading")


def _joined(path: str, link: str) -> str:
    parts: list[str] = []
    for part in (PurePosixPath(path).parent / link).parts:
        if part == ".." and parts:
            parts.pop()
        else:
            parts.append(part)
    return "/".join(parts)


def _anchors(text: str) -> set[str]:
    """Headings as GitHub turns them into anchors."""
    plain = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in _HEADING.findall(text))
    return {heading.strip().replace(" ", "-") for heading in plain}
