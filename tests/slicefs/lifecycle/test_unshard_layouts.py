"""`slicefs ckpt unshard` of DeepSpeed's and OLMo's shards, written here as torch writes them."""

from __future__ import annotations

import io
import json
import os
import struct
import zipfile
from collections.abc import Mapping
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest

from fsclient.cli.main import run
from fsmeta.errors import ConfigError
from slicefs.checkpoint.safetensors import decode_header, header_length, header_metadata
from slicefs.lifecycle.shards.torch_file import StandIn, StoredTensor, read_torch_file
from slicefs.stores.opening import open_tree
from tests.slicefs.lifecycle.layouts import (
    olmo_legacy,
    olmo_local,
    olmo_whole,
    zero_flat,
    zero_three,
    zero_whole,
)
from tests.slicefs.lifecycle.torch_files import FakeTensor, Made, torch_save

Whole = Mapping[str, tuple[tuple[int, ...], list[float]]]
MODEL_FILE = "mp_rank_00_model_states.pt"


def unshard(*words: str | Path) -> tuple[int, str, str]:
    """Exit code, output and errors."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = run(["ckpt", "unshard", *map(str, words)])
    return code, out.getvalue(), err.getvalue()


def listing(path: Path) -> list[str]:
    return sorted(str(each.relative_to(path)) for each in path.rglob("*") if each.is_file())


def tensors(path: Path) -> Whole:
    """The tensors of a file, as numbers."""
    data = path.read_bytes()
    found = decode_header(data[: header_length(data, "f")], len(data), "f")
    codes = {"F32": "f", "F64": "d", "I64": "q"}
    return {
        name: (
            each.spec.shape,
            list(
                struct.unpack(
                    f"<{(each.end - each.begin) // {'f': 4}.get(codes[each.spec.dtype], 8)}"
                    f"{codes[each.spec.dtype]}",
                    data[each.begin : each.end],
                )
            ),
        )
        for name, each in found.items()
    }


def negative(whole: Whole, key: str = "exp_avg") -> Whole:
    return {f"optim.state.{n}.{key}": (s, [-x for x in v]) for n, (s, v) in whole.items()}


TRAINED = ("embed.weight", "norm.weight", "head.bias", "scale")


def step_of(kind: str, folder: Path, ranks: int) -> Path:
    """A step of a kind, in a directory with the name of one."""
    step = folder / "run/step70"
    if kind == "stage1":
        zero_flat(step, ranks, 1)
    elif kind == "stage2":
        zero_flat(step, ranks, 2)
    elif kind == "stage3":
        zero_three(step, ranks)
    elif kind == "stage3-groups":
        zero_three(step, ranks, sub_groups=3)
    elif kind == "legacy":
        olmo_legacy(step, ranks)
    else:
        olmo_local(step, ranks, old=kind == "local-old")
    return step


def whole_of(kind: str, ranks: int) -> tuple[Whole, Whole]:
    """The weights, and what the optimizer has beside steps."""
    if kind.startswith("stage"):
        whole = zero_whole()
        return whole, negative({name: whole[name] for name in TRAINED})
    if kind != "legacy":
        return olmo_whole(), negative(olmo_whole())
    columns = [float(each) for each in range(2 * ranks)]
    square: Whole = {
        "columns": ((2, 2 * ranks), columns + [100 + each for each in columns]),
        "plain": ((2, 2), [1.0, 2.0, 3.0, 4.0]),
    }
    first = olmo_whole()["wte.weight"]
    return {**olmo_whole(), **square}, {"optim.state.wte.weight.exp_avg": first}


KINDS = ["stage1", "stage2", "stage3", "stage3-groups", "local", "local-old", "legacy"]


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("kind", KINDS)
def test_each_tensor_is_whole(tmp_path: Path, kind: str, ranks: int) -> None:
    step, out = step_of(kind, tmp_path, ranks), tmp_path / "out"
    code, said, err = unshard(step, out)
    assert (code, err) == (0, "")
    weights, state = whole_of(kind, ranks)
    assert tensors(out / "model.safetensors") == weights
    found = tensors(out / "optim.safetensors")
    assert {name: v for name, v in found.items() if not name.endswith(".step")} == state
    steps = {tuple(v[1]) for name, v in found.items() if name.endswith(".step")}
    assert steps == {(7,)}
    assert "is there already" not in said
    assert "is there already" in unshard(step, out)[1]
    assert run(["ckpt", "verify", "--digest", str(out)]) == 0


@pytest.mark.parametrize("kind", KINDS)
def test_shards_go_once_the_result_is_read(tmp_path: Path, kind: str) -> None:
    step, out = step_of(kind, tmp_path, 3), tmp_path / "out"
    assert unshard("--delete-sharded", "--model-only", step, out)[0] == 1
    code, _, err = unshard("--delete-sharded", step, out)
    assert (code, err) == (0, "")
    left = listing(step)
    assert not [name for name in left if "optim" in name or name.startswith(("model/", "rank"))]
    assert left, "what is no shard stays"
    assert tensors(out / "model.safetensors") == whole_of(kind, 3)[0]


@pytest.mark.parametrize("kind", ["stage2", "stage3", "local", "legacy"])
def test_an_interrupted_removal_goes_on(tmp_path: Path, kind: str) -> None:
    step, out = step_of(kind, tmp_path, 3), tmp_path / "out"
    assert unshard(step, out)[0] == 0
    others = step_of(kind, tmp_path / "b", 3)
    for folder in (step, others):
        for name in listing(folder):
            if "rank2" in name or ("rank_2" in name and "optim" in name):
                (folder / name).unlink()
    [last] = [n for n in listing(others) if n.endswith(("_0_mp_rank_00_optim_states.pt",))][:1] or [
        n for n in listing(others) if n in ("model/rank0.pt", "rank0.pt")
    ]
    torch_save({"other": FakeTensor([1.0])}, others / last)
    before = listing(others)
    assert unshard("--delete-sharded", others, out)[0] == 1, "the result is of other shards"
    assert listing(others) == before
    code, _, err = unshard("--delete-sharded", step, out)
    assert (code, err) == (0, "")
    assert not [n for n in listing(step) if n.endswith("optim_states.pt") or n == "rank0.pt"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_missing_rank_is_refused(tmp_path: Path, kind: str) -> None:
    for rank in (0, 1, 2):
        step, out = step_of(kind, tmp_path / f"{rank}", 3), tmp_path / f"out{rank}"
        gone = [n for n in listing(step) if f"rank{rank}" in n or f"rank_{rank}_" in n]
        for name in gone:
            if not name.startswith("train/"):
                (step / name).unlink()
        before = listing(step)
        code, _, err = unshard("--delete-sharded", step, out)
        assert code == 1
        assert err.count("\n") == 1
        assert str(rank) in err
        assert listing(step) == before
        assert not out.exists()


@pytest.mark.parametrize("kind", ["stage1", "stage3", "local", "legacy"])
def test_each_cut_file_is_refused(tmp_path: Path, kind: str) -> None:
    step = step_of(kind, tmp_path, 2)
    for name in listing(step):
        if not name.endswith(".pt") or name.startswith("train/"):
            continue
        if kind == "stage3" and name.endswith("rank_1_mp_rank_00_model_states.pt"):
            continue
        data = (step / name).read_bytes()
        for keep in (0, 10, len(data) // 2, len(data) - 1):
            (step / name).write_bytes(data[:keep])
            code, _, err = unshard("--delete-sharded", step, tmp_path / "out")
            assert (code, err.count("\n")) == (1, 1), (name, keep)
            assert name.rpartition("/")[2] in err
            assert not (tmp_path / "out").exists()
        (step / name).write_bytes(data)
    assert unshard(step, tmp_path / "out")[0] == 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_flipped_byte_leaves_nothing(tmp_path: Path, kind: str) -> None:
    step, out = step_of(kind, tmp_path, 2), tmp_path / "out"
    [path] = [step / n for n in listing(step) if n.endswith(("1_mp_rank_00_optim_states.pt",))] or [
        step / n for n in listing(step) if n in ("model/rank1.pt", "rank1.pt")
    ]
    with zipfile.ZipFile(path) as archive:
        largest = max(
            (each for each in archive.infolist() if "/data/" in each.filename),
            key=lambda each: each.file_size,
        )
        at = largest.header_offset + 30 + len(largest.filename) + largest.file_size - 1
    data = bytearray(path.read_bytes())
    data[at] ^= 0x40
    path.write_bytes(data)
    before = listing(step)
    code, _, err = unshard("--delete-sharded", step, out)
    assert (code, err.count("\n")) == (1, 1)
    assert path.name in err
    assert "not what was saved" in err
    assert listing(step) == before
    assert not listing(out)


def test_shapes_that_do_not_add_up(tmp_path: Path) -> None:
    from tests.slicefs.lifecycle.layouts import GROUPS, numbers

    longer = [{**GROUPS[0], "norm.weight": numbers(0, 70)}, GROUPS[1]]
    for kind, make in (("a", zero_flat), ("b", zero_flat)):
        step = tmp_path / kind / "step7"
        make(step, 2, 2)
        other = tmp_path / "other/step7"
        zero_flat(other, 2, 2, longer if kind == "a" else GROUPS[:1])
        os.replace(other / MODEL_FILE, step / MODEL_FILE)
        code, _, err = unshard(step, tmp_path / "out")
        assert (code, err.count("\n")) == (1, 1)
        assert "keep the files of one save" in err
        assert not (tmp_path / "out").exists()


def test_what_only_deepspeed_can_do_is_refused(tmp_path: Path) -> None:
    step = step_of("stage2", tmp_path, 2)
    for extra, why in (
        ("zero_pp_rank_0_mp_rank_01_optim_states.pt", "tensor parallelism"),
        ("layer_00-model_states.pt", "pipeline"),
        ("bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt", "stands beside"),
        ("zero_pp_rank_1_mp_rank_00_model_states.pt", "another stage"),
        ("zero_pp_rank_2_mp_rank_00_optim_states.pt", "too many"),
    ):
        (step / extra).write_bytes(b"x")
        code, _, err = unshard(step, tmp_path / "out")
        assert (code, err.count("\n")) == (1, 1)
        assert why in err
        (step / extra).unlink()
    assert not (tmp_path / "out").exists()


def test_mixed_and_unknown_layouts(tmp_path: Path) -> None:
    step = step_of("local", tmp_path, 2)
    olmo_legacy(step, 2)
    code, _, err = unshard(step, tmp_path / "out")
    assert (code, err.count("\n")) == (1, 1)
    assert "olmo-legacy and olmo-local" in err
    assert unshard("--type", "dcp", step, tmp_path / "out")[0] == 1
    assert unshard("--type", "olmo-local", step, tmp_path / "out")[0] == 0
    assert tensors(tmp_path / "out/model.safetensors") == olmo_whole()
    (tmp_path / "empty/step1").mkdir(parents=True)
    (tmp_path / "empty/step1/model.bin").write_bytes(b"x")
    code, _, err = unshard(tmp_path / "empty/step1", tmp_path / "out2")
    assert (code, err.count("\n")) == (1, 1)
    assert "deepspeed, olmo-local, olmo-legacy" in err


def test_deepspeeds_latest_leads_to_a_step(tmp_path: Path) -> None:
    zero_flat(tmp_path / "run/best", 2, 1)
    (tmp_path / "run/latest").write_text("best\n")
    assert unshard(tmp_path / "run", tmp_path / "a")[0] == 0
    assert tensors(tmp_path / "a/model.safetensors") == zero_whole()
    zero_flat(tmp_path / "checkpoint-5/global_step5", 2, 1)
    (tmp_path / "checkpoint-5/latest").write_text("global_step5")
    assert unshard(tmp_path / "checkpoint-5", tmp_path / "b")[0] == 0
    assert tensors(tmp_path / "b/model.safetensors") == zero_whole()
    zero_three(tmp_path / "run/global_step10", 2)
    zero_three(tmp_path / "run/global_step20", 2)
    (tmp_path / "run/latest").write_text("global_step10")
    assert unshard("--latest-checkpoint-only", tmp_path / "run", tmp_path / "c")[0] == 0
    assert listing(tmp_path / "c")[-1] == "global_step10-unsharded/optim.safetensors"
    assert unshard(tmp_path / "run", tmp_path / "d")[0] == 0
    assert len(listing(tmp_path / "d")) == 6
    (tmp_path / "gone").mkdir()
    for text in ("global_step30", "../run", ""):
        (tmp_path / "gone/latest").write_text(text)
        code, _, err = unshard(tmp_path / "gone", tmp_path / "e")
        assert (code, err.count("\n")) == (1, 1)


def test_a_result_of_other_shards_is_written_again(tmp_path: Path) -> None:
    zero_flat(tmp_path / "a/step1", 2, 1)
    olmo_local(tmp_path / "b/step1", 2)
    assert unshard(tmp_path / "a/step1", tmp_path / "out")[0] == 0
    assert unshard("--delete-sharded", tmp_path / "b/step1", tmp_path / "out")[0] == 0
    assert tensors(tmp_path / "out/model.safetensors") == olmo_whole()


def test_model_only_needs_no_optimizer(tmp_path: Path) -> None:
    step = step_of("local", tmp_path, 2)
    for name in ("optim/rank0.pt", "optim/rank1.pt"):
        (step / name).unlink()
    assert "optim/rank0.pt: is missing" in unshard(step, tmp_path / "out")[2]
    assert unshard("--model-only", step, tmp_path / "out")[0] == 0
    assert listing(tmp_path / "out") == [".slicefs-checkpoint.json", "model.safetensors"]


def test_a_result_of_the_model_only_costs_no_shards(tmp_path: Path) -> None:
    for kind in ("stage1", "stage3", "local", "legacy"):
        step, out = step_of(kind, tmp_path / kind, 3), tmp_path / kind / "out"
        assert unshard("--model-only", step, out)[0] == 0
        assert "is there already" in unshard("--model-only", step, out)[1]
        for name in listing(step):
            if "rank2" in name or ("rank_2" in name and "optim" in name):
                (step / name).unlink()
        before = listing(step)
        assert unshard("--delete-sharded", step, out)[0] == 1
        assert listing(step) == before


def test_groups_of_the_optimizer_are_in_the_header(tmp_path: Path) -> None:
    for kind in KINDS:
        step, out = step_of(kind, tmp_path / kind, 2), tmp_path / kind / "out"
        assert unshard(step, out)[0] == 0
        data = (out / "optim.safetensors").read_bytes()
        assert json.loads(header_metadata(data, "f")["param_groups"])[0]["lr"] == 0.5


def test_json_names_the_kind(tmp_path: Path) -> None:
    step = step_of("stage3", tmp_path, 2)
    found = json.loads(unshard("--json", step, tmp_path / "out")[1])
    assert found["steps"][0]["kind"] == "deepspeed"


def read(path: Path) -> Any:
    return read_torch_file(open_tree(path.parent), path.name)


def test_nothing_in_a_pickle_is_run(tmp_path: Path) -> None:
    for module, name in (
        *(("os", "system"), ("builtins", "eval"), ("__builtin__", "exec"), ("subprocess", "run")),
        *(("posix", "system"), ("importlib", "import_module"), ("pickle", "loads")),
    ):
        torch_save({"x": Made(module, name, f"touch {tmp_path}/ran")}, tmp_path / "a.pt")
        with pytest.raises(ConfigError, match=rf"a\.pt: .*{module}\.{name} is not what"):
            read(tmp_path / "a.pt")
    assert not (tmp_path / "ran").exists()
    other = Made("tests.slicefs.lifecycle.ran", "Never", tmp_path.name, state={"a": 1})
    torch_save({"x": other}, tmp_path / "a.pt")
    found = read(tmp_path / "a.pt")["x"]
    assert isinstance(found, StandIn)
    assert (found.module, found.name) == ("tests.slicefs.lifecycle.ran", "Never")
    assert (found.values, found.state) == ((tmp_path.name,), {"a": 1})


def test_a_tensor_outside_of_its_storage_is_refused(tmp_path: Path) -> None:
    for tensor in (
        FakeTensor([1.0, 2.0], (3,)),
        FakeTensor([1.0, 2.0], (2,), offset=1),
        FakeTensor([1.0, 2.0], (2,), strides=(2,)),
        FakeTensor([1.0, 2.0], (-1,)),
    ):
        torch_save(tensor, tmp_path / "a.pt")
        with pytest.raises(ConfigError, match=r"a\.pt: is damaged"):
            read(tmp_path / "a.pt")
    torch_save(FakeTensor([1.0, 2.0, 3.0], (2,), strides=(2,)), tmp_path / "a.pt")
    found = read(tmp_path / "a.pt")
    assert isinstance(found, StoredTensor)
    assert found.span() == (0, 12)


def test_old_and_compressed_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    path.write_bytes(b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.")  # torch before 1.6
    with pytest.raises(ConfigError, match=r"a\.pt: .* save it again with torch's zip format"):
        read(path)
    torch_save({"x": FakeTensor([1.0] * 1000)}, path)
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    with pytest.raises(ConfigError, match="is compressed"):
        read(path)
