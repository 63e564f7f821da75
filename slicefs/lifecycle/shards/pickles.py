"""What keeps a hostile pickle small and harmless. Called by `dcp_metadata` and `torch_file`.

An unpickler of this folder hands out `Fixed` callables only: a pickle can call them, and can set no
attribute of them, so it leaves nothing behind in the process. What a pickle makes takes memory in
proportion to its own length.
"""

from __future__ import annotations

import pickle
import pickletools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final
from zipfile import BadZipFile

from fsmeta.errors import ConfigError

DIMENSIONS_MAX: Final = 64  # torch's own limit of a tensor
_PUTS: Final = frozenset({"PUT", "LONG_BINPUT"})
_COPIES_PER_BYTE: Final = 8  # items that calls may copy; torch's own files need below one
_COPIES_MIN: Final = 1024


class Fixed:
    """A function that a pickle may call and can't change."""

    __slots__ = ("_function",)
    _function: Callable[..., Any]

    def __init__(self, function: Callable[..., Any]) -> None:
        object.__setattr__(self, "_function", function)

    def __setattr__(self, name: str, value: Any) -> None:
        raise pickle.UnpicklingError(f"sets {name} of a function")

    def __call__(self, *values: Any) -> Any:
        return self._function(*values)


class Ordered(dict[Any, Any]):
    """An OrderedDict of a pickle; what was set as its attributes is left out."""

    __slots__ = ()

    def __setstate__(self, state: Any) -> None:
        pass


class Budget:
    """How many items calls may copy: a memoized list can be copied by a few bytes each time."""

    def __init__(self, data: bytes) -> None:
        self._left = _COPIES_PER_BYTE * len(data) + _COPIES_MIN

    def take(self, count: int) -> None:
        """Raises: UnpicklingError."""
        self._left -= count
        if self._left < 0:
            raise pickle.UnpicklingError("copies more than a checkpoint has")

    def copied(self, kind: Callable[..., Any]) -> Fixed:
        """A function that counts the items of its arguments."""

        def made(*values: Any) -> Any:
            self.take(sum(len(each) for each in values))
            return kind(*values)

        return Fixed(made)


def check_pickle(data: bytes) -> None:
    """Raises: UnpicklingError, ValueError where lengths or memo indexes exceed the pickle."""
    for opcode, argument, _ in pickletools.genops(data):
        if opcode.name in _PUTS and not 0 <= argument <= len(data):  # type: ignore[operator]
            raise pickle.UnpicklingError(f"{opcode.name} {argument} in {len(data)} bytes")


@contextmanager
def told_of(where: str) -> Iterator[None]:
    """Errors of values that are not what a checkpoint has, as one line about `where`.

    Raises: ConfigError.
    """
    try:
        yield
    except (
        *(AttributeError, TypeError, LookupError, ValueError, ArithmeticError),
        *(RecursionError, MemoryError, BadZipFile, EOFError, pickle.UnpicklingError),
    ) as error:
        raise ConfigError(
            f"{where}: is damaged or of no known layout ({short(error)}): copy it again, or use "
            "its own library"
        ) from error


def short(error: BaseException) -> str:
    """An error in a few words, on one line."""
    said = " ".join(str(error).split())[:160]
    return said if said and not isinstance(error, KeyError) else f"{type(error).__name__} {said}"


def is_plain(value: Any, depth: int = DIMENSIONS_MAX) -> bool:
    """Whether JSON can hold all of a value: numbers, text, lists and dictionaries of them."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return True
    if depth == 0:
        return False
    if isinstance(value, Mapping):
        return all(is_plain(n, 0) and is_plain(e, depth - 1) for n, e in value.items())
    return isinstance(value, (list, tuple)) and all(is_plain(each, depth - 1) for each in value)
