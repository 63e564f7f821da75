"""`python -m tools.bench clean`: runs without a checkpoint go from a bucket, beside a script.

Half of the runs have a step and stay. The script is what is written by hand with boto3: run by run
it lists what is there, then the keys, and deletes those in one request. Both take turns on fresh
runs of one server, behind the proxy that lets each request wait. The time is the whole command's;
that of a command for one run, which is mostly its start, stands beside it: on a busy machine it is
most of the time, and the rest is what grows with the runs.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from tools.benchlib import delay, s3
from tools.benchlib.s3 import S3
from tools.benchlib.sync import SyncRun, run

SYSTEMS: Final = ("script", "slicefs")
BUCKET: Final = "cleanbench"
FILES: Final = ("config.yaml", "wandb/debug.log", "wandb/run.json", "train_data/index.npy")
STEP: Final = ("step0/model.pt", "step1000/model.pt")  # of those that stay


def main(words: Sequence[str]) -> int:
    """Measure and print."""
    made = argparse.ArgumentParser(prog="python -m tools.bench clean", description=__doc__)
    made.add_argument("--runs", type=int, default=200)
    made.add_argument("--delays-ms", default="10,30")
    made.add_argument("--repeat", type=int, default=3)
    made.add_argument("--dir", type=Path, default=Path("/dev/shm"))
    arguments = made.parse_args(words)
    workspace = Path(tempfile.mkdtemp(prefix="slicefs-bench-", dir=arguments.dir))
    try:
        with (
            s3.running(workspace) as server,
            delay.before(server, workspace, 1.0, 0.0, 0.0) as bucket,
        ):
            client(server.port).create_bucket(Bucket=BUCKET)
            for delay_ms in map(float, arguments.delays_ms.split(",")):
                found: dict[str, list[SyncRun]] = {system: [] for system in SYSTEMS}
                alone: dict[str, list[SyncRun]] = {system: [] for system in SYSTEMS}
                for repeat in range(arguments.repeat):
                    for system in SYSTEMS:
                        name = f"{system}-{delay_ms:g}-{repeat}"
                        runs = fill(server.port, name, arguments.runs)
                        first = fill(server.port, f"{name}-alone", 1)
                        bucket.set_delay_ms(delay_ms)
                        alone[system].append(_round(system, first, bucket))
                        found[system].append(_round(system, runs, bucket))
                        require_cleaned(server.port, runs)
                _show(delay_ms, arguments.runs, found, alone)
    finally:
        shutil.rmtree(workspace, ignore_errors=True)
    return 0


def client(port: int) -> Any:
    """boto3's for the server at a port."""
    return S3(port).client()


def fill(port: int, prefix: str, count: int) -> list[str]:
    """Make `count` runs; the prefix of each."""
    made, runs = client(port), [f"{prefix}/run{number:04}" for number in range(count)]
    for number, name in enumerate(runs):
        for file in FILES + (STEP if number % 2 else ()):
            made.put_object(Bucket=BUCKET, Key=f"{name}/{file}", Body=b"x" * 100)
    return runs


def require_cleaned(port: int, runs: Sequence[str]) -> None:
    """Every second run is gone, and no other. Raises: RuntimeError."""
    made = client(port)
    for number, name in enumerate(runs):
        left = len(list(keys_of(made, f"{name}/")))
        if left != (len(FILES + STEP) if number % 2 else 0):
            raise RuntimeError(f"{name} has {left} objects after it was cleaned")


def keys_of(made: Any, prefix: str, bucket: str = BUCKET) -> Iterator[str]:
    """The keys below a prefix, page by page."""
    for page in made.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix):
        yield from (each["Key"] for each in page.get("Contents", []))


def script(port: int, runs: Sequence[str]) -> None:
    """What a user would write: one run after the other."""
    made = client(port)
    for name in runs:
        top = made.list_objects_v2(Bucket=BUCKET, Prefix=f"{name}/", Delimiter="/")
        folders = [each["Prefix"].split("/")[-2] for each in top.get("CommonPrefixes", [])]
        if any(each.startswith("step") and each != "step0" for each in folders):
            continue
        doomed = [{"Key": key} for key in keys_of(made, f"{name}/")]
        made.delete_objects(Bucket=BUCKET, Delete={"Objects": doomed})


def _round(system: str, runs: Sequence[str], bucket: S3) -> SyncRun:
    if system == "script":
        words = [sys.executable, "-m", "tools.benchlib.clean", str(bucket.port), *runs]
    else:
        program = str(Path(sys.executable).with_name("slicefs"))
        words = [program, "ckpt", "clean", *(f"s3://{BUCKET}/{name}" for name in runs)]
    return run(words, _environment(bucket), bucket)


def _environment(bucket: S3) -> Mapping[str, str]:
    endpoint = {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{bucket.port}"}
    return {**os.environ, **bucket.environment(), **endpoint, "AWS_DEFAULT_REGION": "us-east-1"}


def _show(
    delay_ms: float,
    count: int,
    found: Mapping[str, Sequence[SyncRun]],
    alone: Mapping[str, Sequence[SyncRun]],
) -> None:
    whole = {system: _median(each.seconds for each in found[system]) for system in SYSTEMS}
    start = {system: _median(each.seconds for each in alone[system]) for system in SYSTEMS}
    for system in SYSTEMS:
        print(
            f"{delay_ms:4g} ms {count} runs {system:8} {whole[system]:7.2f} s, one run "
            f"{start[system]:5.2f} s; {_median(each.processor for each in found[system]):6.2f} s "
            f"of processor {_median(each.requests for each in found[system]):6.0f} requests"
        )
    more = {system: max(whole[system] - start[system], 1e-9) for system in SYSTEMS}
    print(
        f"{delay_ms:4g} ms: {whole['script'] / whole['slicefs']:.1f} times as fast, "
        f"{more['script'] / more['slicefs']:.1f} times without the start",
        flush=True,
    )


def _median(values: Iterable[float]) -> float:
    return statistics.median(values)


if __name__ == "__main__":
    script(int(sys.argv[1]), sys.argv[2:])
