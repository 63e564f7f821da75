"""`slicefs ckpt pipeline`, logs beside a moved run, and ids that W&B knows."""

from __future__ import annotations

import json
import sys
import zipfile
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from fsmeta.errors import ConfigError
from slicefs.lifecycle.pipeline import parse_plan
from slicefs.lifecycle.run_map import wandb_resolver
from tests.slicefs.checkpoint.test_lifecycle import DCP, ckpt, listing, write
from tests.slicefs.lifecycle.layouts import olmo_legacy, olmo_local, zero_flat

PLAN = """
target = "{base}/target"
runs = [{runs}]
unshard = "latest"
delete_source = true
state = "{base}/state.json"

[names]
"{base}/runs/a" = "entity/project/ipzq9ab9"
"""


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """Two runs with a DCP step, and one without any."""
    for name in ("a", "b"):
        write(tmp_path / "runs" / name / "config.yaml", name.encode())
        write(tmp_path / "runs" / name / "wandb/run-20260101_000000-ipzq9ab9/log", b"l")
        with zipfile.ZipFile(DCP) as archive:
            archive.extractall(tmp_path / "runs" / name / "step20")
    write(tmp_path / "runs/empty/config.yaml")
    (tmp_path / "runs/empty/wandb").mkdir()
    return tmp_path


def plan(base: Path, *names: str) -> Path:
    runs = ", ".join(f'"{base}/runs/{name}"' for name in names)
    path = base / "plan.toml"
    path.write_text(PLAN.format(base=base, runs=runs))
    return path


def test_a_pipeline_is_run_again_where_it_was_interrupted(base: Path) -> None:
    before = listing(base / "runs")
    code, out, _ = ckpt("pipeline", "--dry-run", plan(base, "a", "b", "empty"))
    assert code == 0
    assert listing(base / "runs") == before
    assert "empty: would be removed" in out
    assert "a → entity/project/ipzq9ab9" in out
    write(base / "target/b/config.yaml", b"B")  # of the same size: an upload that went wrong
    metadata = base / "runs/b/step20/.metadata"
    whole = metadata.read_bytes()
    metadata.write_bytes(whole[:100])
    code, out, err = ckpt("pipeline", plan(base, "a", "b", "empty"))
    assert code == 1
    assert "/runs/b: " in err
    assert listing(base / "runs") == [each for each in before if each.startswith("b/")]
    metadata.write_bytes(whole)
    code, out, err = ckpt("pipeline", "-j1", plan(base, "a", "b", "empty"))
    assert (code, err) == (0, "")
    assert "runs/a: is done" in out
    assert listing(base / "runs") == []
    done = json.loads((base / "state.json").read_text())["done"]
    assert sorted(Path(each).name for each in done) == ["a", "b", "empty"]
    for name in ("b", "entity/project/ipzq9ab9"):
        target = base / "target" / name
        assert (target / "config.yaml").read_bytes() in (b"a", b"b")
        assert (target / "step20/.metadata").read_bytes() == whole
        assert (target / "step20-unsharded/model.safetensors").stat().st_size > 0


def test_steps_of_every_kind_are_unsharded(base: Path) -> None:
    runs = base / "runs"
    zero_flat(runs / "deep/global_step10", 2, 1)
    zero_flat(runs / "deep/best", 2, 1)
    write(runs / "deep/latest", b"best\n")
    zero_flat(runs / "hf/checkpoint-5/global_step5", 2, 1)
    write(runs / "hf/checkpoint-5/latest", b"global_step5")
    olmo_local(runs / "olmo/step7", 2)
    write(runs / "olmo/step9/model.pt", b"whole already")
    olmo_legacy(runs / "old/step3", 2)
    wanted = {"deep": "best", "hf": "checkpoint-5", "olmo": "step7", "old": "step3"}
    code, out, err = ckpt("pipeline", "--dry-run", plan(base, *wanted))
    assert (code, err) == (0, "")
    assert all(f"would be unsharded: {step}\n" in out for step in wanted.values())
    code, out, err = ckpt("pipeline", plan(base, *wanted))
    assert (code, err) == (0, "")
    for name, step in wanted.items():
        assert (base / "target" / name / f"{step}-unsharded/model.safetensors").exists()
    assert (base / "target/olmo/step9/model.pt").read_bytes() == b"whole already"
    assert not (runs / "deep").exists()


def test_without_upload_only_shards_of_results_go(base: Path) -> None:
    run = base / "runs/mixed"
    olmo_local(run / "step7", 2)
    for name in ("step9/model.pt", "step7/notes.txt", "best/model.pt", "step5-unsharded/model.pt"):
        write(run / name, b"in no result")
    path = plan(base, "mixed", "a")
    path.write_text(path.read_text().replace('"latest"', '"all"\nupload = false'))
    before = {name: listing(base / "runs" / name) for name in ("mixed", "a")}
    code, out, err = ckpt("pipeline", path)
    assert (code, err) == (0, "")
    assert "shards removed, and nothing else" in out
    gone = set(before["mixed"]) - set(listing(run))
    shards = {f"step7/{kind}/rank{rank}.pt" for kind in ("model", "optim") for rank in (0, 1)}
    assert gone == shards
    assert (base / "target/mixed/step7-unsharded/model.safetensors").exists()
    gone = set(before["a"]) - set(listing(base / "runs/a"))
    assert {name.rpartition("/")[2].rpartition(".")[2] for name in gone} == {"distcp", "metadata"}
    assert ckpt("pipeline", path)[0] == 0


def test_a_result_in_the_source_is_copied_as_it_is(base: Path) -> None:
    write(base / "runs/a/step20-unsharded/model.pt", b"made by the trainer")
    code, _, err = ckpt("pipeline", plan(base, "a"))
    assert (code, err) == (0, "")
    target = base / "target/entity/project/ipzq9ab9"
    assert listing(target / "step20-unsharded") == ["model.pt"]
    assert (target / "step20/.metadata").exists()


@pytest.mark.parametrize("shards", ["best", "."])
def test_a_checkpoint_without_a_number_is_no_reason_to_clean(base: Path, shards: str) -> None:
    run = base / "runs/deep"
    write(run / "config.yaml", b"c")
    write(run / "wandb/log", b"l")
    zero_flat(run / shards, 2, 1)
    if shards != ".":
        write(run / "latest", b"best\n")
    before = listing(run)
    for words in (("clean", run), ("pipeline", plan(base, "deep"))):
        text = ckpt(*words)[1]
        assert "1 of 1 runs removed" not in text
        assert "without a checkpoint" not in text
        if words[0] == "clean":
            assert listing(run) == before


@pytest.mark.parametrize(
    ("names", "why"),
    [
        ({"a": "m", "b": "m/"}, "name them in"),
        ({"a": "m", "b": "./m"}, "name them in"),
        ({"a": "m", "b": "m/step5"}, "name them in"),
        ({"a": "m", "a/": "n"}, "leave one of them out"),
        ({"a": "m", "a/b": "n"}, "leave one of them out"),
    ],
)
def test_runs_that_meet_are_refused(base: Path, names: dict[str, str], why: str) -> None:
    lines = "\n".join(f'"{base}/runs/{run}" = "{name}"' for run, name in names.items())
    runs = ", ".join(f'"{base}/runs/{run}"' for run in names)
    text = f'target = "{base}/t"\nruns = [{runs}]\n[names]\n{lines}'
    with pytest.raises(ConfigError, match=why):
        parse_plan(text, "plan.toml")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("=", "is no TOML"),
        ('target = "t"', "set `target` and `runs`"),
        ('target = "t"\nruns = "r"', "is no list"),
        ('target = "t"\nruns = ["r"]\ncolour = 1', "knows no 'colour'"),
        ('target = "t"\nruns = ["r"]\nunshard = "some"', "use none, latest, all"),
        ('target = "t"\nruns = ["r"]\nupload = false\ndelete_source = true', "delete_source"),
        ('target = "t"\nruns = ["a/r", "b/r"]', "two runs meet"),
    ],
)
def test_a_wrong_plan_is_one_line(text: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why) as caught:
        parse_plan(text, "plan.toml")
    assert "\n" not in str(caught.value)


def test_logs_go_with_a_run(base: Path) -> None:
    for name in ("slurm-1.out", "slurm-2.out"):
        write(base / "logs" / name, name.encode())
    code, out, _ = ckpt("move", "--with-logs", base / "logs/*.out", base / "runs/a", base / "moved")
    assert code == 0
    assert "2 log files" in out
    assert listing(base / "moved/logs") == ["slurm-1.out", "slurm-2.out"]
    assert listing(base / "logs") == []


def test_ids_that_the_tracker_knows(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    class Api:
        def runs(self, place: str, filters: dict[str, Any]) -> list[Any]:
            asked.append((place, filters))
            return [SimpleNamespace(path=["entity", "project", "ipzq9ab9"])]

    module = ModuleType("wandb")
    module.__dict__["Api"] = Api
    monkeypatch.setitem(sys.modules, "wandb", module)
    code, out, _ = ckpt("map", "--wandb", "entity/project", base / "runs/a", base / "runs/b")
    assert code == 0
    assert set(json.loads(out).values()) == {"entity/project/ipzq9ab9"}
    assert len(asked) == 1
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match="pip install wandb"):
        wandb_resolver("entity/project")
    assert ckpt("map", base / "runs/a")[0] != 0
