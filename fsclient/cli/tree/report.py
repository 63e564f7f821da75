"""What a command on trees prints at its end: its failures, and JSON or one line of counts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Protocol

import click

from fsclient.cli.options.tell import tell
from fsclient.trees.walk import Failure

SHOWN_MAX: Final = 20  # failures on a terminal; --json has those that were kept


class Outcome(Protocol):
    """The result of a job on trees, a NamedTuple."""

    @property
    def failed(self) -> int:
        """How many paths failed."""

    @property
    def failures(self) -> list[Failure]:
        """The first of them."""

    def _asdict(self) -> dict[str, Any]: ...


def report(done: Outcome, paths: Sequence[str], counts: str, as_json: bool) -> int:
    """Print the outcome for `paths`; the exit code, 1 if something failed."""
    if as_json:
        failures = [each._asdict() for each in done.failures]
        tell({**done._asdict(), "failures": failures}, paths=paths)
    else:
        for each in done.failures[:SHOWN_MAX]:
            click.echo(f"slicefs: {each.path}: {each.why}", err=True)
        click.echo(counts + (f", {done.failed} failures" if done.failed else ""))
    return 1 if done.failed else 0
