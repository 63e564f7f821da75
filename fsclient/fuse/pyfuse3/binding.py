"""pyfuse3 and trio, which come with an extra: imported only where a mount asks for them.

Nothing else in the tree imports them, and their types are `Any`: where they are missing, types are
checked all the same.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any, NamedTuple

from fsmeta.errors import ConfigError


class Binding(NamedTuple):
    """The modules that the transport stands on."""

    fuse: Any  # pyfuse3
    trio: Any


def load() -> Binding:
    """The modules. Raises: ConfigError where they are not there."""
    try:
        return Binding(import_module("pyfuse3"), import_module("trio"))
    except ImportError as error:
        raise ConfigError(
            f"--transport pyfuse3: {error}: `apt-get install libfuse3-dev pkg-config gcc "
            "python3-dev`, then `pip install 'slicefs[pyfuse3]'`"
        ) from error
