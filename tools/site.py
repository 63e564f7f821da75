"""`make docs`: the site of docs/, with a reference that is written from the code, in build/site.

mkdocs reads one folder, so build/site-source gets README.md as its index, docs/, the pages beside
README.md, and the reference: commands from `--help`, options and metrics from their tables, Python
from the docstrings of `slicefs`. Links to files that are no pages lead to the name of the file.
"""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import click

from fsclient.cli.main import commands
from fsclient.observe.catalog import families, help_of, kind_of
from fsclient.observe.registry import PREFIX
from tools.option_tables import option_tables

ROOT: Final = Path(__file__).resolve().parent.parent
SOURCE: Final = ROOT / "build" / "site-source"
BESIDE_README: Final = ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
NO_PAGES: Final = ("NOTES.md",)  # of docs/: for work on the code
_LINK: Final = re.compile(r"(?<!!)\[([^\]]*)\]\(([^)#:]+)(#[^)]*)?\)")
_REFERENCE: Final = re.compile(r"^(\[[^\]]+\]): (?:docs/)?(\S+)$", re.MULTILINE)
PUBLIC: Final = (
    "client/client.py",
    "client/namespace.py",
    "client/files.py",
    "stores/opening.py",
    "torch/data.py",
    "torch/checkpoint.py",
    "torch/checkpoint_manager.py",
    "torch/dcp.py",
    "lightning.py",
    "compat/dataflux/dataflux_mapstyle_dataset.py",
    "compat/s3torch/data.py",
    "fsspec.py",
)


def assemble() -> None:
    """Write build/site-source."""
    shutil.rmtree(SOURCE, ignore_errors=True)
    shutil.copytree(ROOT / "docs", SOURCE, ignore=shutil.ignore_patterns(*NO_PAGES))
    for name in ("README.md", *BESIDE_README):
        shutil.copy(ROOT / name, SOURCE / name)
    (SOURCE / "README.md").rename(SOURCE / "index.md")
    pages = {path.relative_to(SOURCE).as_posix() for path in SOURCE.rglob("*.md")}
    for page in pages:
        path = SOURCE / page
        path.write_text(_linked(path.read_text(), page, pages))
    reference = SOURCE / "reference"
    reference.mkdir()
    (reference / "commands.md").write_text("\n".join(_commands()))
    (reference / "options.md").write_text("\n".join(option_tables()))
    (reference / "metrics.md").write_text("\n".join(_metrics()))
    (reference / "python.md").write_text("\n".join(_python()))


def _linked(text: str, page: str, pages: set[str]) -> str:
    """`text` of a page with its links as they are in the site."""
    here = Path(page).parent

    def moved(match: re.Match[str]) -> str:
        words, target, anchor = match[1], match[2], match[3] or ""
        place = _place(here, target)
        if place not in pages:
            return f"{words} (`{target.lstrip('./')}`)"
        steps = "../" * len(here.parts)
        return f"[{words}]({steps}{place}{anchor})"

    text = _LINK.sub(moved, text)
    return _REFERENCE.sub(r"\1: \2", text) if page == "index.md" else text


def _place(here: Path, target: str) -> str:
    """Where a link that is written in the folder `here` leads, seen from the site's root."""
    parts: list[str] = []
    for part in (*here.parts, *target.split("/")):
        if part == "..":
            parts = parts[:-1]
        elif part != ".":
            parts.append(part)
    place = "/".join(parts).removeprefix("docs/")
    return "index.md" if place == "README.md" else place


def _commands() -> Iterator[str]:
    yield "# Commands\n\nWhat `slicefs COMMAND --help` prints.\n"
    root = click.Context(commands, info_name="slicefs", max_content_width=100)
    yield from _helped(commands, root, 2)


def _helped(command: click.Command, context: click.Context, depth: int) -> Iterator[str]:
    yield f"{'#' * min(depth, 4)} {context.command_path}\n"
    yield f"```text\n{command.get_help(context)}\n```\n"
    if not isinstance(command, click.Group):
        return
    for name in command.list_commands(context):
        inner = command.get_command(context, name)
        if inner is not None and not inner.hidden:
            below = click.Context(inner, info_name=name, parent=context, max_content_width=100)
            yield from _helped(inner, below, depth + 1)


def _metrics() -> Iterator[str]:
    yield "# Metrics\n\nOf `mount --metrics`, and of `.stats` without the prefix and as JSON.\n"
    yield "| series | kind | meaning |\n|---|---|---|"
    for family in families():
        yield f"| `{PREFIX}{family}` | {kind_of(family)} | {help_of(family)} |"


def _python() -> Iterator[str]:
    yield "# Python\n\nThe public classes and functions of the package `slicefs`.\n"
    for name in PUBLIC:
        module = "slicefs." + name.removesuffix(".py").replace("/", ".")
        tree = ast.parse((ROOT / "slicefs" / name).read_text())
        yield f"## {module}\n\n{ast.get_docstring(tree) or ''}\n"
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                yield f"### {node.name}\n\n{_block(ast.get_docstring(node))}"
                yield from (_signature(each) for each in node.body if _is_public(each))
            elif _is_public(node):
                yield _signature(node)


def _is_public(node: ast.stmt) -> bool:
    if not isinstance(node, ast.FunctionDef):
        return False
    return node.name == "__init__" or not node.name.startswith("_")


def _signature(node: ast.stmt) -> str:
    assert isinstance(node, ast.FunctionDef)
    result = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    text = f"#### {node.name}\n\n```python\n{node.name}({ast.unparse(node.args)}){result}\n```\n"
    return f"{text}\n{_block(ast.get_docstring(node))}"


def _block(docstring: str | None) -> str:
    """A docstring as it stands: it is aligned for a terminal."""
    return f"```text\n{docstring}\n```\n" if docstring else ""


def main() -> int:
    """The exit code of mkdocs."""
    assemble()
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict"], cwd=ROOT, check=False
    )
    if not built.returncode:
        print(f"{ROOT / 'build' / 'site' / 'index.html'}")
    return built.returncode


if __name__ == "__main__":
    raise SystemExit(main())
