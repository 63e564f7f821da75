"""Serving a mount: client and kernel session together, from mounting to the last flush.

Runs in the process that stays: in the foreground, or behind `daemonize`.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from functools import partial
from typing import Final, NamedTuple

from fsclient.client.client import MountClient
from fsclient.client.client_options import ClientOptions
from fsclient.client.given_parts import GivenParts
from fsclient.client.process_limits import raise_limits
from fsclient.fuse.dispatch.squash import Squash
from fsclient.fuse.mount import mount as kernel
from fsclient.fuse.mount.mount_options import is_read_only, parse_options as kernel_options
from fsclient.fuse.pyfuse3.session import Pyfuse3Session, require_usable as require_pyfuse3
from fsclient.fuse.session.backing import SessionBackings
from fsclient.fuse.session.idle_poll import IdlePolling
from fsclient.fuse.session.init import Agreement, KernelWants
from fsclient.fuse.session.session import Session, SessionConfig
from fsclient.fuse.session.transport import NATIVE, PYFUSE3, Transport
from fsclient.fuse.wire.protocol import Init
from fsclient.kernel.contract import FIRST_VIRTUAL_INO
from fsclient.mount.daemon import Teller
from fsclient.mount.ending import Ending, fail_on_signal
from fsclient.mount.exit_status import LEFT, ExitStatus, telling
from fsclient.mount.gc_tuning import tune
from fsclient.mount.logs import log_place, name_requests, start_log
from fsclient.mount.worker_link import (
    WorkerLink,
    find_agreement,
    finds_polling,
    keep_agreement,
    noting,
    noting_lane,
)
from fsclient.observe.observer import Observer
from fsclient.observe.options import ObserveOptions
from fsclient.observe.sources import operation_sample, request_latencies
from fsclient.service_manager import tell_service_manager
from fsclient.survival import tables
from fsclient.survival.channel import Inherited
from fsclient.volume.cache_options import CacheOptions
from fsclient.volume.metadata_url import naming, open_store, require_apart, require_sound
from fsclient.volume.mount_root import find_root
from fsclient.volume.object_stores import Pacing, require_usable, require_writable
from fsclient.volume.volume_key import KeyOffer
from fsclient.writeback.journal_dir import warn_of_journals
from fsclient.writeback.writeback import StagingRequest
from fsdata.resources.memory_budget import BUFFER_BYTES
from fsmeta.errors import ConfigError
from fsmeta.rules.rate_limits import NO_LIMITS, RateLimits
from fsmeta.runtime import Runtime, SystemRuntime
from fsmeta.store.contract import Store
from fsmeta.store.url import shown_url
from fsmeta.txn.retry import DEADLINE_S
from fsmeta.types import ROOT_INO
from fsmeta.user_namespace import own_namespace

log = logging.getLogger(__name__)

OPEN_REQUESTS: Final = ("auto", "always")  # whether open(2) asks the mount
AGAIN_S: Final = 1.0  # between two tries to reach a metadata store that is away


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
    staging: StagingRequest = StagingRequest()
    subdir: str = ""  # the directory to mount; "": the volume's root
    snapshot: str = ""  # of that directory; "": itself
    pack_below: int | None = None
    tikv_gc: bool = True  # have old values in TiKV dropped, if this client leads
    observe: ObserveOptions = ObserveOptions()
    squash: Squash | None = None
    open_requests: str = OPEN_REQUESTS[0]
    passthrough: bool = False
    confine_root: bool = False  # it takes no snapshots, and attaches nothing
    transport: str = NATIVE
    rate_limits: RateLimits = NO_LIMITS


def serve(request: MountRequest, teller: Teller, given: Inherited | None = None) -> int:
    """Mount and serve until unmounted; the exit code. `teller` learns how far it is.

    `given` is what a supervisor gives, if there is one. Raises: ConfigError.
    """
    _prepare(request)
    runtime = SystemRuntime()
    link = None if given is None else WorkerLink(given, runtime, request.buffer_bytes)
    native = request.transport == NATIVE
    idle = IdlePolling(runtime, request.idle_poll if native else "never")
    observer = Observer(request.observe, runtime, sees_requests=native)
    teller.step(f"the metadata in {shown_url(request.meta)}")
    store = observer.tracing.layers.store(_open_store(request, runtime, link), runtime)
    try:
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
            passthrough=request.passthrough,
            transport=request.transport,
            rate_limits=request.rate_limits,
            zero_message=_opens_without_asking(request, store.name, link is not None),
        )
        survival = None if link is None else link.standby()
        review = require_sound(request.meta, store)
        for warning in review.warnings:
            log.warning("%s", warning)
        for note in review.notes:
            log.info("%s", note)
        with naming(request.meta):
            client = MountClient(
                store,
                runtime,
                options,
                GivenParts(
                    offer=request.offer, step=teller.step, observer=observer, survival=survival
                ),
            )
        client.vfs.questions.confine(request.confine_root)
        client.metrics.add_latencies(
            lambda: request_latencies("meta_request_duration_seconds", store.readings())
        )
        if request.staging.options is None:
            warn_of_journals(request.staging.others, client.meta.format.uuid)
        if link is not None and link.takes_over:
            mounted = kernel.Mounted(link.descriptor, kernel.real_path(request.mountpoint))
        else:
            mounted = _mount(request, client, runtime, idle)
            if link is not None:
                link.mounted(mounted.fd)
    except BaseException:
        store.close()
        raise
    code = _serve_mounted(client, mounted, request, idle, runtime, teller, link)
    if link is not None:
        link.ended(code)
    return code


def _prepare(request: MountRequest) -> None:
    """What comes before anything can fail that is worth a line in the log. Raises: ConfigError."""
    start_log(request.log_file, request.observe, request.debug)
    raise_limits()
    tune(request.buffer_bytes)
    fail_on_signal()
    if request.transport == PYFUSE3:
        require_pyfuse3()


def _open_store(request: MountRequest, runtime: Runtime, link: WorkerLink | None) -> Store:
    """The metadata engine; a client that takes over waits until it can be reached. Raises:
    ConfigError."""
    while True:
        try:
            return open_store(
                request.meta,
                runtime,
                redis_wait=request.redis_wait,
                tikv_gc=request.tikv_gc,
                token=None if link is None else link.given.token,
            )
        except ConfigError as error:
            if link is None or not link.waits():
                raise
            log.warning("%s; trying again", error)
            runtime.sleep(AGAIN_S)


def _mount(
    request: MountRequest, client: MountClient, runtime: Runtime, idle: IdlePolling
) -> kernel.Mounted:
    """A new mount, which waits to be served. Raises: ConfigError."""
    client.vfs.root = find_root(client.meta, request.subdir, request.snapshot)
    if not is_read_only(request.options):
        require_writable(client.meta.format)
        require_usable(client.meta.format, runtime, client.overrides)
    if kernel.find_mount(request.mountpoint) is None:  # else `mount` refuses, and asks no store
        require_apart(request.meta, client.meta.format, request.mountpoint)
    acl = False if request.squash is not None else kernel_options(request.options).acl
    client.vfs.xattrs.acls = client.meta.has_acls() if acl is None else acl
    idle.probe()
    return kernel.mount(
        request.mountpoint, client.meta.format.name, request.options, request.squash is None
    )


def _opens_without_asking(request: MountRequest, engine: str, survives: bool) -> bool:
    """Whether the kernel may open files by itself: nothing is written here, and other clients'
    changes reach it, or nothing ever changes. A client that takes over does not know which pages
    the kernel has of files that it opened so: only where nothing changes."""
    if (
        request.open_requests == "always"
        or request.passthrough
        or request.transport != NATIVE
        or not is_read_only(request.options)
    ):
        return False
    if request.staging.options is not None:
        return False
    return bool(request.snapshot) or (engine == "redis" and not survives)


def _serve_mounted(
    client: MountClient,
    mounted: kernel.Mounted,
    request: MountRequest,
    idle: IdlePolling,
    runtime: Runtime,
    teller: Teller,
    link: WorkerLink | None,
) -> int:
    """The exit code."""
    trace = logging.getLogger("slicefs.request").debug if request.debug else None
    kept = None
    if client.survival is not None and client.survival.takes_over:
        kept, client.vfs.root = find_agreement(client.survival.kept)
        client.vfs.xattrs.acls = bool(kept.flags & Init.POSIX_ACL)
    namespace, tracing = own_namespace(), client.observer.tracing
    config = SessionConfig(
        threads=request.threads,
        wants=KernelWants(
            acl=client.vfs.xattrs.acls,
            export=client.vfs.root == ROOT_INO and request.squash is None,
            readdirplus=request.squash is None and namespace is None,
            zero_message=client.options.zero_message,
            passthrough=client.options.passthrough,
        ),
        trace=trace,
        on_corrupt=client.freeze,
        idle=idle,
        root=client.vfs.root,
        tap=client.observer.access,
        squash=request.squash,
        quick=client.vfs.fast_lane if namespace is None else None,  # it knows nothing of those
        around=(*(() if link is None else (noting,)), *tracing.around),
        around_lane=(*(() if link is None else (noting_lane,)), *tracing.around_lane),
        survives=link is not None,
        namespace=namespace,
        throttle=client.qos.throttle,
    )
    session: Transport
    if request.transport == NATIVE:
        session = Session(mounted, client.vfs, runtime, config)
    else:
        session = Pyfuse3Session(mounted, client.vfs, runtime, config)
    name_requests(session.current_request)
    try:
        ready = partial(_tell_ready, teller, link)
        ending = _start(session, client, mounted, idle, kept, runtime)
        return _serve_until_unmounted(session, client, mounted, ending, request, ready, runtime)
    finally:
        if not session.left:  # else its workers use it, and the process is about to end
            os.close(mounted.fd)


def _start(
    session: Transport,
    client: MountClient,
    mounted: kernel.Mounted,
    idle: IdlePolling,
    kept: Agreement | None,
    runtime: Runtime,
) -> Ending:
    """Let the session begin to serve; where that fails, a new mount is gone again."""
    try:
        client.start()
        if client.options.transport == NATIVE:
            client.qos.start()
        agreed = session.agree(kept)
        _keep(client, session, agreed, kept is None, idle)
        kernel.raise_readahead(mounted.mountpoint)
        client.vfs.coherence.start(session.notifier, session.under_way)
        past_pages = bool(agreed.flags & Init.DIRECT_IO_ALLOW_MMAP)  # both came with Linux 6.6
        client.vfs.io.direct.obey(agreed.minor, drops_before=past_pages)
        _write_directly(client, agreed)
        if agreed.flags & Init.PASSTHROUGH:
            client.vfs.io.passthrough.start(SessionBackings(mounted.fd))
        client.vfs.locks.start(session)
        client.vfs.io.copy_up.interrupted = session.interrupted
        if kept is not None:
            _adopt_handles(client, session)
            client.drop_kernel_caches()
            session.resend()
        # whether reading moves atime is what the kernel shows for the mount: one truth, for all
        client.vfs.atimes.follow(lambda: kernel.find_flags(mounted.mountpoint) or ("ro",))
        client.metrics.add_samples(lambda: operation_sample(session.snapshot()))
        client.metrics.add(idle.numbers)
        session.begin()  # the first request may be one for `.stats`
        client.observer.start(client.trouble, client.meta, mounted.mountpoint)
        return Ending(session, mounted.mountpoint, runtime)
    except BaseException:
        if kept is None:  # else the next client has another try
            kernel.umount(mounted.mountpoint, lazy=True)
            client.stop()
        raise


def _serve_until_unmounted(
    session: Transport,
    client: MountClient,
    mounted: kernel.Mounted,
    ending: Ending,
    request: MountRequest,
    ready: Callable[[], None],
    runtime: Runtime,
) -> int:
    """The exit code."""
    log.info("volume %s mounted on %s", client.meta.format.name, mounted.mountpoint)
    where = log_place(request.log_file) or "where its standard error goes"
    testament = ExitStatus(where, -1 if client.survival is None else client.survival.status)
    ready()
    session.wait()
    ending.finish()
    if not session.left:
        session.release_handles()
    with telling(runtime, client.unstored_bytes):
        client.stop()
    lost = client.lost
    log.info("unmounted %s", mounted.mountpoint)
    testament.end(None if lost is None else {**lost._asdict(), "text": str(lost)})
    if lost is not None:
        return 1
    return 0 if client.drained else LEFT


def _keep(
    client: MountClient, session: Transport, agreed: Agreement, is_new: bool, idle: IdlePolling
) -> None:
    """Let the next client know what was agreed with the kernel."""
    if client.survival is None:
        return
    kept = client.survival.kept
    if not is_new:
        idle.believe(finds_polling(kept))
    elif session.can_resend():
        keep_agreement(kept, agreed, client.vfs.root, idle.pays)
    else:
        log.warning("this kernel is older than Linux 6.16: the mount ends with its client")


def _adopt_handles(client: MountClient, session: Transport) -> None:
    """Handles that the last client had made for readers without one."""
    assert client.survival is not None, "a mount that is taken over has a supervisor"
    handles = tables.handles(client.survival.kept.arena)
    session.adopt_handles(
        (each.ino, each.fh, each.is_dir) for each in handles if each.ino < FIRST_VIRTUAL_INO
    )


def _tell_ready(teller: Teller, link: WorkerLink | None) -> None:
    """The mount is served."""
    teller.ready()
    if link is None:
        if silent := tell_service_manager():
            log.warning(silent)
    else:  # the supervisor tells, as the main process
        os.chdir("/")
        link.ready()


def _write_directly(client: MountClient, agreed: Agreement) -> None:
    """Do so if it was asked for, and where files stay mappable meanwhile."""
    options = client.options.writeback
    if options is None or not options.direct_writes:
        return
    client.vfs.io.direct.writes = bool(agreed.flags & Init.DIRECT_IO_ALLOW_MMAP)
    if not client.vfs.io.direct.writes:
        log.warning("--direct-writes needs Linux 6.6: files are written through the kernel's pages")
