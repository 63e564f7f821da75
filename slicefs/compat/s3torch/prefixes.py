"""Where a rank's files of a distributed checkpoint go: strategies that spread keys over prefixes.

Called by `S3StorageWriter` on the coordinator. Threading: immutable.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

_DIGITS: Final = "0123456789abcdef"


class S3PrefixStrategyBase:
    """A strategy of a program's own: `generate_prefix(rank)` is what the rank's keys begin with."""

    def __call__(self, rank: int) -> str:
        return self.generate_prefix(rank)

    def generate_prefix(self, rank: int) -> str:
        """What the keys of a rank begin with, below the checkpoint."""
        raise NotImplementedError


class DefaultPrefixStrategy(S3PrefixStrategyBase):
    """All files of a checkpoint beside each other."""

    def generate_prefix(self, rank: int) -> str:
        """See above."""
        return f"__{rank}_"


class RoundRobinPrefixStrategy(S3PrefixStrategyBase):
    """Ranks take turns on prefixes that a program names."""

    def __init__(self, user_prefixes: Sequence[str], epoch_num: int | None = None) -> None:
        """Raises: ValueError where there is no prefix."""
        if not user_prefixes:
            raise ValueError("user_prefixes is empty: name at least one prefix")
        self.user_prefixes, self.epoch_num = list(user_prefixes), epoch_num

    def generate_prefix(self, rank: int) -> str:
        """See above."""
        folder = self.user_prefixes[rank % len(self.user_prefixes)]
        return f"{folder}/{_epoch(self.epoch_num)}__{rank}_"


class NumericPrefixStrategy(S3PrefixStrategyBase):
    """Ranks take turns on the numbers below `prefix_count`, their lowest digit first."""

    def __init__(
        self,
        base: int,
        epoch_num: int | None = None,
        min_prefix_length: int = 10,
        prefix_count: int | None = None,
        min_prefix_len: int | None = None,
    ) -> None:
        """`prefix_count`: None is the number of ranks. Raises: ValueError."""
        length = min_prefix_length if min_prefix_len is None else min_prefix_len
        if length < 1:
            raise ValueError(f"min_prefix_length {length}: a prefix has at least one digit")
        if prefix_count is not None and prefix_count < 1:
            raise ValueError(f"prefix_count {prefix_count}: name at least one")
        self.base, self.epoch_num, self.min_prefix_len = base, epoch_num, length
        self.prefix_count = prefix_count or _world()
        needed = len(_digits(self.prefix_count - 1, base))
        width = max(length, needed)
        numbers = (_digits(number, base) for number in range(self.prefix_count))
        self.prefix_map = [digits.ljust(width, "0") for digits in numbers]

    def generate_prefix(self, rank: int) -> str:
        """See above."""
        folder = self.prefix_map[rank % len(self.prefix_map)]
        return f"{folder}/{_epoch(self.epoch_num)}__{rank}_"


class BinaryPrefixStrategy(NumericPrefixStrategy):
    """Of the digits 0 and 1."""

    def __init__(
        self,
        epoch_num: int | None = None,
        min_prefix_length: int = 10,
        prefix_count: int | None = None,
        min_prefix_len: int | None = None,
    ) -> None:
        super().__init__(2, epoch_num, min_prefix_length, prefix_count, min_prefix_len)


class HexPrefixStrategy(NumericPrefixStrategy):
    """Of hexadecimal digits."""

    def __init__(
        self,
        epoch_num: int | None = None,
        min_prefix_length: int = 10,
        prefix_count: int | None = None,
        min_prefix_len: int | None = None,
    ) -> None:
        super().__init__(16, epoch_num, min_prefix_length, prefix_count, min_prefix_len)


def _epoch(number: int | None) -> str:
    return "" if number is None else f"epoch_{number}/"


def _digits(number: int, base: int) -> str:
    """A number's digits, the lowest first."""
    out = ""
    while number or not out:
        number, digit = divmod(number, base)
        out += _DIGITS[digit]
    return out


def _world() -> int:
    """The number of ranks; 1 where torch.distributed was not initialized."""
    from torch import distributed

    started = distributed.is_available() and distributed.is_initialized()
    return int(distributed.get_world_size()) if started else 1
