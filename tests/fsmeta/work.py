"""Random verbs on one small tree, by any number of clients at once."""

from __future__ import annotations

import random
from functools import partial

from fsmeta.meta.meta import Meta
from fsmeta.ops.names.rename import DentryLocation
from fsmeta.types import ROOT_CALLER as ROOT, ROOT_INO, SetAttr, Slice


def random_work(meta: Meta, chance: random.Random, turns: int) -> None:
    """Verbs of every kind in one small tree; most of them work."""
    first = b"%x" % chance.getrandbits(64)
    dirs, files = [ROOT_INO], [meta.create(ROOT, ROOT_INO, first, 0o100644).ino]
    name = partial(lambda: b"n%d" % chance.randrange(12))
    for _ in range(turns):
        parent, other = chance.choice(dirs), chance.choice(dirs)
        verb = chance.randrange(9)
        try:
            if verb == 0:
                dirs.append(meta.create(ROOT, parent, name(), 0o40755).ino)
            elif verb == 1:
                files.append(meta.create(ROOT, parent, name(), 0o100644).ino)
            elif verb == 2:
                meta.symlink(ROOT, parent, name(), b"to")
            elif verb == 3:
                meta.unlink(ROOT, parent, name())
            elif verb == 4:
                meta.rmdir(ROOT, parent, name())
            elif verb == 5:
                places = DentryLocation(parent, name()), DentryLocation(other, name())
                meta.rename(ROOT, *places, flags=chance.choice((0, 0, 1, 2)))
            elif verb == 6:
                meta.link(ROOT, chance.choice(files), parent, name())
            elif verb == 7:
                begin, length = chance.randrange(20_000), chance.randrange(1, 9000)
                piece = Slice(begin, meta.new_slice_id(), length, 0, length)
                meta.write_slices(chance.choice(files), [(0, piece)], begin + length, 1)
            else:
                want = SetAttr(size=chance.randrange(20_000))
                meta.setattr(ROOT, chance.choice(files), want)
        except OSError:
            pass  # no such name, not empty, into itself, …
