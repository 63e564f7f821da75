"""Serving a mount: client and kernel session together, from mounting to the last flush.

Runs in the process that stays: in the foreground, or behind `daemonize`.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
from collections.abc import Callable
from types import FrameType
from typing import Final, NamedTuple

from fsclient.client import Client, ClientOptions
from fsclient.config import open_store
from fsclient.fuse import mount as kernel
from fsclient.fuse.session import Session, SessionConfig
from fsclient.metrics import operation_numbers
from fsdata.budget import BUFFER_BYTES
from fsdata.uploads import UPLOAD_THREADS
from fsmeta.errors import ConfigError
from fsmeta.runtime import Runtime, SystemRuntime
from fsmeta.transact import DEADLINE_S

log = logging.getLogger(__name__)

_LOG_FORMAT: Final = "%(asctime)s %(process)d %(levelname)s %(name)s: %(message)s"


class MountRequest(NamedTuple):
    """What to mount, where, and how."""

    meta: str
    mountpoint: str
    options: tuple[str, ...]  # of mount(8)
    buffer_bytes: int = BUFFER_BYTES
    threads: int = 4
    max_uploads: int = UPLOAD_THREADS
    meta_timeout_s: float = DEADLINE_S
    heartbeat_s: float = 5.0
    log_file: str | None = None  # None: standard error
    debug: bool = False


def serve(request: MountRequest, ready: Callable[[], None]) -> int:
    """Mount and serve until unmounted; the exit code. `ready` is called once it can be used.

    Raises: ConfigError.
    """
    _start_log(request)
    runtime = SystemRuntime()
    options = ClientOptions(
        buffer_bytes=request.buffer_bytes,
        upload_threads=request.max_uploads,
        heartbeat_s=request.heartbeat_s,
        meta_timeout_s=request.meta_timeout_s,
        mountpoint=request.mountpoint,
    )
    store = open_store(request.meta, runtime)
    try:
        client = Client(store, runtime, options)
        mounted = kernel.mount(request.mountpoint, client.meta.format.name, request.options)
    except BaseException:
        store.close()
        raise
    try:
        return _serve_mounted(client, mounted, request, runtime, ready)
    finally:
        os.close(mounted.fd)


def _serve_mounted(
    client: Client,
    mounted: kernel.Mounted,
    request: MountRequest,
    runtime: Runtime,
    ready: Callable[[], None],
) -> int:
    trace = logging.getLogger("slicefs.request").debug if request.debug else None
    config = SessionConfig(threads=request.threads, trace=trace, on_corrupt=client.vfs.freeze)
    session = Session(mounted, client.vfs, runtime, config)
    try:
        client.start()
        session.start()
        kernel.raise_readahead(mounted.mountpoint)
        client.vfs.coherence.start(session.notifier)
        client.metrics.add(lambda: operation_numbers(session.snapshot()))
        _end_on_signal(session, mounted.mountpoint, runtime)
    except BaseException:
        kernel.umount(mounted.mountpoint, lazy=True)
        client.stop()
        raise
    log.info("volume %s mounted on %s", client.meta.format.name, mounted.mountpoint)
    ready()
    session.wait()
    stored = client.stop()
    log.info("unmounted %s", mounted.mountpoint)
    return 0 if stored else 1


def _end_on_signal(session: Session, mountpoint: str, runtime: Runtime) -> None:
    """SIGTERM and SIGINT unmount; where the mount is in use it is detached after the flush."""

    def end() -> None:
        try:
            kernel.umount(mountpoint)
        except ConfigError as error:
            log.warning("%s; detaching it", error)
            session.stop()
            kernel.umount(mountpoint, lazy=True)

    def on_signal(number: int, _frame: FrameType | None) -> None:
        log.info("%s: unmounting", signal.Signals(number).name)
        runtime.spawn("unmount", end)

    signal.signal(signal.SIGTERM, on_signal)
    signal.signal(signal.SIGINT, on_signal)


def _start_log(request: MountRequest) -> None:
    if request.log_file is not None:
        try:
            os.makedirs(os.path.dirname(os.path.abspath(request.log_file)), exist_ok=True)
            handler: logging.Handler = logging.FileHandler(request.log_file)
        except OSError as error:
            raise ConfigError(
                f"can't write the log {request.log_file}: {error.strerror}; choose --log FILE"
            ) from error
        faulthandler.enable(handler.stream)  # type: ignore[attr-defined]
    else:
        handler = logging.StreamHandler()
        faulthandler.enable()
    handler.setFormatter(logging.Formatter(_LOG_FORMAT))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.DEBUG if request.debug else logging.INFO)
