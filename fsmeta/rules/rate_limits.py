"""Records of rate limits: what a volume, a directory, a user or a group may do in a second.

Table `B` has the limits. Table `b` has, for each session, how much it has lately done under each of
them, so that the mounts of a volume can divide a limit. `docs/FORMAT.md` is this page in prose.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from struct import Struct
from typing import Final, NamedTuple

from fsmeta.errors import Corrupt
from fsmeta.schema import keys

LIMITS: Final = b"B"
DEMANDS: Final = b"b"
VOLUME: Final = b"v"  # the node of everything in a volume
MOUNT: Final = b"m"  # of one mount; never stored
_LIMITS: Final = Struct(">QQQ")
_DEMAND: Final = Struct(">QQQB")  # and which of the three were waited for
_NODE_BYTES: Final = {VOLUME: 1, b"d": 9, b"u": 5, b"g": 5}


class RateLimits(NamedTuple):
    """What is allowed in a second; 0: no limit."""

    read: int = 0  # bytes
    write: int = 0  # bytes
    ops: int = 0  # requests


NO_LIMITS: Final = RateLimits()


class Demand(NamedTuple):
    """What a session did in a second, of late, and of which it would have done more."""

    done: RateLimits
    hungry: tuple[bool, bool, bool]


def pack_limits(limits: RateLimits) -> bytes:
    """The value of a node in `B`."""
    return _LIMITS.pack(*limits)


def unpack_limits(node: bytes, value: bytes) -> RateLimits:
    """Raises: Corrupt."""
    if len(node) != _NODE_BYTES.get(node[:1]) or len(value) != _LIMITS.size:
        raise Corrupt(LIMITS, node, "no rate limit")
    return RateLimits(*_LIMITS.unpack(value))


def pack_demands(beat: int, demands: Mapping[bytes, Demand]) -> bytes:
    """The value of a session in `b`; `beat` is another each time."""
    packed = {
        node: _DEMAND.pack(*each.done, sum(flag << at for at, flag in enumerate(each.hungry)))
        for node, each in demands.items()
    }
    return keys.pack_map({"beat": beat, "of": list(packed.items())})


def unpack_demands(session: bytes, value: bytes) -> dict[bytes, Demand]:
    """Raises: Corrupt."""
    record = keys.unpack_map(DEMANDS, session, value)
    try:
        found = {}
        for node, packed in record["of"]:
            *done, flags = _DEMAND.unpack(packed)
            hungry = (bool(flags & 1), bool(flags & 2), bool(flags & 4))
            found[bytes(node)] = Demand(RateLimits(*done), hungry)
        return found
    except (KeyError, TypeError, ValueError, struct.error) as error:
        raise Corrupt(DEMANDS, session, f"no demands: {error}") from error
