"""What the command that mounts tells the supervisor that it becomes, and where that listens."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from fsclient.survival import channel, launch

LISTENS = """
from fsclient.survival import channel
end, path = channel.listen()
print(path, flush=True)
input()
"""


@pytest.mark.parametrize(
    "words",
    [
        ["mount", "redis://h/1", "/mnt"],
        ["mount", "--log", "", "a b", "c:d", "/mnt/\x1f--read-only", "\n", "7"],
        ["mount", os.fsdecode(b"/mnt/\xff\xfe"), "/mnt/\u00e4"],
        [os.fsdecode(b"half \xc3"), os.fsdecode(b"\xa4 of a letter")],
    ],
)
def test_words_are_those_that_were_typed(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A name with a control character in it is no further option."""
    found = launch.environment_of(words)
    (name,) = [each for each, value in found.items() if value == launch.packed(words)]
    monkeypatch.setenv(name, found[name])
    assert launch.given_words() == words
    assert name not in os.environ, "clients do not inherit it"


def test_sockets_of_killed_supervisors_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next supervisor removes them, and none that a supervisor listens at."""
    tmp_path.chmod(0o700)
    monkeypatch.setenv(channel.RUNTIME_DIR_ENV, str(tmp_path))
    (tmp_path / "supervisor-1-1").touch()  # of another namespace of process ids
    command = [sys.executable, "-c", LISTENS, channel.PROGRAM]
    with ExitStack() as stack:

        def listening() -> tuple[subprocess.Popen[str], Path]:
            pipe = subprocess.PIPE
            process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
            stack.enter_context(process)
            stack.callback(process.kill)
            assert process.stdout is not None
            return process, Path(process.stdout.readline().rstrip())

        killed, left = listening()
        killed.kill()
        killed.wait()
        assert left.is_socket()
        _, stays = listening()
        assert not left.exists()
        _, newest = listening()
        assert {each.name for each in tmp_path.iterdir()} == {
            *(stays.name, newest.name),
            "supervisor-1-1",
        }
