"""mount(8)'s words for `slicefs mount`.

Type `slicefs` makes mount(8) run `mount.slicefs META DIR [-sfnv] [-N ns] [-o OPTIONS] [-t TYPE]`
from /sbin; type `fuse.slicefs` makes it run mount.fuse, which runs `slicefs META DIR -o OPTIONS`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

_FLAGS = re.compile(r"-[sfnv]+")


def helper_arguments(words: Sequence[str]) -> list[str] | None:
    """The arguments of `slicefs` that do what mount(8) asks for; None: nothing (`mount --fake`)."""
    out = ["mount", "-d"]
    rest = iter(words)
    for word in rest:
        if word in ("-N", "-t"):
            next(rest, None)
        elif _FLAGS.fullmatch(word):
            if "f" in word:
                return None
        else:
            out.append(word)
    return out
