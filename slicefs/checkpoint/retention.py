"""Which steps go when a new one is published. Pure; called by the manager."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from fsmeta.errors import ConfigError


class RetainedStep(NamedTuple):
    """A published step, as the policy sees it."""

    number: int
    ephemeral: bool


class Retention(NamedTuple):
    """How many steps stay.

    `keep_last`: so many of the newest steps; None: all. `keep_every`: a step that this number
    divides stays for ever. `ephemeral_every`: a step that this number divides, but not
    `keep_every`, is for resuming only: it goes as soon as a newer step is published.
    """

    keep_last: int | None = None
    keep_every: int | None = None
    ephemeral_every: int | None = None

    def checked(self) -> Retention:
        """This policy. Raises: ConfigError."""
        for name, value in self._asdict().items():
            if value is not None and (isinstance(value, bool) or value < 1):
                raise ConfigError(f"{name}={value}: use a whole number from 1, or None")
        return self

    def is_permanent(self, number: int) -> bool:
        """Whether a step stays for ever."""
        return self.keep_every is not None and number % self.keep_every == 0

    def is_ephemeral(self, number: int) -> bool:
        """Whether a step is saved for resuming only."""
        if self.ephemeral_every is None or self.is_permanent(number):
            return False
        return number % self.ephemeral_every == 0

    def doomed(self, steps: Sequence[RetainedStep]) -> list[int]:
        """The steps to remove, oldest first; the newest one is never among them."""
        ordered = sorted(steps)[:-1]
        newest = max(steps, default=None)
        lasting = [step for step in ordered if not step.ephemeral]
        going = [step.number for step in ordered if step.ephemeral]
        if self.keep_last is not None:
            counted = self.keep_last - (newest is not None and not newest.ephemeral)
            surplus = lasting[: max(0, len(lasting) - counted)]
            going += [step.number for step in surplus if not self.is_permanent(step.number)]
        return sorted(number for number in going if not self.is_permanent(number))
