"""DCP and the manager with real torch: one rank, several gloo ranks, damage, async saves."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem

from fsclient.cli.main import run
from slicefs.checkpoint.safetensors import decode_header, header_length
from slicefs.client.client import Client
from slicefs.torch.checkpoint import Checkpoint, CheckpointManager, StorageReader, StorageWriter
from slicefs.torch.dcp_reader import BATCH_BYTES
from tests.conftest import LogWatch
from tests.posix.volumes import PATIENCE_S, new_volume
from tests.slicefs.checkpoint.test_dedupe import stored_bytes
from tests.support.redis_server import free_port

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's own


def state(step: int) -> dict[str, Any]:
    return {
        "w": torch.arange(100_000, dtype=torch.float32) + step,
        "t": torch.arange(600, dtype=torch.int64).reshape(20, 30).t(),
        "b": torch.ones(3, dtype=torch.bfloat16) * step,
        "step": step,
    }


def same(one: dict[str, Any], two: dict[str, Any]) -> bool:
    tensors = all(torch.equal(one[name], two[name]) for name in ("w", "t", "b"))
    return tensors and one["step"] == two["step"]


def run_ranks(tmp_path: Path, world: int, what: str) -> list[str]:
    """What each rank has printed."""
    store = tmp_path / f"store-{what}-{world}"
    words = [sys.executable, "-W", "ignore", "-m", "tests.slicefs.torch.ranks"]
    ranks = [
        subprocess.Popen(
            [*words, str(rank), str(world), str(store), what, f"file://{tmp_path}/run"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world)
    ]
    printed = [rank.communicate()[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * world, "\n".join(printed)
    return printed


def test_dcp_on_a_tree(tmp_path: Path, log_watch: LogWatch) -> None:
    log_watch.expect("already exists")
    url = f"file://{tmp_path}/a"
    for step in (1, 2):  # the second replaces the first
        dcp.save(state(step), storage_writer=StorageWriter(url), no_dist=True)
    loaded = state(0)
    dcp.load(loaded, storage_reader=StorageReader(url), no_dist=True)
    assert same(loaded, state(2))
    with pytest.raises(CheckpointException, match="already exists"):
        dcp.save(state(3), storage_writer=StorageWriter(url, overwrite=False), no_dist=True)


def test_the_metadata_is_replaced_in_one_operation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"file://{tmp_path}/a"
    dcp.save(state(1), storage_writer=StorageWriter(url), no_dist=True)
    seen: list[str] = []
    unlink = os.unlink

    def watched(path: Any) -> None:
        seen.append(str(path))
        unlink(path)

    monkeypatch.setattr(os, "unlink", watched)
    dcp.save(state(2), storage_writer=StorageWriter(url), no_dist=True)
    assert not [path for path in seen if path.endswith(".metadata")]


def test_a_manager_saves_and_loads(tmp_path: Path) -> None:
    manager = CheckpointManager(f"file://{tmp_path}", keep_last=2)
    changing = state(4)
    for step in (1, 2, 3):
        manager.save(step, state(step))
    future = manager.save(4, changing, async_=True)
    assert future is not None
    changing["w"].zero_()
    manager.wait()
    assert manager.steps() == [3, 4]
    assert manager.last_durable == 4
    loaded = state(0)
    assert manager.load(loaded) == 4
    assert same(loaded, state(4))


def test_a_flipped_byte_is_an_error(tmp_path: Path, log_watch: LogWatch) -> None:
    log_watch.expect("not what was saved")
    manager = CheckpointManager(f"file://{tmp_path}")
    manager.save(1, state(1))
    [shard] = [
        path for path in (tmp_path / "step1").glob("*.distcp") if path.stat().st_size > 10**5
    ]
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    with pytest.raises(CheckpointException, match="not what was saved"):
        manager.load(state(0))


def test_a_failed_async_save_is_raised(tmp_path: Path) -> None:
    manager = CheckpointManager(f"file://{tmp_path}")
    manager.save(1, state(1))
    future = manager.save(2, state(2), async_=True)
    assert future is not None
    manager.wait()
    (tmp_path / "step3").mkdir()
    with pytest.raises(FileExistsError):
        manager.save(3, state(3), async_=True)
    assert manager.steps() == [1, 2]


def test_ranks_save_together_and_load_on_another_number(tmp_path: Path) -> None:
    run_ranks(tmp_path, 2, "save")
    run_ranks(tmp_path, 2, "fail")
    run_ranks(tmp_path, 3, "load")
    left = [name for name in os.listdir(tmp_path / "run") if name.startswith(".saving")]
    assert not left


@pytest.mark.parametrize("world", [2, 3, 4])
def test_a_rank_reads_its_part(tmp_path: Path, world: int) -> None:
    run_ranks(tmp_path, 2, "save-part")
    for printed in run_ranks(tmp_path, world, "load-part"):
        read, needed = map(int, printed.split())
        assert needed <= read <= 1.05 * needed


def part_of(reader: StorageReader, offset: int, name: str = "w", count: int = 1000) -> torch.Tensor:
    """`count` items of a stored tensor, from `offset` on."""
    reader.set_up_storage_reader(reader.read_metadata(), is_coordinator=True)
    index = next(each for each in reader.storage_data if each.fqn == name)
    item = ReadItem(
        LoadItemType.TENSOR,
        *(index, torch.Size([0]), index, torch.Size([offset]), torch.Size([count])),
    )
    planner = _OneTensor(count)
    reader.read_data(LoadPlan([item]), planner).wait()
    return planner.tensor


def damage(folder: Path, reader: StorageReader, at: int) -> None:
    """Change byte `at` of the archive of the only stored tensor."""
    [place] = reader.storage_data.values()
    with (folder / place.relative_path).open("r+b") as file:
        file.seek(place.offset + at)
        byte = file.read(1)
        file.seek(place.offset + at)
        file.write(bytes([byte[0] ^ 1]))


WHOLE = torch.arange(4 << 20, dtype=torch.float32)


def test_a_flipped_byte_of_a_part_is_an_error(tmp_path: Path) -> None:
    """Of a step with a manifest."""
    manager = CheckpointManager(f"file://{tmp_path}", dedupe=False)
    manager.save(1, {"w": WHOLE})
    step = manager.latest()
    assert step is not None
    reader = StorageReader(step)
    assert torch.equal(part_of(reader, 1 << 20), WHOLE[1 << 20 : (1 << 20) + 1000])
    damage(tmp_path / "step1", reader, (4 << 20) + 2000)
    with pytest.raises(OSError, match="not what was saved"):
        part_of(reader, 1 << 20)


def test_whole_tensors_are_compared_with_what_torch_has_stored(tmp_path: Path) -> None:
    """Without a manifest. The part alone has no checksum."""
    url = f"file://{tmp_path}"
    dcp.save({"w": WHOLE}, storage_writer=StorageWriter(url), no_dist=True)
    reader = StorageReader(url, whole_tensors=True)
    assert torch.equal(part_of(reader, 5), WHOLE[5:1005])
    damage(tmp_path, reader, 12 << 20)
    with pytest.raises(OSError, match="not what was saved"):
        part_of(reader, 5)
    assert torch.equal(part_of(StorageReader(url), 5), WHOLE[5:1005])


def test_a_file_that_is_replaced_between_two_reads_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The place of the items comes from the first read, the items from the second."""
    url, other = f"file://{tmp_path}/a", f"file://{tmp_path}/b"
    for place, before in ((url, 1000), (other, 3000)):
        state = {"a": torch.zeros(before), "w": WHOLE}
        writer = StorageWriter(place, thread_count=1, single_file_per_rank=True)
        dcp.save(state, storage_writer=writer, no_dist=True)
    [name] = [path.name for path in (tmp_path / "a").glob("*.distcp")]
    reader = StorageReader(url)
    read_ranges, calls = reader.fs.tree.read_ranges, []

    def replaced(*asked: Any) -> list[memoryview]:
        calls.append(asked)
        if len(calls) == 2:
            (tmp_path / "b" / name).replace(tmp_path / "a" / name)
        return read_ranges(*asked)

    monkeypatch.setattr(reader.fs.tree, "read_ranges", replaced)
    with pytest.raises(OSError, match="was replaced while it was read"):
        part_of(reader, 50_000)


@pytest.mark.parametrize("chunk_bytes", [256 << 10, 4 << 20])  # of manifests now, and before
def test_memory_and_bytes_are_bounded_with_a_manifest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk_bytes: int
) -> None:
    """What is verified together is read together, and small tensors are not worth two reads."""
    monkeypatch.setattr(
        "slicefs.checkpoint.manifest.Digester.__init__.__defaults__", (chunk_bytes,)
    )
    manager = CheckpointManager(f"file://{tmp_path}", dedupe=False)
    count, items = 200, 1 << 17  # 100 MiB in tensors of 512 KiB
    manager.save(1, {f"x{at:03}": torch.full((items,), float(at)) for at in range(count)})
    step = manager.latest()
    assert step is not None
    reader = StorageReader(step)
    reader.set_up_storage_reader(reader.read_metadata(), is_coordinator=True)
    read_ranges, sizes = reader.fs.tree.read_ranges, []

    def counted(*asked: Any) -> list[memoryview]:
        found = read_ranges(*asked)
        sizes.append(sum(map(len, found)))
        return found

    monkeypatch.setattr(reader.fs.tree, "read_ranges", counted)
    half = torch.Size([items // 2])
    plan = LoadPlan(
        [
            ReadItem(LoadItemType.TENSOR, index, torch.Size([0]), index, half, half)
            for index in reader.storage_data
        ]
    )
    reader.read_data(plan, _OneTensor(items // 2)).wait()
    whole = count * items * 4
    assert max(sizes) <= BATCH_BYTES + 4 * chunk_bytes
    assert sum(sizes) <= 1.1 * whole + 20 * chunk_bytes


@pytest.mark.parametrize("name", ["complex128", "float8_e4m3fnuz", "uint32"])
def test_types_that_torch_stores_are_loaded(tmp_path: Path, name: str) -> None:
    url, dtype = f"file://{tmp_path}", getattr(torch, name)
    saved = {"x": torch.arange(40).to(dtype)}
    dcp.save(saved, storage_writer=StorageWriter(url), no_dist=True)
    loaded = {"x": torch.zeros(40, dtype=dtype)}
    dcp.load(loaded, storage_reader=StorageReader(url), no_dist=True)
    assert torch.equal(loaded["x"].view(torch.uint8), saved["x"].view(torch.uint8))


class _OneTensor(DefaultLoadPlanner):
    """A planner of which `read_data` needs one tensor."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.tensor = torch.zeros(count)

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        """The tensor to fill."""
        del read_item
        return self.tensor

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """Nothing more."""


def test_ranks_save_by_processes_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    run_ranks(tmp_path, 2, "process")
    run_ranks(tmp_path, 2, "load")


def test_of_a_changed_model_the_change_is_uploaded(tmp_path: Path) -> None:
    with (
        new_volume(tmp_path / "vol", f"sqlite://{tmp_path}/meta.db") as volume,
        Client(volume.meta, uid=0, gid=0, meta_timeout=PATIENCE_S),
    ):
        manager = CheckpointManager(f"{volume.meta}#run", keep_last=None)
        model = {f"layer{number}": torch.randn(1 << 18) for number in range(100)}  # 1 MiB each
        model["big"] = torch.randn(12 << 20)
        manager.save(1, dict(model))
        before = stored_bytes(tmp_path)
        model["layer7"] = torch.randn(1 << 18)  # 1 % of the layers
        manager.save(2, dict(model))
        uploaded = (stored_bytes(tmp_path) - before) / before
        assert uploaded <= 0.03, f"{100 * uploaded:.1f} % were uploaded"
        for step in (1, 2):
            loaded = {name: torch.zeros_like(tensor) for name, tensor in model.items()}
            manager.load(loaded, step)
            same = {name: torch.equal(loaded[name], model[name]) for name in model}
            assert [name for name in same if not same[name]] == (["layer7"] if step == 1 else [])
        manager.close()


def test_torch_save_streams(tmp_path: Path) -> None:
    checkpoint = Checkpoint(f"file://{tmp_path}")
    with checkpoint.writer("deep/a.pt") as file:
        torch.save(state(5), file)
    with checkpoint.reader("deep/a.pt") as stream:
        assert same(torch.load(stream, weights_only=True), state(5))
    with pytest.raises(AttributeError), checkpoint.writer("deep/a.pt") as file:
        torch.save({"bad": lambda: 1}, file)
    assert os.listdir(tmp_path / "deep") == ["a.pt"]


def test_torch_save_adds_little_memory(tmp_path: Path) -> None:
    program = (
        "import resource, sys, torch\n"
        "from slicefs.torch import Checkpoint\n"
        "state = {'w': torch.ones(1 << 26)}\n"
        "def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "before = peak()\n"
        "with Checkpoint(sys.argv[1]).writer('a.pt') as file: torch.save(state, file)\n"
        "print((peak() - before) // 1024)\n"
    )
    words = [sys.executable, "-W", "ignore", "-c", program, f"file://{tmp_path}"]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert int(done.stdout) < 64, "MiB more for 256 MiB"


def test_unshard_gives_what_torch_saved(tmp_path: Path) -> None:
    manager = CheckpointManager(f"file://{tmp_path}/run")
    saved = {**state(9), "q": torch.arange(8).to(torch.float8_e4m3fn)}
    manager.save(9, saved)
    assert run(["ckpt", "unshard", str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    data = (tmp_path / "out/step9-unsharded/model.safetensors").read_bytes()
    found = decode_header(data[: header_length(data, "f")], len(data), "f")
    for name in ("w", "t", "b", "q"):
        each = found[name]
        tensor = torch.frombuffer(bytearray(data[each.begin : each.end]), dtype=saved[name].dtype)
        whole = tensor.reshape(each.spec.shape).float()
        assert torch.equal(whole, saved[name].float())
    assert torch.load(tmp_path / "out/step9-unsharded/other/step.pt") == 9


def test_metadata_that_names_a_function_runs_nothing(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/a"
    dcp.save(state(1), storage_writer=StorageWriter(url), no_dist=True)
    (tmp_path / "a" / ".metadata").write_bytes(b"cos\nmkdir\n(S'%s/ran'\ntR." % bytes(tmp_path))
    with pytest.raises(pickle.UnpicklingError, match=r"os\.mkdir|posix\.mkdir"):
        StorageReader(url).read_metadata()
    assert not (tmp_path / "ran").exists()
