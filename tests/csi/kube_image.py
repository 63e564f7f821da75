"""A container image of a few kilobytes: the links and directories of a root, and no programs.

Its containers get the programs of this host by `hostPath`; what runs without any is `/pause`.
"""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from pathlib import Path
from typing import Any, Final

LINKS: Final = {"bin": "usr/bin", "lib": "usr/lib", "lib64": "usr/lib64", "sbin": "usr/sbin"}
DIRECTORIES: Final = ("usr", "etc", "tmp", "root", "proc", "sys", "dev", "run", "var", "data")
BUSYBOX: Final = Path("/bin/busybox")  # statically linked: Debian's busybox-static


def write_image(target: Path, name: str) -> None:
    """An archive as `ctr images import` takes it."""
    layer = _layer()
    layer_digest = hashlib.sha256(layer).hexdigest()
    config = json.dumps(
        {
            "architecture": "amd64",
            "os": "linux",
            "config": {"Entrypoint": ["/busybox", "sleep", "inf"], "Env": ["PATH=/usr/bin"]},
            "rootfs": {"type": "layers", "diff_ids": [f"sha256:{layer_digest}"]},
        }
    ).encode()
    manifest = [{"Config": "config.json", "RepoTags": [name], "Layers": ["layer.tar"]}]
    with tarfile.open(target, "w") as archive:
        _add(archive, "layer.tar", layer)
        _add(archive, "config.json", config)
        _add(archive, "manifest.json", json.dumps(manifest).encode())


def _layer() -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name in DIRECTORIES:
            _add(archive, name, b"", type=tarfile.DIRTYPE, mode=0o1777 if name == "tmp" else 0o755)
        for name, place in LINKS.items():
            _add(archive, name, b"", type=tarfile.SYMTYPE, linkname=place)
        _add(archive, "busybox", BUSYBOX.read_bytes(), mode=0o755)
    return buffer.getvalue()


def _add(archive: tarfile.TarFile, name: str, content: bytes, **fields: Any) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(content)
    for key, value in fields.items():
        setattr(info, key, value)
    archive.addfile(info, io.BytesIO(content))
