"""CRC-32C (Castagnoli) of bytes, by the extension module of the package crc32c.

Importing that package asks for its version, through importlib.metadata, zipfile and email: a
quarter of what a short command costs. So the extension alone is loaded.
"""

from __future__ import annotations

import sys
from importlib.machinery import PathFinder
from importlib.util import find_spec, module_from_spec
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from crc32c import crc32c as crc32c
else:

    def _load():
        """The extension. Raises: ImportError."""
        name = "crc32c._crc32c"
        if name in sys.modules:
            return sys.modules[name]
        package = find_spec("crc32c")
        found = package and PathFinder.find_spec(name, package.submodule_search_locations)
        if not found:
            raise ImportError("the package crc32c is missing: pip install crc32c")
        module = module_from_spec(found)
        found.loader.exec_module(module)
        return module

    crc32c: Final = _load().crc32c
