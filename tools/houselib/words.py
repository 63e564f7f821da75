"""Words: no class name twice, no retired name, and sentences whose subject is a component.

Called by `tools/house.py`. docs/GLOSSARY.md has the words that replace the retired ones.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from tools.houselib.tree import Finding, SourceFile

# A name that an earlier edition used, and the word of the glossary.
RETIRED: Final[Mapping[str, str]] = {
    "backlog": "publish_queue",
    "census": "quota_scan",
    "crowd": "contended directory, prefetch",
    "distrust": "downgrade",
    "dying": "exiting",
    "glance": "read_unvalidated",
    "hear": "poll_invalidations",
    "hurry": "flush_now",
    "lineage": "store_epoch",
    "overlook": "drop_check",
    "shelf": "snapshot_dir",
    "suppose": "assume",
    "testament": "exit record",
    "unlearn": "forget",
    "vouched": "leased",
    "vouches": "has_leases",
    "weigh": "size_of",
}
# A sentence, clause of a docstring, comment or page that begins with a person.
_PERSON: Final = re.compile(
    r"(?:^|[.:;!?]\s+|^\W+)(Who|Whoever|Whom|Whose|He|His|Him|Nobody|Somebody)\b(?![^.]*\?)"
)
# Persons anywhere, and words of earlier editions; users, people and owners may act.
_PRIVATE: Final = re.compile(
    r"\b(whoever|nobody|somebody|he|his|him|believed|vouch\w*|news|hears?)\b"
    r"|(?<!\buser )(?<!\busers )(?<!\bpeople )(?<!\bowner )(?<!\bowners )\b(who)\b(?!-)",
    re.IGNORECASE,
)
_MEANT_FOR: Final = ("NOTES.md",)  # for developers
_OPENERS: Final = (tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING)
_QUOTED: Final = re.compile(r"`[^`]*`|\"[^\"]*\"")


def check_class_names(sources: Iterable[SourceFile]) -> Iterator[Finding]:
    """Two classes of one name in the product and its tools."""
    first: dict[str, str] = {}
    for source in sources:
        if source.tree is None or source.top == "tests":
            continue
        for node in source.nodes:
            if not isinstance(node, ast.ClassDef):
                continue
            where = first.setdefault(node.name, source.path)
            if where != source.path:
                message = f"class {node.name} is defined in {where} too: choose another name"
                yield Finding(source.path, node.lineno, "class-twice", message)


def check_retired(source: SourceFile) -> Iterator[Finding]:
    """Functions and classes of the product that are named with a retired word."""
    if source.tree is None or source.top in ("tests", "tools"):
        return
    for node in source.nodes:
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            continue
        for word in re.findall(r"[A-Z]?[a-z0-9]+", node.name):
            better = RETIRED.get(word.lower())
            if better is not None:
                message = f"{node.name}: the glossary says {better} for {word.lower()}"
                yield Finding(source.path, node.lineno, "retired-word", message)


def check_sentences(source: SourceFile) -> Iterator[Finding]:
    """Comments and docstrings of the product in which a sentence begins with a person."""
    if source.tree is None or source.top == "tests":
        return
    for number, text in _prose(source.text):
        yield from persons(source.path, number, text)
        yield from private(source.path, number, text)


def check_pages(root: Path, paths: Sequence[str]) -> Iterator[Finding]:
    """The same for Markdown pages; but for notes, private words anywhere."""
    for path in paths:
        if not path.endswith(".md") or not (root / path).is_file():
            continue
        text = (root / path).read_text(encoding="utf-8")
        for number, line in enumerate(text.splitlines(), 1):
            yield from persons(path, number, line)
            if Path(path).name not in _MEANT_FOR:
                yield from private(path, number, line)


def persons(path: str, number: int, text: str) -> Iterator[Finding]:
    """Sentences of a text that begin with a person."""
    plain = _QUOTED.sub("x", text)
    for found in _PERSON.finditer(plain):
        message = f'a sentence begins with "{found[1]}": name the component or the user'
        yield Finding(path, number, "prose", message)


def private(path: str, number: int, text: str) -> Iterator[Finding]:
    """Persons anywhere in a text, and words of earlier editions."""
    for found in _PRIVATE.finditer(_QUOTED.sub("x", text)):
        word = found[1] or found[2]
        message = f'"{word}": name the component or the user, and what it does'
        yield Finding(path, number, "private-word", message)


def _prose(text: str) -> Iterator[tuple[int, str]]:
    """Lines of comments and docstrings with their numbers."""
    before = tokenize.NEWLINE
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string.lstrip("#! ")
        elif token.type == tokenize.STRING and before in _OPENERS:
            for offset, line in enumerate(token.string.strip("\"'").splitlines()):
                yield token.start[0] + offset, line.strip()
        if token.type not in (tokenize.NL, tokenize.COMMENT):
            before = token.type
