"""Which mounts have a supervisor: what is asked for, and what AUTO makes of the rest."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Final

import click
import pytest

from fsclient.cli.mount import supervisor_options
from fsclient.cli.mount.mount import mount
from fsclient.cli.mount.supervisor_options import AUTO, can_survive, wants_supervisor
from fsclient.fuse.mount.mount_options import with_atime
from fsclient.survival.channel import CLIENT_NAME, RUNTIME_DIR_ENV, SUPERVISOR_NAME
from fsmeta.errors import ConfigError
from tests.faults.program import (
    SLICEFS,
    Mount,
    Volume,
    is_mounted,
    needs_mounts,
    slicefs,
    wait_until,
)
from tests.faults.test_process_limits import unprivileged
from tests.fsclient.survival.supervised import DEATH_S

AUTO_PROGRAM: Final = f"""
from fsclient.cli.main import main
from fsclient.cli.mount import supervisor_options
supervisor_options.DEFAULT = {AUTO!r}
main()
"""
FAILS_PROGRAM: Final = """
from fsclient.cli.main import main
from fsclient.fuse.session.session import Session
from fsmeta.errors import ConfigError
def agree(self, kept):
    raise ConfigError("the kernel agrees on nothing")
Session.agree = agree
main()
"""
NO_SUPERVISOR_PROGRAM: Final = """
from fsclient.cli.main import main
from fsclient.survival import launch
launch._PROGRAM = {program!r}
launch.sys.executable = {python!r}
main()
"""
needs_supervisor: Final = pytest.mark.skipif(
    not can_survive(os.uname().release), reason="needs Linux 6.16"
)


@pytest.fixture
def runtime_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a supervisor would listen."""
    place = tmp_path / "run"
    place.mkdir(mode=0o700)
    monkeypatch.setenv(RUNTIME_DIR_ENV, str(place))
    return place


@pytest.fixture
def auto(monkeypatch: pytest.MonkeyPatch, runtime_dir: Path) -> Path:
    """AUTO is the default, on a kernel that can."""
    monkeypatch.setattr(supervisor_options, "DEFAULT", AUTO)
    monkeypatch.setattr(supervisor_options, "LINUX_LEAST", (5, 0))
    return runtime_dir


def name_of(pid: int) -> str:
    """What ps(1) calls a process."""
    return Path(f"/proc/{pid}/comm").read_text().rstrip()


def wanted(words: str, meta: str = "redis://host/1") -> bool:
    """Whether `slicefs mount WORDS` has a supervisor."""
    with mount.make_context("mount", [*words.split(), meta, "/mnt"]) as ctx:
        kernel_words = ["ro"] if ctx.params["read_only"] or ctx.params["snapshot"] else []
        return wants_supervisor(ctx, ctx.params, {}, with_atime(kernel_words, None))


@pytest.mark.usefixtures("runtime_dir")
@pytest.mark.parametrize(
    ("words", "expected"), [("--supervisor", True), ("--no-supervisor", False)]
)
def test_asked_for(words: str, expected: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is asked for holds, whatever the default is."""
    for default in (supervisor_options.OFF, AUTO):
        monkeypatch.setattr(supervisor_options, "DEFAULT", default)
        assert wanted(words) is expected


@pytest.mark.usefixtures("auto")
@pytest.mark.parametrize(
    ("words", "meta", "expected"),
    [
        ("", "redis://host/1", True),
        ("--writeback", "redis://host/1", True),
        ("--hang-after 9", "redis://host/1", True),
        ("--take-over", "redis://host/1", True),
        ("--transport pyfuse3", "redis://host/1", False),
        ("--encrypt-passphrase", "redis://host/1", False),
        ("--read-only", "redis://host/1", False),
        ("--read-only", "sqlite:///x.db", True),
        ("--read-only", "tikv://host/x", True),
        ("--read-only --open-requests always", "redis://host/1", True),
        ("--snapshot one", "redis://host/1", True),
    ],
)
def test_what_auto_takes(words: str, meta: str, expected: bool) -> None:
    assert wanted(words, meta) is expected


def test_auto_needs_a_private_directory(auto: Path) -> None:
    assert wanted("")
    auto.chmod(0o755)
    assert not wanted("")


@pytest.mark.usefixtures("auto")
def test_what_needs_a_supervisor() -> None:
    """Where AUTO has none, what needs one is refused, as with `--no-supervisor`."""
    for without in ("--no-supervisor", "--read-only"):
        with pytest.raises(
            ConfigError, match="--hang-after is for a mount with a supervisor: leave it out"
        ):
            wanted(f"{without} --hang-after 9")
        with pytest.raises(click.UsageError, match="--take-over needs --supervisor"):
            wanted(f"{without} --take-over")


@pytest.mark.parametrize(
    ("release", "expected"),
    [
        ("6.16.0", True),
        ("6.16-rc1", True),
        ("7.0.3-cloud", True),
        ("6.15.9", False),
        ("5.10.0-30-amd64", False),
        ("odd", False),
    ],
)
def test_kernels(release: str, expected: bool) -> None:
    assert can_survive(release) is expected


@needs_mounts
@needs_supervisor
def test_a_mount_by_auto(embedded: Volume, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mount that asks for nothing goes on under the next client; `-o no-supervisor` has none."""
    monkeypatch.setattr(Volume, "supervisor", ())
    embedded.format()
    program = (sys.executable, "-c", AUTO_PROGRAM)
    plain = embedded.mount("-o", "no-supervisor", program=program, name="plain")
    assert "supervisor" not in json.loads((plain.path / ".config").read_text())["mount"]
    survives = embedded.mount(program=program)

    def says() -> dict[str, int]:
        found: dict[str, int] = json.loads((survives.path / ".config").read_text())["mount"]
        return found

    os.kill(survives.pid, signal.SIGKILL)
    before = survives.pid
    wait_until("the next client", DEATH_S, lambda: says()["pid"] != before)
    survives.pid = says()["pid"]
    assert name_of(survives.pid) == CLIENT_NAME
    assert name_of(survives.supervisor) == SUPERVISOR_NAME
    embedded.end("slicefs.supervisor process .* ended with signal 9")


@needs_mounts
@needs_supervisor
def test_the_arena_needs_room_in_a_file(embedded: Volume) -> None:
    """Where a user may not raise `ulimit -f`, AUTO has none, and one that is asked for says why."""
    embedded.format()
    few = ("prlimit", f"--fsize={100 << 20}:{100 << 20}", *unprivileged())
    path = embedded.base / "mnt"
    path.mkdir()
    words = ("mount", "-d", "--log", embedded.log, "--supervisor", embedded.meta, path)
    done = slicefs(*words, program=(*few, SLICEFS))
    assert done.code == 1
    assert "a file of 512.0 MiB in memory is not allowed: raise `ulimit -Hf`" in done.err
    mount = embedded.mount(program=(*few, sys.executable, "-c", AUTO_PROGRAM))
    assert not mount.supervisor
    embedded.end()


@needs_mounts
@needs_supervisor
def test_the_first_client_is_forked(embedded: Volume) -> None:
    """It goes on with what the command has imported; the supervisor has imported nothing of it."""
    embedded.format()
    mount = embedded.mount("--supervisor")
    status = Path(f"/proc/{mount.pid}/status").read_text()
    assert f"PPid:\t{mount.supervisor}\n" in status
    words = Path(f"/proc/{mount.pid}/cmdline").read_bytes().split(b"\0")
    assert os.fsencode(SLICEFS) in words, "it is the command itself"
    assert Mount(mount.path, mount.supervisor).memory() < mount.memory() / 2
    embedded.end()


@needs_mounts
@needs_supervisor
@pytest.mark.parametrize("way", ["background", "foreground"])
def test_a_first_client_that_fails_when_it_has_mounted(embedded: Volume, way: str) -> None:
    """The mount fails as one without a supervisor: at once, with one line, and nothing is left."""
    embedded.format()
    path = embedded.base / "mnt"
    path.mkdir()
    words = ("mount", *(("-d",) if way == "background" else ()), "--log", embedded.log)
    program = (sys.executable, "-c", FAILS_PROGRAM)
    for option in ("--no-supervisor", "--supervisor"):
        done = slicefs(*words, option, embedded.meta, path, program=program)
        assert (done.code, done.err) == (1, "slicefs: the kernel agrees on nothing\n")
        assert not is_mounted(path)
    assert len(embedded.log_lines()) == (2 if way == "background" else 0)
    embedded.end("the mount has failed: the kernel agrees on nothing")


@needs_mounts
@needs_supervisor
@pytest.mark.parametrize(
    ("program", "python", "said"),
    [
        (("-c", "exit(1)"), sys.executable, "the supervisor has not started: mount again"),
        ((), "/no/python", "No such file or directory"),
    ],
)
def test_a_supervisor_that_does_not_start(
    embedded: Volume, program: tuple[str, ...], python: str, said: str
) -> None:
    """The client that was forked mounts nothing, and ends."""
    embedded.format()
    path = embedded.base / "mnt"
    path.mkdir()
    text = NO_SUPERVISOR_PROGRAM.format(program=program, python=python)
    words = ("mount", "-d", "--log", embedded.log, "--supervisor", embedded.meta, path)
    done = slicefs(*words, program=(sys.executable, "-c", text))
    assert done.code == 1
    assert said in done.err
    assert not is_mounted(path)
    embedded.end(f"the mount has failed: .*{said}")
