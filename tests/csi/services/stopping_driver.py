"""The driver, which kills itself at a step: `python -m tests.csi.services.stopping_driver …`.

Its options are those of `slicefs-csi`. A step is a record, a command, or a change of mounts; it is
killed before or after one. The file STOP_AT names says at which, counted from SIGUSR1 on.
"""

from __future__ import annotations

import inspect
import os
import signal
from collections.abc import Callable
from types import ModuleType
from typing import Any, Final

from csi.host import commands, mounts, records

STEPS: Final[tuple[tuple[ModuleType, str], ...]] = (
    (commands, "run"),
    (mounts, "bind"),
    (mounts, "make_target"),
    (mounts, "remove_target"),
    (mounts, "unmount"),
    (records, "create_record"),
    (records, "remove_record"),
    (records, "write_record"),
)


class SelfKill:
    """Counts moments before and after steps, and kills this process in one of them."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._left = 0  # moments to come; 0: it is not armed
        signal.signal(signal.SIGUSR1, self._arm)

    def _arm(self, *_: object) -> None:
        with open(self._path, encoding="ascii") as file:
            self._left = int(file.read())

    def moment(self) -> None:
        if not self._left:
            return
        self._left -= 1
        if self._left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def around(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """The same, with a moment before it and one after it."""
        if inspect.iscoroutinefunction(step):

            async def wait(*arguments: Any, **words: Any) -> Any:
                self.moment()
                found = await step(*arguments, **words)
                self.moment()
                return found

            return wait

        def call(*arguments: Any, **words: Any) -> Any:
            self.moment()
            found = step(*arguments, **words)
            self.moment()
            return found

        return call


def main() -> None:
    """Put moments around all steps, before other modules take them, and be the driver."""
    kill = SelfKill(os.environ["STOP_AT"])
    for module, name in STEPS:
        setattr(module, name, kill.around(getattr(module, name)))
    from csi.server.main import main as serve

    serve()


if __name__ == "__main__":
    main()
