"""R1: what commands say names the remedy, also of errors that nobody foresaw."""

from __future__ import annotations

from pathlib import Path

import pytest

from fsclient.cli import main
from fsclient.cli.volume import status
from tests.faults.program import slicefs, succeed


@pytest.fixture
def meta(tmp_path: Path) -> str:
    place = f"sqlite://{tmp_path}/meta.db"
    succeed("format", place, "vol", "--bucket", tmp_path / "data")
    return place


def test_fsck_names_gc(meta: str, tmp_path: Path) -> None:
    chunk = tmp_path / "data" / "vol" / "chunks" / "0" / "0" / "7_0_4"
    chunk.parent.mkdir(parents=True)
    chunk.write_bytes(b"left")
    said = succeed("fsck", meta)
    assert f"1 objects belong to nothing: `slicefs gc --delete {meta}` removes them" in said
    assert said.splitlines()[-1] == "clean"


def test_an_unforeseen_error_is_one_line_with_a_remedy(
    meta: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("nobody foresaw this")

    monkeypatch.setattr(status, "report", broken)
    assert main.run(["status", meta]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "RuntimeError: nobody foresaw this: a bug, please report it" in line
    monkeypatch.setenv("SLICEFS_TRACEBACK", "1")
    with pytest.raises(RuntimeError):
        main.run(["status", meta])


def test_help_says_what_is_needed() -> None:
    said = " ".join(succeed("format", "--help").split())
    assert "NAME has 3 to 63 of a-z, 0-9 and `-`" in said
    assert "--bucket PLACE Required, except with --storage mem." in said
    assert slicefs("format", "sqlite:///x.db", "ab", "--bucket", "/tmp/x").code == 1
