"""The steps of the demo: each does something real on a mount and says what it has seen."""

from __future__ import annotations

import shutil
import stat
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from tools.demolib import trees
from tools.demolib.sources import SourceArchive
from tools.demolib.volume import DemoVolume

WRITERS: Final = 4
ROWS: Final = 40  # transactions of each writer
DELETED_S: Final = 30  # how long the background may take to delete the last object
_C: Final = "int answer(int x) { return 6 * x; }\n"
_CALL: Final = "import ctypes, sys; print(ctypes.CDLL(sys.argv[1]).answer(7))"
# one process of `concurrent writers`; the journal and its locks are SQLite's own business
_WRITER: Final = """
import sqlite3, sys
path, writer, rows = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
database = sqlite3.connect(path, timeout=60, isolation_level=None)
for row in range(rows):
    database.execute("BEGIN IMMEDIATE")
    database.execute("INSERT INTO entries VALUES (?, ?, randomblob(5000))", (writer, row))
    database.execute("UPDATE total SET entries = entries + 1")
    database.execute("COMMIT")
"""


class Failed(Exception):
    """A step has not shown what it should."""


def run(words: Sequence[str | Path], at: Path) -> str:
    """What a command prints. Raises: Failed with what it says where it fails."""
    done = subprocess.run(
        [str(word) for word in words], cwd=at, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise Failed(f"{words[0]}: {(done.stderr or done.stdout).strip()[-500:]}")
    return done.stdout


def unpack(source: SourceArchive, target: Path) -> str:
    """Unpack an archive."""
    try:
        source.unpack(target)
    except subprocess.CalledProcessError as error:
        said = error.stderr.decode(errors="replace").strip()
        raise Failed(f"tar: {said[-500:]}") from error
    files, size = trees.size(target)
    return f"{files:,} files, {size / 1e6:.1f} MB"


def compare(source: SourceArchive, copy: Path) -> str:
    """Every member's SHA-256, mode, owner, mtime and link against the archives."""
    links = sum(stat.S_ISLNK(seen.mode) for seen in source.members.values())
    count = trees.compare(source.members, copy)
    return f"{count:,} as archived: SHA-256, mode, mtime, {links} links"


def git(tree: Path, clone: Path) -> str:
    """Put a tree under version control and clone it."""
    me = ["-c", "user.name=Demo", "-c", "user.email=demo@example.org", "-c", "gc.auto=0"]
    run(["git", "init", "-q", "-b", "main"], tree)
    run(["git", "add", "-A"], tree)
    run(["git", *me, "commit", "-q", "-m", "Everything"], tree)
    run(["git", "clone", "-q", tree, clone], tree.parent)
    run(["git", "fsck", "--full", "--strict", "--no-progress"], clone)
    for place in (tree, clone):
        if run(["git", "status", "--porcelain"], place):
            raise Failed(f"git status of {place} is not clean")
    files = run(["git", "ls-files"], clone).count("\n")
    return f"{files:,} files committed, cloned, fsck clean"


def extension(folder: Path) -> str:
    """Build a shared library in the mount and call it."""
    folder.mkdir()
    (folder / "answer.c").write_text(_C)
    run(["gcc", "-O2", "-shared", "-fPIC", "-o", "answer.so", "answer.c"], folder)
    answer = run([sys.executable, "-c", _CALL, folder / "answer.so"], folder).strip()
    if answer != "42":
        raise Failed(f"the library answers {answer}")
    return f"{(folder / 'answer.so').stat().st_size:,} bytes, answers {answer}"


def database(folder: Path) -> str:
    """Several processes write to one SQLite database."""
    import sqlite3

    folder.mkdir()
    path = folder / "demo.db"
    with sqlite3.connect(path) as made:
        made.execute("CREATE TABLE entries (writer, number, data)")
        made.execute("CREATE TABLE total (entries)")
        made.execute("INSERT INTO total VALUES (0)")
    made.close()
    command = [sys.executable, "-c", _WRITER, str(path)]
    writers = [
        subprocess.Popen([*command, str(number), str(ROWS)], stderr=subprocess.PIPE)
        for number in range(WRITERS)
    ]
    for writer in writers:
        _, said = writer.communicate()
        if writer.returncode != 0:
            raise Failed(said.decode()[-500:])
    read = sqlite3.connect(path)
    verdict = read.execute("PRAGMA integrity_check").fetchone()[0]
    counts = read.execute("SELECT (SELECT count(*) FROM entries), entries FROM total").fetchone()
    read.close()
    if (verdict, counts) != ("ok", (WRITERS * ROWS, WRITERS * ROWS)):
        raise Failed(f"integrity_check: {verdict}; rows and their count: {counts}")
    return f"{WRITERS} writers, {counts[0]} transactions, integrity_check {verdict}"


def two_mounts(tree: Path, one: Path, two: Path, members: trees.Tree) -> str:
    """At the same time a tree is copied both ways; each copy is read on the mount it came from."""
    copies = (("there", one, two), ("back", two, one))
    running = [
        subprocess.Popen(["cp", "-a", from_ / tree, to / copy], stderr=subprocess.PIPE)
        for copy, from_, to in copies
    ]
    for process in running:
        _, said = process.communicate()
        if process.returncode != 0:
            raise Failed(f"cp: {said.decode(errors='replace')[-500:]}")
    entries = sum(trees.compare(members, from_ / copy) for copy, from_, _ in copies)
    return f"{entries:,} entries, each right on the other mount"


def remove(root: Path, volume: DemoVolume) -> str:
    """rm -rf; then the blocks go, too."""
    names = [str(path) for path in root.iterdir()]
    run(["rm", "-rf", "--", *names], root)
    if left := list(root.iterdir()):
        raise Failed(f"still there: {left}")
    deadline = time.monotonic() + DELETED_S
    while volume.objects():
        if time.monotonic() > deadline:
            raise Failed(f"{volume.objects()} objects left over")
        time.sleep(0.2)
    return "no file, no object left"


def check(volume: DemoVolume) -> str:
    """slicefs fsck of what is left: one directory."""
    report = volume.fsck()
    if (report["inodes"], report["objects"], report["problems"]) != (1, 0, []):
        raise Failed(f"fsck: {report}")
    if complaints := volume.complaints():
        raise Failed("in the log: " + "; ".join(complaints[:3]))
    return "clean: 1 inode, 0 objects"


def missing_tools() -> list[str]:
    """Programs that the steps call and that are not here."""
    return [name for name in ("tar", "xz", "git", "gcc", "cp", "rm") if shutil.which(name) is None]
