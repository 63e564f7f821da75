"""The source tree as the rules see it: files, parsed modules and what a finding is.

Called by `tools/house.py` and its tests. Files are those git knows or would add, so that generated
and ignored files never count.
"""

from __future__ import annotations

import ast
import io
import subprocess
import tokenize
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath
from tokenize import COMMENT
from typing import NamedTuple

CODE_SUFFIXES = frozenset({".py", ".lua", ".c", ".h", ".go", ".sh"})
GENERATED = "_pb2.py"  # what protoc writes is judged by its .proto file


class Finding(NamedTuple):
    """One rule broken at one line; `str()` is the line that is printed."""

    path: str
    line: int
    rule: str
    message: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.rule}: {self.message}"


@dataclass(frozen=True)
class SourceFile:
    """A file of code. `tree` is None where it is not Python."""

    path: str  # relative to the root, with slashes
    text: str
    tree: ast.Module | None

    @cached_property
    def nodes(self) -> Sequence[ast.AST]:
        """The nodes of `tree`, each behind its parent, listed once for all rules."""
        return () if self.tree is None else list(ast.walk(self.tree))

    @cached_property
    def comments(self) -> Sequence[tuple[int, str]]:
        """The comments of Python code, as line number and text; docstrings are not comments."""
        if self.tree is None:
            return ()
        tokens = tokenize.generate_tokens(io.StringIO(self.text).readline)
        return [(token.start[0], token.string) for token in tokens if token.type == COMMENT]

    @property
    def module(self) -> str:
        """The dotted name that an import of this file uses; a package is its `__init__`."""
        parts = PurePosixPath(self.path).with_suffix("").parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    @property
    def is_package(self) -> bool:
        """Whether this is an `__init__.py`, to which relative imports are relative."""
        return PurePosixPath(self.path).name == "__init__.py"

    @property
    def top(self) -> str:
        """The first directory of the path, or "" at the root."""
        parts = PurePosixPath(self.path).parts
        return parts[0] if len(parts) > 1 else ""


def listed(root: Path) -> list[str]:
    """Paths under `root` that git tracks, or would with `git add .`.

    A clone may belong to another user than CI's, hence `safe.directory`.
    """
    git = ["git", "-c", "safe.directory=*", "-C", str(root), "ls-files", "-z"]
    options = ["--cached", "--others", "--exclude-standard"]
    done = subprocess.run(git + options, check=True, capture_output=True, text=True)
    return sorted({path for path in done.stdout.split("\0") if path})


def load(root: Path, paths: Iterable[str]) -> tuple[list[SourceFile], list[Finding]]:
    """Read and parse the code among `paths`; what can't be parsed is a finding."""
    sources: list[SourceFile] = []
    findings: list[Finding] = []
    for path in paths:
        file = root / path
        if file.suffix not in CODE_SUFFIXES or file.is_symlink() or not file.is_file():
            continue
        if file.name.endswith(GENERATED):
            continue
        text = file.read_text(encoding="utf-8")
        tree = None
        if file.suffix == ".py":
            try:
                tree = ast.parse(text, filename=path)
            except SyntaxError as error:
                findings.append(Finding(path, error.lineno or 1, "syntax", error.msg))
                continue
        sources.append(SourceFile(path, text, tree))
    return sources, findings
