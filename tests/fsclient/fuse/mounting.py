"""A real mount around a test, served by threads of the test's own process."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fsclient.fuse.mount.mount import Mounted, find_mount, mount, umount
from fsclient.fuse.session.session import Session, SessionConfig
from fsclient.kernel.contract import FileSystem
from fsmeta.errors import ConfigError
from fsmeta.runtime import SystemRuntime

needs_root_and_fuse = pytest.mark.skipif(
    os.geteuid() != 0 or not os.path.exists("/dev/fuse"), reason="needs root and /dev/fuse"
)
END_S = 60  # by then every worker must have ended; only a hang takes longer


class _Warnings(logging.Handler):
    """Remembers what it is given."""

    def __init__(self, level: int) -> None:
        super().__init__(level)
        self.seen: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.seen.append(record.getMessage())


@contextmanager
def serving(
    fs: FileSystem,
    mountpoint: Path,
    config: SessionConfig | None = None,
    options: tuple[str, ...] = (),
) -> Iterator[Session]:
    """Mount `fs` and serve it.

    Afterwards the mount is gone, every thread has ended and nothing was worth a warning.
    """
    mountpoint.mkdir(exist_ok=True)
    warnings = _Warnings(logging.WARNING)
    logging.getLogger("fsclient.fuse").addHandler(warnings)
    mounted = mount(str(mountpoint), "testvol", options)
    session = Session(mounted, fs, SystemRuntime(), config)
    try:
        session.start()
        yield session
    finally:
        _end(session, mounted)
        logging.getLogger("fsclient.fuse").removeHandler(warnings)
    assert not warnings.seen


def _end(session: Session, mounted: Mounted) -> None:
    """Unmount; as a last resort lazily, and then the test fails."""
    busy = None
    try:
        if find_mount(mounted.mountpoint) is not None:
            try:
                umount(mounted.mountpoint)
            except ConfigError as error:
                busy = error
                umount(mounted.mountpoint, lazy=True)
        if busy is None:
            assert session.wait(END_S), "workers still run after the unmount"
    finally:
        os.close(mounted.fd)
    if busy is not None:
        raise busy
