"""A proxy that lets every request wait: `python -m tools.benchlib.delay PORT MS UP DOWN COUNT`.

It prints its port and forwards bytes, what clients say at UP MiB a second for all connections
together (0: at once), what the server says at DOWN. The file COUNT has the number of requests and,
behind it, the delay in microseconds, which may be changed there (`S3.set_delay_ms`).
Where the client speaks after the server has, a request begins, and waits for the delay before its
first byte goes on; so HTTP clients that keep connections pay once a request, as they do for
distance. A process of its own, so that it takes no turns from what is measured.
"""

from __future__ import annotations

import asyncio
import mmap
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from tools.benchlib.s3 import S3

CHUNK_BYTES = 1 << 20
COUNT_BYTES = 8
FILE_BYTES = 2 * COUNT_BYTES  # the count, and the delay
PIECE_BYTES = 64 << 10  # of what passes a limit at a time
LATE_S = 0.02  # a link does not stop because this process was woken late: so much is made up for


class _LimitedLink:
    """A link of limited bandwidth, which connections share."""

    def __init__(self, bytes_s: float) -> None:
        self._bytes_s = bytes_s
        self.piece_bytes = PIECE_BYTES if bytes_s else CHUNK_BYTES
        self._free_at = 0.0  # when the link has sent what it was given

    async def carry(self, size: int) -> None:
        """Return when `size` bytes have passed."""
        if self._bytes_s:
            now = time.monotonic()
            self._free_at = max(self._free_at, now - LATE_S) + size / self._bytes_s
            await asyncio.sleep(max(0.0, self._free_at - now))


class _SharedNumber:
    """A number in a file that others read meanwhile, and the delay that they say there."""

    def __init__(self, path: str, delay_s: float) -> None:
        self._count = 0
        with open(path, "r+b") as file:
            self._map = mmap.mmap(file.fileno(), FILE_BYTES)
        self._map[COUNT_BYTES:] = round(delay_s * 1e6).to_bytes(COUNT_BYTES, "little")

    @property
    def delay_s(self) -> float:
        """How long each request waits from now on."""
        return int.from_bytes(self._map[COUNT_BYTES:], "little") / 1e6

    def add(self) -> None:
        """One more."""
        self._count += 1
        self._map[:COUNT_BYTES] = self._count.to_bytes(COUNT_BYTES, "little")


class _Turn:
    """The side that spoke last on a connection."""

    def __init__(self) -> None:
        self.server = True


async def _requests(
    client: asyncio.StreamReader,
    server: asyncio.StreamWriter,
    turn: _Turn,
    uplink: _LimitedLink,
    counter: _SharedNumber,
) -> None:
    while data := await client.read(uplink.piece_bytes):
        if turn.server:
            turn.server = False
            counter.add()
            await asyncio.sleep(counter.delay_s)
        await uplink.carry(len(data))
        server.write(data)
        await server.drain()
    server.close()


async def _answers(
    server: asyncio.StreamReader, client: asyncio.StreamWriter, turn: _Turn, downlink: _LimitedLink
) -> None:
    while data := await server.read(downlink.piece_bytes):
        turn.server = True
        await downlink.carry(len(data))
        client.write(data)
        await client.drain()
    client.close()


async def _serve(
    port: int, delay_s: float, up_bytes_s: float, down_bytes_s: float, count: str
) -> None:
    counter = _SharedNumber(count, delay_s)
    uplink, downlink = _LimitedLink(up_bytes_s), _LimitedLink(down_bytes_s)

    async def connected(client: asyncio.StreamReader, answer: asyncio.StreamWriter) -> None:
        server, request = await asyncio.open_connection("127.0.0.1", port, limit=CHUNK_BYTES)
        turn = _Turn()
        with suppress(OSError):
            await asyncio.gather(
                _requests(client, request, turn, uplink, counter),
                _answers(server, answer, turn, downlink),
            )
        for writer in (request, answer):
            writer.close()

    listener = await asyncio.start_server(connected, "127.0.0.1", 0, limit=CHUNK_BYTES)
    print(listener.sockets[0].getsockname()[1], flush=True)
    await listener.serve_forever()


@contextmanager
def before(
    server: S3,
    workspace: Path,
    delay_ms: float,
    uplink_mib_s: float = 0.0,
    downlink_mib_s: float = 0.0,
) -> Iterator[S3]:
    """`server` behind a delay for each request and narrow links; itself where there is neither."""
    numbers = (server.port, delay_ms, uplink_mib_s, downlink_mib_s)
    if not any(numbers[1:]):
        yield server
        return
    count = workspace / "requests"
    count.write_bytes(bytes(FILE_BYTES))
    command = [sys.executable, "-m", "tools.benchlib.delay", *map(str, numbers), str(count)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as proxy:
        try:
            assert proxy.stdout is not None
            yield replace(server, port=int(proxy.stdout.readline()), count=count)
        finally:
            proxy.terminate()


if __name__ == "__main__":
    PORT, DELAY_MS, UP_MIB, DOWN_MIB = map(float, sys.argv[1:5])
    COUNT = sys.argv[5]
    with suppress(KeyboardInterrupt):
        asyncio.run(
            _serve(int(PORT), DELAY_MS / 1000, UP_MIB * (1 << 20), DOWN_MIB * (1 << 20), COUNT)
        )
