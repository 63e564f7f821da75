"""`slicefs ckpt unshard` of shards that torch wrote: ZeRO's layout, and FSDP as OLMo saves it."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fsclient.cli.main import run
from slicefs.checkpoint.safetensors import decode_header, header_length
from slicefs.lifecycle.transfer import TransferEnd
from slicefs.lifecycle.unshard import unshard
from slicefs.stores.opening import open_tree
from tests.slicefs.torch.zero_files import Tensors, parameters, save_flat, save_three, stages, whole
from tools.benchlib.train_memory import added_mib

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's own

DTYPES = {"F32": torch.float32, "F64": torch.float64, "I64": torch.int64, "BF16": torch.bfloat16}


def tensors(path: Path) -> Tensors:
    """The tensors of a safetensors file."""
    data = path.read_bytes()
    found = decode_header(data[: header_length(data, "f")], len(data), "f")
    out = {}
    for name, each in found.items():
        raw = torch.frombuffer(
            bytearray(data[each.begin : each.end]) or bytearray(8), dtype=torch.uint8
        )
        typed = raw.clone().view(DTYPES[each.spec.dtype])
        out[name] = typed[: math.prod(each.spec.shape)].reshape(each.spec.shape)
    return out


def require_equal(found: Tensors, wanted: Tensors) -> None:
    assert sorted(found) == sorted(wanted)
    for name, each in wanted.items():
        assert found[name].dtype == each.dtype, name
        assert torch.equal(found[name], each), name


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_zero_gives_what_was_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: int, world: int
) -> None:
    zero_stage = stages(monkeypatch.setitem)
    groups = parameters()
    step = tmp_path / "run/global_step40"
    if stage == 3:
        save_three(step, zero_stage(stage), groups, world, sub=2)
    else:
        save_flat(step, zero_stage(stage), groups, world)
    (tmp_path / "run/latest").write_text("global_step40")
    assert run(["ckpt", "unshard", str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    out = tmp_path / "out/global_step40-unsharded"
    require_equal(tensors(out / "model.safetensors"), whole(groups))
    count = torch.tensor(4) if stage == 3 else torch.tensor(4.0)
    state = {}
    for name, each in ((n, e) for group in groups for n, e in group.items()):
        state[f"optim.state.{name}.exp_avg"] = each * 2
        state[f"optim.state.{name}.exp_avg_sq"] = each * each
        state[f"optim.state.{name}.step"] = count
    require_equal(tensors(out / "optim.safetensors"), state)


@pytest.fixture(scope="module", params=[1, 2, 3])
def fsdp(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What this many ranks of FSDP have saved."""
    folder, world = tmp_path_factory.mktemp("fsdp"), request.param
    words = [sys.executable, "-W", "ignore", "-m", "tests.slicefs.torch.fsdp_ranks"]
    ranks = [
        subprocess.Popen(
            [*words, str(rank), str(world), str(folder / "store"), str(folder)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world)
    ]
    printed = [rank.communicate()[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * world, "\n".join(printed)
    return folder


@pytest.mark.parametrize("kind", ["local", "legacy"])
def test_fsdp_gives_what_was_trained(fsdp: Path, tmp_path: Path, kind: str) -> None:
    assert run(["ckpt", "unshard", str(fsdp / kind / "step5"), str(tmp_path / "out")]) == 0
    wanted = torch.load(fsdp / "whole.pt")
    require_equal(tensors(tmp_path / "out/model.safetensors"), wanted["model"])
    state = {
        f"optim.state.{name}.{key}": each
        for name, held in wanted["state"].items()
        for key, each in held.items()
    }
    require_equal(tensors(tmp_path / "out/optim.safetensors"), state)


def test_a_large_tensor_of_zero_is_never_in_memory(tmp_path: Path) -> None:
    large = 192  # MiB: windows and buffers take half of that, whatever it is
    words = [sys.executable, "-W", "ignore", "-m", "tests.slicefs.torch.zero_files"]
    subprocess.run([*words, str(tmp_path), str(large)], check=True, timeout=120)
    for step in ("step2", "step3"):
        source = TransferEnd(open_tree(tmp_path), step)
        target = TransferEnd(open_tree(tmp_path), f"{step}-out")
        added = added_mib(lambda: unshard(source, target))  # noqa: B023 - called at once
        print(f"{step}: a tensor of {large} MiB, {added:.0f} MiB were added")
        assert added < large
