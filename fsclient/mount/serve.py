"""Serving a mount: client and kernel session together, from mounting to the last flush.

Runs in the process that stays: in the foreground, or behind `daemonize`.
"""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Final, NamedTuple

from fsclient.fuse.mount import mount as kernel
from fsclient.fuse.mount.mount_options import is_read_only, parse_options as kernel_options
from fsclient.fuse.session.idle_poll import IdlePolling
from fsclient.fuse.session.init import Agreement, KernelWants
from fsclient.fuse.session.session import Session, SessionConfig
from fsclient.fuse.wire.protocol import Init
from fsclient.mount.client import Client, ClientOptions
from fsclient.mount.daemon import Teller
from fsclient.mount.exit_status import LEFT, ExitStatus, telling
from fsclient.mount.gc_tuning import tune
from fsclient.mount.log_lines import dump_stacks
from fsclient.mount.logs import log_place, name_requests, start_log
from fsclient.mount.process_limits import raise_limits
from fsclient.observe.observer import Observer
from fsclient.observe.options import ObserveOptions
from fsclient.observe.sources import operation_latencies, operation_numbers, request_latencies
from fsclient.volume.cache_options import CacheOptions
from fsclient.volume.metadata_url import naming, open_store, require_apart, require_sound
from fsclient.volume.mount_root import find_root
from fsclient.volume.object_stores import Pacing, require_usable, require_writable
from fsclient.volume.volume_key import KeyOffer
from fsclient.writeback.journal_dir import warn_of_journals
from fsclient.writeback.writeback import Staging
from fsdata.resources.memory_budget import BUFFER_BYTES
from fsmeta.errors import ConfigError, StoreError, StoreRolledBack
from fsmeta.runtime import Runtime, SystemRuntime
from fsmeta.store.metered import MeteredStore
from fsmeta.store.url import shown_url
from fsmeta.txn.retry import DEADLINE_S
from fsmeta.types import ROOT_INO

log = logging.getLogger(__name__)

LEAVE_S: Final = 3.0  # how long the kernel may take to let a client go that is unmounted
_ENDING: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class MountRequest(NamedTuple):
    """What to mount, where, and how."""

    meta: str
    mountpoint: str
    options: tuple[str, ...]  # of mount(8)
    buffer_bytes: int = BUFFER_BYTES
    threads: int = 4
    max_uploads: int | None = None  # as `ClientOptions.upload_threads`
    meta_timeout_s: float = DEADLINE_S
    heartbeat_s: float = 5.0
    log_file: str | None = None  # None: standard error
    debug: bool = False
    idle_poll: str = "auto"
    pacing: Pacing = Pacing()
    store_options: tuple[str, ...] = ()  # NAME=VALUE, instead of the volume's own
    offer: KeyOffer | None = None  # opens an encrypted volume
    redis_wait: tuple[int, int] | None = None  # replicas that must have a change, milliseconds
    backup_meta_s: float = 0.0
    cache: CacheOptions = CacheOptions()
    staging: Staging = Staging()
    subdir: str = ""  # the directory to mount; "": the volume's root
    snapshot: str = ""  # of that directory; "": itself
    pack_below: int | None = None
    tikv_gc: bool = True  # have old values in TiKV dropped, if this client leads
    observe: ObserveOptions = ObserveOptions()


def serve(request: MountRequest, teller: Teller) -> int:
    """Mount and serve until unmounted; the exit code. `teller` learns how far it is.

    Raises: ConfigError.
    """
    start_log(request.log_file, request.observe, request.debug)
    raise_limits()
    tune(request.buffer_bytes)
    runtime = SystemRuntime()
    options = ClientOptions(
        buffer_bytes=request.buffer_bytes,
        upload_threads=request.max_uploads,
        heartbeat_s=request.heartbeat_s,
        meta_timeout_s=request.meta_timeout_s,
        mountpoint=request.mountpoint,
        pacing=request.pacing,
        store_options=request.store_options,
        backup_meta_s=request.backup_meta_s,
        cache=request.cache,
        staging_dir=request.staging.directory,
        staging_others=request.staging.others,
        writeback=request.staging.options,
        subdir=request.subdir,
        snapshot=request.snapshot,
        pack_below=request.pack_below,
    )
    _fail_on_signal()
    idle = IdlePolling(runtime, request.idle_poll)
    observer = Observer(request.observe, runtime)
    teller.step(f"the metadata in {shown_url(request.meta)}")
    store = MeteredStore(
        open_store(request.meta, runtime, redis_wait=request.redis_wait, tikv_gc=request.tikv_gc),
        runtime,
    )
    try:
        review = require_sound(request.meta, store)
        for warning in review.warnings:
            log.warning("%s", warning)
        for note in review.notes:
            log.info("%s", note)
        with naming(request.meta):
            client = Client(
                store, runtime, options, offer=request.offer, step=teller.step, observer=observer
            )
        client.metrics.add_latencies(
            lambda: request_latencies("meta_request_duration_seconds", store.readings())
        )
        if request.staging.options is None:
            warn_of_journals(request.staging.others, client.meta.format.uuid)
        client.vfs.root = find_root(client.meta, request.subdir, request.snapshot)
        if not is_read_only(request.options):
            require_writable(client.meta.format)
            require_usable(client.meta.format, runtime, client.overrides)
        if kernel.find_mount(request.mountpoint) is None:  # else `mount` refuses, and asks nobody
            require_apart(request.meta, client.meta.format, request.mountpoint)
        idle.probe()
        mounted = kernel.mount(request.mountpoint, client.meta.format.name, request.options)
    except BaseException:
        store.close()
        raise
    return _serve_mounted(client, mounted, request, idle, runtime, teller)


def _serve_mounted(
    client: Client,
    mounted: kernel.Mounted,
    request: MountRequest,
    idle: IdlePolling,
    runtime: Runtime,
    teller: Teller,
) -> int:
    """The exit code."""
    trace = logging.getLogger("slicefs.request").debug if request.debug else None
    acl = kernel_options(request.options).acl
    client.vfs.xattrs.acls = client.meta.has_acls() if acl is None else acl
    config = SessionConfig(
        threads=request.threads,
        wants=KernelWants(acl=client.vfs.xattrs.acls, export=client.vfs.root == ROOT_INO),
        trace=trace,
        on_corrupt=_freezer(client),
        idle=idle,
        root=client.vfs.root,
        tap=client.observer.access,
    )
    session = Session(mounted, client.vfs, runtime, config)
    name_requests(session.current_request)
    try:
        return _serve_session(session, client, mounted, request, idle, runtime, teller)
    finally:
        if not session.left:  # else its workers use it, and the process is about to end
            os.close(mounted.fd)


def _serve_session(
    session: Session,
    client: Client,
    mounted: kernel.Mounted,
    request: MountRequest,
    idle: IdlePolling,
    runtime: Runtime,
    teller: Teller,
) -> int:
    try:
        client.start()
        agreed = session.start()
        kernel.raise_readahead(mounted.mountpoint)
        client.vfs.coherence.start(session.notifier, session.under_way)
        past_pages = bool(agreed.flags & Init.DIRECT_IO_ALLOW_MMAP)  # both came with Linux 6.6
        client.vfs.io.direct.obey(agreed.minor, drops_before=past_pages)
        _write_directly(client, agreed)
        client.vfs.locks.start(session)
        client.vfs.questions.on_remount = lambda: _obey_flags(client, mounted.mountpoint)
        _obey_flags(client, mounted.mountpoint)
        client.metrics.add(lambda: operation_numbers(session.snapshot()))
        client.metrics.add_latencies(lambda: operation_latencies(session.snapshot()))
        client.metrics.add(idle.numbers)
        client.observer.start(client.trouble, client.meta, mounted.mountpoint)
        ending = Ending(session, mounted.mountpoint, runtime)
    except BaseException:
        kernel.umount(mounted.mountpoint, lazy=True)
        client.stop()
        raise
    log.info("volume %s mounted on %s", client.meta.format.name, mounted.mountpoint)
    testament = ExitStatus(log_place(request.log_file) or "where its standard error goes")
    teller.ready()
    session.wait()
    ending.finish()
    with telling(runtime, client.unstored_bytes):
        client.stop()
    lost = client.lost
    log.info("unmounted %s", mounted.mountpoint)
    testament.end(None if lost is None else {**lost._asdict(), "text": str(lost)})
    if lost is not None:
        return 1
    return 0 if client.drained else LEFT


def _write_directly(client: Client, agreed: Agreement) -> None:
    """Do so if it was asked for, and where files stay mappable meanwhile."""
    options = client.options.writeback
    if options is None or not options.direct_writes:
        return
    client.vfs.io.direct.writes = bool(agreed.flags & Init.DIRECT_IO_ALLOW_MMAP)
    if not client.vfs.io.direct.writes:
        log.warning("--direct-writes needs Linux 6.6: files are written through the kernel's pages")


def _obey_flags(client: Client, mountpoint: str) -> None:
    """Whether reading moves atime is what the kernel shows for the mount: one truth, for all."""
    client.vfs.atimes.obey(kernel.find_flags(mountpoint) or ("ro",))


def _freezer(client: Client) -> Callable[[StoreError], None]:
    """What to do where metadata are corrupt or gone back: change nothing more, and say so once."""
    found: list[StoreError] = []
    client.metrics.add(lambda: {"read_only": float(bool(found))})

    def freeze(error: StoreError) -> None:
        if not found:
            found.append(error)
            remedy = "unmount and run `slicefs fsck`"
            if isinstance(error, StoreRolledBack):
                remedy += ", then mount again"
            log.error("%s; read-only from now on: %s", error, remedy)
            client.vfs.freeze(error)

    client.meta.transactor.on_rewound = freeze
    return freeze


def _fail_on_signal() -> None:
    """Until there is something to unmount, the signals that end programs make mounting fail."""

    def on_signal(number: int, _frame: FrameType | None) -> None:
        raise ConfigError(f"{signal.Signals(number).name} before the mount was ready")

    for number in _ENDING:
        signal.signal(number, on_signal)


class Ending:
    """The signals that end programs unmount; a mount in use is detached when nobody is served.

    What others hold of it in mount namespaces of their own is left without a client. A second
    signal does not wait for anything but that what was written is stored.

    A signal may come to any thread, and Python calls handlers in the main thread, when that runs
    again: it waits for the session, which does not end. So signals are read from a pipe.
    """

    def __init__(self, session: Session, mountpoint: str, runtime: Runtime) -> None:
        self._session = session
        self._mountpoint = mountpoint
        self._info = kernel.find_mount(mountpoint)
        self._runtime = runtime
        self._begun = False
        self._done = runtime.event()
        told, tell = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(tell, False)
        signal.set_wakeup_fd(tell, warn_on_full_buffer=False)
        for number in (*_ENDING, signal.SIGUSR1):
            signal.signal(number, lambda _number, _frame: None)
        runtime.spawn("signals", partial(self._listen, told))

    def finish(self) -> None:
        """The session has ended: return when what a signal has begun is done."""
        if self._begun:
            self._done.wait()

    def _listen(self, told: int) -> None:
        _await_signal(told)
        self._begun = True
        self._runtime.spawn("unmount", self._end)
        _await_signal(told)
        if not self._session.wait(0):
            log.info("a second signal: not waiting for who still uses the mount")
            self._session.leave()
        while True:  # what hangs now is of interest, too
            _await_signal(told)

    def _end(self) -> None:
        try:
            self._unmount()
        finally:
            self._done.set()

    def _unmount(self) -> None:
        try:
            if kernel.find_mount(self._mountpoint) == self._info:
                kernel.umount(self._mountpoint)
        except ConfigError as error:
            log.warning("%s; detaching it", error)
            self._session.stop()
            self._session.wait()  # its workers are woken through the mount: detached after that
            _detach(self._mountpoint)
            return
        gone = self._session.wait(LEAVE_S) and not self._session.left
        if self._info is not None and not gone:
            _leave_holder(self._session, self._info)


def _leave_holder(session: Session, info: kernel.MountInfo) -> None:
    """End though the mount, gone from here, is still elsewhere."""
    for holder in kernel.find_holders(info).values():
        log.warning("unmounted, but %s; it is left without a client", holder)
        session.stop(holder.path)
        return
    pins = "; ".join(kernel.find_pins()) or "something that has no name keeps the mount"
    log.warning("unmounted, but %s; what is left of it has no client", pins)
    session.leave()


def _await_signal(told: int) -> None:
    while (number := os.read(told, 1)[0]) not in _ENDING:
        if number == signal.SIGUSR1:
            dump_stacks()
    log.info("%s: unmounting", signal.Signals(number).name)


def _detach(mountpoint: str) -> None:
    try:
        kernel.umount(mountpoint, lazy=True)
    except ConfigError as error:
        log.info("%s", error)  # somebody was faster
