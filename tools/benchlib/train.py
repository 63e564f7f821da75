"""`python -m tools.bench train`: epochs of small samples, beside the peers that install from PyPI.

The same samples lie in a bucket as objects, in a bucket as tar shards (WebDataset), in a volume of
SliceFS and in one of JuiceFS, all on one S3 server behind one proxy, which delays and counts
requests. Each system reads a cold epoch and a warm one in a process of its own, with torch's
DataLoader (s3fs: without) and WORKERS worker processes; SliceFS and the bucket's objects without,
too. The peers' packages are looked for outside the repository; docs/PERFORMANCE.md says how they
come there.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import random
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Final, NamedTuple

from tools.benchlib import delay, machine, redis, s3
from tools.benchlib.results import Metric, Results, table
from tools.benchlib.systems import JUICEFS, SLICEFS
from tools.benchlib.volume import BenchVolume

CACHE: Final = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "slicefs"
TORCH: Final = "torch-*/bin/python"
PEERS: Final = CACHE / "train-peers"  # pip install --target: s3torchconnector, webdataset
S3FS: Final = CACHE / "s3fs" / "bin" / "python"  # it wants an older botocore than boto3
WORKERS: Final = 4
SHARD_SAMPLES: Final = 512
SEED: Final = 1
EPOCH_S_MAX: Final = 1800.0
WIDE_MIB: Final = 1e6  # a link that is no limit: the proxy counts all the same
OURS: Final = "slicefs-iterable"


class TrainRun(NamedTuple):
    """A system and where its samples are."""

    name: str
    system: str
    url: str
    workers: int


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(prog="python -m tools.bench train", description=__doc__)
    made.add_argument("--count", type=int, default=5000, help="samples; 5000")
    made.add_argument("--size", type=int, default=60_000, help="bytes of each; 60000")
    made.add_argument("--delay-ms", default="0,10,30", help="of each request, in turn; 0,10,30")
    made.add_argument("--only", default="", help="names of systems, with commas")
    made.add_argument("--repeat", type=int, default=1)
    made.add_argument("--dir", type=Path, default=Path("/dev/shm"), help="for stores and mounts")
    made.add_argument("--json", type=Path, metavar="OUT", help="write every value there")
    return made


def main(words: Sequence[str]) -> int:
    """Measure and print one table for each delay."""
    arguments = parser().parse_args(words)
    python = next(iter(sorted(CACHE.glob(TORCH))), None)
    if python is None:
        print(
            "bench: needs torch: run `make test-torch` once, or tools/torch_env.sh", file=sys.stderr
        )
        return 1
    workspace = Path(tempfile.mkdtemp(prefix="slicefs-train-", dir=arguments.dir))
    delays = [float(word) for word in arguments.delay_ms.split(",")]
    found: dict[float, Results] = {each: Results() for each in delays}
    try:
        with ExitStack() as stack:
            bench = _Bench(arguments, workspace, python, stack)
            for delay_ms in delays:
                for _ in range(arguments.repeat):
                    bench.measure(delay_ms, found[delay_ms])
    finally:
        shutil.rmtree(workspace, ignore_errors=True)
    for key, value in machine.facts([SLICEFS]).items():
        print(f"  {key}: {value}")
    for delay_ms, results in found.items():
        print(f"\n{arguments.count} samples of {arguments.size} bytes, {delay_ms:g} ms a request")
        names = {name for row in results.rows for name in row.values}
        print(table(results.rows, OURS, sorted(names - {OURS})))
    if arguments.json:
        shown = {
            delay_ms: {row.operation: row.values for row in results.rows}
            for delay_ms, results in found.items()
        }
        arguments.json.write_text(json.dumps(shown, indent=1) + "\n", encoding="utf-8")
    return 0


class _Bench:
    """The stores with the samples in them, and the runs."""

    def __init__(
        self, arguments: argparse.Namespace, workspace: Path, python: Path, stack: ExitStack
    ) -> None:
        self._count, self._size = arguments.count, arguments.size
        self._python = python
        self._only = set(filter(None, arguments.only.split(",")))
        server = stack.enter_context(redis.running(workspace / "redis.log"))
        direct = stack.enter_context(s3.running(workspace))
        self._s3 = stack.enter_context(delay.before(direct, workspace, 0, WIDE_MIB, WIDE_MIB))
        self._workspace = workspace
        self._plain = workspace / "plain"
        self._plain.mkdir()
        for name, data in self._samples():
            (self._plain / name).write_bytes(data)
        self._mounts: dict[str, BenchVolume] = {}
        for system in (SLICEFS, JUICEFS):
            if not self._only or any(system.name in each for each in self._only):
                url = system.meta_urls["redis"].format(port=server.port, path="")
                volume = stack.enter_context(BenchVolume(system, workspace, url, self._s3))
                self._mounts[system.name] = volume
                shutil.copytree(self._plain, volume.mountpoint / "samples")
        self._fill_buckets()

    def _samples(self) -> Iterator[tuple[str, bytes]]:
        source = random.Random(SEED)
        for number in range(self._count):
            yield f"{number:06}.bin", source.randbytes(self._size)

    def _environment(self) -> dict[str, str]:
        paths = (str(Path(__file__).parents[2]), str(PEERS))
        return {
            **os.environ,
            **self._s3.environment(),
            "AWS_ENDPOINT_URL": self._s3.url("").rstrip("/"),
            "AWS_DEFAULT_REGION": "us-east-1",
            "PYTHONPATH": os.pathsep.join(paths),
        }

    def _fill_buckets(self) -> None:
        """The samples as objects, and as tar shards."""
        client = self._s3.client()
        client.create_bucket(Bucket="samples")
        samples = self._samples()
        while members := list(islice(samples, SHARD_SAMPLES)):
            for name, data in members:
                client.put_object(Bucket="samples", Key=f"plain/{name}", Body=data)
            client.put_object(Bucket="samples", Key=f"tar/{members[0][0]}.tar", Body=_tar(members))

    def _runs(self) -> Iterator[TrainRun]:
        if SLICEFS.name in self._mounts:
            volume = self._mounts[SLICEFS.name]
            url = f"{volume.meta_url}#samples"
            yield TrainRun(OURS, OURS, url, 0)
            yield TrainRun("slicefs-map", "slicefs-map", url, 0)
            yield TrainRun(f"{OURS}-workers", OURS, url, WORKERS)
            yield TrainRun("slicefs-map-workers", "slicefs-map", url, WORKERS)
            yield TrainRun("slicefs-mount", "files", str(volume.mountpoint / "samples"), WORKERS)
        yield TrainRun("slicefs-bucket", "slicefs-map", "s3://samples/plain", 0)
        if (PEERS / "s3torchconnector").is_dir():
            yield TrainRun("s3torchconnector", "s3torchconnector", "s3://samples/plain/", WORKERS)
        if (PEERS / "webdataset").is_dir():
            yield TrainRun("webdataset", "webdataset", "s3://samples/tar/", WORKERS)
        if S3FS.exists():
            yield TrainRun("s3fs", "s3fs", "s3://samples/plain", 0)
        if JUICEFS.name in self._mounts:
            mount = self._mounts[JUICEFS.name].mountpoint
            yield TrainRun("juicefs-mount", "files", str(mount / "samples"), WORKERS)
        yield TrainRun("plain", "files", str(self._plain), 0)
        yield TrainRun("plain-workers", "files", str(self._plain), WORKERS)

    def measure(self, delay_ms: float, found: Results) -> None:
        """One cold and one warm epoch of each system."""
        for run in self._runs():
            if self._only and run.name not in self._only:
                continue
            self._s3.set_delay_ms(0)
            volume = self._mounts.get(run.name.removesuffix("-mount"))
            if volume is not None and run.name.endswith("-mount"):
                volume.remount(keep_cache=False)
            self._s3.set_delay_ms(delay_ms)
            for state, line in zip(("cold", "warm"), self._epochs(run), strict=True):
                ms = 1000 / self._count
                found.add("train", run.name, Metric(f"epoch, {state}", line["seconds"], "s"))
                cpu = Metric(f"processor, {state}", line["cpu_s"] * ms, "ms/sample")
                found.add("train", run.name, cpu)
                requests = line["requests"] / self._count
                found.add("train", run.name, Metric(f"requests, {state}", requests, "/sample"))
                if state == "warm":
                    found.add("train", run.name, Metric("peak memory", line["peak_mib"], "MiB"))
            print(f"bench: {delay_ms:g} ms {run.name}", file=sys.stderr, flush=True)
        self._s3.set_delay_ms(0)

    def _epochs(self, run: TrainRun) -> list[dict[str, float]]:
        """Raises: RuntimeError."""
        asked = {
            **run._asdict(),
            "epochs": 2,
            "samples": self._count,
            "sample_bytes": self._size,
            "count_file": str(self._s3.count),
        }
        python = S3FS if run.system == "s3fs" else self._python
        command = [str(python), "-m", "tools.benchlib.train_epoch", json.dumps(asked)]
        environment = self._environment()
        if run.system == "s3fs":
            environment["PYTHONPATH"] = str(Path(__file__).parents[2])
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=EPOCH_S_MAX
        )
        if done.returncode != 0:
            raise RuntimeError(f"{run.name} ended with {done.returncode}:\n{done.stderr[-3000:]}")
        return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def _tar(members: Sequence[tuple[str, bytes]]) -> bytes:
    """A shard of samples."""
    shard = io.BytesIO()
    with tarfile.open(fileobj=shard, mode="w") as tar:
        for name, data in members:
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return shard.getvalue()
