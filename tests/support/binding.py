"""Whether there is pyfuse3, which needs libfuse to be built; `make pyfuse3` tries."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

NO_PYFUSE3 = "needs pyfuse3: `make pyfuse3` builds it, or says why not"

needs_pyfuse3 = pytest.mark.skipif(find_spec("pyfuse3") is None, reason=NO_PYFUSE3)


def require_pyfuse3() -> None:
    """Skip the test where there is none."""
    if find_spec("pyfuse3") is None:
        pytest.skip(NO_PYFUSE3)
