"""Quotas, as `slicefs quota` and tests set them: accounting on and off, limits, recounts.

Each step is a commit of its own and may be done twice, so a command that was killed can be run
again, and two at once do no harm. docs/design/locks-permissions-quotas says why this is exact.

Threading: from any thread; nothing is kept but the `Meta`.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Final, NamedTuple

from fsmeta.errors import ConfigError
from fsmeta.meta.meta import Meta
from fsmeta.ops.sessions.session import raise_fence
from fsmeta.ops.trees import quota_scan
from fsmeta.rules import quota, settings as volume
from fsmeta.rules.context import get_stable
from fsmeta.rules.settings import ARMED, COUNTING, OFF, ON, VolumeFormat
from fsmeta.schema import inode, keys
from fsmeta.store.contract import COMMIT_OPS_ENOUGH, Page, RowPage, Store
from fsmeta.store.writes import BESIDE
from fsmeta.txn.txn import Txn
from fsmeta.types import NO_PARENT, ROOT_INO, Ino, SessionId, SpaceUsage

BATCH: Final = 100  # inodes that are taken together, unless clients change them all the time
Progress = Callable[[int], None]  # gets the number of inodes counted so far


class Quota(NamedTuple):
    """A node with a limit, and what counts there. A limit of 0 means none."""

    node: bytes
    used: SpaceUsage
    limit: SpaceUsage


class QuotaLimits(NamedTuple):
    """What is to be set; None leaves a limit as it is, 0 takes it away."""

    space: int | None = None
    inodes: int | None = None


def set_quota(
    meta: Meta, node: bytes, limits: QuotaLimits, progress: Progress | None = None
) -> Quota:
    """Limit a directory, a user or a group; the first quota of a volume counts it first.

    Raises: ConfigError where a directory has gone.
    """
    start(meta, progress)
    meta.transactor.run(lambda txn: _set_limits(txn, node, limits))
    found = get_quota(meta, node)
    if not any(found.limit):
        _end_without_limits(meta)
    return found


def get_quota(meta: Meta, node: bytes) -> Quota:
    """What counts at a node, and its limits, if any."""
    return meta.transactor.view(lambda txn: quotas_of(txn, [node]))[0]


def list_quotas(meta: Meta) -> Iterator[Quota]:
    """Every node that has a limit, in no order; in constant memory."""
    cursor: bytes | None = b""
    seen: set[bytes] = set()
    while cursor is not None:
        page = _page(meta, keys.LIMITED, cursor)
        nodes = [node for node, _ in page.items if node not in seen]
        seen = {node for node, _ in page.items} if page.cursor else set()
        yield from meta.transactor.view(partial(quotas_of, nodes=nodes))
        cursor = page.cursor


def quotas_of(txn: Txn, nodes: Sequence[bytes]) -> list[Quota]:
    """The quotas of some nodes."""
    found = zip(nodes, quota.rooms(txn, nodes), strict=True)
    return [Quota(node, room.used, room.limit) for node, room in found]


def delete_quota(meta: Meta, node: bytes) -> bool:
    """Take the limits of a node away; False where it has none. Without any accounting ends."""
    found = meta.transactor.run(lambda txn: _drop_limits(txn, node))
    if found:
        _end_without_limits(meta)
    return found


def _end_without_limits(meta: Meta) -> None:
    if not has_limits(meta):
        stop(meta)


def has_limits(meta: Meta) -> bool:
    """Whether there is any quota."""
    return bool(_page(meta, keys.LIMITED, b"").items)


def _set_limits(txn: Txn, node: bytes, limits: QuotaLimits) -> None:
    if volume.load_format(txn).accounting != ON:
        raise ConfigError("another command has turned accounting off: run this one again")
    if node[:1] == quota.DIR:
        _require_dir(txn, Ino(keys.id_of(node)))
    fields = quota.node_fields(node)[2:]
    known = txn.get_many([(keys.ACCOUNTS, field) for field in fields])
    left = False
    for field, before, value in zip(fields, known, limits, strict=True):
        if value is None:
            left = left or before is not None
        elif value:
            txn.put(keys.ACCOUNTS, field, b"%d" % value)
            left = True
        else:
            txn.delete(keys.ACCOUNTS, field)
    if left:
        txn.put(keys.LIMITED, node, b"1")
    else:
        txn.delete(keys.LIMITED, node)


def _require_dir(txn: Txn, ino: Ino) -> None:
    """Its record is checked by the commit, so a directory that goes takes its limit along."""
    try:
        stable = get_stable(txn, ino)
    except OSError as error:
        raise ConfigError("the directory was removed during the command") from error
    if stable.parent == NO_PARENT and ino != ROOT_INO:
        raise ConfigError("the directory was removed during the command")


def _drop_limits(txn: Txn, node: bytes) -> bool:
    if txn.get(keys.LIMITED, node) is None:
        return False
    for field in quota.node_fields(node)[2:]:
        txn.delete(keys.ACCOUNTS, field)
    txn.delete(keys.LIMITED, node)
    return True


# --- accounting on and off -----------------------------------------------------------------------


def change_settings(
    meta: Meta, change: Callable[[VolumeFormat], VolumeFormat], unless: bytes | None = None
) -> VolumeFormat:
    """Change the volume's settings, and have every session follow before this returns.

    `change` raises ConfigError, or returns the settings it was given where there is nothing to do.
    Raises: ENOTEMPTY where the row `unless` has a field.
    """

    def verb(txn: Txn) -> VolumeFormat:
        before = volume.load_format(txn)
        after = change(before)
        if after != before:
            after = after._replace(changes=before.changes + 1)
            txn.put(keys.FORMAT, keys.FORMAT_FIELD, volume.pack_format(after))
            if unless is not None:
                txn.require_empty(unless)
        return after

    settings = meta.transactor.run(verb)
    publish(meta)
    return settings


def publish(meta: Meta) -> None:
    """Return when no session can commit under older settings than those of now."""
    settings = meta.transactor.view(volume.load_format)
    for session in meta.sessions.all():
        meta.transactor.run(partial(_raise, sid=session.id, settings=settings))


def _raise(txn: Txn, sid: SessionId, settings: VolumeFormat) -> None:
    """Unless the settings have changed once more: then others are about to do it."""
    if volume.load_format(txn).edition == settings.edition:
        raise_fence(txn, sid, settings.edition)


def start(meta: Meta, progress: Progress | None = None) -> None:
    """Have every inode counted and every change charged; goes on where a count was broken off."""
    while True:
        settings = meta.transactor.view(volume.load_format)
        if settings.accounting == ON:
            return
        if settings.accounting == OFF:
            _forget_counters(meta)
            change_settings(meta, _arm)
        elif settings.accounting == ARMED:
            publish(meta)  # a command that was killed may not have reached all clients
            change_settings(meta, lambda now: _advance(now, ARMED, COUNTING))
        else:
            publish(meta)
            if _count_or_stop(meta, settings.epoch, progress):
                meta.transactor.run(partial(_finish, epoch=settings.epoch))


def _count_or_stop(meta: Meta, epoch: int, progress: Progress | None) -> bool:
    """`count`; where that can't be done, accounting ends again. Raises: ConfigError."""
    try:
        return count(meta, epoch, progress)
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        stop(meta)
        raise ConfigError(f"the volume can't be counted for quotas: {error.strerror}") from error


def _arm(settings: VolumeFormat) -> VolumeFormat:
    if settings.accounting != OFF:
        return settings
    return settings._replace(accounting=ARMED, epoch=settings.epoch % (inode.MARKS - 1) + 1)


def _advance(settings: VolumeFormat, old: str, new: str) -> VolumeFormat:
    return settings._replace(accounting=new) if settings.accounting == old else settings


def _finish(txn: Txn, epoch: int) -> None:
    """All are counted. To the verbs it is the same, so the edition stays."""
    settings = volume.load_format(txn)
    if settings.accounting == COUNTING and settings.epoch == epoch:
        packed = volume.pack_format(settings._replace(accounting=ON))
        txn.put(keys.FORMAT, keys.FORMAT_FIELD, packed)


def stop(meta: Meta) -> None:
    """End accounting, unless another command has set a quota meanwhile."""
    try:
        change_settings(meta, lambda now: now._replace(accounting=OFF), unless=keys.LIMITED)
    except OSError as error:
        if error.errno != errno.ENOTEMPTY:
            raise
        return
    _forget_counters(meta)


def recount(meta: Meta, progress: Progress | None = None) -> None:
    """Count anew, under live mounts; limits stay, and are measured against what is counted yet."""
    change_settings(meta, lambda now: now._replace(accounting=OFF))
    start(meta, progress)


def _forget_counters(meta: Meta) -> None:
    """Delete all counters but no limits. No client charges once all sessions know of it."""
    publish(meta)
    cursor: bytes | None = b""
    while cursor is not None:
        page = _page(meta, keys.ACCOUNTS, cursor)
        counters = [field for field, _ in page.items if not field.endswith(BESIDE)]
        for begin in range(0, len(counters), COMMIT_OPS_ENOUGH):
            part = counters[begin : begin + COMMIT_OPS_ENOUGH]
            meta.transactor.run(partial(_delete_counters, fields=part))
        cursor = page.cursor


def _delete_counters(txn: Txn, fields: Sequence[bytes]) -> None:
    if volume.load_format(txn).accounting == OFF:
        for field in fields:
            txn.delete(keys.ACCOUNTS, field)


def count(meta: Meta, epoch: int, progress: Progress | None = None) -> bool:
    """Take every inode that has not been counted in this epoch; False where that has ended."""
    counted = 0
    for rows in inode_rows(meta):
        inos = [Ino(keys.id_of(row)) for row in rows]
        for begin in range(0, len(inos), BATCH):
            if not _take_all(meta, epoch, inos[begin : begin + BATCH]):
                return False
            counted += len(inos[begin : begin + BATCH])
            if progress is not None:
                progress(counted)
    return True


def _take_all(meta: Meta, epoch: int, inos: Sequence[Ino]) -> bool:
    while inos:
        attempts = 0

        def verb(txn: Txn, inos: Sequence[Ino] = inos) -> int:
            nonlocal attempts
            at_most = max(1, len(inos) >> attempts)  # the fewer, the fewer change meanwhile
            attempts += 1
            return quota_scan.take(txn, epoch, inos[:at_most])

        try:
            done = meta.transactor.run(verb)
        except OSError as error:
            if error.errno != errno.ENAMETOOLONG or len(inos) == 1:
                raise
            done = meta.transactor.run(partial(quota_scan.take, epoch=epoch, inos=inos[:1]))
        if not done:
            return False
        inos = inos[done:]
    return True


def _page(meta: Meta, row: bytes, cursor: bytes) -> Page:
    """A page of a table; repeated while the store is away."""
    return meta.transactor.view(lambda _txn: meta.store.scan(row, cursor))


def inode_rows(meta: Meta) -> Iterator[Sequence[bytes]]:
    """The rows of all inodes, in pages; one that is there throughout comes at least once."""
    cursor: bytes | None = b""
    while cursor is not None:
        page = meta.transactor.view(partial(_scan_inodes, store=meta.store, cursor=cursor))
        yield page.rows
        cursor = page.cursor


def _scan_inodes(_txn: Txn, store: Store, cursor: bytes) -> RowPage:
    return store.scan_rows(keys.INODE_PREFIX, cursor)
