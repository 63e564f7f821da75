"""Faults in real parts: a real redis-server, real mounts of the real program, real kills."""

import pytest

pytest.register_assert_rewrite("tests.faults.program", "tests.faults.judge")
