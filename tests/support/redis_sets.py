"""Several Redis that belong together, processes of our own: a master with Sentinels, a cluster."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import redis

from tests.support.redis_server import RedisServer

READY_S = 100.0
DOWN_MS = 500  # of silence before others take a server for dead, once they `watch_closely`
FORM_MS = 1000  # the same for nodes of a cluster, and while it forms
STALL_MS = 60_000  # until then: a busy machine lets nobody die


class Member(RedisServer):
    """One of several servers; it can be frozen and killed."""

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def freeze(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL; `start` starts it again with what it has on disk, mostly nothing."""
        assert self._process is not None
        self._process.kill()
        self.stop()

    def is_running(self) -> bool:
        return self._process is not None

    def info(self) -> dict[str, Any]:
        found: dict[str, Any] = self.ask("INFO", "replication")
        return found


class _Set:
    """Servers that are started together."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.members: list[Member] = []

    def _member(self, name: str, *options: str) -> Member:
        directory = self._folder / name
        directory.mkdir()
        member = Member(directory, *options)
        self.members.append(member)
        member.start()
        return member

    def close(self) -> None:
        for member in self.members:
            if member.is_running():
                with contextlib.suppress(ProcessLookupError):
                    member.thaw()
                    member.kill()

    def __enter__(self) -> Any:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class Sentinels(_Set):
    """A master called `main`, two replicas, and three Sentinels that watch over them.

    They find out that a master is dead when they are told to `watch_closely`.
    """

    def __init__(self, folder: Path, *options: str) -> None:
        super().__init__(folder)
        self.first = self._member("r0", "--repl-diskless-sync-delay", "0", *options)
        follow = ("--replicaof", "127.0.0.1", str(self.first.port))
        self.servers = [self.first]
        for n in (1, 2):
            self.servers.append(
                self._member(f"r{n}", *follow, "--repl-diskless-sync-delay", "0", *options)
            )
        self.watchers = [self._sentinel(f"s{n}") for n in range(3)]
        _await("two replicas and three Sentinels", self._is_complete)

    def _sentinel(self, name: str) -> Sentinel:
        directory = self._folder / name
        directory.mkdir()
        (directory / "sentinel.conf").write_text(
            f"sentinel monitor main 127.0.0.1 {self.first.port} 2\n"
            f"sentinel down-after-milliseconds main {STALL_MS}\n"
            "sentinel failover-timeout main 3000\n"
        )
        member = Sentinel(directory)
        self.members.append(member)
        member.start()
        return member

    def _is_complete(self) -> bool:
        replicas = self.first.info()
        online = [replicas.get(f"slave{n}", {}).get("state") == "online" for n in (0, 1)]
        return all(online) and all(
            state["num-slaves"] == 2 and state["num-other-sentinels"] == 2
            for state in (watcher.state() for watcher in self.watchers)
        )

    def watch_closely(self) -> None:
        """Whoever is silent now is dead soon."""
        for each in self.watchers:
            each.ask("SENTINEL", "SET", "main", "down-after-milliseconds", DOWN_MS)

    def has_failed_over(self) -> bool:
        """Whether the first server is no longer what Sentinels call the master."""
        return all(int(each.state()["port"]) != self.first.port for each in self.watchers)

    def url(self, scheme: str = "redis+sentinel") -> str:
        places = ",".join(f"127.0.0.1:{each.port}" for each in self.watchers)
        return f"{scheme}://{places}/main/0"


class Sentinel(Member):
    """A redis-server that is a Sentinel."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self._fixed = [str(directory / "sentinel.conf"), "--sentinel"]
        self._fixed += ["--unixsocket", str(self.socket), "--port", str(self.port)]

    def _command(self) -> list[str]:
        return [self.program, *self._fixed]

    def state(self) -> dict[str, Any]:
        with redis.Redis(unix_socket_path=str(self.socket), decode_responses=True) as client:
            found: dict[str, Any] = client.sentinel_master("main")
        return found


class Cluster(_Set):
    """Three nodes with a third of the slots each, and a replica of each if wanted.

    A replica takes over when the others are told to `watch_closely`.
    """

    SLOTS = 16384

    def __init__(self, folder: Path, replicas: bool = False, *options: str) -> None:
        super().__init__(folder)
        own: tuple[str, ...] = ("--cluster-enabled", "yes", "--cluster-node-timeout", str(FORM_MS))
        own += ("--repl-diskless-sync-delay", "0", *options)
        names = [f"n{n}" for n in range(6 if replicas else 3)]
        self.nodes = [self._member(name, *own) for name in names]
        for n, node in enumerate(self.nodes[:3]):
            begin, end = self.SLOTS * n // 3, self.SLOTS * (n + 1) // 3 - 1
            node.ask("CLUSTER", "ADDSLOTS", *range(begin, end + 1))
        for n, node in enumerate(self.nodes):
            node.ask("CLUSTER", "SET-CONFIG-EPOCH", n + 1)
        for node in self.nodes[1:]:
            self.nodes[0].ask("CLUSTER", "MEET", "127.0.0.1", node.port)
        _await("a cluster", lambda: all(self._sees_all(node) for node in self.nodes))
        for master, replica in zip(self.nodes, self.nodes[3:], strict=False):
            replica.ask("CLUSTER", "REPLICATE", self.id_of(master))
        _await("a working cluster", self._is_ready)
        self._set_timeout(STALL_MS)

    def _set_timeout(self, ms: int) -> None:
        """How long a node may be silent."""
        for node in self.nodes:
            if node.is_running():
                node.ask("CONFIG", "SET", "cluster-node-timeout", ms)

    def watch_closely(self) -> None:
        """Whoever is silent now is dead soon."""
        self._set_timeout(FORM_MS)

    def _sees_all(self, node: Member) -> bool:
        known = node.ask("CLUSTER", "NODES").count(b"\n")
        return len(node.ask("CLUSTER", "SLOTS")) == 3 and bool(known == len(self.nodes))

    @staticmethod
    def id_of(node: Member) -> str:
        return str(node.ask("CLUSTER", "MYID").decode())

    def _is_ready(self) -> bool:
        if not all(b"cluster_state:ok" in node.ask("CLUSTER", "INFO") for node in self.nodes):
            return False
        shown = self.nodes[0].ask("CLUSTER", "SLOTS")
        wanted = len(self.nodes) // 3
        return all(len(each) == 2 + wanted for each in shown) and all(
            node.info().get("master_link_status", "up") == "up" for node in self.nodes
        )

    def url(self, name: str) -> str:
        places = ",".join(f"127.0.0.1:{node.port}" for node in self.nodes)
        return f"redis+cluster://{places}/{name}"

    def owner(self, slot: int) -> Member:
        """The node that has a slot, as a node that lives sees it."""
        alive = next(node for node in self.nodes if node.is_running())
        for first, last, place, *_ in alive.ask("CLUSTER", "SLOTS"):
            if first <= slot <= last:
                return next(node for node in self.nodes if node.port == place[1])
        raise AssertionError(f"nobody has slot {slot}")

    def move(self, slot: int, keys_at_once: int = 20, pause_s: float = 0.0) -> None:
        """Move a slot to another master, key by key, as `redis-cli --cluster reshard` does."""
        source = self.owner(slot)
        target = next(node for node in self.nodes[:3] if node is not source)
        target.ask("CLUSTER", "SETSLOT", slot, "IMPORTING", self.id_of(source))
        source.ask("CLUSTER", "SETSLOT", slot, "MIGRATING", self.id_of(target))
        while keys := source.ask("CLUSTER", "GETKEYSINSLOT", slot, keys_at_once):
            words = ("MIGRATE", "127.0.0.1", target.port, "", 0, STALL_MS, "KEYS", *keys)
            source.ask(*words)
            time.sleep(pause_s)
        for node in (target, source, *self.nodes[:3]):
            node.ask("CLUSTER", "SETSLOT", slot, "NODE", self.id_of(target))


def _await(what: str, condition: Any) -> None:
    deadline = time.monotonic() + READY_S
    while True:
        try:
            if condition():
                return
        except (redis.RedisError, KeyError):
            pass
        assert time.monotonic() < deadline, f"{what}: not within {READY_S} s"
        time.sleep(0.05)
