"""Q2 on real mounts: limits of users, directories and mounts, divided, changed and interrupted."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.faults.program import Mount, Volume, needs_mounts, slicefs, succeed, wait_until
from tests.fsclient.survival.supervised import Supervised

pytestmark = needs_mounts

MIB = 1 << 20
KILLED = "slicefs.supervisor process .* ended with signal 9"
KNOWN_S = 15.0  # until mounts keep to a new limit
SLOW = 64 << 10  # the least limit of bytes
USER = ("setpriv", "--reuid=1234", "--regid=1234", "--clear-groups")
WRITER = """
import os, sys, time
fd, until, done = os.open(sys.argv[1], os.O_CREAT | os.O_WRONLY, 0o644), time.time() + 6, 0
while time.time() < until:
    done += os.pwrite(fd, b"x" * 131072, done)
print(done)
"""


def limit(volume: Volume, *words: str) -> Any:
    return json.loads(succeed("qos", "set", volume.meta, *words, "--json"))


def in_force(*mounts: Mount, count: int = 1) -> None:
    """The mounts know so many limits."""
    for mount in mounts:
        wait_until("the limit", KNOWN_S, lambda m=mount: m.numbers()["qos_limits"] == count)


def writer(path: Path) -> subprocess.Popen[str]:
    words = [sys.executable, "-c", WRITER, str(path)]
    return subprocess.Popen(words, stdout=subprocess.PIPE, text=True)


def waiting(mount: Mount, least: int = 1) -> None:
    wait_until("a request that waits", 10.0, lambda: mount.numbers()["qos_requests_held"] >= least)


def test_q2_commands(embedded: Volume) -> None:
    embedded.format()
    mount = embedded.mount()
    (mount.path / "d").mkdir()
    assert limit(embedded, "--path", "/d", "--read", "100MiB", "--ops", "50")["read"] == 100 * MIB
    limit(embedded, "--path", "/d", "--read", "0")
    limit(embedded, "--path", "/", "--write", "1GiB")
    limit(embedded, "--uid", "1234", "--write", "1MiB")
    limit(embedded, "--gid", "root", "--write", "1MiB")
    found = json.loads(succeed("qos", "list", embedded.meta, "--json"))["limits"]
    assert [(each["type"], each["read"], each["write"], each["ops"]) for each in found] == [
        ("volume", 0, 1024 * MIB, 0),
        ("directory", 0, 0, 50),
        ("group", 0, MIB, 0),
        ("user", 0, MIB, 0),
    ]
    found = json.loads(succeed("qos", "get", embedded.meta, "--uid", "1234", "--json"))
    assert (found["uid"], found["write"]) == (1234, MIB)
    in_force(mount, count=4)
    assert "/d" in succeed("qos", "list", embedded.meta)
    succeed("qos", "delete", embedded.meta, "--path", "/d")
    for words, said in (
        (("delete", "--path", "/d"), "/d has no limit: see `slicefs qos list`"),
        (("set", "--path", "/no", "--ops", "10"), "--path /no: no such name in the volume"),
        (("set", "--uid", "1"), "name a limit"),
        (("set", "--uid", "1", "--read", "10"), "at least 64KiB a second"),
        (("set", "--uid", "1", "--ops", "1k"), "a whole number from 10 on"),
        (("set", "--ops", "10"), "name one of --path DIR, --uid USER and --gid GROUP"),
    ):
        done = slicefs("qos", words[0], embedded.meta, *words[1:])
        assert done.code in (1, 2), done
        assert said in done.err
    (mount.path / "gone").mkdir()
    limit(embedded, "--path", "/gone", "--ops", "10")
    (mount.path / "gone").rmdir()
    listed = json.loads(succeed("qos", "list", embedded.meta, "--json"))["limits"]
    (gone,) = [each for each in listed if each["type"] == "directory"]
    succeed("qos", "delete", embedded.meta, "--path", gone["path"])
    dumped = embedded.base / "dump"
    succeed("dump", embedded.meta, dumped)
    other = f"sqlite://{embedded.base}/other.db"
    succeed("load", other, dumped)
    assert len(json.loads(succeed("qos", "list", other, "--json"))["limits"]) == 3
    embedded.end()


def test_q2_two_mounts_keep_to_one_limit(served: Volume) -> None:
    served.format()
    mounts = [served.mount(), served.mount(name="mnt2")]
    (mounts[0].path / "d").mkdir()
    limit(served, "--path", "/d", "--write", "8MiB")
    in_force(*mounts)
    alone = int(writer(mounts[0].path / "d" / "alone").communicate(timeout=60)[0])
    both = [writer(mount.path / "d" / mount.path.name) for mount in mounts]
    parts = [int(process.communicate(timeout=60)[0]) for process in both]
    assert alone <= 8 * MIB * 7, "six seconds, a burst, and a write that waits beyond the end"
    assert alone >= 8 * MIB * 3, "an idle mount leaves its part"
    assert sum(parts) <= 8 * MIB * 9, "at first each has a part that is too large"
    assert min(parts) >= MIB
    free = int(writer(mounts[1].path / "free").communicate(timeout=60)[0])
    assert free > 2 * alone, "what is not below the directory is not limited"
    served.end()


def test_q2_those_that_wait_hold_up_no_other(embedded: Volume) -> None:
    """More of them than the mount has threads; and a signal ends each at once."""
    embedded.format()
    mount = embedded.mount("--threads", "4")
    (mount.path / "slow").mkdir(mode=0o777)
    (mount.path / "slow").chmod(0o777)
    limit(embedded, "--uid", "1234", "--write", "64KiB")
    in_force(mount)
    script = f"i=$1; exec dd if=/dev/zero of={mount.path}/slow/$i bs=64k count=100 status=none"
    slow = [
        subprocess.Popen([*USER, "sh", "-c", script, "sh", str(number)]) for number in range(80)
    ]
    waiting(mount, 70)
    begun = time.monotonic()
    for number in range(50):
        (mount.path / f"file{number}").write_bytes(b"x" * 4096)
    assert time.monotonic() - begun < 20, "one slow write alone takes a second"
    for process in slow[:40]:
        process.kill()
    for process in slow[40:]:
        process.terminate()
    for process in slow:
        assert process.wait(20) < 0
    assert mount.numbers()["qos_requests_held"] == 0
    embedded.end()


def test_q2_a_limit_that_is_taken_away(served: Volume) -> None:
    """What waits goes on at once, by however little it was limited."""
    served.format()
    mount = served.mount()
    limit(served, "--path", "/", "--write", "64KiB")
    in_force(mount)
    with subprocess.Popen(
        ["dd", "if=/dev/zero", f"of={mount.path}/f", "bs=1M", "count=64", "status=none"]
    ) as program:
        waiting(mount)
        succeed("qos", "delete", served.meta, "--path", "/")
        assert program.wait(60) == 0, "it would be a quarter of an hour"
    assert (mount.path / "f").stat().st_size == 64 * MIB
    served.end()


APPENDS = """
import os, sys
fd = os.open(sys.argv[1], os.O_CREAT | os.O_APPEND | os.O_WRONLY)
for number in range(200):
    os.write(fd, b"%07d\\n" % number)
    os.mkdir(sys.argv[1] + ".d%d" % number)
os.close(fd)
"""


@pytest.mark.parametrize("what", ["ops", "write"])
def test_q2_a_client_that_dies_while_requests_wait(served: Volume, what: str) -> None:
    """Each is served once: what has not begun is sent again, and nothing else."""
    served.format()
    supervised = Supervised(served)
    words = ("--ops", "200") if what == "ops" else ("--write", "64KiB")
    limit(served, "--path", "/", *words)
    in_force(supervised.mount)
    program = subprocess.Popen([sys.executable, "-c", APPENDS, str(supervised.path / "log")])
    filler = subprocess.Popen(
        ["dd", "if=/dev/zero", f"of={supervised.path}/f", "bs=64k", "count=64", "status=none"]
    )
    try:
        for _ in range(3):
            time.sleep(1.0)
            supervised.kill()
            supervised.await_next()
        succeed("qos", "delete", served.meta, "--path", "/")
        assert program.wait(60) == 0
        assert filler.wait(60) == 0
    finally:
        program.kill()
        filler.kill()
    lines = (supervised.path / "log").read_bytes().split()
    assert lines == [b"%07d" % number for number in range(200)]
    assert (supervised.path / "f").stat().st_size == 64 * (64 << 10)
    served.end(KILLED)


def test_q2_limits_of_one_mount(embedded: Volume) -> None:
    embedded.format()
    mount = embedded.mount("--write-limit", "4MiB", "-o", "ops-limit=100000")
    done = int(writer(mount.path / "f").communicate(timeout=60)[0])
    assert done <= 4 * MIB * 7
    assert mount.numbers()["qos_requests_delayed_total"] > 0
    config = json.loads((mount.path / ".config").read_text())
    assert config["mount"]["rate_limits"] == {"read": 0, "write": 4 * MIB, "ops": 100_000}
    done_reading = slicefs("mount", embedded.meta, mount.path, "--read-limit", "1")
    assert done_reading.code == 2
    os.kill(mount.pid, signal.SIGTERM)
    wait_until("its end", 30.0, mount.has_ended)
    embedded.end()


def test_q2_a_squashed_caller_is_charged_as_the_volume_knows_it(embedded: Volume) -> None:
    embedded.format()
    plain = embedded.mount()
    plain.path.chmod(0o777)
    plain.umount()
    mount = embedded.mount("--squash", "all", "--anon-uid", "1234")
    limit(embedded, "--uid", "1234", "--write", "64KiB")
    in_force(mount)
    for name in "ab":
        (mount.path / name).write_bytes(bytes(64 << 10))
    assert mount.numbers()["qos_requests_delayed_total"] > 0
    embedded.end()


def test_q2_streams_that_wait_hold_up_no_other_reader(embedded: Volume) -> None:
    """The kernel has read-ahead under way for each of them, and allows for so much in all."""
    embedded.format()
    first = embedded.mount()
    for number in range(40):
        (first.path / f"slow{number}").write_bytes(bytes(8 * MIB))
    (first.path / "other").write_bytes(os.urandom(32 * MIB))
    first.umount()
    limit(embedded, "--uid", "1234", "--read", "64KiB")
    mount = embedded.mount()
    in_force(mount)
    slow = [
        subprocess.Popen([*USER, "cat", str(mount.path / f"slow{number}")], stdout=subprocess.PIPE)
        for number in range(40)
    ]
    waiting(mount, 30)
    try:
        begun = time.monotonic()
        assert len((mount.path / "other").read_bytes()) == 32 * MIB
        assert time.monotonic() - begun < 30, "each read of the others takes two seconds or more"
    finally:
        for process in slow:
            process.kill()
        for process in slow:
            process.wait(30)
            assert process.stdout is not None
            process.stdout.close()
    embedded.end()


def test_q2_a_mount_ends_while_requests_wait(served: Volume) -> None:
    """SIGTERM: what has begun is stored, what has not is refused, and nothing waits for it."""
    served.format()
    mount = served.mount()
    limit(served, "--path", "/", "--write", "64KiB")
    in_force(mount)
    programs = [
        subprocess.Popen(
            ["dd", "if=/dev/zero", f"of={mount.path}/f{number}", "bs=64k", "count=99"],
            stderr=subprocess.PIPE,
        )
        for number in range(8)
    ]
    waiting(mount, 6)
    os.kill(mount.pid, signal.SIGTERM)
    wait_until("its end", 30.0, mount.has_ended)
    for program in programs:
        _, said = program.communicate(timeout=30)
        assert program.returncode == 1
        assert b"not connected" in said or b"abort" in said, said
    served.end("in use: .*detaching it")


MANY_WRITERS = """
import os, sys, threading

def write(number):
    fd = os.open(f"{sys.argv[1]}/many{number}", os.O_CREAT | os.O_WRONLY)
    for block in range(100):
        os.pwrite(fd, b"x" * (1 << 20), block << 20)

for number in range(120):
    threading.Thread(target=write, args=(number,)).start()
"""


def test_q2_more_waits_than_there_is_memory_for(embedded: Volume) -> None:
    """Copies of requests take 64 MiB; the mount serves others all the same."""
    embedded.format()
    mount = embedded.mount()
    (mount.path / "slow").mkdir()
    (mount.path / "slow").chmod(0o777)
    limit(embedded, "--uid", "1234", "--write", "64KiB")
    in_force(mount)
    script = [*USER, sys.executable, "-c", MANY_WRITERS, str(mount.path / "slow")]
    with subprocess.Popen(script, stderr=subprocess.PIPE) as program:
        try:
            waiting(mount, 60)
            time.sleep(2.0)
            begun = time.monotonic()
            for number in range(20):
                (mount.path / f"file{number}").write_bytes(b"x" * 4096)
                assert (mount.path / f"file{number}").stat().st_size == 4096
            assert time.monotonic() - begun < 20
            assert mount.memory() < 400 * MIB
        finally:
            program.kill()
        assert program.wait(20) < 0
        assert program.stderr is not None
        assert program.stderr.read() == b"", "Python repeats what ends with EINTR"
    embedded.end()


MAPPED = """
import mmap, os, sys
fd = os.open(sys.argv[1], os.O_CREAT | os.O_RDWR)
os.ftruncate(fd, 64 << 20)
with mmap.mmap(fd, 64 << 20) as pages:
    pages[:] = bytes([1]) * (64 << 20)
    pages.flush()
"""


def test_q2_mapped_writes_leave_little_behind(embedded: Volume) -> None:
    """The kernel writes them back in its own time, so they are limited in part."""
    embedded.format()
    mount = embedded.mount()
    limit(embedded, "--path", "/", "--write", "1MiB")
    in_force(mount)
    subprocess.run([sys.executable, "-c", MAPPED, str(mount.path / "map")], check=True, timeout=120)
    begun = time.monotonic()
    (mount.path / "other").write_bytes(b"x" * 4096)
    assert time.monotonic() - begun < 30
    limit(embedded, "--path", "/", "--write", "0")
    assert (mount.path / "map").read_bytes() == bytes([1]) * (64 << 20)
    embedded.end()


def test_q2_a_directory_that_waits_is_there_for_others(embedded: Volume) -> None:
    embedded.format()
    mount = embedded.mount()
    (mount.path / "shared").mkdir()
    (mount.path / "shared").chmod(0o777)
    limit(embedded, "--uid", "1234", "--ops", "10")
    in_force(mount)
    script = "import os, sys\nfor n in range(10_000): os.mkdir(f'{sys.argv[1]}.{n}')"
    slow = [
        subprocess.Popen([*USER, sys.executable, "-c", script, f"{mount.path}/shared/{number}"])
        for number in range(12)
    ]
    try:
        waiting(mount)
        begun = time.monotonic()
        (mount.path / "shared" / "other").mkdir()
        assert time.monotonic() - begun < 20, "each of the twelve may hold the lock for 5 s"
    finally:
        for process in slow:
            process.kill()
        for process in slow:
            process.wait(30)
    embedded.end()
