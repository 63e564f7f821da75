"""Ids and paths of requests: checked here, and turned into names that are safe for files."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from typing import Final

from csi.errors import invalid

ID_BYTES_MAX: Final = 255  # the specification allows 128; static volumes name their own
NAME_BYTES_MAX: Final = 255  # of one component of a path
PATH_BYTES_MAX: Final = 4000  # PATH_MAX, less what the driver puts in front
CATALOG: Final = ".csi"  # the directory of the driver's own records at the root of a volume
_SAFE: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_VARIABLE: Final = re.compile(r"\$\{([^}]*)\}")
_VARIABLES: Final = {
    "pvc.name": "csi.storage.k8s.io/pvc/name",
    "pvc.namespace": "csi.storage.k8s.io/pvc/namespace",
    "pv.name": "csi.storage.k8s.io/pv/name",
}


def check_id(what: str, text: str) -> str:
    """The id, if it can be one. Raises: CsiError."""
    if not text:
        raise invalid(f"the {what} is missing")
    if len(text.encode()) > ID_BYTES_MAX or not text.isprintable():
        raise invalid(
            f"the {what} {text[:40]!r} is not valid: at most {ID_BYTES_MAX} printable bytes"
        )
    return text


def file_name(any_id: str) -> str:
    """A name for files about a thing, whatever its id holds."""
    return hashlib.sha256(any_id.encode()).hexdigest()[:40]


def id_for(name: str) -> str:
    """The id of what a request calls `name`: the name, or its hash where it has odd characters."""
    return name if _SAFE.fullmatch(name) else f"csi-{file_name(name)}"


def clean_path(what: str, text: str) -> str:
    """A relative path within a volume without `.` and `..`; "" is its root. Raises: CsiError."""
    parts = [part for part in text.split("/") if part]
    for part in parts:
        if part in (".", "..") or not part.isprintable() or len(part.encode()) > NAME_BYTES_MAX:
            raise invalid(f"{what} {text[:80]!r}: {part[:40]!r} can't be part of a path")
    if parts and parts[0] == CATALOG:
        raise invalid(f"{what} {text[:80]!r}: {CATALOG} belongs to the driver; choose another")
    if len(text.encode()) > PATH_BYTES_MAX:
        raise invalid(f"{what}: the path has more than {PATH_BYTES_MAX} bytes")
    return "/".join(parts)


def expand_pattern(pattern: str, name: str, parameters: Mapping[str, str]) -> str:
    """The path that `pathPattern` gives a volume. Raises: CsiError."""

    def value(found: re.Match[str]) -> str:
        variable = found[1].lower().lstrip(".")
        if variable == "name":
            return name.replace("/", "_")
        key = _VARIABLES.get(variable)
        if key is None:
            known = ", ".join(["name", *_VARIABLES])
            raise invalid(f"pathPattern: there is no variable {found[0]}; use one of {known}")
        if key not in parameters:
            raise invalid(
                f"pathPattern: {found[0]} is not known: run external-provisioner with "
                "--extra-create-metadata"
            )
        return parameters[key].replace("/", "_")

    path = clean_path("pathPattern", _VARIABLE.sub(value, pattern))
    if not path:
        raise invalid(f"pathPattern {pattern!r} names the root of the volume: add ${{name}}")
    return path


def check_absolute(what: str, path: str) -> str:
    """A path of the host. Raises: CsiError."""
    if not path:
        raise invalid(f"the {what} is missing")
    if "\0" in path or not path.startswith("/") or ".." in path.split("/"):
        raise invalid(f"the {what} {path[:80]!r} is not an absolute path")
    return path.rstrip("/") or "/"
