"""`python -m tools.bench train-memory`: memory and bytes of checkpoints, exact on a busy machine.

Three things, each in a process of its own with torch's Python, on a volume in memory: what
`torch.save` adds to the memory of its process, what a save uploads after 1 % of the tensors have
changed, and what `ckpt unshard` adds beside its largest tensor. No duration is measured.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from tools.benchlib.train import CACHE, TORCH

MIB: Final = 1 << 20
TENSORS: Final = 200
RUN_S_MAX: Final = 1800.0


def main(words: Sequence[str]) -> int:
    """Measure and print one line for each thing."""
    parser = argparse.ArgumentParser(prog="python -m tools.bench train-memory", description=__doc__)
    parser.add_argument("--mib", type=int, default=1024, help="of a checkpoint; 1024")
    parser.add_argument("--dir", type=Path, default=Path("/dev/shm"), help="for the volume")
    arguments = parser.parse_args(words)
    python = next(iter(sorted(CACHE.glob(TORCH))), None)
    if python is None:
        print("bench: needs torch: run `make test-torch` once", file=sys.stderr)
        return 1
    root = Path(__file__).resolve().parents[2]
    for what in PARTS:
        folder = Path(tempfile.mkdtemp(prefix="slicefs-train-", dir=arguments.dir))
        try:
            meta = f"sqlite://{folder}/meta.db"
            slicefs = Path(sys.executable).with_name("slicefs")
            store = ("--bucket", str(folder / "data"), "--trash-days", "0")
            subprocess.run(
                [slicefs, "format", meta, "vol", *store], check=True, capture_output=True
            )
            asked = [what, meta, str(folder), str(arguments.mib)]
            subprocess.run(
                [str(python), "-W", "ignore", "-m", "tools.benchlib.train_memory", *asked],
                env={**os.environ, "PYTHONPATH": str(root)},
                check=True,
                timeout=RUN_S_MAX,
            )
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    return 0


def memory_mib(name: str) -> float:
    """VmRSS (now) or VmHWM (the most) of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) / 1024
    raise AssertionError(f"no {name}")


def added_mib(action: Callable[[], object]) -> float:
    """How much memory an action takes at its most, above what there was before it."""
    Path("/proc/self/clear_refs").write_text("5")  # the most begins anew
    before = memory_mib("VmRSS")
    action()
    return memory_mib("VmHWM") - before


def _state(mib: int) -> dict[str, Any]:
    import torch

    numbers = mib * MIB // TENSORS // 4
    return {f"t{at:03}": torch.rand(numbers) for at in range(TENSORS)}


def torch_save(meta: str, folder: Path, mib: int) -> dict[str, float]:
    """`torch.save` through `Checkpoint.writer`."""
    del folder
    import torch

    from slicefs.torch import Checkpoint

    state = _state(mib)
    place = Checkpoint(f"{meta}#run")

    def save(name: str, what: dict[str, Any]) -> None:
        with place.writer(name) as file:
            torch.save(what, file)

    save("first", {"t": torch.rand(10)})  # connections and buffers of the volume itself
    added = added_mib(lambda: save("state.pt", state))
    place.close()
    return {"saved_mib": mib, "added_mib": added}


def dedupe(meta: str, folder: Path, mib: int) -> dict[str, float]:
    """A second step in which 1 % of the tensors are others."""
    import torch

    from slicefs.torch import CheckpointManager

    state = _state(mib)
    manager = CheckpointManager(f"{meta}#run", keep_last=None)
    manager.save(1, state)
    first = _stored(folder)
    for at in range(0, TENSORS, 100):
        name = f"t{at:03}"
        state[name] = torch.rand(state[name].shape)
    manager.save(2, state)
    manager.close()
    return {"step_mib": mib, "uploaded_percent": 100 * (_stored(folder) - first) / first}


def _stored(folder: Path) -> int:
    return sum(each.stat().st_size for each in (folder / "data").rglob("*") if each.is_file())


def unshard_peak(meta: str, folder: Path, mib: int) -> dict[str, float]:
    """`unshard` of a step with one tensor of an eighth of it, and many small ones."""
    del meta
    import torch
    import torch.distributed.checkpoint as dcp

    from slicefs.lifecycle.transfer import TransferEnd
    from slicefs.lifecycle.unshard import unshard
    from slicefs.stores.opening import open_tree

    largest = mib // 8
    child = os.fork()  # the tensors are another process's
    if not child:
        state = {"large": torch.rand(largest * MIB // 4), **_state(mib - largest)}
        dcp.save({"model": state}, checkpoint_id=str(folder / "step1"), no_dist=True)
        os._exit(0)
    os.waitpid(child, 0)
    source, target = (TransferEnd(open_tree(folder), name) for name in ("step1", "whole"))
    added = added_mib(lambda: unshard(source, target))
    return {"step_mib": mib, "largest_mib": largest, "added_mib": added}


PARTS: Final = {"torch-save": torch_save, "dedupe": dedupe, "unshard": unshard_peak}


if __name__ == "__main__":
    name, meta, folder, mib = sys.argv[1:]
    print(json.dumps({"what": name, **PARTS[name](meta, Path(folder), int(mib))}), flush=True)
