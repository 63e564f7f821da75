"""`make man`: a manual page for each command of `slicefs`, from what `--help` says.

They follow man-pages(7): build/man/man1/slicefs.1, slicefs-mount.1, slicefs-quota-set.1 and so on.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import version
from inspect import cleandoc
from pathlib import Path

import click

from fsclient.cli.main import commands

HOME = Path(__file__).resolve().parent.parent / "build" / "man" / "man1"
_AS_IT_IS = "\b\n"


def pages(command: click.Command, name: str, parent: click.Context | None = None) -> Iterator[str]:
    """The page of a command, and those of its commands; the first line has the page's name."""
    context = click.Context(command, info_name=name, parent=parent)
    below = _commands(command, context)
    yield "\n".join(_page(command, context, below)) + "\n"
    for each, inner in below.items():
        yield from pages(inner, each, context)


def _commands(command: click.Command, context: click.Context) -> dict[str, click.Command]:
    if not isinstance(command, click.Group):
        return {}
    found = {name: command.get_command(context, name) for name in command.list_commands(context)}
    return {name: each for name, each in found.items() if each is not None and not each.hidden}


def _page(
    command: click.Command, context: click.Context, below: dict[str, click.Command]
) -> Iterator[str]:
    path = context.command_path
    dashed = path.replace(" ", "-")
    yield f'.TH {dashed.upper()} 1 "" "slicefs {version("slicefs")}" "SliceFS Manual"'
    yield from (".SH NAME", _text(f"{dashed} - {_first_sentence(command)}"))
    yield from (".SH SYNOPSIS", f".B {_text(path)}")
    yield _text(" ".join(command.collect_usage_pieces(context)))
    yield from (".SH DESCRIPTION", *_paragraphs(command.help or ""))
    options = (each for each in command.get_params(context) if isinstance(each, click.Option))
    yield ".SH OPTIONS"
    for option, meaning in filter(None, (each.get_help_record(context) for each in options)):
        yield from (".TP", rf"\fB{_text(option)}\fR", _text(meaning))
    if below:
        yield ".SH COMMANDS"
    for name, each in below.items():
        yield from (".TP", rf"\fB{_text(dashed)}\-{_text(name)}\fR(1)")
        yield _text(_first_sentence(each))
    if command.epilog:
        yield from (".SH NOTES", *_paragraphs(command.epilog))
    if context.parent is not None:
        yield from (".SH SEE ALSO", rf"\fB{_text(context.parent.command_path)}\fR(1)")


def _first_sentence(command: click.Command) -> str:
    return cleandoc(command.help or "").split("\n\n")[0].replace("\n", " ").rstrip(".")


def _paragraphs(text: str) -> Iterator[str]:
    """Of click's text, in which a paragraph that begins with \\b keeps its lines."""
    for number, paragraph in enumerate(cleandoc(text).split("\n\n")):
        if number:
            yield ".PP"
        as_it_is = paragraph.startswith(_AS_IT_IS)
        yield from ([".nf"] if as_it_is else [])
        yield from (_text(line) for line in paragraph.removeprefix(_AS_IT_IS).splitlines() if line)
        yield from ([".fi"] if as_it_is else [])


def _text(text: str) -> str:
    r"""Text that troff(1) prints as it is; `\&` keeps a line from being a request."""
    escaped = text.replace("\\", r"\e").replace("-", r"\-")
    return rf"\&{escaped}" if escaped.startswith((".", "'")) else escaped


def main() -> None:
    """Write them all, and say where."""
    HOME.mkdir(parents=True, exist_ok=True)
    for page in pages(commands, "slicefs"):
        name = page.split(maxsplit=2)[1].lower()
        (HOME / f"{name}.1").write_text(page)
    print(f"MANPATH={HOME.parent}: man slicefs")


if __name__ == "__main__":
    main()
