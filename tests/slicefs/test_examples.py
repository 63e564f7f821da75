"""Examples that need no torch: LMDB on a mount; the jobs of SkyPilot and Slurm, played by stubs."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.posix.volumes import Volume, can_mount
from tests.support.examples import EXAMPLES, ROOT, RUN_S, run_example

needs_mount = pytest.mark.skipif(not can_mount(), reason="mounting takes root and /dev/fuse")
SKYPILOT = EXAMPLES / "skypilot/train.yaml"
SLURM = EXAMPLES / "slurm/train.sbatch"
# what a test has instead of a cluster; all arguments of torchrun lie in the volume afterwards
STUBS = {
    "srun": 'while [[ $1 == --* ]]; do shift; done; exec "$@"',
    "scontrol": "echo localhost",
    "torchrun": 'mkdir "$MOUNT/run"; echo "$@" > "$MOUNT/run/words"',
    "slicefs": f'exec {sys.executable} -m fsclient.cli.main "$@"',
}


@needs_mount
def test_lmdb_on_a_mount(volume: Volume) -> None:
    path = volume.mount() / "set.lmdb"
    assert run_example("lmdb_dataset.py", path, "--make", 2000, "--reads", 300) == (
        "1000 samples written\n2000 samples written\n300 of 2000 samples read\n"
    )
    assert run_example("lmdb_dataset.py", path, "--reads", 5) == "5 of 2000 samples read\n"


def job(script: str, volume: Volume, folder: Path) -> None:
    """Run a job's script with the commands of a cluster played; the mount is gone afterwards."""
    stubs = folder / "bin"
    stubs.mkdir()
    for name, text in STUBS.items():
        (stubs / name).write_text(f"#!/bin/bash\n{text}\n")
        (stubs / name).chmod(stat.S_IRWXU)
    places = {"MOUNT": str(folder / "mnt"), "STAGING": str(folder / "staging")}
    environment = {
        **os.environ,
        **places,
        "PATH": f"{stubs}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "SLICEFS_META": volume.meta,
        "HOME": str(folder),
    }
    done = subprocess.run(
        ["bash", "-c", script], env=environment, cwd=ROOT, capture_output=True, text=True,
        timeout=RUN_S, check=False,
    )  # fmt: skip
    try:
        assert done.returncode == 0, done.stderr + done.stdout
        assert not (folder / "mnt").is_mount()
    finally:
        if (folder / "mnt").is_mount():
            subprocess.run(["umount", "-l", folder / "mnt"], check=False)


@needs_mount
def test_a_job_of_skypilot(volume: Volume, tmp_path: Path) -> None:
    shown = yaml.safe_load(SKYPILOT.read_text())
    assert set(shown) == {"name", "resources", "num_nodes", "envs", "setup", "run"}
    assert set(shown["envs"]) == {"SLICEFS_META", "MOUNT", "STAGING"}
    subprocess.run(["bash", "-n", "-c", shown["setup"]], check=True)
    job(shown["run"], volume, tmp_path)
    words = (volume.mount() / "run/words").read_text().split()
    assert words[2:] == [
        "examples/gpt_checkpoints.py", f"{tmp_path}/mnt/run", "--steps", "1000",
    ]  # fmt: skip


@needs_mount
def test_a_job_of_slurm(volume: Volume, tmp_path: Path) -> None:
    text = SLURM.read_text()
    lines = text.splitlines()
    options = [line for line in lines if line.startswith("#SBATCH")]
    assert lines[1 : 1 + len(options)] == options  # sbatch stops reading at the first command
    job(text, volume, tmp_path)
    words = (volume.mount() / "run/words").read_text().split()
    assert words[:2] == ["--nnodes", "1"]
    assert "localhost:29500" in words
    assert words[-4:-2] == ["examples/gpt_checkpoints.py", f"{tmp_path}/mnt/run"]


def test_the_page_names_each_example() -> None:
    page = (ROOT / "docs/train/examples.md").read_text()
    names = [
        path.relative_to(EXAMPLES).as_posix()
        for path in EXAMPLES.rglob("*.*")
        if "__pycache__" not in path.parts
    ]
    assert len(names) == 7
    assert [name for name in names if f"`{name}`" not in page] == []
