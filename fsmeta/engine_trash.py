"""Which directory of the trash `Meta` puts things into.

Each client notes once an hour, with the first thing it puts there, that the hour is in use; `Bin`
remembers whether that is done. Threading: any thread; who does not know yet notes it once more.
"""

from __future__ import annotations

from typing import TypeVar

from fsmeta.ops.inode import Env
from fsmeta.ops.rename import Renamed
from fsmeta.trash import hour_at, is_trash
from fsmeta.types import NO_PARENT, Attr, Ino

T = TypeVar("T")


class Bin:
    """See the module."""

    def __init__(self) -> None:
        self._listed: Ino = NO_PARENT  # the hour that T is known to list

    def env(self, env: Env) -> Env:
        """What a verb is told by which something may lose its last name."""
        hour = hour_at(env.now_ns)
        return env._replace(trash=hour, trash_is_new=hour != self._listed)

    def noted(self, result: T) -> T:
        """Such a verb has been committed."""
        left = result.replaced if isinstance(result, Renamed) else result
        if isinstance(left, Attr) and left.parent > self._listed and is_trash(left.parent):
            self._listed = left.parent  # from here on T lists it
        return result
