"""The distribution's `rados` module, also where SliceFS runs in an environment of its own.

librados' binding is no PyPI package. Debian's python3-rados is one extension file that a virtual
environment does not see. That one file is loaded, and not its directory put on the path, where
everything else of the system would come along.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from typing import Any, Final

from fsmeta.errors import ConfigError

_VERSION: Final = f"python{sys.version_info[0]}.{sys.version_info[1]}"
_PLACES: Final = (
    "/usr/lib/python3/dist-packages",  # Debian and its descendants
    f"/usr/lib64/{_VERSION}/site-packages",  # Fedora and its descendants, SUSE
    f"/usr/lib/{_VERSION}/site-packages",
)


def load_rados() -> Any:
    """The module `rados`. Raises: ConfigError with what to install."""
    try:
        return import_module("rados")
    except ModuleNotFoundError:
        pass
    # Only a file made for this version of Python is found: extensions carry it in their names.
    spec = PathFinder.find_spec("rados", list(_PLACES))
    if spec is None or spec.loader is None:
        raise ConfigError(
            f"storage rados needs librados for {_VERSION}: apt-get install python3-rados, "
            "and run slicefs with the distribution's own version of Python"
        )
    module = module_from_spec(spec)
    sys.modules["rados"] = module
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules["rados"]
        if isinstance(error, ImportError):
            raise ConfigError(f"python3-rados can't be loaded: {error}; reinstall it") from error
        raise
    return module
