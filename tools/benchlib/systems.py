"""The commands of the systems that are measured. To measure another one, add it here.

Both run at their defaults but for what would be unfair or noisy: no trash, no usage report, no
metadata backup, and a cache directory that the benchmark can empty.
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

    Words in braces are filled in: {meta} {store} {cache} {mountpoint} {log}.
    """

    name: str
    program: tuple[str, ...]
    format: str
    mount: str
    umount: str
    version: str
    meta_urls: Mapping[str, str]  # by --meta; {port} or {path} is filled in
    redis_db: int

    def command(self, words: str, **values: str) -> list[str]:
        """The argument list for one of the templates above."""
        return [*self.program, *(word.format(**values) for word in shlex.split(words))]


def _program(name: str) -> tuple[str, ...]:
    return (str(Path(sys.executable).parent / name),)


SLICEFS = System(
    name="slicefs",
    program=_program("slicefs"),
    format="format {meta} bench --storage file --bucket {store}/ --trash-days 0",
    mount="mount {meta} {mountpoint} -d --log {log}",
    umount="umount {mountpoint}",
    version="--version",
    meta_urls={"redis": "redis://127.0.0.1:{port}/1", "sqlite": "sqlite://{path}"},
    redis_db=1,
)

JUICEFS = System(
    name="juicefs",
    program=_program("juicefs"),
    format="format --storage file --bucket {store}/ --trash-days 0 {meta} bench",
    mount="mount -d --no-usage-report --no-syslog --backup-meta 0 --log {log}"
    " --cache-dir {cache} {meta} {mountpoint}",
    umount="umount {mountpoint}",
    version="--version",
    meta_urls={"redis": "redis://127.0.0.1:{port}/3", "sqlite": "sqlite3://{path}"},
    redis_db=3,
)


def adjusted(system: System, program: str, format_options: str, mount_options: str) -> System:
    """`system` with another program, if one is given, and more options."""
    return replace(
        system,
        program=tuple(shlex.split(program)) or system.program,
        format=f"{system.format} {format_options}",
        mount=f"{system.mount} {mount_options}",
    )
