"""A bundle for a report of a problem: what a mount and its host say of themselves, without secrets.

`slicefs doctor` calls it. A mount that hangs is not waited for. Every text is cleaned of user names
and passwords of URLs, of keys and of passphrases before it is written.

Threading: the caller's thread, and one for each file of a mount, which may hang.
"""

from __future__ import annotations

import io
import json
import os
import platform
import re
import resource
import tarfile
from collections.abc import Callable, Mapping
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final

from fsclient.fuse.mount.mount import find_mount
from fsmeta.errors import ConfigError
from fsmeta.runtime import Runtime

FILE_WAIT_S: Final = 5.0
LOG_BYTES: Final = 256 << 10  # of its end
_FILE_MAX: Final = 4 << 20
_PACKAGES: Final = (
    *("slicefs", "click", "crc32c", "hiredis", "lz4", "msgpack", "redis", "zstandard"),
    *("boto3", "cryptography", "opentelemetry-sdk", "tikv-client"),
)
_SECRETS: Final = (
    (re.compile(r"(\w://)[^/\s\"'@]*@"), r"\1***@"),
    (
        re.compile(
            r"((?:secret|password|passphrase|passwd|token|access_?key|authorization|signature)"
            r"[\w-]*[\"']?\s*[=:]\s*[\"']?)[^\s\"',&]+",
            re.IGNORECASE,
        ),
        r"\1***",
    ),
    (re.compile(r"\b(?:AKIA|ASIA)[A-Z0-9]{12,}\b"), "***"),
)
_HOST_FILES: Final = (
    "/proc/version",
    "/proc/meminfo",
    "/proc/cpuinfo",
    "/proc/loadavg",
    "/etc/os-release",
    "/sys/module/fuse/parameters/max_user_bgreq",
)


def cleaned(text: str) -> str:
    """`text` without what looks like a secret."""
    for pattern, instead in _SECRETS:
        text = pattern.sub(instead, text)
    return text


def versions() -> dict[str, str | None]:
    """Versions of SliceFS, of what it uses, of Python and of the kernel."""
    found: dict[str, str | None] = {}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return {**found, "python": platform.python_version(), "kernel": platform.release()}


def collect(
    mountpoint: str,
    log_file: str,
    runtime: Runtime,
    status: Callable[[], Mapping[str, Any]] | None = None,
) -> dict[str, str]:
    """The files of a bundle by name. Raises: ConfigError where `mountpoint` is no mount of ours."""
    info = find_mount(os.path.abspath(mountpoint))
    if info is None or "slicefs" not in info.fstype:
        raise ConfigError(f"{mountpoint} is no SliceFS mount: `findmnt -t fuse.slicefs` lists them")
    files = {
        "versions.json": json.dumps(versions(), indent=2),
        "mount.json": json.dumps(info._asdict(), indent=2),
        "limits.json": json.dumps(_limits(), indent=2),
    }
    for name in (".config", ".stats"):
        files[name.removeprefix(".")] = _read_patiently(os.path.join(mountpoint, name), runtime)
    for path in _HOST_FILES:
        files[f"host{path}"] = _read(path, 0)
    files["log"] = _read(log_file, LOG_BYTES)
    try:
        pid = int(json.loads(files["config"])["mount"]["pid"])
        for name in ("status", "limits", "io"):
            files[f"process/{name}"] = _read(f"/proc/{pid}/{name}", 0)
    except (ValueError, KeyError, TypeError):
        files["process/missing"] = "the mount does not say which process serves it"
    if status is not None:
        files["status.json"] = _status(status)
    return {name: cleaned(text) for name, text in files.items()}


def _status(status: Callable[[], Mapping[str, Any]]) -> str:
    try:
        return json.dumps(status(), indent=2)
    except ConfigError as error:
        return json.dumps({"error": str(error)})


def _limits() -> dict[str, list[int]]:
    names = ("RLIMIT_NOFILE", "RLIMIT_NPROC", "RLIMIT_MEMLOCK", "RLIMIT_AS")
    return {name: list(resource.getrlimit(getattr(resource, name))) for name in names}


def _read(path: str, tail: int) -> str:
    """A file, or only its end; what is wrong with it where it cannot be read."""
    try:
        with open(path, "rb") as file:
            if tail:
                file.seek(max(0, os.fstat(file.fileno()).st_size - tail))
            return file.read(_FILE_MAX).decode(errors="replace")
    except OSError as error:
        return f"cannot be read: {error.strerror}"


def _read_patiently(path: str, runtime: Runtime) -> str:
    """A file of a mount that may hang."""
    found: list[str] = []
    thread = runtime.spawn("doctor", partial(_append, found, path))
    thread.join(FILE_WAIT_S)
    return found[0] if found else f"no answer within {FILE_WAIT_S:.0f} s: the mount hangs"


def _append(found: list[str], path: str) -> None:
    found.append(_read(path, 0))


def bundle(files: Mapping[str, str], out: str, now_s: int) -> None:
    """Write the files to a new .tar.gz that only its owner may read. Raises: ConfigError."""
    try:
        fd = os.open(out, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    except FileExistsError as error:
        raise ConfigError(f"{out} exists already: name another file with --out") from error
    except OSError as error:
        raise ConfigError(f"{out}: {error.strerror}: name another file with --out") from error
    try:
        with os.fdopen(fd, "wb") as raw, tarfile.open(fileobj=raw, mode="w:gz") as tar:
            for name, text in files.items():
                data = text.encode(errors="replace")
                entry = tarfile.TarInfo(f"slicefs-doctor/{name}")
                entry.size, entry.mtime, entry.mode = len(data), now_s, 0o600
                tar.addfile(entry, io.BytesIO(data))
    except OSError:
        os.unlink(out)
        raise
