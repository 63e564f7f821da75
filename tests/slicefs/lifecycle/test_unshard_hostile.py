"""`slicefs ckpt unshard` of shards that are odd or hostile: nothing wrong is written or deleted."""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from fsmeta.errors import ConfigError
from slicefs.checkpoint.safetensors import TensorSpec
from slicefs.lifecycle.shards import reading
from slicefs.lifecycle.shards.dcp_metadata import read_metadata
from slicefs.lifecycle.shards.plan import Flat, Placed, StorageRange, plain_json, planned_file
from slicefs.lifecycle.shards.provenance import dcp_digests
from slicefs.lifecycle.shards.reading import ShardReader
from slicefs.lifecycle.shards.strides import are_apart
from slicefs.lifecycle.shards.torch_file import Storage, StoredTensor, read_torch_file
from slicefs.stores.opening import open_tree
from tests.slicefs.checkpoint.test_lifecycle import unpack
from tests.slicefs.lifecycle.layouts import olmo_legacy, zero_flat, zero_three
from tests.slicefs.lifecycle.test_unshard_layouts import listing, tensors, unshard
from tests.slicefs.lifecycle.torch_files import FakeTensor, Made, sharded_tensor, torch_save

OPTIM = "zero_pp_rank_{}_mp_rank_00_optim_states.pt"


def rewrite(path: Path, change: Callable[[Any], Any]) -> None:
    """Write a torch file again: `change` gets the objects that the builder had."""
    SAVED[path] = change(SAVED[path])
    torch_save(SAVED[path], path)


SAVED: dict[Path, Any] = {}


@pytest.fixture
def saved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remember what the builders save."""

    def noted(value: Any, path: Path) -> None:
        SAVED[path] = value
        torch_save(value, path)

    monkeypatch.setattr("tests.slicefs.lifecycle.layouts.torch_save", noted)


def refused(step: Path, out: Path, *words: str) -> str:
    """The one line of an unshard that fails; every shard stays."""
    before = listing(step)
    code, _, err = unshard("--delete-sharded", *words, step, out)
    assert (code, err.count("\n")) == (1, 1), err
    assert "a bug" not in err
    assert listing(step) == before
    return err


@pytest.mark.usefixtures("saved")
@pytest.mark.parametrize("stage", [2, 3])
def test_an_unknown_optimizer_is_not_dropped(tmp_path: Path, stage: int) -> None:
    step = tmp_path / "step1"
    key = "optimizer_state_dict" if stage == 3 else "base_optimizer_state"

    def put(rank: int, state: Any) -> None:
        def change(found: Any) -> Any:
            return {"optimizer_state_dict": {**found["optimizer_state_dict"], key: state}}

        rewrite(step / OPTIM.format(rank), change)

    for first, second in (
        ({"other": 1}, {"other": 1}),
        ({"state": {}}, {"state": {0: {"exp_avg": FakeTensor([1.0])}}}),
        ({"state": {}}, None),
        ([{"step": 1}] * 3, [{"step": 1}] * 3),
        (7, 7),
    ):
        zero_three(step, 2) if stage == 3 else zero_flat(step, 2, stage)
        put(0, first)
        if second is not None:
            put(1, second)
        assert "the optimizer's state" in refused(step, tmp_path / "out")


@pytest.mark.usefixtures("saved")
def test_replicas_of_a_shard_are_written_once(tmp_path: Path) -> None:
    step, out = tmp_path / "step1", tmp_path / "out"
    olmo_legacy(step, 2)
    rows = [((0, 0), (2, 2)), ((2, 0), (2, 2))]
    parts = [FakeTensor([1.0, 2.0, 3.0, 4.0], (2, 2)), FakeTensor([5.0, 6.0, 7.0, 8.0], (2, 2))]
    for rank in (0, 1):  # each rank has both: two replicas

        def change(found: Any) -> Any:
            both = sharded_tensor((4, 2), rows, {0: parts[0], 1: parts[1]})
            return {**found, "model": {**found["model"], "a.twice": both}}

        rewrite(step / f"rank{rank}.pt", change)
    assert unshard("--delete-sharded", step, out)[0] == 0
    found = tensors(out / "model.safetensors")
    assert found["a.twice"] == ((4, 2), [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0])
    assert found["plain"] == ((2, 2), [1.0, 2.0, 3.0, 4.0])


@pytest.mark.usefixtures("saved")
@pytest.mark.parametrize(
    ("shape", "every"),
    [
        ((4, 2), [((0, 0), (2, 2)), ((1, 0), (2, 2))]),
        ((4, 2), [((0, 0), (3, 1)), ((2, 0), (1, 2)), ((0, 1), (3, 1))]),
    ],
)
def test_overlapping_shards_are_refused(tmp_path: Path, shape: Any, every: Any) -> None:
    step = tmp_path / "step1"
    olmo_legacy(step, 1)

    def change(found: Any) -> Any:
        parts = {
            at: FakeTensor([1.0] * (sizes[0] * sizes[1]), sizes)
            for at, (_, sizes) in enumerate(every)
        }
        return {**found, "model": {"x": sharded_tensor(shape, every, parts)}}

    rewrite(step / "rank0.pt", change)
    assert "overlaps another" in refused(step, tmp_path / "out")


def test_blocks_apart() -> None:
    assert are_apart((4, 4), [((0, 0), (4, 2)), ((0, 2), (4, 2))])
    assert are_apart((4,), [((0,), (0,)), ((0,), (4,))])
    assert are_apart((), [((), ())])
    assert not are_apart((4, 4), [((0, 0), (4, 3)), ((0, 2), (4, 2))])
    assert not are_apart((4,), [((-1,), (2,))])
    assert not are_apart((4,), [((3,), (2,))])
    assert not are_apart((), [((), ()), ((), ())])


@pytest.mark.usefixtures("saved")
def test_a_tensor_of_another_rank_only_is_refused(tmp_path: Path) -> None:
    step = tmp_path / "step1"
    olmo_legacy(step, 2)

    def change(found: Any) -> Any:
        return {**found, "model": {**found["model"], "mine": FakeTensor([1.0])}}

    rewrite(step / "rank1.pt", change)
    assert "rank1.pt: has mine as a tensor of its own" in refused(step, tmp_path / "out")


@pytest.mark.usefixtures("saved")
def test_what_is_not_kept_is_said(tmp_path: Path) -> None:
    step = tmp_path / "step1"
    olmo_legacy(step, 1)
    rewrite(step / "rank0.pt", lambda found: {**found, "odd": [Made("mytrainer", "X")]})
    code, said, _ = unshard(step, tmp_path / "out")
    assert code == 0
    assert said.endswith("not kept, or not all of it: rng, odd\n")


def test_dcp_results_of_another_step_do_not_count(tmp_path: Path) -> None:
    first, second, out = (
        unpack(tmp_path / "a/step7"),
        unpack(tmp_path / "b/step8"),
        tmp_path / "out",
    )
    assert unshard(first, out)[0] == 0
    assert "is there already" in unshard(second, out)[1], "its shards are the same"
    tree = open_tree(second)
    before = dcp_digests(tree, "")
    found = read_metadata((second / ".metadata").read_bytes(), "f")
    chunk = next(iter(found.tensors.values())).chunks[0]
    data = bytearray((second / chunk.shard).read_bytes())
    data[chunk.begin + chunk.length - 1] ^= 1
    (second / chunk.shard).write_bytes(data)
    assert dcp_digests(tree, "")[chunk.shard] != before[chunk.shard]
    (first / ".metadata").write_bytes((first / ".metadata").read_bytes() + b" ")
    code, said, _ = unshard("--delete-sharded", first, out)
    assert code == 0
    assert "is there already" not in said
    assert not (first / ".metadata").exists()


def test_an_interrupted_removal_of_dcp_goes_on(tmp_path: Path) -> None:
    step, out = unpack(tmp_path / "step7"), tmp_path / "out"
    assert unshard(step, out)[0] == 0
    (step / "__0_0.distcp").unlink()
    left = listing(step)
    assert ".metadata" in left
    code, said, err = unshard("--delete-sharded", step, out)
    assert (code, err) == (0, "")
    assert "is there already" in said
    assert listing(step) == []


class FlakyTree:
    """A tree whose reads go wrong once `wrong` is set."""

    def __init__(self, path: Path) -> None:
        self._tree = open_tree(path)
        self.wrong = False

    def read_ranges(self, items: Any, max_gap: int = 0) -> list[memoryview]:
        found = self._tree.read_ranges(items, max_gap)
        if not self.wrong:
            return found
        return [memoryview(bytes([each[0] ^ 1]) + bytes(each[1:])) for each in found]


@pytest.mark.parametrize("piece", [4, 8, 1 << 20])
def test_bytes_that_are_read_again_are_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece: int
) -> None:
    monkeypatch.setattr(reading, "PIECE_BYTES", piece)
    torch_save({"x": FakeTensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])}, tmp_path / "a.pt")
    held = read_torch_file(open_tree(tmp_path), "a.pt")["x"]

    def flat(begin: int, end: int) -> Flat:
        spec = TensorSpec("F32", ((end - begin) // 4,))
        return Flat(spec, "F32", (StorageRange(held.storage, begin, end),))

    for again in ((0, 24), (4, 12), (8, 24), (0, 4), (20, 24)):
        for wrong in (False, True):
            tree: Any = FlakyTree(tmp_path)
            reader = ShardReader(tree)
            first = [flat(0, 12), flat(16, 24)]
            reader.expect(first)
            reader.expect([flat(*again)])
            assert len(b"".join(bytes(each) for each in reader.tensors(first))) == 20
            tree.wrong = wrong
            if wrong:
                with pytest.raises(ConfigError, match="not what was saved"):
                    list(reader.tensors([flat(*again)]))
            else:
                assert b"".join(bytes(e) for e in reader.tensors([flat(*again)]))
                reader.finish()


def test_a_failed_unshard_keeps_the_earlier_result(tmp_path: Path) -> None:
    good, bad, out = tmp_path / "a/step1", tmp_path / "b/step1", tmp_path / "out"
    zero_flat(good, 2, 1)
    zero_flat(bad, 2, 1)
    path = bad / OPTIM.format(1)
    with zipfile.ZipFile(path) as archive:
        member = max(
            (each for each in archive.infolist() if "/data/" in each.filename),
            key=lambda each: each.file_size,
        )
    data = bytearray(path.read_bytes())
    data[member.header_offset + 30 + len(member.filename)] ^= 1
    path.write_bytes(data)
    assert unshard(good, out)[0] == 0
    # another step, so that it is not the same shards
    torch_save({"epoch": 3}, bad / "extra.pt")
    model = bad / "mp_rank_00_model_states.pt"
    with zipfile.ZipFile(model, "a") as archive:
        archive.writestr("other/extra", b"x")
    before = {name: (out / name).read_bytes() for name in listing(out)}
    assert "not what was saved" in refused(bad, out)
    assert {name: (out / name).read_bytes() for name in listing(out)} == before


@pytest.mark.parametrize("name", [OPTIM.format(1), "mp_rank_00_model_states.pt"])
def test_shards_that_change_meanwhile_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    step, out = tmp_path / "step1", tmp_path / "out"
    zero_flat(step, 2, 1)
    finish = ShardReader.finish

    def changed(self: ShardReader) -> None:
        finish(self)
        torch_save({"other": FakeTensor([1.0])}, step / name)

    monkeypatch.setattr(ShardReader, "finish", changed)
    assert f"{name}: has changed meanwhile" in refused(step, out)
    assert not listing(out)


def archive_of(path: Path, data: bytes, method: int = zipfile.ZIP_STORED) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a/data.pkl", data, method)
        archive.writestr("a/byteorder", b"little", method)


def read(path: Path) -> Any:
    return read_torch_file(open_tree(path.parent), path.name)


NAMED = b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n"
HOSTILE: Mapping[str, bytes] = {
    "a memo index": b"\x80\x02Nr\xff\xff\xff\x7f.",
    "a memo index as text": b"\x80\x02Np4000000000\n.",
    "a long string": b"\x80\x04\x8e\x00\x00\x00\x00\x00\x00\x00\x10x.",
    "an attribute of a function": NAMED + b"N}U\x08__name__U\x01xs\x86b.",
    "a dictionary of a function": NAMED + b"}U\x01xU\x01ysb.",
    "a forged storage": NAMED + b"(cother\nStorage\n)RU\x03F32\x86K\x00)){}tR.",
    "nothing but a number": b"I" + b"9" * 10000 + b"\n.",
    "copies": b"\x80\x02("
    + b"K\x01" * 1000
    + b"lq\x000"
    + b"ctorch\nSize\nh\x00\x85R" * 999
    + b".",
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_hostile_pickle_is_refused(tmp_path: Path, what: str) -> None:
    archive_of(tmp_path / "a.pt", HOSTILE[what])
    with pytest.raises(ConfigError, match=r"a\.pt: is damaged"):
        read(tmp_path / "a.pt")


def test_nested_and_compressed_pickles(tmp_path: Path) -> None:
    archive_of(tmp_path / "a.pt", pickle.dumps({}, 2), zipfile.ZIP_DEFLATED)
    with pytest.raises(ConfigError, match=r"data\.pkl is compressed"):
        read(tmp_path / "a.pt")
    torch_save(FakeTensor([1.0], (1000,), strides=(0,)), tmp_path / "a.pt")
    with pytest.raises(ConfigError, match="repeats items"):
        read(tmp_path / "a.pt")
    bomb: list[Any] = [1]
    for _ in range(40):
        bomb = [bomb, bomb]
    deep: list[Any] = []
    for _ in range(500):
        deep = [deep]
    for value in (bomb, deep):
        with pytest.raises(ConfigError, match="are more than"):
            plain_json(value)


def test_parts_that_are_not_as_large_as_their_tensor() -> None:
    storage = Storage("a.pt", 0, 100, 0)
    spec = TensorSpec("F32", (4,))
    short = Flat(spec, "F32", (StorageRange(storage, 0, 12),))
    twice = Placed(spec, (((0,), StoredTensor(storage, "F32", 0, (4,), (1,))),) * 2)
    for tensor in (short, twice):
        with pytest.raises(ConfigError, match=r"x would have \d+ bytes, its shape needs 16"):
            planned_file("model.safetensors", {"x": tensor})


@pytest.mark.usefixtures("saved")
@pytest.mark.parametrize(
    "model",
    [
        {"buffer_names": 7, "param_shapes": [], "module": {}},
        {"buffer_names": [], "param_shapes": [7], "module": {}},
        {"buffer_names": [[]], "param_shapes": [{}], "module": {}},
        {"buffer_names": [], "param_shapes": [{}], "module": {}, "shared_params": 7},
        {"buffer_names": [], "param_shapes": [{}], "module": {}, "frozen_param_fragments": [1]},
    ],
)
def test_odd_states_are_one_line(tmp_path: Path, model: Any) -> None:
    step = tmp_path / "step1"
    zero_flat(step, 2, 1)
    torch_save(model, step / "mp_rank_00_model_states.pt")
    assert "mp_rank_00_model_states.pt" in refused(step, tmp_path / "out")
