"""`slicefs ckpt`: what goes, what stays, and what a command says."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import os
import struct
import tarfile
import zipfile
from collections.abc import Callable, Mapping
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest
import zstandard

from fsclient.cli.main import run
from fsmeta.errors import ConfigError, Corrupt
from slicefs.checkpoint.manager import StepManager
from slicefs.checkpoint.safetensors import decode_header, header_length
from slicefs.client.parallel import Readers
from slicefs.lifecycle.move import OpenTrees, move
from slicefs.lifecycle.shards import dcp_metadata
from slicefs.lifecycle.shards.dcp_metadata import is_of_checkpoints, read_metadata
from slicefs.lifecycle.tar_index import tar_names
from slicefs.lifecycle.transfer import Copier, TransferEnd, is_busy, refuse_overlap
from slicefs.stores.opening import open_tree
from slicefs.stores.tree import Tree

DCP = Path(__file__).parent / "data/dcp.zip"


def ckpt(*words: str | Path) -> tuple[int, str, str]:
    """A command's exit code, output and errors."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = run(["ckpt", *map(str, words)])
    return code, out.getvalue(), err.getvalue()


def write(path: Path, data: bytes = b"x") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def listing(path: Path) -> list[str]:
    return sorted(str(each.relative_to(path)) for each in path.rglob("*") if each.is_file())


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Runs of each kind."""
    base = tmp_path / "runs"
    write(base / "empty/config.yaml")
    (base / "empty/wandb").mkdir()
    write(base / "zero/step0/model.pt")
    write(base / "zero/config.yaml")
    write(base / "cut/step500/model.safetensors", struct.pack("<Q", 500) + b"{")
    write(base / "good/step10-unsharded/model.pt")
    write(base / "other/thesis.tex")
    return base


def test_clean_removes_what_has_no_checkpoint(runs: Path) -> None:
    urls = [runs / name for name in ("empty", "zero", "cut", "good")]
    before = listing(runs)
    code, out, _ = ckpt("clean", "--dry-run", "-j8", *urls)
    assert code == 0
    assert listing(runs) == before
    assert "2 of 4 runs would be removed" in out
    code, out, _ = ckpt("clean", "--json", *urls)
    assert code == 0
    verdicts = {Path(each["path"]).name: each["verdict"] for each in json.loads(out)["runs"]}
    assert verdicts == {"empty": "remove", "zero": "remove", "cut": "keep", "good": "keep"}
    assert sorted(os.listdir(runs)) == ["cut", "good", "other"]


def test_clean_with_verify_sees_a_truncated_step(runs: Path) -> None:
    code, out, _ = ckpt("clean", "--verify", "-n", runs / "cut", runs / "good")
    assert code == 0
    assert "remove   " + str(runs / "cut") in out
    assert "keep     " + str(runs / "good") in out


def test_clean_leaves_everything_where_one_is_no_run(runs: Path) -> None:
    before = listing(runs)
    code, _, err = ckpt("clean", runs / "zero", runs / "other")
    assert code == 1
    assert "does not look like a run" in err
    assert listing(runs) == before
    assert ckpt("clean", "--ignore-non-runs", runs / "zero", runs / "other")[0] == 0
    assert (runs / "other/thesis.tex").exists()
    assert not (runs / "zero").exists()


def test_clean_leaves_recent_runs(runs: Path) -> None:
    assert "skip" in ckpt("clean", "--older-than", "7d", runs / "zero")[1]
    for name in ("step0/model.pt", "config.yaml"):
        os.utime(runs / "zero" / name, (1, 1))
    assert ckpt("clean", "--older-than", "7d", runs / "zero")[0] == 0
    assert not (runs / "zero").exists()


_PACKERS: Mapping[str, Callable[[bytes], bytes]] = {
    "tar": bytes,
    "tar.gz": gzip.compress,
    "tar.bz2": bz2.compress,
    "tar.zst": lambda data: zstandard.ZstdCompressor().compress(data),
}


@pytest.mark.parametrize("suffix", _PACKERS)
def test_clean_reads_archives(tmp_path: Path, suffix: str) -> None:
    for name, steps in (("bad", ["step0"]), ("good", ["step0", "step7"])):
        data = io.BytesIO()
        with tarfile.open(fileobj=data, mode="w:") as tar:
            for step in steps:
                member = tarfile.TarInfo(f"{name}/{step}/model.pt")
                member.size = 1000
                tar.addfile(member, io.BytesIO(bytes(1000)))
        packed = data.getvalue()
        packed = _PACKERS[suffix](packed)
        (tmp_path / f"{name}.{suffix}").write_bytes(packed)
    code, _, err = ckpt("clean", *(tmp_path / f"{name}.{suffix}" for name in ("bad", "good")))
    assert (code, err) == (0, "")
    assert os.listdir(tmp_path) == [f"good.{suffix}"]


def test_only_the_index_of_a_big_archive_is_read(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "big.tar", "w") as tar:
        for step in range(1, 5):
            member = tarfile.TarInfo(f"run/step{step}/model.pt")
            member.size = 32 << 20
            with open("/dev/zero", "rb") as zero:
                tar.addfile(member, zero)
    size = (tmp_path / "big.tar").stat().st_size
    names, fetched = tar_names(open_tree(tmp_path), "big.tar", size)
    assert len(names) == 4
    assert fetched < 1 << 20
    os.truncate(tmp_path / "big.tar", 512 * 3 + 7)
    with pytest.raises(OSError, match="no whole archive"):
        tar_names(open_tree(tmp_path), "big.tar", 512 * 3 + 7)


def test_verify_says_what_is_wrong(tmp_path: Path) -> None:
    manager = StepManager(str(tmp_path))
    for step in (1, 2):
        with manager.save(step) as saving:
            saving.put("model.bin", bytes(100))
    assert ckpt("verify", tmp_path)[0] == 0
    (tmp_path / "step2/model.bin").write_bytes(b"1" * 100)
    assert ckpt("verify", tmp_path)[0] == 0
    code, out, _ = ckpt("verify", "--digest", tmp_path)
    assert code == 3
    assert "not what was saved" in out
    assert ckpt("verify", tmp_path / "nothing")[0] == 1


def unpack(folder: Path) -> Path:
    with zipfile.ZipFile(DCP) as archive:
        archive.extractall(folder)
    return folder


def test_verify_of_what_is_no_step_says_so(tmp_path: Path) -> None:
    code, out, _ = ckpt("verify", tmp_path)
    assert code == 3
    assert out.splitlines() == [
        f"no step  {tmp_path}",
        "         has no files: name the directory of a step or a run",
    ]
    (tmp_path / "notes.txt").write_text("no weights")
    assert "no step" in ckpt("verify", tmp_path)[1]


def test_verify_sees_a_dcp_step_that_lacks_bytes(tmp_path: Path) -> None:
    step = unpack(tmp_path / "step7")
    assert ckpt("verify", step)[0] == 0
    shard = step / "__1_0.distcp"
    os.truncate(shard, shard.stat().st_size // 2)
    assert "belong to it" in ckpt("verify", step)[1]
    shard.unlink()
    assert "__1_0.distcp: is missing" in ckpt("verify", step)[1]
    (step / ".metadata").unlink()
    assert "a save did not end" in ckpt("verify", step)[1]


def tensors(path: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    data = path.read_bytes()
    found = decode_header(data[: header_length(data, "f")], len(data), "f")
    return {
        name: (each.spec.dtype, each.spec.shape, data[each.begin : each.end])
        for name, each in found.items()
    }


def floats(begin: int, count: int) -> bytes:
    return struct.pack(f"<{count}f", *range(begin, begin + count))


def test_unshard_writes_each_tensor_in_order(tmp_path: Path) -> None:
    step, out = unpack(tmp_path / "step7"), tmp_path / "step7-unsharded"
    write(step / "notes.txt")
    code, _, err = ckpt("unshard", step, out)
    assert (code, err) == (0, "")
    model = tensors(out / "model.safetensors")
    assert model["model.rows"] == ("F32", (6, 10), floats(0, 60))
    assert model["model.columns"] == ("F32", (6, 10), floats(100, 60))
    assert model["model.middle"] == ("F32", (3, 4, 5), floats(200, 60))
    assert model["model.turned"] == ("I64", (3, 2), struct.pack("<6q", 0, 3, 1, 4, 2, 5))
    assert model["model.half"] == ("BF16", (3,), b"\x80\x3f" * 3)
    assert model["model.scalar"] == ("F64", (), struct.pack("<d", 7.0))
    assert model["model.empty"] == ("F32", (0, 4), b"")
    assert tensors(out / "optim.safetensors") == {"optim.exp_avg": ("F32", (60,), floats(0, 60))}
    assert listing(out / "other") == ["optim.lr.pt", "step.pt"]
    assert "is there already" in ckpt("unshard", step, out)[1]
    (out / "model.safetensors").write_bytes(b"damaged")
    assert ckpt("unshard", "--delete-sharded", step, out)[0] == 0
    assert listing(step) == ["notes.txt"]
    assert ckpt("verify", "--digest", out)[0] == 0


def test_unshard_keeps_shards_where_it_fails(tmp_path: Path) -> None:
    step, out = unpack(tmp_path / "run/step7"), tmp_path / "out"
    before = listing(step)
    assert ckpt("unshard", "--delete-sharded", "--model-only", step, out)[0] == 1
    shard = step / "__0_0.distcp"
    data = shard.read_bytes()
    shard.write_bytes(data[:100] + bytes(len(data) - 100))
    code, _, err = ckpt("unshard", "--delete-sharded", tmp_path / "run", out)
    assert code == 1
    assert err.count("\n") == 1
    assert listing(step) == before
    assert "no such step" in ckpt("unshard", "--checkpoint-num", "8", tmp_path / "run", out)[2]


def test_nothing_in_a_pickle_is_run() -> None:
    bad = b"cos\nsystem\n(S'true'\ntR."
    with pytest.raises(Corrupt, match="not what a checkpoint consists of"):
        read_metadata(bad, "here")
    with pytest.raises(Corrupt):
        read_metadata(b"", "here")


def test_move_renames_on_one_disk(tmp_path: Path) -> None:
    write(tmp_path / "a/step1/model.pt", b"data")
    code, out, _ = ckpt("move", tmp_path / "a", tmp_path / "new/b")
    assert (code, out) == (0, "renamed, 1 files\n")
    assert (tmp_path / "new/b/step1/model.pt").read_bytes() == b"data"
    assert not (tmp_path / "a").exists()


def test_move_refuses_to_eat_itself(tmp_path: Path) -> None:
    write(tmp_path / "a/model.pt")
    (tmp_path / "link").symlink_to(tmp_path / "a")
    before = listing(tmp_path)
    for target in ("a", "a/", "a/../a", "link", "a/b", "link/b/c", "."):
        code, _, err = ckpt("move", tmp_path / "a", f"{tmp_path}/{target}")
        assert code == 1, target
        assert "name another" in err or "name a destination" in err
    assert ckpt("move", f"file://{tmp_path}/a", tmp_path / "a")[0] == 1
    assert listing(tmp_path) == before
    for two in ("s3://b/x", "s3://b//x/", "s3://b/x/./y"):
        with pytest.raises(ConfigError):
            refuse_overlap("s3://b/x/", two)
    refuse_overlap("s3://b/x", "s3://b/xy")


def test_a_copy_of_the_same_size_is_not_the_same(tmp_path: Path) -> None:
    write(tmp_path / "a/one", b"right")
    write(tmp_path / "a/two", b"there")
    write(tmp_path / "b/one", b"wrong")
    write(tmp_path / "b/two", b"there")
    code, out, _ = ckpt("move", "--keep-src", tmp_path / "a", tmp_path / "b")
    assert code == 0
    assert "1 files copied" in out
    assert "1 were there" in out
    assert (tmp_path / "b/one").read_bytes() == b"right"
    assert listing(tmp_path / "a") == ["one", "two"]
    assert ckpt("move", "--entry", "one", tmp_path / "a", tmp_path / "b")[0] == 0
    assert listing(tmp_path / "a") == ["two"]


class _BusyTree:
    """A tree whose first writers are refused, and one of whose files can't be copied."""

    def __init__(self, tree: Tree, refusals: int, broken: str = "") -> None:
        self._tree = tree
        self.left = refusals
        self._broken = broken

    def __getattr__(self, name: str) -> object:
        return getattr(self._tree, name)

    def writer(self, path: str, *, size: int | None = None) -> object:
        if path == self._broken:
            raise PermissionError(13, "Permission denied", path)
        if self.left:
            self.left -= 1
            raise OSError(5, "the store answers ServiceUnavailable: Reduce your request rate")
        return self._tree.writer(path, size=size)


class _NoWaiting:
    """A runtime that does not sleep."""

    def __init__(self) -> None:
        self.slept = 0

    def sleep(self, _seconds: float) -> None:
        self.slept += 1

    def random(self) -> float:
        return 0.5


def test_a_busy_store_is_asked_again(tmp_path: Path) -> None:
    for number in range(5):
        write(tmp_path / f"a/{number}", b"data")
    source = TransferEnd(open_tree(tmp_path / "a"))
    target = TransferEnd(_BusyTree(open_tree(tmp_path / "b"), 4, "3"))  # type: ignore[arg-type]
    runtime = _NoWaiting()
    copier = Copier(source, target, jobs=1, runtime=runtime)  # type: ignore[arg-type]
    report = move(source, target, copier)
    assert runtime.slept == 4
    assert report.copy.copied == 4
    assert report.copy.failures == ("3: Permission denied",)
    assert len(listing(tmp_path / "a")) == 5  # nothing goes before everything is there
    assert not is_busy(OSError(28, "No space left on device"))


def test_map_reports_what_is_ambiguous(tmp_path: Path) -> None:
    for run_name, run_id in (("a", "abc123"), ("b", "twice"), ("c", "unknown")):
        (tmp_path / run_name / "wandb" / f"run-20260101_120000-{run_id}").mkdir(parents=True)
    (tmp_path / "d").mkdir()
    table = tmp_path / "table.json"
    table.write_text(json.dumps({"abc123": "team/proj/abc123", "twice": ["x/y/1", "x/y/2"]}))
    runs = [tmp_path / name for name in "abcd"]
    code, out, err = ckpt("map", "--table", table, *runs)
    assert code == 3
    assert json.loads(out) == {str(tmp_path / "a"): "team/proj/abc123"}
    assert "b: is ambiguous: x/y/1, x/y/2" in err
    assert "knows no unknown" in err
    assert "d: has no wandb/run" in err
    assert ckpt("map", *runs)[0] == 1
    assert ckpt("map", "--resolver", "json:loads", "--table", table, *runs)[0] == 1


@pytest.mark.soak
def test_more_than_a_thousand_keys_are_seen(bucket_url: str, tmp_path: Path) -> None:
    tree = open_tree(f"{bucket_url}/run")

    def write_part(number: int) -> None:
        tree.write_atomic(f"step0/part-{number:04}", [b"%d" % number])

    write_part(0)
    Readers(8).run(range(1, 1005), write_part)
    with OpenTrees() as stores:
        source, target = stores.endpoints(f"{bucket_url}/run", f"file://{tmp_path}/run")
        assert Copier(source, target).plan()[0] == 1005
        few = [info for info in source.files() if info.path.endswith("99")]
        report = Copier(source, target).copy(few)
    assert (report.copied, report.failures) == (10, ())
    code, out, _ = ckpt("clean", f"{bucket_url}/run")
    assert code == 0
    assert "1 of 1 runs removed" in out
    assert list(tree.list("")) == []
    tree.close()


def test_export_writes_plain_objects(bucket_url: str, tmp_path: Path) -> None:
    manager = StepManager(str(tmp_path / "run"))
    with manager.save(7) as saving:
        saving.put("a/model.bin", bytes(1000))
    code, out, _ = ckpt("export", tmp_path / "run/step7", f"{bucket_url}/step7")
    assert (code, out) == (0, "1 files copied, 1000 B; 0 were there\n")
    exported = open_tree(f"{bucket_url}/step7")
    assert [(info.path, info.size) for info in exported.list("")] == [("a/model.bin", 1000)]
    exported.remove_tree("")
    exported.close()


def test_what_metadata_may_name_is_what_checkpoints_have() -> None:
    """The reader for torch takes these and nothing else: a pickle can name any function."""
    with zipfile.ZipFile(DCP) as archive:
        (found,) = [name for name in archive.namelist() if name.endswith(".metadata")]
        data = archive.read(found)
    named: set[tuple[str, str]] = set()

    class Noted(dcp_metadata._MetadataUnpickler):
        def find_class(self, module: str, name: str) -> object:
            named.add((module, name))
            return super().find_class(module, name)

    Noted(io.BytesIO(data)).load()
    assert named
    assert {each for each in named if not is_of_checkpoints(*each)} == set()
    for module, name in (
        ("os", "system"),
        ("builtins", "eval"),
        ("torch", "load"),
        ("torch.hub", "load"),
    ):
        assert not is_of_checkpoints(module, name)
