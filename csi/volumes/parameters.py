"""What a request wants: parameters of the class, capacity and access modes, checked."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple

from csi.errors import Code, CsiError, invalid
from csi.names import expand_pattern

CAPACITY_MAX: Final = (1 << 62) - 1  # half of what the counters of a volume hold
_K8S: Final = "csi.storage.k8s.io/"
_KNOWN: Final = ("pathPattern", "mountOptions", "onDelete", "directoryMode", "uid", "gid")
_ON_DELETE: Final = ("delete", "archive", "retain")
_ID_MAX: Final = (1 << 32) - 2
_READ_ONLY_MODES: Final = (2, 3)  # SINGLE_NODE_READER_ONLY, MULTI_NODE_READER_ONLY
SINGLE_WRITER: Final = 6  # SINGLE_NODE_SINGLE_WRITER: one pod


class ClassParameters(NamedTuple):
    """The parameters of a storage class."""

    path: str
    on_delete: str
    mode: int
    uid: int
    gid: int
    mount_options: str


def parse_parameters(name: str, parameters: Mapping[str, str]) -> ClassParameters:
    """Raises: CsiError."""
    for key in parameters:
        if key not in _KNOWN and not key.startswith(_K8S):
            raise invalid(f"there is no parameter {key[:40]!r}; known: {', '.join(_KNOWN)}")
    on_delete = parameters.get("onDelete", "delete")
    if on_delete not in _ON_DELETE:
        raise invalid(f"onDelete {on_delete[:40]!r}: use {', '.join(_ON_DELETE)}")
    return ClassParameters(
        expand_pattern(parameters.get("pathPattern") or "${name}", name, parameters),
        on_delete,
        _number("directoryMode", parameters.get("directoryMode", "0777"), 8, 0o7777),
        _number("uid", parameters.get("uid", "0"), 10, _ID_MAX),
        _number("gid", parameters.get("gid", "0"), 10, _ID_MAX),
        parameters.get("mountOptions", ""),
    )


def _number(what: str, text: str, base: int, most: int) -> int:
    try:
        found = int(text, base)
    except ValueError:
        found = -1
    if not 0 <= found <= most:
        raise invalid(f"{what} {text[:40]!r}: a number in base {base}, at most {most:#o}")
    return found


class CapacityRange(NamedTuple):
    """A capacity range; a `limit` of 0 is none."""

    required: int
    limit: int

    @property
    def wanted(self) -> int:
        """The capacity that a new volume gets; 0 is without a quota."""
        return self.required or self.limit

    def fits(self, capacity: int) -> bool:
        """Whether a volume of that capacity will do."""
        if not capacity:
            return not self.wanted
        return self.required <= capacity and (not self.limit or capacity <= self.limit)


def parse_range(found: Any) -> CapacityRange:
    """Raises: CsiError."""
    required, limit = int(found.required_bytes), int(found.limit_bytes)
    if required < 0 or limit < 0:
        raise invalid("a capacity can't be negative")
    if limit and required > limit:
        raise CsiError(
            Code.OUT_OF_RANGE, f"the capacity range is empty: {required} to {limit} bytes"
        )
    if max(required, limit) > CAPACITY_MAX:
        raise CsiError(Code.OUT_OF_RANGE, f"a capacity is at most {CAPACITY_MAX} bytes")
    return CapacityRange(required, limit)


def check_capabilities(capabilities: Iterable[Any]) -> None:
    """Raises: CsiError where there are none, or one is not a mount."""
    found = list(capabilities)
    if not found:
        raise invalid("the volume capabilities are missing")
    for each in found:
        check_capability(each)


def check_capability(capability: Any) -> None:
    """Raises: CsiError."""
    if why := refusal(capability):
        raise invalid(why)


def refusal(capability: Any) -> str:
    """Why a volume can't be used so; "" where it can."""
    if capability.WhichOneof("access_type") == "block":
        return "SliceFS has no block volumes: use volumeMode Filesystem"
    if capability.WhichOneof("access_type") != "mount":
        return "the volume capability is missing or has no access type"
    if not capability.HasField("access_mode") or not capability.access_mode.mode:
        return "the volume capability has no access mode"
    return ""


def is_read_only(capability: Any) -> bool:
    """Whether the access mode is one of those without writers."""
    return capability.access_mode.mode in _READ_ONLY_MODES
