"""Programs of others that use a mount while its client is killed: see `programs`."""

from __future__ import annotations

import hashlib
import os
import random
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import lmdb

_POSTGRES: Final = Path("/usr/lib/postgresql/15/bin")
_SAMPLES: Final = 100
_STRESSORS: Final = (
    *("access", "chdir", "chmod", "chown", "copy-file", "dentry", "dir", "dirdeep", "dirmany"),
    *("dup", "fallocate", "fcntl", "filename", "flock", "fpunch", "fsize", "fstat", "getdent"),
    *("hdd", "io", "iomix", "lease", "link", "locka", "lockf", "lockofd", "mknod", "open"),
    *("rename", "symlink", "sync-file", "touch", "utime", "xattr"),
)
_STRESS_S: Final = 3


def set_up(stop: Path, name: str) -> Path:
    """The file that is there when a program has begun with what is to be disturbed."""
    return stop.with_name(f"{name}-is-set-up")


def _run(*words: str | Path, within: Path | None = None) -> str:
    done = subprocess.run(words, cwd=within, capture_output=True, text=True, check=False)
    assert done.returncode == 0, (done.returncode, words, done.stdout, done.stderr)
    return done.stdout


def fio(directory: Path, chance: random.Random, stop: Path) -> int:
    """fio writes at random and verifies all of it, with calls and with maps."""
    done = 0
    while not stop.exists():
        _run(
            "fio",
            "--name=verify",
            "--directory=.",
            f"--ioengine={chance.choice(('psync', 'mmap'))}",
            "--rw=randwrite",
            "--bsrange=4k-64k",
            "--size=4m",
            "--fsync=32",
            "--verify=crc32c",
            "--verify_fatal=1",
            f"--randseed={chance.randrange(1 << 30)}",
            within=directory,
        )
        done += 1
    return done


def lmdb_writer(directory: Path, chance: random.Random, stop: Path) -> int:
    """LMDB commits; what it maps is what was committed."""
    known: dict[bytes, bytes] = {}
    done = 0
    with lmdb.open(str(directory / "db"), map_size=64 << 20) as database:
        while not stop.exists():
            key = b"%d" % chance.randrange(500)
            known[key] = chance.randbytes(chance.randrange(1, 3000))
            with database.begin(write=True) as change:
                change.put(key, known[key])
            done += 1
            seen = chance.choice(list(known))
            with database.begin() as view:
                assert view.get(seen) == known[seen], f"key {seen!r} after {done}"
    with lmdb.open(str(directory / "db"), map_size=64 << 20) as database, database.begin() as view:
        assert dict(view.cursor()) == known
    return done


def dataloader(directory: Path, chance: random.Random, stop: Path) -> int:
    """Epochs of small files in random order, read by several threads; some are replaced."""
    sums: dict[Path, bytes] = {}

    def put(path: Path) -> None:
        data = chance.randbytes(chance.randrange(1, 60_000))
        new = path.with_suffix(".new")
        new.write_bytes(data)
        new.rename(path)
        sums[path] = hashlib.sha256(data).digest()

    def check(path: Path) -> None:
        assert hashlib.sha256(path.read_bytes()).digest() == sums[path], path

    for number in range(_SAMPLES):
        put(directory / f"{number:03}")
    done = 0
    with ThreadPoolExecutor(3) as pool:
        while not stop.exists():
            order = list(sums)
            chance.shuffle(order)
            list(pool.map(check, order))
            done += len(order)
            for path in order[:10]:
                put(path)
        list(pool.map(check, sums))
    return done + len(sums)


def pgbench(directory: Path, chance: random.Random, stop: Path) -> int:
    """PostgreSQL runs pgbench, dies in the midst of it and recovers; its sums agree."""
    del chance
    shutil.chown(directory, "postgres")
    sockets = Path(tempfile.mkdtemp(prefix="slicefs-pg-"))
    shutil.chown(sockets, "postgres")
    data = directory / "data"

    def run(program: str, *words: str | Path) -> str:
        return _run("runuser", "-u", "postgres", "--", _POSTGRES / program, *words, within=sockets)

    def ask(sql: str) -> list[str]:
        return run("psql", "-h", sockets, "-Atc", sql, "postgres").strip().split("|")

    def start() -> None:
        options = f"-c listen_addresses= -k {sockets}"
        run("pg_ctl", "-D", data, "-w", "-t", "300", "-l", sockets / "log", "-o", options, "start")

    run("initdb", "-D", data, "--data-checksums")
    start()
    count = 0
    try:
        run("pgbench", "-h", sockets, "-i", "-q", "postgres")
        set_up(stop, "pgbench").touch()
        while not (count and stop.exists()):
            out = run("pgbench", "-h", sockets, "-c", "2", "-T", "3", "-n", "postgres")
            count += _transactions(out)
            if count % 3 == 0:
                run("pg_ctl", "-D", data, "-m", "immediate", "stop")
                start()
        run("pg_ctl", "-D", data, "-m", "immediate", "stop")
        start()
        sums = "SELECT (SELECT sum({}balance) FROM pgbench_{})"
        balances = [
            ask(sums.format(letter, table))
            for letter, table in (("a", "accounts"), ("t", "tellers"), ("b", "branches"))
        ]
        moved, noted = ask("SELECT coalesce(sum(delta), 0), count(*) FROM pgbench_history")
        assert balances == [[moved]] * 3
        assert int(noted) == count
        run("pg_amcheck", "-h", sockets, "--install-missing", "--heapallindexed", "postgres")
    finally:
        run("pg_ctl", "-D", data, "-m", "fast", "stop")
        shutil.rmtree(sockets)
    return count


def _transactions(out: str) -> int:
    line = next(line for line in out.splitlines() if "actually processed" in line)
    return int(line.split(":")[1].split("/")[0])


def stress(directory: Path, chance: random.Random, stop: Path) -> int:
    """The stressors of file systems of stress-ng, each for a while, with its own checks."""
    done = 0
    order: list[str] = []
    while not stop.exists():
        if not order:
            order = list(_STRESSORS)
            chance.shuffle(order)
        name = order.pop()
        options = (f"--{name}", "1", "-t", str(_STRESS_S), "--verify", "--temp-path", directory)
        _run("stress-ng", *options, within=directory)
        assert os.listdir(directory) == [], name
        done += 1
    return done


LONG_PROGRAMS: Final[dict[str, Callable[[Path, random.Random, Path], int]]] = {
    "fio": fio,
    "lmdb_writer": lmdb_writer,
    "dataloader": dataloader,
    "pgbench": pgbench,
    "stress": stress,
}
