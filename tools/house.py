"""The house rules that a program can check: `.venv/bin/python -m tools.house [ROOT]`.

Called by `make check`. Prints one line a finding, `path:line: rule: message`, and exits with 1 if
there are any. There is no allow-list, but for the limits of `houselib/limits`, whose list only
shrinks: a rule that needs exceptions is a wrong rule. Commented-out code is left to ruff's ERA,
which `make check` turns on.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from tools.houselib import imports, limits, messages, ports, prose, rooms, shape, words
from tools.houselib.tree import Finding, SourceFile, listed, load

REPOSITORY = Path(__file__).resolve().parent.parent


def findings(root: Path) -> list[Finding]:
    """Everything in the git repository at `root` that breaks a house rule, in order."""
    paths = listed(root)
    sources, broken = load(root, paths)
    said = prose.check_prose(root, paths, sources)
    pages = words.check_pages(root, paths)
    over = limits.check_limits(root, sources)
    of_files = _file_rules(sources)
    return sorted([*broken, *_tree_rules(sources), *of_files, *said, *pages, *over])


def _tree_rules(sources: Sequence[SourceFile]) -> Iterator[Finding]:
    python = [source for source in sources if source.tree is not None]
    modules = frozenset(source.module for source in python)
    yield from imports.check_ranks(python, modules)
    yield from rooms.check_rooms(python, modules)
    yield from imports.check_seam(python, modules)
    yield from imports.check_cycles(python, modules)
    yield from words.check_class_names(python)


def _file_rules(sources: Sequence[SourceFile]) -> Iterator[Finding]:
    contracts = shape.protocol_methods(sources)
    for source in sources:
        yield from shape.check_sizes(source)
        yield from shape.check_excepts(source)
        yield from shape.check_todos(source)
        yield from shape.check_docstrings(source, contracts)
        yield from words.check_retired(source)
        yield from words.check_sentences(source)
        yield from messages.check_messages(source)
        yield from ports.check_callbacks(source)


def main(arguments: Sequence[str]) -> int:
    """Print the findings for the tree at `arguments[0]`, or for this repository."""
    found = findings(Path(arguments[0]) if arguments else REPOSITORY)
    for finding in found:
        print(finding)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
