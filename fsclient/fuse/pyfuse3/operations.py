"""The requests that pyfuse3 knows: each becomes a call of the file system, in a thread.

pyfuse3 finds the methods by their names; its own class `Operations` documents them. What it does
not know, libfuse answers with ENOSYS, and the kernel does without: locks are then the host's own,
fallocate(2) and O_TMPFILE are EOPNOTSUPP, lseek(2) sees no holes, copies go through the program.

Threading: all methods run in the event loop's thread; what they pass to `serve` runs in others.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

from fsclient.files.setid_bits import groups_of
from fsclient.fuse.dispatch.squash import ProcGroups
from fsclient.fuse.pyfuse3.binding import Binding
from fsclient.fuse.pyfuse3.handles import Handles
from fsclient.fuse.pyfuse3.serving import Serving
from fsclient.fuse.pyfuse3.translate import Translator, wanted
from fsclient.fuse.session.session import SessionConfig
from fsclient.fuse.wire.protocol import ROOT_ID, Opcode
from fsclient.kernel.contract import FIRST_VIRTUAL_INO, Buffer, EntryOut, FileSystem
from fsclient.kernel.later import Later
from fsmeta.schema.acl import ACCESS_XATTR
from fsmeta.types import NAME_MAX, Caller, Ino

_ROOT_GID: Final = 0  # is not replaced in groups


class Parts(NamedTuple):
    """What the operations work with."""

    fs: FileSystem
    serving: Serving
    handles: Handles
    translator: Translator


def parts_of(binding: Binding, fs: FileSystem, config: SessionConfig, serving: Serving) -> Parts:
    """The parts of a session."""
    translator = Translator(binding.fuse)
    shown = _as_it_is if config.squash is None else _unnamed
    handles = Handles(fs, translator, binding.fuse.readdir_reply, shown)
    return Parts(fs, serving, handles, translator)


def _as_it_is(entry: EntryOut) -> EntryOut:
    return entry


def _unnamed(entry: EntryOut) -> EntryOut:
    """Without a lifetime of the name: each step of a path is asked for, and judged."""
    return entry._replace(entry_ttl=0.0)


class Operations:
    """The file system as pyfuse3 calls it."""

    enable_writeback_cache = False  # close(2) must find our errors, and sizes are ours

    def __init__(self, parts: Parts, config: SessionConfig, begun: Callable[[], None]) -> None:
        """`begun` is called when the kernel has asked for INIT."""
        self._fs, self._serving, self._handles, self._translator = parts
        self._serve = self._serving.serve
        self._root = config.root
        self._squash = config.squash
        self._begun = begun
        self.supports_dot_lookup = config.wants.export
        self.enable_acl = config.wants.acl

    def init(self) -> None:
        """INIT."""
        self._begun()

    def stacktrace(self) -> None:
        """Asked for by an attribute that no program sets: SIGUSR1 shows the stacks."""

    # --- caller and inode ------------------------------------------------------------------------

    def _node(self, ino: int) -> Ino:
        return self._root if ino == ROOT_ID else Ino(ino)

    def _caller(self, ctx: Any, ino: int = 0) -> Caller:
        """The caller of a request about `ino`, as the rules judge it."""
        if self._squash is None:
            return Caller(ctx.uid, ctx.gid, ProcGroups(ctx.pid, _ROOT_GID), ctx.pid, True)
        plain = Caller(ctx.uid, ctx.gid, (), ctx.pid)
        return plain if ino >= FIRST_VIRTUAL_INO else self._squash.caller(plain)

    def _entry(self, entry: EntryOut) -> Any:
        return self._translator.entry(entry if self._squash is None else _unnamed(entry))

    # --- names -----------------------------------------------------------------------------------

    async def lookup(self, parent: int, name: bytes, ctx: Any) -> Any:
        """LOOKUP."""
        return await self._named(Opcode.LOOKUP, self._fs.lookup, ctx, parent, name)

    async def mknod(self, parent: int, name: bytes, mode: int, rdev: int, ctx: Any) -> Any:
        """MKNOD; the kernel has applied the umask."""
        return await self._named(Opcode.MKNOD, self._fs.mknod, ctx, parent, name, mode, rdev)

    async def mkdir(self, parent: int, name: bytes, mode: int, ctx: Any) -> Any:
        """MKDIR; the kernel has applied the umask."""
        return await self._named(Opcode.MKDIR, self._fs.mkdir, ctx, parent, name, mode)

    async def symlink(self, parent: int, name: bytes, target: bytes, ctx: Any) -> Any:
        """SYMLINK."""
        return await self._named(Opcode.SYMLINK, self._fs.symlink, ctx, parent, name, target)

    async def link(self, ino: int, parent: int, name: bytes, ctx: Any) -> Any:
        """LINK."""

        def linked(caller: Caller, parent: Ino, name: bytes) -> EntryOut:
            return self._fs.link(caller, self._node(ino), parent, name)

        return await self._named(Opcode.LINK, linked, ctx, parent, name)

    async def _named(
        self,
        opcode: Opcode,
        make: Callable[..., EntryOut],
        ctx: Any,
        parent: int,
        name: bytes,
        *rest: object,
    ) -> Any:
        """A request whose answer is what a name leads to."""
        node = self._node(parent)
        caller = self._caller(ctx, node)

        def body() -> Any:
            return self._entry(make(caller, node, _checked(name), *rest))

        return await self._serve(opcode, node, body)

    async def unlink(self, parent: int, name: bytes, ctx: Any) -> None:
        """UNLINK."""
        node = self._node(parent)
        body = partial(self._fs.unlink, self._caller(ctx), node, name)
        await self._serve(Opcode.UNLINK, node, body)

    async def rmdir(self, parent: int, name: bytes, ctx: Any) -> None:
        """RMDIR."""
        node = self._node(parent)
        await self._serve(
            Opcode.RMDIR, node, partial(self._fs.rmdir, self._caller(ctx), node, name)
        )

    async def rename(
        self, parent: int, name: bytes, new_parent: int, new_name: bytes, flags: int, ctx: Any
    ) -> None:
        """RENAME2."""
        node, new_node, caller = self._node(parent), self._node(new_parent), self._caller(ctx)

        def body() -> None:
            self._fs.rename(caller, node, name, new_node, _checked(new_name), flags)

        await self._serve(Opcode.RENAME2, node, body)

    async def forget(self, lookups: Sequence[tuple[int, int]]) -> None:
        """FORGET, of one inode or several."""

        def body() -> None:
            for ino, count in lookups:
                self._fs.forget(self._node(ino), count)

        opcode = Opcode.FORGET if len(lookups) == 1 else Opcode.BATCH_FORGET
        await self._serve(opcode, lookups[0][0] if lookups else 0, body)

    # --- attributes ------------------------------------------------------------------------------

    async def getattr(self, ino: int, ctx: Any) -> Any:
        """GETATTR."""
        node = self._node(ino)
        caller = self._caller(ctx, node)

        def body() -> Any:
            return self._translator.stat(self._fs.getattr(caller, node, None))

        return await self._serve(Opcode.GETATTR, node, body)

    async def setattr(self, ino: int, attr: Any, fields: Any, fh: int | None, ctx: Any) -> Any:
        """SETATTR; a time that was asked for as "now" is the kernel's."""
        node = self._node(ino)
        caller = self._caller(ctx, node)

        def body() -> Any:
            want = wanted(attr, fields, caller)
            return self._translator.stat(self._fs.setattr(caller, node, want, fh))

        return await self._serve(Opcode.SETATTR, node, body)

    async def readlink(self, ino: int, ctx: Any) -> bytes:
        """READLINK."""
        body = partial(self._fs.readlink, self._caller(ctx), self._node(ino))
        return await self._serve(Opcode.READLINK, ino, body)

    async def access(self, ino: int, mask: int, ctx: Any) -> bool:
        """ACCESS, which the kernel sends only where it judges nothing itself."""
        node = self._node(ino)
        body = partial(self._fs.access, self._caller(ctx, node), node, mask)
        await self._serve(Opcode.ACCESS, node, body)
        return True

    async def statfs(self, ctx: Any) -> Any:
        """STATFS; pyfuse3 does not say of which inode, so it is the root's."""
        caller = self._caller(ctx)

        def body() -> Any:
            return self._translator.statfs(self._fs.statfs(caller, self._root))

        return await self._serve(Opcode.STATFS, self._root, body)

    async def setxattr(self, ino: int, name: bytes, value: bytes, ctx: Any) -> None:
        """SETXATTR; pyfuse3 has looked whether the attribute is there, where that matters."""
        node = self._node(ino)
        caller = self._caller(ctx, node)

        def body() -> None:
            kill_sgid = name == ACCESS_XATTR and self._is_stranger(caller, node)
            self._fs.xattrs.setxattr(caller, node, name, value, 0, kill_sgid)

        await self._serve(Opcode.SETXATTR, node, body)

    def _is_stranger(self, caller: Caller, ino: Ino) -> bool:
        """Whether a caller is not in the group of a file whose ACL it sets."""
        gid = self._fs.getattr(caller, ino, None).attr.gid
        if not caller.checked or caller.uid == 0 or gid == caller.gid:
            return False
        return gid not in (groups_of(caller.pid) or ())

    async def getxattr(self, ino: int, name: bytes, ctx: Any) -> bytes:
        """GETXATTR."""
        node = self._node(ino)
        caller = self._caller(ctx, node)

        def body() -> bytes | Later[bytes]:
            later = self._fs.xattrs.question(caller, node, name)
            return self._fs.xattrs.getxattr(caller, node, name) if later is None else later

        return await self._serve(Opcode.GETXATTR, node, body)

    async def listxattr(self, ino: int, ctx: Any) -> list[bytes]:
        """LISTXATTR."""
        node = self._node(ino)
        body = partial(self._fs.xattrs.listxattr, self._caller(ctx, node), node)
        return await self._serve(Opcode.LISTXATTR, node, body)

    async def removexattr(self, ino: int, name: bytes, ctx: Any) -> None:
        """REMOVEXATTR."""
        node = self._node(ino)
        body = partial(self._fs.xattrs.removexattr, self._caller(ctx, node), node, name)
        await self._serve(Opcode.REMOVEXATTR, node, body)

    # --- files and directories -------------------------------------------------------------------

    async def create(
        self, parent: int, name: bytes, mode: int, flags: int, ctx: Any
    ) -> tuple[Any, Any]:
        """CREATE; the kernel has applied the umask."""
        node, caller = self._node(parent), self._caller(ctx)

        def body() -> tuple[Any, Any]:
            kill = caller.uid != 0
            entry, opened = self._fs.create(caller, node, _checked(name), mode, flags, kill)
            assert entry.attr is not None, "it was made, or is there"
            info = self._handles.enter(caller, entry.attr.ino, flags, opened)
            return info, self._entry(entry)

        return await self._serve(Opcode.CREATE, node, body)

    async def open(self, ino: int, flags: int, ctx: Any) -> Any:
        """OPEN."""
        node = self._node(ino)
        caller = self._caller(ctx, node)

        def body() -> Any:
            opened = self._fs.begin_open(caller, node, flags, caller.uid != 0)
            if isinstance(opened, Later):
                return opened.map(lambda come: self._handles.enter(caller, node, flags, come()))
            return self._handles.enter(caller, node, flags, opened)

        return await self._serve(Opcode.OPEN, node, body)

    async def read(self, fh: int, offset: int, size: int) -> Buffer:
        """READ."""
        body = partial(self._handles.read, fh, offset, size)
        data: Buffer = await self._serve(Opcode.READ, self._handles.ino_of(fh), body)
        self._serving.moved(Opcode.READ, len(data))
        return data

    async def write(self, fh: int, offset: int, data: bytes) -> int:
        """WRITE."""
        body = partial(self._handles.write, fh, offset, data)
        taken: int = await self._serve(Opcode.WRITE, self._handles.ino_of(fh), body)
        self._serving.moved(Opcode.WRITE, taken)
        return taken

    async def flush(self, fh: int) -> None:
        """FLUSH; locks are not ours, so its owner does not matter."""
        body = partial(self._handles.flush, fh)
        await self._serve(Opcode.FLUSH, self._handles.ino_of(fh), body)

    async def fsync(self, fh: int, data_only: bool) -> None:
        """FSYNC."""
        body = partial(self._handles.fsync, fh, data_only)
        await self._serve(Opcode.FSYNC, self._handles.ino_of(fh), body)

    async def release(self, fh: int) -> None:
        """RELEASE."""
        body = partial(self._handles.release, fh)
        await self._serve(Opcode.RELEASE, self._handles.ino_of(fh), body)

    async def opendir(self, ino: int, ctx: Any) -> int:
        """OPENDIR."""
        node = self._node(ino)
        body = partial(self._handles.opendir, self._caller(ctx), node)
        return await self._serve(Opcode.OPENDIR, node, body)

    async def readdir(self, fh: int, cookie: int, token: Any) -> None:
        """READDIRPLUS."""
        body = partial(self._handles.readdir, fh, cookie, token)
        await self._serve(Opcode.READDIRPLUS, self._handles.ino_of(fh), body)

    async def fsyncdir(self, fh: int, data_only: bool) -> None:
        """FSYNCDIR."""
        del data_only
        body = partial(self._handles.fsyncdir, fh)
        await self._serve(Opcode.FSYNCDIR, self._handles.ino_of(fh), body)

    async def releasedir(self, fh: int) -> None:
        """RELEASEDIR."""
        body = partial(self._handles.releasedir, fh)
        await self._serve(Opcode.RELEASEDIR, self._handles.ino_of(fh), body)

    async def poll(self, ino: int, fh: int, waiter: Any, ctx: Any) -> int:
        """POLL: files are always ready, which the kernel concludes from ENOSYS."""
        del fh, waiter, ctx
        return await self._serve(Opcode.POLL, ino, _without)


def _without() -> int:
    raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))


def _checked(name: bytes) -> bytes:
    """Raises: ENAMETOOLONG."""
    if len(name) > NAME_MAX:
        raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG))
    return name
