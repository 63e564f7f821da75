"""What commands print with `--json`: alike everywhere, as docs/OPERATING.md promises.

One object, or one a line where a command goes on telling. What the command was about comes first,
as it was typed: `meta`, `mountpoint`, `path`, `source`, ... Sizes are integers of bytes, durations
floats of seconds, points in time Unix seconds.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

import click

from fsmeta.store.url import shown_url


def tell(found: Mapping[str, object], **subject: object) -> None:
    """Print the one object of a command. `meta` is shown without its password."""
    click.echo(json.dumps({**_shown(subject), **found}, indent=2))


def tell_line(found: Mapping[str, object], **subject: object) -> None:
    """Print an object on a line, where others follow."""
    click.echo(json.dumps({**_shown(subject), **found}))


def _shown(subject: Mapping[str, object]) -> dict[str, object]:
    meta = subject.get("meta")
    return {**subject, "meta": shown_url(meta)} if isinstance(meta, str) else dict(subject)
