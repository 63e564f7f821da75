"""A program that only sends and gets blocks: what the object store gives to a client without costs.

It is no file system. Blocks of 4 MiB go through HTTP connections of their own, signed beforehand,
from memory and into memory, without checksums, metadata or the kernel's file system. Its rows have
the names of `bigfile`, so a table shows how much of a store's speed a file system could ever reach.
"""

from __future__ import annotations

import http.client
import os
import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from typing import Any
from urllib.parse import urlsplit

from tools.benchlib.results import RATE, Metric
from tools.benchlib.s3 import S3
from tools.benchlib.workloads import KIB, MIB, RANDOM_READS, SEED, Options

NAME = "bare"
BUCKET = "bench-bare"
BLOCK_BYTES = 4 * MIB
CONNECTIONS = 8
URL_S_MAX = 3600  # how long a signed address is valid
TIMEOUT_S = 120.0


def bigfile(s3: S3, options: Options) -> Iterator[Metric]:
    """Blocks of a large file: all of them sent, then got, then parts of them at random places."""
    client = s3.client()
    client.create_bucket(Bucket=BUCKET)
    keys = [f"block-{number}" for number in range(options.size_mib * MIB // BLOCK_BYTES)]
    try:
        for name in ("1 MiB", "128 KiB"):  # the same for both
            took_s = _each(_signed(client, "put_object", keys), _send)
            yield _rate(f"write+fsync {name}", len(keys), took_s)
        gets = _signed(client, "get_object", keys)
        yield _rate("read 1 MiB, cold", len(keys), _each(gets, _get))
        for size, name in ((4 * KIB, "4 KiB"), (128 * KIB, "128 KiB")):
            count = options.count_or(RANDOM_READS)
            took_s = _ranges(random.Random(SEED), gets, size, count)
            yield Metric(f"random read {name}, cold", 1e6 * took_s / count, "µs/op")
    finally:
        for key in keys:
            client.delete_object(Bucket=BUCKET, Key=key)
        client.delete_bucket(Bucket=BUCKET)


def _signed(client: Any, action: str, keys: list[str]) -> list[str]:
    return [
        client.generate_presigned_url(action, {"Bucket": BUCKET, "Key": key}, URL_S_MAX)
        for key in keys
    ]


def _rate(name: str, blocks: int, took_s: float) -> Metric:
    return Metric(name, blocks * BLOCK_BYTES / took_s / 1e6, RATE)


class _BareConnection:
    """A connection, and memory for a block."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        assert parts.hostname is not None
        self._http = http.client.HTTPConnection(parts.hostname, parts.port, timeout=TIMEOUT_S)
        self.memory = memoryview(bytearray(os.urandom(BLOCK_BYTES)))

    def ask(self, method: str, url: str, body: memoryview | None, headers: dict[str, str]) -> int:
        """Send a request and read its answer into the memory; how many bytes it had."""
        parts = urlsplit(url)
        self._http.request(method, f"{parts.path}?{parts.query}", body, headers)
        answer = self._http.getresponse()
        size = 0
        while got := answer.readinto(self.memory[size:]):
            size += got
        if answer.status not in (200, 206):
            raise RuntimeError(f"the store answered {answer.status} to {method} {parts.path}")
        return size

    def close(self) -> None:
        """It is not needed any more."""
        self._http.close()


def _send(connection: _BareConnection, url: str) -> None:
    connection.ask("PUT", url, connection.memory, {})


def _get(connection: _BareConnection, url: str) -> None:
    size = connection.ask("GET", url, None, {})
    if size != BLOCK_BYTES:
        raise RuntimeError(f"the store gave {size} bytes of a block")


def _each(urls: list[str], act: Callable[[_BareConnection, str], None]) -> float:
    """Seconds that all requests take, as many at a time as there are connections."""

    def work(first: int) -> None:
        connection = connections[first]
        for url in urls[first::CONNECTIONS]:
            act(connection, url)

    with ExitStack() as stack, ThreadPoolExecutor(CONNECTIONS) as pool:
        connections = [
            stack.enter_context(closing(_BareConnection(urls[0]))) for _ in range(CONNECTIONS)
        ]
        begin = time.monotonic()
        list(pool.map(work, range(CONNECTIONS)))
        return time.monotonic() - begin


def _ranges(places: random.Random, urls: list[str], size: int, count: int) -> float:
    """Seconds for `count` requests of `size` bytes at random places, one after the other."""
    with closing(_BareConnection(urls[0])) as connection:
        begin = time.monotonic()
        for _ in range(count):
            at = places.randrange(BLOCK_BYTES // size) * size
            wanted = {"Range": f"bytes={at}-{at + size - 1}"}
            got = connection.ask("GET", places.choice(urls), None, wanted)
            if got != size:
                raise RuntimeError(f"the store gave {got} bytes of a range")
        return time.monotonic() - begin
