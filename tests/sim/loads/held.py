"""Files that are open while others remove their names, on their own client and on other ones.

A name always leads to a complete file: it is made under another name, closed and renamed. So
whoever opens it finds all of it, and finds it to the end, however many deletion rounds pass. Only a
client that was taken for dead may lose it; then it gets an error, never other bytes.
"""

from __future__ import annotations

import errno
import os
import random

from fsmeta.errors import ObjectMissing, StoreError
from tests.fsdata.world import pattern
from tests.sim.loads import Load
from tests.sim.world.cluster import BLOCK, Node
from tests.sim.world.posix import File, Posix

NAMES = (b"/held/a", b"/held/b", b"/held/c")
SIZES = (0, 10, 3000, BLOCK, 2 * BLOCK + 5)
PATTERN = pattern(1 << 20, 3)
HEAD = 12  # digits of the file's number and size that it begins with
LONG_S = 20.0  # a hold that several rounds fall into


def content(number: int, size: int) -> bytes:
    return b"%06d%06d" % (number, size) + PATTERN[number * 101 : number * 101 + size]


class Held:
    """See the module."""

    def __init__(self) -> None:
        self._made = 0

    def prepare(self, node: Node) -> None:
        Posix(node.client.vfs).mkdir(b"/held")

    def act(self, node: Node, dice: random.Random, turns: int) -> None:
        posix = Posix(node.client.vfs)
        for _ in range(turns):
            try:
                verb = dice.random()
                if verb < 0.4:
                    self._make(posix, dice)
                elif verb < 0.65:
                    posix.unlink(dice.choice(NAMES))
                else:
                    self._hold(node, posix, dice)
            except (StoreError, FileNotFoundError) as error:
                assert node.shaken or not isinstance(error, ObjectMissing), error
            node.process.sleep(dice.random())

    def _make(self, posix: Posix, dice: random.Random) -> None:
        self._made += 1
        number = self._made
        draft = b"/held/draft%d" % number
        file = posix.open(draft, os.O_CREAT | os.O_EXCL | os.O_RDWR)
        try:
            file.write(0, content(number, dice.choice(SIZES)))
        finally:
            file.close()
        posix.rename(draft, dice.choice(NAMES))

    def _hold(self, node: Node, posix: Posix, dice: random.Random) -> None:
        path = dice.choice(NAMES)
        try:
            file = posix.open(path, os.O_RDWR)
        except OSError as error:
            # replaced by others again and again while we walked
            assert error.errno in (errno.ENOENT, errno.ESTALE), error
            return
        try:
            self._use(node, dice, file)
        except OSError as error:
            assert node.shaken, f"{path!r} is lost to its holder: {error}"
            assert error.errno == errno.ESTALE, error
        finally:
            try:
                file.close()
            except OSError as error:
                assert node.shaken, f"{path!r} can't be closed: {error}"

    def _use(self, node: Node, dice: random.Random, file: File) -> None:
        head = file.read(0, HEAD)
        assert len(head) == HEAD, f"inode {file.ino} begins with {head!r}"
        expected = content(int(head[:6]), int(head[6:]))
        assert head == expected[:HEAD]
        for _ in range(dice.randrange(1, 5)):
            if dice.random() < 0.15:  # what it holds already, in a new slice
                begin = dice.randrange(len(expected))
                file.write(begin, expected[begin : begin + dice.choice(SIZES)])
            got = file.read(0, len(expected) + 1)
            assert got == expected, f"inode {file.ino}: {len(got)} bytes, {got[:50]!r}…"
            node.process.sleep(dice.random() * dice.choice((0.1, 1, LONG_S)))

    def check(self, node: Node) -> None:
        posix = Posix(node.client.vfs)
        for path in NAMES:
            if posix.exists(path):
                file = posix.open(path)
                head = file.read(0, HEAD)
                expected = content(int(head[:6]), int(head[6:]))
                assert file.read(0, len(expected) + 1) == expected, path
                file.close()


def _conforms(load: Held) -> Load:
    return load
