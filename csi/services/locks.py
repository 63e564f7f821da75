"""One call at a time for each volume."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from csi.errors import Code, CsiError

WAIT_S: Final = 30.0  # then a call answers ABORTED, and the caller tries again


class Locks:
    """Locks by name; unused ones are forgotten. Threading: the event loop's."""

    def __init__(self) -> None:
        self._locks: dict[str, asyncio.Lock] = {}
        self._wanted: dict[str, int] = {}

    @asynccontextmanager
    async def hold(self, name: str) -> AsyncIterator[None]:
        """Raises: CsiError where another call holds the lock for long."""
        lock = self._locks.setdefault(name, asyncio.Lock())
        self._wanted[name] = self._wanted.get(name, 0) + 1
        try:
            try:
                await asyncio.wait_for(lock.acquire(), WAIT_S)
            except TimeoutError as error:
                text = f"another call for {name} is under way, try again"
                raise CsiError(Code.ABORTED, text) from error
            try:
                yield
            finally:
                lock.release()
        finally:
            self._wanted[name] -= 1
            if not self._wanted[name]:
                del self._wanted[name], self._locks[name]
