"""What a mount may use: raised at its start, whatever the shell was limited to, and shown."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from fsclient.client import process_limits
from tests.faults.program import SLICEFS, Volume, needs_mounts, succeed


def may_use_resources() -> bool:
    """Whether this process has CAP_SYS_RESOURCE; capabilities(7)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    mask = next(line.split()[1] for line in lines if line.startswith("CapEff:"))
    return bool(int(mask, 16) >> 24 & 1)


def shell(*settings: str) -> tuple[str, ...]:
    """The program, as a shell with such limits runs it."""
    return "sh", "-c", f'{"; ".join(settings)}; exec "$@"', "sh", SLICEFS


@needs_mounts
@pytest.mark.parametrize("way", ["--supervisor", "--no-supervisor"])
def test_a_mount_is_not_limited_by_the_shell_it_is_started_from(embedded: Volume, way: str) -> None:
    """1,024 open files, as most systems have it, are used up by 60 GiB of staged data.

    A supervisor makes a file in memory that is larger than this shell allows.
    """
    embedded.format()
    mount = embedded.mount("--writeback", way, program=shell("ulimit -Sn 256", "ulimit -Sf 100"))
    lines = Path(f"/proc/{mount.pid}/limits").read_text().splitlines()
    limits = {line[:26].strip(): line[26:].split()[:2] for line in lines}
    files, most = limits["Max open files"]
    assert files == most
    assert int(files) >= 4096
    assert limits["Max file size"][0] == limits["Max file size"][1]
    (mount.path / "file").write_bytes(bytes(1 << 20))  # more than the shell allowed a file to have
    ours = int(Path("/proc/self/oom_score_adj").read_text())
    score = int(Path(f"/proc/{mount.pid}/oom_score_adj").read_text())
    assert score == (process_limits.OOM_SCORE if may_use_resources() and not ours else ours)
    if mount.supervisor:
        assert int(Path(f"/proc/{mount.supervisor}/oom_score_adj").read_text()) == score
    (session,) = embedded.status()["sessions"]
    assert session["limits"]["open_files"] == int(files)
    assert session["limits"]["oom_score_adj"] == score
    text = succeed("status", embedded.meta)
    assert f"may open {files} files" in text
    assert (f"OOM score {score:+d}" in text) is bool(score)


@needs_mounts
def test_too_few_open_files_are_worth_a_word(embedded: Volume) -> None:
    embedded.format()
    embedded.mount(program=("prlimit", "--nofile=512:512", *unprivileged(), SLICEFS))
    embedded.end("this mount may have 512 files open: raise `ulimit -Hn`")


def unprivileged() -> tuple[str, ...]:
    """A command that runs another one without the right to raise limits."""
    return "setpriv", "--bounding-set=-sys_resource", "--inh-caps=-sys_resource"


def test_a_limit_is_raised_as_far_as_it_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """And never lowered."""
    limits = {resource.RLIMIT_NOFILE: (1024, 4096)}
    may_raise = False

    def set_limit(which: int, limit: tuple[int, int]) -> None:
        if limit[1] > limits[which][1] and not may_raise:
            raise ValueError("not allowed to raise maximum limit")
        limits[which] = limit

    monkeypatch.setattr(resource, "getrlimit", limits.__getitem__)
    monkeypatch.setattr(resource, "setrlimit", set_limit)
    process_limits._raise(resource.RLIMIT_NOFILE, 5000)
    assert limits[resource.RLIMIT_NOFILE] == (4096, 4096)
    may_raise = True
    process_limits._raise(resource.RLIMIT_NOFILE, 5000)
    assert limits[resource.RLIMIT_NOFILE] == (5000, 5000)
    process_limits._raise(resource.RLIMIT_NOFILE, 4000)
    assert limits[resource.RLIMIT_NOFILE] == (5000, 5000)
    may_raise = False
    limits[resource.RLIMIT_NOFILE] = (1024, resource.RLIM_INFINITY)
    process_limits._raise(resource.RLIMIT_NOFILE, 5000)
    assert limits[resource.RLIMIT_NOFILE] == (5000, resource.RLIM_INFINITY)
