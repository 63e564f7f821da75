"""Every `slicefs …` of the documents is one that the program takes: its command and its options.

Whole command lines, which are indented, must parse. What a sentence or the first column of a table
names must exist.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from typing import Final

import click
import pytest

from fsclient.cli import main
from tests.demo.pages import commands
from tests.faults.program import REPOSITORY

PAGES: Final = [
    *(REPOSITORY / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")),
    *sorted((REPOSITORY / "docs").rglob("*.md")),
]
NAMES: Final = [str(path.relative_to(REPOSITORY)) for path in PAGES]
_COMMENT: Final = re.compile(r"(^|\s)#\s.*$")
_ENDS: Final = re.compile(r"[;&|()<>]+")  # of one command of a line
_BEFORE: Final = re.compile(r"\$|!|do|then|if|\w+=.*")  # a command
_OPTIONS_OF_THE_PAGE: Final = re.compile(r"\$skip")  # of the page on JuiceFS
_FENCED: Final = re.compile(r"^```.*?^```$|^    .*?$", re.MULTILINE | re.DOTALL)
_INLINE: Final = re.compile(r"`slicefs ([^`]+)`")
_OPTION: Final = re.compile(r"(?<![\w-])-{1,2}[a-zA-Z][a-z-]*")
_NO_COMMANDS: Final = re.compile(r"(metadata|block) ")  # of FORMAT: how dumps and keys begin
_HEADING: Final = re.compile(r"#{2,3} slicefs ([a-z-]+)")
_TOP: Final = click.Context(main.commands, info_name="slicefs")


def _calls(line: str) -> Iterator[list[str]]:
    """The words behind each `slicefs` of a line of shell."""
    lexer = shlex.shlex(_COMMENT.sub("", line), posix=True, punctuation_chars=";&|()<>")
    lexer.whitespace_split, lexer.commenters = True, ""
    call: list[str] = []
    for word in [*lexer, ";"]:
        if not _ENDS.fullmatch(word):
            call += [] if not call and _BEFORE.fullmatch(word) else [word]
            continue
        if call[:1] == ["slicefs"]:
            yield [each for each in call[1:] if not _OPTIONS_OF_THE_PAGE.fullmatch(each)]
        call = []


def _command(name: str) -> click.Command:
    found = main.commands.get_command(_TOP, name)
    assert found is not None, f"slicefs {name}: no such command"
    return found


def _options(command: click.Command) -> set[str]:
    """All of the command's, of those below it, and those that each command has."""
    below = command.commands.values() if isinstance(command, click.Group) else ()
    found = {"-h", "--help", "--version", *(name for each in below for name in _options(each))}
    for each in command.params:
        found |= {*each.opts, *each.secondary_opts}
    return found


@pytest.mark.parametrize("page", NAMES)
def test_command_lines_parse(page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(click.Path, "convert", lambda _self, value, *_: value)  # they are not here
    wrong = []
    for number, line in commands((REPOSITORY / page).read_text(encoding="utf-8")):
        for words in _calls(line) if "slicefs " in line else ():
            try:
                _parse(main.commands, "slicefs", words)
            except click.ClickException as error:
                wrong.append(f"{page}:{number}: {line}: {error.format_message()}")
    assert wrong == []


def _parse(command: click.Command, name: str, words: list[str]) -> None:
    """Raises: ClickException."""
    context = command.make_context(name, list(words))
    if not isinstance(command, click.Group):
        return
    rest = [*context._protected_args, *context.args]
    below, inner, words = command.resolve_command(context, rest)
    assert inner is not None
    _parse(inner, str(below), words)


@pytest.mark.parametrize("page", NAMES)
def test_sentences_name_options_that_exist(page: str) -> None:
    text = " ".join(_FENCED.sub("", (REPOSITORY / page).read_text(encoding="utf-8")).split())
    wrong = []
    for call in filter(lambda each: not _NO_COMMANDS.match(each), _INLINE.findall(text)):
        known = main.commands if call.startswith("-") else _command(call.split()[0])
        named = set(_OPTION.findall(call))
        if named - _options(known) - _options(main.commands):
            wrong.append(call)
    assert wrong == []


def test_tables_of_a_command_name_options_that_exist() -> None:
    text = (REPOSITORY / "docs/OPERATING.md").read_text(encoding="utf-8")
    known: set[str] = set()
    seen = 0
    for line in text.splitlines():
        heading = _HEADING.match(line)
        if line.startswith("## "):
            known = set()
        if heading:
            known = _options(_command(heading[1])) | _options(main.commands)
        if known and re.match(r"\| `-", line):
            for option in _OPTION.findall(line.split(" | ")[0].replace("-vv", "-v")):
                assert option in known, line
                seen += 1
    assert seen > 80


def test_a_wrong_line_is_found() -> None:
    (words,) = _calls("ACCESS_KEY=… slicefs quota set sqlite:///a --piath / > log   # no such")
    assert words == ["quota", "set", "sqlite:///a", "--piath", "/"]
    with pytest.raises(click.NoSuchOption):
        _parse(main.commands, "slicefs", words)
