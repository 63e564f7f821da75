"""Hides the password of a metadata URL: neither ps(1) nor a message shows it.

Called as the program begins. Until then, for some milliseconds, ps can see it; `env:NAME` in place
of the URL keeps it out of the arguments altogether.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Sequence
from typing import Final

from fsmeta.errors import ConfigError
from fsmeta.store.url import shown_url

_ARG_START: Final = 48  # proc_pid_stat(5)
_AFTER_NAME: Final = 3  # the first field behind the program's name, which may hold anything
_FROM_ENVIRONMENT: Final = re.compile(r"env:([A-Za-z_][A-Za-z0-9_]*)")


def read_environment(arguments: Sequence[str]) -> list[str]:
    """The arguments, with the environment's value where one is `env:NAME`.

    Raises: ConfigError where the environment has no such name.
    """
    return [_value(each) for each in arguments]


def _value(argument: str) -> str:
    found = _FROM_ENVIRONMENT.fullmatch(argument)
    if found is None:
        return argument
    value = os.environ.get(found[1], "")
    if not value:
        raise ConfigError(f"{argument}: the environment has no {found[1]}: export it")
    return value


def hide_passwords(arguments: Sequence[str]) -> None:
    """Overwrite the URLs among this process's arguments with what may be shown of them."""
    urls = _with_passwords(arguments)
    if not urls:
        return
    begin, end = _area()
    area = ctypes.string_at(begin, end - begin)
    for url, shown in urls:
        raw = os.fsencode(url)
        at = area.find(raw + b"\0")
        if at >= 0:
            ctypes.memmove(begin + at, os.fsencode(shown).ljust(len(raw), b"\0"), len(raw))


def without_passwords(text: str, arguments: Sequence[str]) -> str:
    """A message that may quote one of the arguments."""
    for url, shown in _with_passwords(arguments):
        text = text.replace(url, shown)
    return text


def _with_passwords(arguments: Sequence[str]) -> list[tuple[str, str]]:
    """URLs that may hold one, and what may be shown of them."""
    urls = [each for each in arguments if ":/" in each and ("@" in each or "?" in each)]
    return [(url, shown_url(url)) for url in urls]


def _area() -> tuple[int, int]:
    """Where the kernel finds the arguments in our memory; nowhere if it does not say."""
    try:
        with open("/proc/self/stat", encoding="ascii", errors="replace") as stat:
            fields = stat.read().rpartition(")")[2].split()
    except OSError:
        return 0, 0
    at = _ARG_START - _AFTER_NAME
    return int(fields[at]), int(fields[at + 1])
