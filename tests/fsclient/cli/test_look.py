"""`-q`, `-v`, `--color`, `--log-format` and `--syslog`, before and behind every command."""

from __future__ import annotations

import json
import os
import socket
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from fsclient.cli import main
from tests.faults.program import SLICEFS, Volume, needs_mounts, slicefs, wait_until
from tests.fsclient.cli.test_every_command import ALONE, CODES, EVERY

Capture = pytest.CaptureFixture[str]
RED = "\x1b[31m"
WRONG = "--none-such"  # no command has it


@pytest.mark.parametrize("behind", [False, True], ids=["before", "behind"])
@pytest.mark.parametrize("words", [words for words in EVERY if words not in ALONE])
def test_errors_of_every_command(words: str, behind: bool, capsys: Capture) -> None:
    """As a coloured line, and as a line of JSON. Arguments are missing, or an option is wrong."""

    def said(*options: str) -> str:
        typed = [*words.split(), *options] if behind else [*options, *words.split(), WRONG]
        assert main.run(typed) in (1, CODES.get(words, {}).get(2, 2))
        return capsys.readouterr().err

    assert said("-q", "--color", "always").startswith(f"{RED}\x1b[1mslicefs:\x1b[0m ")
    assert said("-v", "--color", "never").startswith("slicefs: ")
    told = json.loads(said("--log-format", "json"))
    assert told["level"] == "ERROR"
    assert behind or WRONG in told["message"]


def _at_terminal(words: Sequence[str], **environment: str) -> str:
    """What standard error shows at a terminal."""
    ours, theirs = os.openpty()
    env = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
    try:
        subprocess.run(
            [SLICEFS, *words], stderr=theirs, env={**env, **environment}, timeout=100, check=False
        )
        return os.read(ours, 4096).decode()
    finally:
        os.close(ours)
        os.close(theirs)


def test_colours_at_a_terminal(tmp_path: Path) -> None:
    words = ("status", f"sqlite://{tmp_path}/none.db")
    assert _at_terminal(words).startswith(RED)
    assert _at_terminal(words, NO_COLOR="1").startswith("slicefs: ")
    assert _at_terminal(("--color", "always", *words), NO_COLOR="1").startswith(RED)
    assert slicefs(*words).err.startswith("slicefs: ")


def test_what_a_check_finds_has_colours(embedded: Volume) -> None:
    embedded.format()
    assert "\x1b[32mclean\x1b[0m" in slicefs("fsck", embedded.meta, "--color", "always").out
    assert slicefs("fsck", embedded.meta).out.endswith("clean\n")


@contextmanager
def _daemon(path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as daemon:
        daemon.bind(str(path))
        daemon.settimeout(60)
        yield daemon


def test_an_error_in_the_log_of_the_system(tmp_path: Path) -> None:
    with _daemon(tmp_path / "log") as daemon:
        done = slicefs("status", "foo", "--syslog", tmp_path / "log")
        line = daemon.recv(4096).decode()
    assert done.code == 1
    assert line.startswith("<11>slicefs[")  # facility user, severity error
    assert line.endswith(f": ERROR slicefs: {done.err.removeprefix('slicefs: ')}".rstrip())
    for address, why in (
        (str(tmp_path / "none"), "No such file or directory: start the daemon"),
        (str(tmp_path / "log"), "Connection refused: start the daemon"),
        ("host:port", "write `local`, a socket's path, or HOST[:PORT]"),
    ):
        done = slicefs("status", "foo", "--syslog", address)
        assert (done.code, done.err.count("\n")) == (1, 1), done
        assert why in done.err


@needs_mounts
def test_the_log_of_a_mount_goes_there_too(embedded: Volume, tmp_path: Path) -> None:
    embedded.format()
    with _daemon(tmp_path / "log") as daemon:
        mount = embedded.mount("--syslog", str(tmp_path / "log"))
        seen: list[str] = []

        def heard() -> bool:
            seen.append(daemon.recv(4096).decode())
            return f"slicefs[{mount.pid}]: INFO" in seen[-1]

        wait_until("the mount says something", 60, heard)
        mount.umount()
    text = embedded.log.read_text()
    assert seen[-1].rpartition(": ")[2].strip() in text, "the file has it as well"
    embedded.end()
