"""Which directory of the trash `Meta` puts things into.

Each client notes that an hour is in use with the first thing that it puts there, and with the
first one NOTE_S after that: so whoever empties the trash knows that nobody puts anything into an
hour that was not noted for long, whatever clocks say. `Bin` remembers when that was done.
Threading: any thread; who does not know yet notes it once more.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import Final

from fsmeta.ops.inode import Env
from fsmeta.ops.rename import Renamed
from fsmeta.trash import hour_at, is_trash
from fsmeta.types import NO_PARENT, Attr, Ino

NOTE_S: Final = 600.0


class Bin:
    """See the module."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self._noted: tuple[Ino, float] = NO_PARENT, -inf  # an hour, and when; replaced whole

    def env(self, env: Env) -> Env:
        """What a verb is told by which something may lose its last name."""
        hour = hour_at(env.now_ns)
        noted, when = self._noted
        return env._replace(trash=hour, trash_is_new=hour != noted or self.clock() - when >= NOTE_S)

    def committed(self, env: Env, begun: float, result: object) -> None:
        """Such a verb has been committed, with `env`; it was begun then."""
        left = result.replaced if isinstance(result, Renamed) else result
        if env.trash_is_new and isinstance(left, Attr) and is_trash(left.parent):
            self._noted = left.parent, begun
