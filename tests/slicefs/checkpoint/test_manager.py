"""The manager: whole steps or none, verified reading, retention, two savers, kills."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from slicefs.checkpoint.files import Checkpoint
from slicefs.checkpoint.layout import MANIFEST
from slicefs.checkpoint.manager import StepManager
from slicefs.checkpoint.manifest import CHUNK_BYTES
from tests.conftest import LogWatch
from tests.posix.volumes import Volume, run as run_slicefs


def save(manager: StepManager, step: int, data: bytes = b"weights") -> None:
    with manager.save(step) as saving:
        saving.put("model.bin", data)


def names(path: Path) -> list[str]:
    return sorted(os.listdir(path))


def test_a_step_is_published_whole(tmp_path: Path) -> None:
    manager = StepManager(str(tmp_path / "run"))
    assert manager.latest() is None
    with manager.save(5) as saving:
        saving.put("a/model.bin", b"abc")
        assert manager.latest() is None
    step = manager.latest(digest=True)
    assert step is not None
    assert (step.number, step.names, step.read("a/model.bin")) == (5, ["a/model.bin"], b"abc")
    assert str(step) == f"file://{tmp_path}/run/step5"
    assert (tmp_path / "run/.slicefs-latest").read_text() == "step5\n"
    assert names(tmp_path / "run/step5") == [MANIFEST, "a"]
    with pytest.raises(FileNotFoundError):
        step.open("other")


def test_an_exception_leaves_nothing(tmp_path: Path) -> None:
    manager = StepManager(str(tmp_path))
    save(manager, 1)
    with contextlib.suppress(RuntimeError), manager.save(2) as saving:
        saving.put("model.bin", b"x")
        raise RuntimeError
    assert names(tmp_path) == [".slicefs-latest", "step1"]


def test_a_step_that_is_there_is_refused(tmp_path: Path) -> None:
    manager = StepManager(str(tmp_path))
    save(manager, 1)
    with pytest.raises(FileExistsError, match="remove it"):
        save(manager, 1, b"other")
    (tmp_path / "step2").mkdir()
    with pytest.raises(FileExistsError):
        save(manager, 2)
    manager.remove(1)
    save(manager, 1, b"other")
    assert manager.step(1).read("model.bin") == b"other"


def test_two_savers_of_one_step_do_not_mix(tmp_path: Path) -> None:
    one, two = StepManager(str(tmp_path)), StepManager(str(tmp_path))
    first, second = one.save(3), two.save(3)
    for saving, data in ((first, b"first"), (second, b"second")):
        for name in ("a", "b"):
            saving.put(name, data)
    step = second.publish()
    assert step.read("a") == step.read("b") == b"second"
    with pytest.raises(FileExistsError), first:
        pass
    assert one.latest(digest=True) is not None
    assert names(tmp_path) == [".slicefs-latest", "step3"]


def test_ranks_save_together(tmp_path: Path) -> None:
    leader, follower = StepManager(str(tmp_path)), StepManager(str(tmp_path))
    with leader.save(8) as saving:
        saving.put("rank0", b"0")
        with follower.join(8, saving.token) as part:
            part.put("rank1", b"1")
        saving.add(part.entries)
    step = leader.latest(digest=True)
    assert step is not None
    assert step.names == ["rank0", "rank1"]


def test_a_file_that_is_not_there_is_not_published(tmp_path: Path) -> None:
    manager = StepManager(str(tmp_path))
    saving = manager.save(1)
    saving.put("model.bin", b"x")
    os.unlink(tmp_path / saving.folder / "model.bin")
    with pytest.raises(OSError, match=r"model\.bin: is missing"), saving:
        pass
    assert names(tmp_path) == []


def test_damaged_steps_are_passed_over(tmp_path: Path, log_watch: LogWatch) -> None:
    log_watch.expect("step . is skipped")
    manager = StepManager(str(tmp_path), keep_last=None)
    for step in range(1, 6):
        save(manager, step, bytes(1000))
    os.truncate(tmp_path / "step5/model.bin", 999)
    os.unlink(tmp_path / "step4/model.bin")
    (tmp_path / "step3" / MANIFEST).write_bytes(b"{")
    data = bytearray(1000)
    data[500] = 1
    (tmp_path / "step2/model.bin").write_bytes(data)
    latest = manager.latest()
    assert latest is not None
    assert latest.number == 2
    with pytest.raises(OSError, match="not what was saved"):
        latest.read("model.bin")
    verified = manager.latest(digest=True)
    assert verified is not None
    assert verified.number == 1
    assert manager.steps() == [1, 2]


def test_retention_leaves_what_is_not_its_own(tmp_path: Path, log_watch: LogWatch) -> None:
    log_watch.expect("step . is skipped")
    other = StepManager(str(tmp_path), run="other")
    save(other, 1)
    (tmp_path / "step2").mkdir()
    (tmp_path / "step2/theirs").write_bytes(b"x")
    manager = StepManager(str(tmp_path), keep_last=2, keep_every=5)
    for step in range(3, 9):
        save(manager, step)
    assert manager.steps() == [1, 5, 7, 8]
    assert (tmp_path / "step2/theirs").exists()
    os.unlink(tmp_path / "step8/model.bin")
    save(manager, 9)
    assert manager.steps() == [1, 5, 7, 9]  # the damaged one is left for its owner to look at


def test_what_a_killed_save_leaves_goes_with_the_next(tmp_path: Path) -> None:
    program = (
        "import os, sys\n"
        "from slicefs.checkpoint.manager import StepManager\n"
        "saving = StepManager(sys.argv[1]).save(1)\n"
        "saving.put('a', b'x')\n"
        "os._exit(0)\n"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=True)
    [left] = [name for name in names(tmp_path) if name.startswith(".saving")]
    manager = StepManager(str(tmp_path))
    running = manager.save(2)
    running.put("a", b"y")
    assert left not in names(tmp_path)
    save(manager, 3)  # a save that runs is not abandoned
    running.publish()
    assert manager.steps() == [2, 3]


def test_big_files_are_read_by_ranges(tmp_path: Path) -> None:
    data = os.urandom(1 << 20) * 21 + b"tail"
    manager = StepManager(str(tmp_path))
    save(manager, 1, data)
    with manager.step(1).open("model.bin") as file:
        assert file.read() == data
        assert file.seek(-4, os.SEEK_END) == len(data) - 4
        assert file.read() == b"tail"
        file.seek(CHUNK_BYTES - 2)
        room = bytearray(10)
        assert file.readinto(room) == 10
        assert room == data[CHUNK_BYTES - 2 : CHUNK_BYTES + 8]
        assert file.seek(len(data) + 5) == len(data) + 5
        assert file.read(1) == b""


def test_files_for_torch_are_whole_or_not_there(tmp_path: Path) -> None:
    checkpoint = Checkpoint(f"file://{tmp_path}")
    with checkpoint.writer("a/state.pt") as file:
        pickle.dump({"step": 1}, file)
    with contextlib.suppress(RuntimeError), checkpoint.writer("a/state.pt") as file:
        file.write(b"half")
        raise RuntimeError
    assert names(tmp_path / "a") == ["state.pt"]
    with checkpoint.reader("a/state.pt") as stream:
        assert stream.seekable()
        assert pickle.load(stream) == {"step": 1}


def test_twenty_kills(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "tests.slicefs.checkpoint.killed_saver", str(tmp_path / "run")]
    done = subprocess.run([*words, "1", "20"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(2, 10))
def test_many_kills(tmp_path: Path, seed: int) -> None:
    words = [sys.executable, "-m", "tests.slicefs.checkpoint.killed_saver", str(tmp_path / "run")]
    done = subprocess.run([*words, str(seed), "100"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("kills", [4, pytest.param(60, marks=pytest.mark.soak)])
def test_kills_on_a_volume(tmp_path: Path, redis_url: str, kills: int) -> None:
    volume = Volume(tmp_path / "vol", redis_url)
    words = [sys.executable, "-m", "tests.slicefs.checkpoint.killed_saver", f"{redis_url}#run"]
    done = subprocess.run(
        [*words, "3", str(kills)], capture_output=True, text=True, check=False, timeout=900
    )
    assert done.returncode == 0, done.stdout + done.stderr
    # what the killed ones have uploaded and not committed is gc's
    report = json.loads(run_slicefs("fsck", volume.meta, "--json"))
    assert not report["problems"], report
