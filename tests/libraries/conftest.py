"""Without these libraries nothing here is collected; `make test-data` has an environment."""

from __future__ import annotations

from importlib.util import find_spec

_NEEDED = ("pandas", "pyarrow", "zarr", "datasets")
collect_ignore_glob = [] if all(map(find_spec, _NEEDED)) else ["test_*.py"]
