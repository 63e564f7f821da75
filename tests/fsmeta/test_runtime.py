"""The seam to threads: what Ctrl-C may not break."""

from __future__ import annotations

from fsmeta.runtime import SystemRuntime


def test_a_condition_is_entered_in_c() -> None:
    """Ctrl-C between taking a lock and its `with` once left it locked: `restore` then hung."""
    lock = SystemRuntime().lock()
    condition = SystemRuntime().condition(lock)
    assert (condition.__enter__, condition.__exit__) == (lock.__enter__, lock.__exit__)
    with condition:
        assert not lock.acquire(blocking=False)
    assert lock.acquire(blocking=False)
