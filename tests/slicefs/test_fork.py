"""A1: a client in forked, spawned and forkserver children, and what happens to open files."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from multiprocessing.queues import Queue
from pathlib import Path
from typing import IO, Any

import pytest

from slicefs.client.client import Client
from tests.posix.volumes import PATIENCE_S, Volume

JOIN_S = 120


def _child(client: Client, name: str, out: Queue[Any]) -> None:
    try:
        before = client.listdir("/")
        with client.open(name, "wb") as file:
            file.write(name.encode())
        out.put((sorted(before), bytes(client.read_many([name])[0])))
    except BaseException as error:
        out.put(repr(error))
        raise


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_children_connect_by_themselves(method: str, volume: Volume) -> None:
    context: Any = multiprocessing.get_context(method)
    with Client(volume.meta, meta_timeout=PATIENCE_S) as fs:
        with fs.open("parent", "wb") as file:
            file.write(b"data")
        out = context.Queue()
        children = [
            context.Process(target=_child, args=(fs, f"child-{number}", out)) for number in range(2)
        ]
        for child in children:
            child.start()
        answers = [out.get(timeout=JOIN_S) for _ in children]
        for child in children:
            child.join(JOIN_S)
        assert [child.exitcode for child in children] == [0, 0]
        assert {answer[1] for answer in answers} == {b"child-0", b"child-1"}
        assert all("parent" in answer[0] for answer in answers)
        assert sorted(fs.listdir("/")) == ["child-0", "child-1", "parent"]


def _read_on(reading: IO[bytes], writing: IO[bytes], out: Queue[Any]) -> None:
    rest = reading.read()
    try:
        writing.write(b"x")
        writing.flush()
    except OSError as error:
        out.put((rest, error.errno))


def test_an_open_file_is_read_on_in_a_forked_child(volume: Volume) -> None:
    context = multiprocessing.get_context("fork")
    with Client(volume.meta, meta_timeout=PATIENCE_S) as fs:
        with fs.open("f", "wb") as file:
            file.write(b"0123456789")
        with (
            fs.open("f", "rb", buffering=0) as reading,
            fs.open("g", "wb", buffering=0) as writing,
        ):
            assert reading.read(4) == b"0123"
            out: Queue[Any] = context.Queue()
            child = context.Process(target=_read_on, args=(reading, writing, out))
            child.start()
            assert out.get(timeout=JOIN_S) == (b"456789", 9)  # EBADF
            child.join(JOIN_S)
            assert child.exitcode == 0
            assert reading.read() == b"456789"
            writing.write(b"kept")
        assert bytes(fs.read_many(["g"])[0]) == b"kept"


_ORPHAN = """
import os, sys
from slicefs.client.client import Client
fs = Client(sys.argv[1])
fs.mkdir("parent")
told, tell = os.pipe()
if os.fork() == 0:
    fs.mkdir("child")
    os.read(told, 1)          # until the parent has left the volume
    for number in range(20):
        fs.mkdir(f"child/{number}")
    fs.close()
    open(sys.argv[2], "w").write("done")
    os._exit(0)
fs.close()
os.write(tell, b"x")
_, status = os.wait()
sys.exit(os.waitstatus_to_exitcode(status))
"""


def test_a_child_outlives_its_parents_connection(volume: Volume, tmp_path: Path) -> None:
    """SQLite's log stays while a forked child uses it, though the parent closes its own."""
    words = [sys.executable, "-c", _ORPHAN, volume.meta, str(tmp_path / "done")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=JOIN_S, cwd=os.getcwd())
    assert done.returncode == 0, done.stderr
    with Client(volume.meta) as fs:
        assert len(fs.listdir("child")) == 20
