"""`python -m tools.bench checks`: fsck and gc of a volume of many files, beside JuiceFS's.

Both volumes hold the same files, one small object each, 10,000 a directory, with metadata in a
Redis of the benchmark's own and objects in a directory. They are not made through mounts: ours is
written in bulk through the library (and found clean by its fsck), JuiceFS's is loaded by
`juicefs load`. The objects are hard links. It prints seconds, processor seconds (user and system,
of the command and of Redis) and the most memory that the command had.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import stat
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

from fsclient.volume.metadata_url import open_store
from fsdata.format.block_v1 import encode
from fsdata.format.object_keys import object_key
from fsmeta.meta.meta import Meta
from fsmeta.runtime import SystemRuntime
from fsmeta.schema import inode, keys
from fsmeta.schema.slices import pack_slices
from fsmeta.txn.txn import Txn
from fsmeta.types import ROOT_CALLER, ROOT_INO, FileType, Ino, Slice, SliceId, SliceKind, space_of
from tools.benchlib import redis
from tools.benchlib.fill import name_of
from tools.benchlib.systems import JUICEFS, SLICEFS, System
from tools.benchlib.volume import bucket_of

BYTES = 100  # of a file
A_DIRECTORY = 10_000
A_COMMIT = 800  # files; four writes each, and 4096 are what a commit takes
LINKS = 1000  # of an object's file
COMMAND_S_MAX = 3600


class CommandCost(NamedTuple):
    """What one command took."""

    seconds: float
    processor: float
    redis: float
    memory_bytes: int


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(prog="python -m tools.bench checks", description=__doc__)
    made.add_argument("--files", type=int, default=1_000_000)
    made.add_argument("--only", choices=[SLICEFS.name, JUICEFS.name])
    made.add_argument("--repeat", type=int, default=1)
    made.add_argument("--dir", type=Path, default=Path("/dev/shm"))
    return made


def main(words: Sequence[str]) -> int:
    """Measure and print."""
    arguments = parser().parse_args(words)
    workspace = Path(tempfile.mkdtemp(prefix="slicefs-bench-", dir=arguments.dir))
    try:
        with redis.running(workspace / "redis.log") as server:
            for system in (SLICEFS, JUICEFS):
                if arguments.only not in (None, system.name):
                    continue
                url = system.meta_urls["redis"].format(port=server.port)
                store = workspace / system.name
                begin = time.monotonic()
                _in_another_process(system, url, store, arguments.files)
                took = time.monotonic() - begin
                print(f"{system.name}: {arguments.files:,} files made in {took:.0f} s", flush=True)
                for _ in range(arguments.repeat):
                    for command in ("fsck", "gc"):
                        _print(system.name, command, _cost(system, [command, url], server))
                server.ask("flushdb", db=system.redis_db)
                shutil.rmtree(store)
    finally:
        shutil.rmtree(workspace, ignore_errors=True)
    return 0


def _in_another_process(system: System, url: str, store: Path, count: int) -> None:
    """Fill; a command that is started later counts what this process has had as its own memory."""
    fill = _fill_ours if system is SLICEFS else _fill_juicefs
    process = get_context("spawn").Process(target=fill, args=(system, url, store, count))
    process.start()
    process.join()
    if process.exitcode:
        raise RuntimeError(f"{system.name}: the volume could not be filled")


def _print(name: str, command: str, cost: CommandCost) -> None:
    print(
        f"{name:8} {command:5} {cost.seconds:7.1f} s {cost.processor:7.1f} s of processor "
        f"{cost.redis:6.1f} s of Redis {cost.memory_bytes >> 20:6} MiB",
        flush=True,
    )


def _cost(system: System, words: Sequence[str], server: redis.Redis) -> CommandCost:
    """Run a command to its end. Raises: RuntimeError where it fails."""
    before, begin = server.cpu_seconds(), time.monotonic()
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            [*system.program, *words],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        seconds = time.monotonic() - begin
        output.seek(0)
        said = output.read()[-1000:].decode(errors="replace")
    if process.returncode:
        raise RuntimeError(f"{system.name} {words[0]} exited with {process.returncode}: {said}")
    spent = used.ru_utime + used.ru_stime
    return CommandCost(seconds, spent, server.cpu_seconds() - before, used.ru_maxrss << 10)


def _run(system: System, words: str) -> str:
    command = [*system.program, *words.split()]
    done = subprocess.run(
        command, check=True, capture_output=True, text=True, timeout=COMMAND_S_MAX
    )
    return done.stdout


def _format(system: System, url: str, store: Path) -> None:
    store.mkdir()
    place = system.places["file"].format(store=store)
    _run(system, system.format.format(meta=url, volume=bucket_of(system), place=place))


def _objects(top: Path, keys_of: Iterator[str], data: bytes) -> None:
    """Files of `data` below `top`, as hard links."""
    first = top
    folder = ""
    for number, key in enumerate(keys_of):
        path = top / key
        if str(path.parent) != folder:
            path.parent.mkdir(parents=True, exist_ok=True)
            folder = str(path.parent)
        if number % LINKS:
            os.link(first, path)
        else:
            path.write_bytes(data)
            first = path


# --- ours ----------------------------------------------------------------------------------------


def _fill_ours(system: System, url: str, store: Path, count: int) -> None:
    _format(system, url, store)
    runtime = SystemRuntime()
    opened = open_store(url, runtime)
    meta = Meta(opened, runtime)
    meta.sessions.open({"host": "fill"})
    try:
        first_ino = _take(meta, keys.NEXT_INO, count)
        first_slice = _take(meta, keys.NEXT_SLICE, count)
        for begin in range(0, count, A_DIRECTORY):
            name = b"d%06d" % (begin // A_DIRECTORY)
            parent = meta.create(ROOT_CALLER, ROOT_INO, name, stat.S_IFDIR | 0o755).ino
            end = min(begin + A_DIRECTORY, count)
            for at in range(begin, end, A_COMMIT):
                numbers = range(at, min(at + A_COMMIT, end))
                files = [(Ino(first_ino + n), SliceId(first_slice + n)) for n in numbers]
                create = partial(_create, parent=parent, files=files, now_ns=time.time_ns())
                meta.transactor.run(create)
    finally:
        meta.sessions.close()
        opened.close()
    data = b"".join(map(bytes, encode([b"x" * BYTES])))
    made = (object_key(SliceId(first_slice + n), 0, BYTES) for n in range(count))
    _objects(store / bucket_of(system), made, data)


def _take(meta: Meta, field: bytes, count: int) -> int:
    """The first of `count` numbers."""

    def take(txn: Txn) -> int:
        found = keys.unpack_count(keys.COUNTERS, field, txn.get(keys.COUNTERS, field))
        txn.add(keys.COUNTERS, field, count)
        return found

    return meta.transactor.run(take)


def _create(txn: Txn, parent: Ino, files: Sequence[tuple[Ino, SliceId]], now_ns: int) -> None:
    txn.add(keys.USAGE, keys.INODES, len(files))
    txn.add(keys.USAGE, keys.SPACE, len(files) * space_of(BYTES))
    txn.merge(keys.inode_row(parent), keys.VOLATILE_FIELD, inode.touch_parts(now_ns))
    for ino, sid in files:
        attr = inode.new_attr(ino, stat.S_IFREG | 0o644, (0, 0), parent, now_ns)
        attr = attr._replace(size=BYTES, used=BYTES)
        row = keys.inode_row(ino)
        chunk = pack_slices([Slice(0, sid, BYTES, 0, BYTES, SliceKind.BLOCKS)])
        txn.put(row, keys.ATTR_FIELD, inode.pack_attr(attr))
        txn.put(row, keys.VOLATILE_FIELD, inode.pack_volatile(attr))
        txn.put(row, keys.chunk_field(0), chunk)
        txn.put(keys.dir_row(parent), name_of(ino), keys.pack_dentry(FileType.REG, ino))


# --- JuiceFS's -----------------------------------------------------------------------------------


def _fill_juicefs(system: System, url: str, store: Path, count: int) -> None:
    _format(system, url, store)
    told = json.loads(_run(system, f"dump {url}"))
    folders = -(-count // A_DIRECTORY)
    told["Counters"].update(
        usedSpace=count * space_of(BYTES) + folders * 4096,
        usedInodes=count + folders,
        nextInodes=count + folders + 1000,
        nextChunk=count + 1000,
    )
    dump = store.parent / "dump.json"
    with dump.open("w") as file:
        text = json.dumps({**told, "FSTree": {"attr": told["FSTree"]["attr"], "entries": "HERE"}})
        before, after = text.split('"HERE"')
        file.write(before + "{")
        for folder in range(folders):
            file.write("," * bool(folder) + _juicefs_folder(folder, folders, count))
        file.write("}" + after)
    redis_url, _, db = url.rpartition("/")
    port = redis_url.rpartition(":")[2]
    subprocess.run(["redis-cli", "-p", port, "-n", db, "flushdb"], check=True, capture_output=True)
    _run(system, f"load {url} {dump}")
    dump.unlink()
    made = (f"chunks/{n // 10**6}/{n // 1000}/{n}_0_{BYTES}" for n in range(1, count + 1))
    _objects(store / bucket_of(system), made, b"x" * BYTES)


def _juicefs_folder(folder: int, folders: int, count: int) -> str:
    """One directory as `juicefs dump` has it."""
    entries = {
        name_of(number).decode(): {
            "attr": _juicefs_attr(folders + 2 + number, "regular", 0o644, BYTES),
            "chunks": [{"index": 0, "slices": [{"id": number + 1, "size": BYTES, "len": BYTES}]}],
        }
        for number in range(folder * A_DIRECTORY, min((folder + 1) * A_DIRECTORY, count))
    }
    attr = _juicefs_attr(folder + 2, "directory", 0o755, 0)
    return f'"d{folder:06}":' + json.dumps({"attr": attr, "entries": entries})


def _juicefs_attr(ino: int, kind: str, mode: int, length: int) -> dict[str, object]:
    now_s = 1_790_000_000
    times = dict.fromkeys(("atime", "mtime", "ctime"), now_s)
    nanos = {f"{name}nsec": 0 for name in times}
    links = 2 if kind == "directory" else 1
    owner = {"inode": ino, "type": kind, "mode": mode, "uid": 0, "gid": 0}
    return {**owner, **times, **nanos, "nlink": links, "length": length}
