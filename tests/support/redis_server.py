"""A `redis-server` of our own, started by subprocess and ended by its pid."""

from __future__ import annotations

import itertools
import random
import shutil
import socket
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import redis

START_S = 60.0
STOP_S = 60.0
_CLAIMS: list[socket.socket] = []  # of ports that this process has been given


def free_port() -> int:
    """A loopback port that nobody has or gets; nor is it one the kernel gives to who connects.

    So a server that is stopped finds it free when it starts again; 10000 more is such a port, too.
    Nobody else gets it from here as long as this process lives: not while the server is yet to
    start, nor while a test has it killed.
    """
    while True:
        port = random.SystemRandom().randrange(12000, 22000)  # no test's seed
        claim = socket.socket(socket.AF_UNIX)
        try:
            claim.bind(f"\0slicefs-test-port-{port}")  # a name that goes with the process
        except OSError:
            claim.close()
            continue
        _CLAIMS.append(claim)
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) != 0:
                return port


class RedisServer:
    """A server in `directory`; `start` and `stop` may be repeated, `with` does both.

    It keeps nothing on disk unless `options` say so, and listens on a port and a unix socket.
    """

    DATABASES = 1024
    program = "redis-server"  # `--redis-server` of pytest names another

    def __init__(self, directory: Path, *options: str, port: int | None = None) -> None:
        self.directory = directory
        self.port = free_port() if port is None else port
        self.socket = directory / "redis.sock"
        self._options = options
        self._process: subprocess.Popen[bytes] | None = None
        self._numbers = itertools.cycle(range(self.DATABASES))

    @staticmethod
    def is_installed() -> bool:
        return shutil.which(RedisServer.program) is not None

    def url(self, database: int = 0) -> str:
        return f"redis://127.0.0.1:{self.port}/{database}"

    def empty_url(self) -> str:
        """The URL of a database that nobody has had for a long time, emptied."""
        number = next(self._numbers)
        self.ask("FLUSHDB", database=number)
        return self.url(number)

    def start(self) -> None:
        """Returns when it answers."""
        assert self._process is None
        with (self.directory / "redis.log").open("ab") as log:
            self._process = subprocess.Popen(
                self._command(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        deadline = time.monotonic() + START_S
        while not self._answers():
            code = self._process.poll()
            log_text = (self.directory / "redis.log").read_text()
            assert code is None, f"redis-server ended with {code}:\n{log_text}"
            assert time.monotonic() < deadline, f"redis-server does not answer:\n{log_text}"
            time.sleep(0.005)

    def _command(self) -> list[str]:
        fixed = ["--dir", str(self.directory), "--unixsocket", str(self.socket)]
        fixed += ["--bind", "127.0.0.1", "--port", str(self.port), "--save", ""]
        fixed += ["--databases", str(self.DATABASES)]
        return [self.program, *fixed, *self._options]

    def _answers(self) -> bool:
        try:
            with socket.socket(socket.AF_UNIX) as probe:
                probe.connect(str(self.socket))
                probe.sendall(b"PING\r\n")
                return probe.recv(100)[:5] in (b"+PONG", b"-NOAU")
        except OSError:
            return False

    def stop(self) -> None:
        """End it and wait; with persistence it saves first."""
        process, self._process = self._process, None
        if process is None:
            return
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def ask(self, *words: str | bytes | int, database: int = 0) -> Any:
        """The answer to one command on a connection of its own."""
        with redis.Redis(unix_socket_path=str(self.socket), db=database) as client:
            return client.execute_command(*words)

    def __enter__(self) -> RedisServer:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()
