"""How the process that mounts becomes the supervisor of the mount, and what it tells it.

Before that it forks the first client, which goes on with what the command has imported: another
start of Python would take as long as the whole command. The supervisor is a program of its own, so
that it is small.

The words of the `slicefs` command are in the environment, where ps(1) does not show them: they may
hold passwords. Called by `slicefs mount` and by the supervisor; imports the standard library only.
"""

from __future__ import annotations

import os
import sys
from typing import Final, NamedTuple, NoReturn

from fsclient.survival import channel
from fsclient.survival.channel import Inherited
from fsclient.survival.client_starter import FirstClient
from fsclient.survival.handover import Predecessor

HANG_S: Final = 30.0  # the default of `--hang-after`
_WORDS_ENV: Final = "SLICEFS_WORDS"
_BETWEEN: Final = ":"  # lengths and words
_PROGRAM: Final = ("-P", "-m", channel.PROGRAM)


class Duty(NamedTuple):
    """What a supervisor is to keep, and how."""

    mountpoint: str
    tell: int  # a pipe to the command that waits for the mount; -1: none
    hang_s: float
    log_form: str  # `text` or `json`


def supervise(words: list[str], duty: Duty) -> Inherited:
    """Fork the first client, and become the supervisor of its mount; returns in the client alone.

    No thread may run but the one that calls. Raises: OSError.
    """
    environment = environment_of(words)
    directory = _directory(duty.mountpoint)
    client = FirstClient.fork(duty.tell, directory)
    if isinstance(client, Inherited):
        return client
    try:
        client.bequeath(environment)
        _become(duty, directory, environment)
    except BaseException:
        client.drop()
        raise


def take_over(words: list[str], duty: Duty, predecessor: Predecessor) -> NoReturn:
    """Become the supervisor of a mount that has one, the `predecessor`. Raises: OSError."""
    environment = environment_of(words)
    predecessor.bequeath(environment)
    _become(duty, _directory(duty.mountpoint), environment)


def environment_of(words: list[str]) -> dict[str, str]:
    """Of the supervisor whose clients are told these words. Raises: OSError."""
    environment = {**os.environ, _WORDS_ENV: packed(words)}
    environment[channel.RUNTIME_DIR_ENV] = channel.runtime_directory()
    return environment


def _directory(mountpoint: str) -> str:
    """Where clients begin: here, but below the mount nothing answers while no client runs."""
    directory = os.getcwd()
    return "/" if f"{directory}/".startswith(f"{os.path.realpath(mountpoint)}/") else directory


def _become(duty: Duty, directory: str, environment: dict[str, str]) -> NoReturn:
    if duty.tell >= 0:
        os.set_inheritable(duty.tell, True)
    place = os.path.realpath(duty.mountpoint)
    arguments = [str(duty.tell), directory, str(duty.hang_s), duty.log_form, place]
    os.execve(sys.executable, [sys.executable, *_PROGRAM, *arguments], environment)


def packed(words: list[str]) -> str:
    """Words as one text, whatever is in them: how many bytes each has comes first."""
    parts = [os.fsencode(word) for word in words]
    lengths = " ".join(str(len(part)) for part in parts)
    return lengths + _BETWEEN + os.fsdecode(b"".join(parts))


def given_words() -> list[str]:
    """The words of the command that has become this process."""
    lengths, _, text = os.environ.pop(_WORDS_ENV).partition(_BETWEEN)
    rest = os.fsencode(text)
    words: list[str] = []
    for length in map(int, lengths.split()):
        words.append(os.fsdecode(rest[:length]))
        rest = rest[length:]
    return words
