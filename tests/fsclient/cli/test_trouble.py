"""V: what a command says when its volume, its store, its disk or its user fails it half-way.

One line that names the thing and the remedy, an exit code that is not 0, and nothing changed. The
commands are those of `test_every_command`'s tables.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fsclient.cli import main
from fsmeta.schema import keys
from tests.faults.program import Done, Volume, needs_mounts, slicefs, succeed
from tests.faults.redis_server import DurableRedis
from tests.fsclient.cli.test_every_command import CODES, ON_VOLUMES, run_typed, say_one_line
from tests.fsclient.cli.trees import snapshot

# A program that stops in the middle: `{place}` is what it calls there, on its call number `{turn}`.
IN_THE_MIDDLE = """
import os, signal, sys, time
from fsclient.cli.options import options
options.META_WAIT_S = 0.5
from fsclient.cli import main
from importlib import import_module
module, _, path = "{place}".partition(":")
*above, name = path.split(".")
owner = import_module(module)
for each in above:
    owner = getattr(owner, each)
inner, calls = getattr(owner, name), [0]
def stop(*args, **words):
    calls[0] += 1
    if calls[0] == {turn}:
        {what}
    return inner(*args, **words)
setattr(owner, name, stop)
sys.exit(main.run(sys.argv[1:]))
"""
CTRL_C = "os.kill(os.getpid(), signal.SIGINT); time.sleep(3)"  # the main thread's turn
WAIT = "print('here', flush=True); sys.stdin.readline()"
LONG = ("fsck", "gc", "scrub", "dump")  # that read the metadata page by page


def program_that(place: str, what: str, turn: int = 1) -> tuple[str, ...]:
    """`slicefs`, which does `what` at call number `turn` of `place`."""
    script = IN_THE_MIDDLE.format(place=place, what=what, turn=turn)
    return sys.executable, "-c", script


def interrupted(
    place: str, words: str, text: str, turn: int = 1
) -> subprocess.CompletedProcess[str]:
    """A command that Ctrl-C reaches at call number `turn` of `place`."""
    return subprocess.run(
        [*program_that(place, CTRL_C, turn), *words.split(), *text.split()],
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, "SLICEFS_TRACEBACK": ""},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        check=False,
    )


def _require_one_line(done: Done, words: str, code: int = 1) -> str:
    assert done.code == CODES.get(words, {}).get(code, code), done
    assert re.fullmatch(r"slicefs: [^\n]+\n", done.err), done
    assert done.out == "", done
    return done.err


@pytest.fixture(scope="module")
def half_made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A directory with a volume that is being formatted: its data are claimed, and no more."""
    base = tmp_path_factory.mktemp("half")
    program = program_that("fsclient.cli.volume.format:volume.create_volume", WAIT)
    meta = f"sqlite://{base}/meta.db"
    words = ("format", meta, "testvol", "--bucket", f"{base}/bucket")
    with subprocess.Popen(
        [*program, *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as run:
        assert run.stdout is not None
        assert run.stdout.readline() == "here\n"
        yield base
        out, _ = run.communicate("\n", timeout=60)
    assert run.returncode == 0
    assert "is ready" in out
    succeed("fsck", meta, "--data")


@pytest.mark.parametrize("words", [*ON_VOLUMES, "format"])
def test_a_volume_that_is_being_formatted(
    words: str,
    half_made: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It is no volume yet, and one of its name is refused where its data are."""
    monkeypatch.setenv("SLICEFS_PASSPHRASE", "old")
    monkeypatch.setenv("SLICEFS_NEW_PASSPHRASE", "new")
    meta = f"sqlite://{half_made}/meta.db"
    text = ON_VOLUMES.get(words, f"{{meta}} testvol --bucket {half_made}/bucket")
    before = snapshot(half_made / "bucket")
    code = run_typed(words, text.format(meta=meta, dir=tmp_path))
    said = say_one_line(code, 1, words, capsys)
    if words == "format":
        assert "bucket/testvol holds data of another volume: choose" in said
    else:
        assert f"there is no volume in {meta}: make one with `slicefs format {meta} NAME" in said
    assert snapshot(half_made / "bucket") == before
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("words", ON_VOLUMES)
def test_a_client_that_is_older_than_the_volume(
    words: str,
    embedded: Volume,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("SLICEFS_PASSPHRASE", "old")
    monkeypatch.setenv("SLICEFS_NEW_PASSPHRASE", "new")
    _make(embedded)
    settings = keys.unpack_map(b"F", b"format", embedded.value(b"F", b"format"))
    future = keys.pack_map({**settings, "version": keys.METADATA_VERSION + 1})
    embedded.set_value(b"F", b"format", future)
    before = snapshot(embedded.base)
    capsys.readouterr()
    code = run_typed(words, ON_VOLUMES[words].format(meta=embedded.meta, dir=tmp_path))
    said = say_one_line(code, 1, words, capsys)
    assert f"metadata version {keys.METADATA_VERSION + 1}, " in said
    assert said.endswith(": upgrade slicefs\n")
    assert snapshot(embedded.base) == before
    assert list(tmp_path.iterdir()) == []


def _make(volume: Volume) -> None:
    """`volume.format()` in this process, which is quicker."""
    words = ("format", volume.meta, "testvol", "--bucket", str(volume.bucket), "--trash-days", "0")
    assert main.run(words) == 0


@needs_mounts
def test_a_client_that_is_newer_than_the_volume(embedded: Volume) -> None:
    """What the first version has written is all that there is, and stays so."""
    embedded.format()
    settings = keys.unpack_map(b"F", b"format", embedded.value(b"F", b"format"))
    first = ("name", "uuid", "storage", "bucket", "block_bytes", "compression")
    old = {name: settings[name] for name in (*first, "capacity", "inodes")}
    embedded.set_value(b"F", b"format", keys.pack_map({**old, "version": 1}))
    mount = embedded.mount()
    (mount.path / "file").write_bytes(b"x" * 5000)
    assert (mount.path / "file").read_bytes() == b"x" * 5000
    mount.umount()
    for words in ("status", "config", "gc", "scrub", "quota list", "restore"):
        assert main.run([*words.split(), embedded.meta]) == 0
    assert keys.unpack_map(b"F", b"format", embedded.value(b"F", b"format"))["version"] == 1
    embedded.end()


@pytest.mark.parametrize("words", LONG)
def test_the_metadata_store_dies_in_the_middle(
    words: str, served: Volume, durable_redis: DurableRedis, tmp_path: Path
) -> None:
    served.format()
    pid = durable_redis.pid
    call = "everything" if words == "dump" else "scan_rows"
    program = program_that(f"fsmeta.store.redis.engine:RedisStore.{call}", f"os.kill({pid}, 9)")
    text = ON_VOLUMES[words].format(meta=served.meta, dir=tmp_path).split()
    done = slicefs(words, *text, program=program)
    said = _require_one_line(done, words)
    assert said.startswith(f"slicefs: {served.meta}: ")
    assert said.endswith(": run the command again when it answers\n")
    assert list(tmp_path.iterdir()) == []
    durable_redis.kill()  # it is dead: this buries it
    durable_redis.start()
    served.end()


@pytest.fixture
def full_disk(base: Path) -> Iterator[Path]:
    """A file system without a free byte."""
    path = base / "full"
    path.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16k", "tmpfs", path], check=True)
    (path / "filler").write_bytes(b"x" * 16384)
    yield path
    subprocess.run(["umount", path], check=True)


@needs_mounts
@pytest.mark.parametrize(
    ("words", "names"),
    [
        ("format sqlite://{full}/x.db testvol --bucket {base}/b", "full/x.db"),
        ("format sqlite://{base}/x.db testvol --bucket {full}/b", "full/b"),
        ("dump {meta} {full}/dump", "full/dump"),
        ("load sqlite://{full}/x.db {base}/dump", "full/x.db"),
        ("fsck --cursor {full}/notes {meta}", "full/notes"),
    ],
)
def test_a_full_disk(words: str, names: str, embedded: Volume, full_disk: Path) -> None:
    """The line says which file found no room; nothing half written stays."""
    _make(embedded)
    base = embedded.base
    assert main.run(["dump", embedded.meta, f"{base}/dump"]) == 0
    before = snapshot(base)
    text = words.format(full=full_disk, base=base, meta=embedded.meta)
    said = _require_one_line(slicefs(*text.split()), words.split()[0])
    assert re.search(r"No space left on device|disk is full|disk I/O error", said), said
    assert names in said
    assert snapshot(base) == before


# What is interrupted, and where: {meta} is a volume, {dir} a directory with `tree` in it
INTERRUPTED = [
    ("destroy", "{meta} testvol --yes", "fsmeta.store.sqlite:SqliteStore.read"),
    ("sync", "{dir}/tree/ {dir}/new/", "os:scandir"),
    ("summary", "{dir}/tree", "os:scandir"),
    ("bench", "{dir} --small-file-count 1 --big-file-size 64KiB", "os:fsync"),
    ("mdtest", "{dir} --depth 0 --files 1", "os:mkdir"),
    ("objbench", "--bucket {dir}/objects --skip-functional-tests", "os:rename"),
    ("load", "sqlite://{dir}/new.db {dir}/dump", "fsmeta.store.sqlite:SqliteStore.commit"),
    ("export", "{dir}/tree {dir}/new", "os:replace"),
    ("ckpt verify", "{dir}/tree", "os:scandir"),
]


@pytest.mark.parametrize(("words", "text", "place"), INTERRUPTED)
def test_ctrl_c(words: str, text: str, place: str, embedded: Volume) -> None:
    """One line and its exit code; nothing that was there before is lost, nothing begun stays."""
    _make(embedded)
    base = embedded.base
    assert main.run(["dump", embedded.meta, f"{base}/dump"]) == 0
    (base / "tree" / "step1").mkdir(parents=True)
    (base / "tree" / "file").write_bytes(b"x" * 5000)
    before = snapshot(base)
    done = interrupted(place, words, text.format(meta=embedded.meta, dir=base))
    assert done.returncode == CODES.get(words, {}).get(130, 130), done
    assert re.fullmatch(r"\nslicefs: interrupted[^\n]*\n", done.stderr), done
    left = snapshot(base)
    left.pop(f"{base}/new", None)  # a directory that is empty
    assert {path: what for path, what in left.items() if "objects" not in path} == before
    embedded.end()


@needs_mounts
def test_ctrl_c_on_a_mount(embedded: Volume) -> None:
    """The mount goes on; what was interrupted is completed by the same command."""
    embedded.format()
    mount = embedded.mount()
    tree = mount.path / "tree"
    (tree / "deep").mkdir(parents=True)
    for path in (tree / "one", tree / "deep" / "two"):
        path.write_bytes(b"x" * 5000)
    for words, text, place in (
        ("flush", f"{tree}/one", "os:getxattr"),
        ("warmup", f"--memory {tree}", "os:getxattr"),
        ("compact", f"{tree}", "os:scandir"),
        ("clone", f"{tree} {mount.path}/copy", "os:setxattr"),
        ("rmr", f"{tree}", "os:unlink"),
    ):
        done = interrupted(place, words, text)
        assert done.returncode == 130, (words, done)
        assert re.fullmatch(r"\nslicefs: interrupted[^\n]*\n", done.stderr), (words, done)
        assert mount.numbers()["read_only"] == 0
        if words != "clone":  # the mount may have done all of it by then
            succeed(words, *text.split())
    assert not tree.exists()
    embedded.end()
