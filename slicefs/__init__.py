"""SliceFS for Python programs: `slicefs.Client`, `slicefs.open_tree`, `slicefs.torch`.

A name imports its module when it is first used: a program that only reads a bucket loads no
metadata engine.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from slicefs.client.client import Client
    from slicefs.lifecycle.attach import attach
    from slicefs.stores.opening import open_tree

__all__ = ["Client", "attach", "open_tree"]
_HOMES: Final = {
    "Client": "client.client",
    "attach": "lifecycle.attach",
    "open_tree": "stores.opening",
}


def __getattr__(name: str) -> Any:
    """Raises: AttributeError."""
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{home}"), name)
