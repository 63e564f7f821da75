"""`python -m tools.bench train-link`: `torch.save` over a link of limited bandwidth.

One checkpoint goes to one S3 server behind a proxy whose uplink carries LINK MiB a second and which
delays each request. The systems take turns, each in a process of its own with torch's Python: our
writer on the bucket and on a volume, s3torchconnector, and a script that saves to memory and
uploads with boto3. A save ends when the file is there. The least that is possible is the bytes
over the link's bandwidth; the table shows how many times that each system takes.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final, NamedTuple

from tools.benchlib import delay, s3
from tools.benchlib.clean import keys_of
from tools.benchlib.s3 import REGION, S3
from tools.benchlib.train import CACHE, PEERS, TORCH
from tools.benchlib.train_memory import added_mib

MIB: Final = 1 << 20
TENSORS: Final = 100
BUCKET: Final = "linkbench"
SAVE_S_MAX: Final = 1800.0


def main(words: Sequence[str]) -> int:
    """Measure and print one line for each system and delay."""
    made = argparse.ArgumentParser(prog="python -m tools.bench train-link", description=__doc__)
    made.add_argument("--mib", type=int, default=1024, help="of the checkpoint; 1024")
    made.add_argument("--link-mib", type=float, default=100.0, help="a second; 100")
    made.add_argument("--delays-ms", default="0,30")
    made.add_argument("--repeat", type=int, default=3)
    made.add_argument("--only", default="", help="names of systems, with commas")
    made.add_argument("--dir", type=Path, default=Path("/dev/shm"), help="for the stores")
    arguments = made.parse_args(words)
    python = next(iter(sorted(CACHE.glob(TORCH))), None)
    if python is None:
        print("bench: needs torch: run `make test-torch` once", file=sys.stderr)
        return 1
    workspace = Path(tempfile.mkdtemp(prefix="slicefs-link-", dir=arguments.dir))
    try:
        with ExitStack() as stack:
            direct = stack.enter_context(s3.running(workspace))
            proxy = delay.before(direct, workspace, 1.0, arguments.link_mib, 0.0)
            bucket = stack.enter_context(proxy)
            names = arguments.only.split(",") if arguments.only else SYSTEMS
            floor_s = arguments.mib / arguments.link_mib
            for delay_ms in map(float, arguments.delays_ms.split(",")):
                found: dict[str, list[_Saved]] = {}
                for _ in range(arguments.repeat):
                    for name in names:
                        bucket.set_delay_ms(delay_ms)
                        saved = _round(python, name, arguments.mib, bucket, direct, workspace)
                        found.setdefault(name, []).append(saved)
                _show(delay_ms, floor_s, found)
    finally:
        shutil.rmtree(workspace, ignore_errors=True)
    return 0


class _Saved(NamedTuple):
    seconds: float
    processor_s: float
    added_mib: float


def _round(python: Path, name: str, mib: int, bucket: S3, direct: S3, workspace: Path) -> _Saved:
    """One save into an empty place. Raises: RuntimeError."""
    store = direct.client()
    store.create_bucket(Bucket=BUCKET)
    environment = _environment(bucket)
    url = f"s3://{BUCKET}/run"
    if name == VOLUME:
        url = f"sqlite://{workspace}/meta.db"
        program = Path(sys.executable).with_name("slicefs")
        place = ["--bucket", bucket.url(BUCKET), "--storage", "s3"]
        subprocess.run(
            [program, "format", url, "linkbench", *place],
            env=environment,
            check=True,
            capture_output=True,
        )
    try:
        done = subprocess.run(
            [str(python), "-W", "ignore", "-m", "tools.benchlib.train_link", name, url, str(mib)],
            env=environment,
            capture_output=True,
            text=True,
            timeout=SAVE_S_MAX,
        )
        if done.returncode:
            raise RuntimeError(f"{name} ended with {done.returncode}:\n{done.stderr[:3000]}")
        return _Saved(**json.loads(done.stdout))
    finally:
        Path(workspace / "meta.db").unlink(missing_ok=True)
        for key in keys_of(store, "", BUCKET):
            store.delete_object(Bucket=BUCKET, Key=key)
        store.delete_bucket(Bucket=BUCKET)


def _environment(bucket: S3) -> dict[str, str]:
    return {
        **os.environ,
        **bucket.environment(),
        "AWS_ENDPOINT_URL": bucket.url("").rstrip("/"),
        "AWS_DEFAULT_REGION": REGION,
        "PYTHONPATH": os.pathsep.join((str(Path(__file__).parents[2]), str(PEERS))),
    }


def _show(delay_ms: float, floor_s: float, found: dict[str, list[_Saved]]) -> None:
    for name, saved in found.items():
        seconds = [each.seconds for each in saved]
        middle = statistics.median(seconds)
        processor = statistics.median(each.processor_s for each in saved)
        memory = statistics.median(each.added_mib for each in saved)
        print(
            f"{delay_ms:4g} ms {name:16} {middle:6.2f} s ({min(seconds):.2f} to "
            f"{max(seconds):.2f}), {middle / floor_s:.2f} of the link; {processor:5.2f} s of "
            f"processor, {memory:4.0f} MiB added",
            flush=True,
        )


VOLUME: Final = "slicefs-volume"


def _ours(url: str) -> Callable[[Any], None]:
    import torch

    from slicefs.torch import Checkpoint

    place = Checkpoint(url)

    def save(state: Any) -> None:
        with place.writer("state.pt") as file:
            torch.save(state, file)

    return save


def _s3torchconnector(url: str) -> Callable[[Any], None]:
    import torch
    from s3torchconnector import S3Checkpoint, S3ClientConfig

    place = S3Checkpoint(
        region=REGION,
        endpoint=os.environ["AWS_ENDPOINT_URL"],
        s3client_config=S3ClientConfig(force_path_style=True),
    )

    def save(state: Any) -> None:
        with place.writer(f"{url}/state.pt") as file:
            torch.save(state, file)

    return save


def _boto3(url: str) -> Callable[[Any], None]:
    import boto3
    import torch

    client = boto3.client("s3")
    key = url.removeprefix(f"s3://{BUCKET}/") + "/state.pt"

    def save(state: Any) -> None:
        buffer = io.BytesIO()
        torch.save(state, buffer)
        buffer.seek(0)
        client.upload_fileobj(buffer, BUCKET, key)

    return save


SYSTEMS: Final = {
    "slicefs-bucket": _ours,
    VOLUME: _ours,
    "s3torchconnector": _s3torchconnector,
    "boto3": _boto3,
}


def _measure(name: str, url: str, mib: int) -> _Saved:
    """In a process of torch's: save, and leave the file to be compared."""
    import torch

    numbers = mib * MIB // TENSORS // 4
    state = {f"t{at:03}": torch.rand(numbers) for at in range(TENSORS)}
    save = SYSTEMS[name](url)
    save({"t": torch.rand(10)})  # imports, connections and buffers of their own
    begin, cpu = time.perf_counter(), time.process_time()
    added = added_mib(lambda: save(state))
    return _Saved(time.perf_counter() - begin, time.process_time() - cpu, added)


if __name__ == "__main__":
    system, where, size = sys.argv[1:]
    print(json.dumps(_measure(system, where, int(size))._asdict()), flush=True)
