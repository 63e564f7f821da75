"""Messages: what users read of the code (help, errors, log lines) keeps to the words of the pages.

Called by `tools/house.py`. A message that a function puts together elsewhere is not seen here.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from typing import Final

from tools.houselib import words
from tools.houselib.tree import Finding, SourceFile

# Words that a reader with English as a third language may not know, and plain ones.
PLAIN: Final[Mapping[str, str]] = {
    "anew": "again",
    "everybody": "all users",
    "lest": "so that … not",
    "mend": "repair",
    "mended": "repaired",
    "mends": "repairs",
    "thence": "from there",
    "wherein": "in which",
    "whilst": "while",
}
_PLAIN: Final = re.compile(rf"\b({'|'.join(PLAIN)})\b", re.IGNORECASE)
_HELP: Final = frozenset({"help", "short_help", "epilog"})  # of click and argparse
_LOGGED: Final = frozenset({"debug", "info", "warning", "error", "exception", "critical", "log"})
_PRINTED: Final = frozenset({"echo", "secho"})


def check_messages(source: SourceFile) -> Iterator[Finding]:
    """Help texts, raised errors, log lines and output that have a private or unusual word."""
    if source.tree is None or source.top == "tests":
        return
    seen: set[ast.expr] = set()
    for node in source.nodes:
        for message in _messages(node):
            for literal in _literals(message):
                if literal not in seen:
                    seen.add(literal)
                    yield from _judge(source.path, literal)


def _messages(node: ast.AST) -> Iterator[ast.expr]:
    """The expressions of a node that users read."""
    if isinstance(node, ast.Raise) and node.exc is not None:
        yield node.exc
    elif isinstance(node, ast.Call):
        yield from (each.value for each in node.keywords if each.arg in _HELP)
        if isinstance(node.func, ast.Attribute) and node.func.attr in _LOGGED | _PRINTED:
            yield from node.args


def _literals(message: ast.expr) -> Iterator[ast.Constant | ast.JoinedStr]:
    """The strings in an expression; one with values in it counts as one string."""
    if isinstance(message, ast.JoinedStr):
        yield message
    elif isinstance(message, ast.Constant):
        if isinstance(message.value, str):
            yield message
    else:
        for inner in ast.iter_child_nodes(message):
            if isinstance(inner, ast.keyword):
                yield from _literals(inner.value)
            elif isinstance(inner, ast.expr):
                yield from _literals(inner)


def _judge(path: str, literal: ast.Constant | ast.JoinedStr) -> Iterator[Finding]:
    text = _text(literal)
    yield from words.persons(path, literal.lineno, text)
    yield from words.private(path, literal.lineno, text)
    for found in _PLAIN.finditer(text):
        message = f'a message says "{found[1]}": write "{PLAIN[found[1].lower()]}"'
        yield Finding(path, literal.lineno, "plain-word", message)


def _text(literal: ast.Constant | ast.JoinedStr) -> str:
    if isinstance(literal, ast.Constant):
        return str(literal.value)
    parts = (part.value if isinstance(part, ast.Constant) else "x" for part in literal.values)
    return "".join(str(part) for part in parts)
