"""Commands that the driver runs: none waits for ever, and none shows a secret."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

_SHOWN_MAX: Final = 600  # characters of what a command complains of
_SECRET_LEAST: Final = 4  # a shorter one would blot out half of any text
_OWN: Final = ("ACCESS_KEY", "SECRET_KEY", "SESSION_TOKEN", "SLICEFS_META")


class CommandResult(NamedTuple):
    """A command that has ended; `code` is None where it took too long and was killed."""

    code: int | None
    out: str
    err: str


def find_slicefs() -> str:
    """The `slicefs` beside this Python, else that of the path."""
    beside = os.path.join(os.path.dirname(sys.executable), "slicefs")
    return beside if os.path.exists(beside) else "slicefs"


async def run(
    words: Sequence[str],
    environment: Mapping[str, str],
    timeout_s: float,
    pass_fds: Sequence[int] = (),
) -> CommandResult:
    """Run a command in a session of its own; `environment` is added to the driver's own.

    What it printed holds no value of `environment`.
    """
    own = {name: value for name, value in os.environ.items() if name not in _OWN}
    process = await asyncio.create_subprocess_exec(
        *words,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**own, "LC_ALL": "C.UTF-8", **environment},
        start_new_session=True,
        pass_fds=tuple(pass_fds),
    )
    try:
        out, err = await asyncio.wait_for(process.communicate(), timeout_s)
    except TimeoutError:
        process.kill()
        return CommandResult(None, "", f"no answer within {timeout_s:.0f} s")
    secrets = environment.values()
    return CommandResult(process.returncode, out.decode(errors="replace"), _plain(err, secrets))


def _plain(text: bytes, secrets: Iterable[str]) -> str:
    """One line without secrets and without the program's name."""
    shown = " ".join(text.decode(errors="replace").split()).removeprefix("slicefs: ")
    for secret in secrets:
        if len(secret) >= _SECRET_LEAST:
            shown = shown.replace(secret, "***")
    return shown[:_SHOWN_MAX]
