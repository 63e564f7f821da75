"""How a service names its calls for the server."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final, Protocol, TypeAlias

Call: TypeAlias = tuple[Callable[[Any], Awaitable[Any]], Any]  # a method, and its request's type
DRIVER_NAME: Final = "csi.slicefs"


class Service(Protocol):
    """A service: its name in the protocol, and its calls."""

    name: str

    def calls(self) -> Mapping[str, Call]:
        """Each call by its name in the protocol."""
