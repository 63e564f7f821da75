"""Programs that use a mount while its client is killed. None of them may see an error.

    python -m tests.fsclient.survival.programs NAME DIRECTORY SEED STOP

Each works until the file STOP is there, and then verifies all that it has written.
"""

from __future__ import annotations

import os
import random
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Final

from tests.fsclient.survival.long_programs import LONG_PROGRAMS

BLOCK: Final = 4096
BLOCKS: Final = 256  # of the file that is overwritten at random
PAUSE_S: Final = 0.002


def verify(directory: Path, chance: random.Random, stop: Path) -> int:
    """Random blocks of a file are overwritten and read back, as `fio --verify` does."""
    path = directory / "verify"
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    known: dict[int, bytes] = {}
    done = 0
    while not stop.exists():
        at = chance.randrange(BLOCKS)
        known[at] = chance.randbytes(BLOCK)
        assert os.pwrite(fd, known[at], at * BLOCK) == BLOCK
        done += 1
        seen = chance.choice(list(known))
        assert os.pread(fd, BLOCK, seen * BLOCK) == known[seen], f"block {seen} after {done}"
        if done % 64 == 0:
            os.fsync(fd)
    for at, data in known.items():
        assert os.pread(fd, BLOCK, at * BLOCK) == data, f"block {at}"
    os.close(fd)
    content = path.read_bytes()
    for at, data in known.items():
        assert content[at * BLOCK : (at + 1) * BLOCK] == data, f"block {at}, read again"
    return done


def append(directory: Path, chance: random.Random, stop: Path) -> int:
    """A log gets lines, each once and in order, while it is renamed and begun anew."""
    path = directory / "log"
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    done = rotated = 0
    while not stop.exists():
        line = f"{done} ".encode().ljust(chance.randrange(20, 3000), b"x") + b"\n"
        assert os.write(fd, line) == len(line)
        done += 1
        if done % 100 == 0:
            os.close(fd)
            os.rename(path, directory / f"log.{rotated}")
            rotated += 1
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND)
    os.close(fd)
    paths = [*(directory / f"log.{number}" for number in range(rotated)), path]
    lines = [line for each in paths for line in each.read_bytes().splitlines()]
    numbers = [int(line.split(b" ")[0]) for line in lines]
    assert numbers == list(range(done)), _first_wrong(numbers)
    return done


def _first_wrong(numbers: list[int]) -> str:
    at = next((at for at, number in enumerate(numbers) if number != at), len(numbers))
    return f"line {at}: {numbers[max(0, at - 3) : at + 3]}"


def database(directory: Path, chance: random.Random, stop: Path) -> int:
    """SQLite commits rows, with its locks and its journal; each is there once."""
    done = 0
    with closing(sqlite3.connect(directory / "app.db", timeout=60)) as connection:
        connection.execute("CREATE TABLE t (number INTEGER PRIMARY KEY, text TEXT)")
        connection.commit()
        while not stop.exists():
            with connection:
                text = "y" * chance.randrange(2000)
                connection.execute("INSERT INTO t VALUES (?, ?)", (done, text))
            done += 1
            (count,) = connection.execute("SELECT count(*) FROM t").fetchone()
            assert count == done
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    return done


def names(directory: Path, chance: random.Random, stop: Path) -> int:
    """Names are made and taken away with calls that fail when they are done twice."""
    present: set[str] = set()
    done = 0
    while not stop.exists():
        name = f"n{chance.randrange(40)}"
        path = directory / name
        if name not in present:
            kind = chance.randrange(4)
            if kind == 0:
                os.mkdir(path)
                os.rmdir(path)
                os.symlink("nowhere", path)
            elif kind == 1:
                with open(path, "xb") as file:
                    file.write(name.encode())
                os.setxattr(path, "user.once", b"1", os.XATTR_CREATE)
                os.removexattr(path, "user.once")
            elif kind == 2:
                os.mknod(path)
                os.link(path, f"{path}.link")
                os.unlink(f"{path}.link")
            else:
                os.symlink(name, f"{path}.new")
                os.rename(f"{path}.new", path)
            present.add(name)
        else:
            os.unlink(path)
            present.discard(name)
        done += 1
        if done % 20 == 0:
            assert {each for each in os.listdir(directory) if "." not in each} == present
    return done


def unlinked(directory: Path, chance: random.Random, stop: Path) -> int:
    """A file without a name keeps what is written to it, as long as it is open."""
    done = 0
    while not stop.exists():
        path = directory / f"gone{done}"
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        os.unlink(path)
        data = chance.randbytes(chance.randrange(1, 300_000))
        assert os.write(fd, data) == len(data)
        for _ in range(20):
            at = chance.randrange(len(data))
            assert os.pread(fd, 1000, at) == data[at : at + 1000]
        os.close(fd)
        done += 1
    return done


def git(directory: Path, chance: random.Random, stop: Path) -> int:
    """Commits in a repository; in the end `git fsck` and the log agree."""
    environment = {
        **os.environ,
        "HOME": str(directory),
        **{f"GIT_{who}_NAME": "t" for who in ("AUTHOR", "COMMITTER")},
        **{f"GIT_{who}_EMAIL": "t" for who in ("AUTHOR", "COMMITTER")},
    }

    def run(*words: str) -> str:
        done = subprocess.run(
            ["git", *words],
            cwd=directory,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, (words, done.stdout, done.stderr)
        return done.stdout

    run("init", "-q", ".")
    count = 0
    while not count or not stop.exists():
        for _ in range(5):
            (directory / f"f{chance.randrange(30)}").write_text(str(chance.random()))
        run("add", "-A")
        run("commit", "-q", "-m", str(count), "--allow-empty")
        count += 1
    run("fsck", "--strict")
    assert run("log", "--format=%s").split() == [str(each) for each in reversed(range(count))]
    assert run("status", "--porcelain") == ""
    return count


PROGRAMS: Final[dict[str, Callable[[Path, random.Random, Path], int]]] = {
    "verify": verify,
    "append": append,
    "database": database,
    "names": names,
    "unlinked": unlinked,
    "git": git,
}


def main() -> None:
    """Run one; print how much it did."""
    name, directory, seed, stop = sys.argv[1:]
    place = Path(directory) / name
    place.mkdir()
    print({**PROGRAMS, **LONG_PROGRAMS}[name](place, random.Random(int(seed)), Path(stop)))


if __name__ == "__main__":
    main()
