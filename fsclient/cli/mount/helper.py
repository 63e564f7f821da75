"""mount(8)'s words for `slicefs mount`.

Type `slicefs` makes mount(8) run `mount.slicefs META DIR [-sfnv] [-N ns] [-o OPTIONS] [-t TYPE]`
from /sbin; type `fuse.slicefs` makes it run mount.fuse, which runs `slicefs META DIR -o OPTIONS`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise

_FLAGS = re.compile(r"-[sfnv]+")


def remount_words(words: Sequence[str]) -> tuple[str, list[str]] | None:
    """Where and with which `-o` words `mount -o remount` is asked for; None if it is not.

    mount(8) says what is mounted as /proc/mounts does, so a volume's name is in the place of META.
    """
    options = [
        option for flag, value in pairwise(words) if flag == "-o" for option in value.split(",")
    ]
    if len(words) < 2 or "remount" not in options:
        return None
    return words[1], [option for option in options if option != "remount"]


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
