"""P2 among clients: files that are made immutable and not, and ACLs that directories pass on.

What was immutable from before a call began until after it ended can't have been changed by it; what
was made has an ACL that its directory had at some moment of the call. One actor of all sets flags
and ACLs, so the world knows in which order.
"""

from __future__ import annotations

import errno
import os
import random

from fsmeta.errors import StoreError
from fsmeta.schema.acl import ACCESS_XATTR, DEFAULT_XATTR, Acl, Named, pack_xattr
from fsmeta.types import FLAG_IMMUTABLE, ROOT_CALLER
from tests.sim.loads import Load
from tests.sim.world.cluster import Node
from tests.sim.world.posix import Posix

FILE, HEIR = b"/rules/fixed", b"/rules/heir"
DEFAULTS = [Acl(7, 5, 7, 0, (Named(False, 60000 + n, 4),)) for n in range(3)]
PAUSE_S = 0.3


class Rules:
    """See the module."""

    def __init__(self) -> None:
        self._ruled = False
        self._flags = [0]  # of FILE, oldest first; the last one may be only wanted
        self._sure = 0  # as of which entry it is certain: none before is true any more
        self._defaults = [0]  # of HEIR, by index into DEFAULTS; as _flags
        self._default_sure = 0
        self._made = 0

    def prepare(self, node: Node) -> None:
        posix = Posix(node.client.vfs)
        posix.mkdir(b"/rules")
        posix.mkdir(HEIR)
        posix.open(FILE, os.O_CREAT | os.O_WRONLY).close()
        self._put_default(posix, 0)

    def act(self, node: Node, dice: random.Random, turns: int) -> None:
        posix = Posix(node.client.vfs)
        rules, self._ruled = not self._ruled, True
        for _ in range(turns):
            try:
                if not rules:
                    (self._change if dice.random() < 0.5 else self._make)(posix)
                elif dice.random() < 0.5:
                    self._set_flags(posix, dice.choice((0, FLAG_IMMUTABLE)))
                else:
                    self._set_default(posix, dice.randrange(len(DEFAULTS)))
            except StoreError:
                if rules:
                    return  # a change that may come later; nobody else makes any
            node.process.sleep(dice.random() * PAUSE_S)

    def _set_flags(self, posix: Posix, flags: int) -> None:
        self._flags.append(flags)
        posix.fs.xattrs.setflags(ROOT_CALLER, posix.stat(FILE).ino, flags)
        self._sure = len(self._flags) - 1

    def _set_default(self, posix: Posix, index: int) -> None:
        self._defaults.append(index)
        self._put_default(posix, index)
        self._default_sure = len(self._defaults) - 1

    @staticmethod
    def _put_default(posix: Posix, index: int) -> None:
        value = pack_xattr(DEFAULTS[index])
        posix.fs.xattrs.setxattr(ROOT_CALLER, posix.stat(HEIR).ino, DEFAULT_XATTR, value, 0)

    def _change(self, posix: Posix) -> None:
        """Link the file: nothing but its flags can be against that."""
        before = self._sure
        self._made += 1
        try:
            posix.link(FILE, FILE + b"%d" % self._made)
        except PermissionError as error:
            assert error.errno == errno.EPERM
            assert FLAG_IMMUTABLE in self._flags[before:], "it was never immutable meanwhile"
            return
        assert 0 in self._flags[before:], "it was immutable all the time"

    def _make(self, posix: Posix) -> None:
        before = self._default_sure
        self._made += 1
        path = HEIR + b"/%d" % self._made
        posix.mkdir(path)
        possible = self._defaults[before:]
        ino = posix.stat(path).ino
        seen = posix.fs.xattrs.getxattr(ROOT_CALLER, ino, DEFAULT_XATTR)
        assert seen in [pack_xattr(DEFAULTS[index]) for index in possible], possible
        assert len(posix.fs.xattrs.getxattr(ROOT_CALLER, ino, ACCESS_XATTR)) == len(seen)

    def check(self, node: Node) -> None:
        posix = Posix(node.client.vfs)
        flags = posix.fs.xattrs.getflags(ROOT_CALLER, posix.stat(FILE).ino)
        assert flags in self._flags[self._sure :]
        seen = posix.fs.xattrs.getxattr(ROOT_CALLER, posix.stat(HEIR).ino, DEFAULT_XATTR)
        assert seen in [pack_xattr(DEFAULTS[n]) for n in self._defaults[self._default_sure :]]


def _conforms(load: Rules) -> Load:
    return load
