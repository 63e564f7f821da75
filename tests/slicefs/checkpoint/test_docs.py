"""The examples of `docs/train/` run."""

from __future__ import annotations

import re
import shlex
import zipfile
from pathlib import Path

import pytest

from fsclient.cli.main import run

DOCS = Path(__file__).parents[3] / "docs/train"
DCP = Path(__file__).parent / "data/dcp.zip"


def test_checkpoints(tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / "checkpoints.md").read_text(), re.DOTALL)
    assert len(blocks) == 2
    for number, block in enumerate(blocks):
        exec(block, {"RUN": str(tmp_path / str(number))})


def test_lifecycle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a", "b"):
        (tmp_path / f"runs/{name}/step0").mkdir(parents=True)
    with zipfile.ZipFile(DCP) as archive:
        archive.extractall(tmp_path / "runs/c/step20")
    (tmp_path / "runs/c/wandb/run-20260101_120000-abc").mkdir(parents=True)
    (tmp_path / "runs/c/wandb/run-20260101_120000-abc/log").write_bytes(b"x")
    (tmp_path / "table.json").write_text('{"abc": "team/project/abc"}')
    monkeypatch.chdir(tmp_path)
    commands = re.findall(
        r"^    \$ slicefs (.*)$", (DOCS / "lifecycle.md").read_text(), re.MULTILINE
    )
    assert len(commands) == 9
    for command in commands:
        assert run(shlex.split(command)) == 0, command
    assert not (tmp_path / "runs/a").exists()
    assert (tmp_path / "unsharded/step20-unsharded/model.safetensors").exists()
    assert (tmp_path / "plain/step20/.metadata").exists()
