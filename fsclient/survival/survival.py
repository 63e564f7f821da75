"""What a client of a supervised mount is told: where it keeps records, if it takes over."""

from __future__ import annotations

from typing import NamedTuple

from fsclient.survival.kept import KeptRecords


class Survival(NamedTuple):
    """A worker under a supervisor."""

    kept: KeptRecords
    generation: int  # of the worker: 1 is the first
    takes_over: bool  # a mount that an earlier worker has served
    supervisor: int  # its process
    address: str  # where commands reach it
    status: int  # descriptor of the file in which a client says how it ended
