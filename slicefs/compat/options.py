"""What all shims do with options that have no meaning here, and with names that load lazily.

Called by the modules of `dataflux/` and `s3torch/`. Threading: functions only.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from fsmeta.errors import ConfigError

log = logging.getLogger(__name__)


def accepted(where: str, **options: Any) -> None:
    """Say which options were given and change nothing; those of None were not given."""
    given = [name for name, value in options.items() if value is not None]
    if given:
        log.debug("%s: accepted without effect: %s", where, ", ".join(given))


def refused(where: str, option: str, value: Any, advice: str) -> None:
    """Refuse an option that was given. Raises: ConfigError."""
    if value is not None:
        raise ConfigError(f"{where}: {option} has no equivalent here: {advice}")


def loaded(package: str, homes: Mapping[str, str], name: str) -> Any:
    """A name of a package, from the module that `homes` says. Raises: AttributeError."""
    home = homes.get(name)
    if home is None:
        raise AttributeError(f"module {package!r} has no attribute {name!r}")
    module = import_module(f"{package}.{home}")
    return module if home == name else getattr(module, name)
