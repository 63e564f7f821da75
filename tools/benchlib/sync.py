"""`python -m tools.bench sync`: small files from a directory to S3 and back, beside rclone.

Both systems take turns on fresh prefixes of one server, behind the proxy that lets each request
wait. It prints seconds, processor seconds (user and system, of the command) and requests of each
run, and in the end a table of medians with the ratio, and where slicefs is no slower than rclone.
Where other work shares the machine, processor seconds and requests are the reliable figures.
"""

from __future__ import annotations

import argparse
import os
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from tools.benchlib import delay, s3
from tools.benchlib.results import Metric, Results, Row, table, times_better
from tools.benchlib.s3 import S3

OURS, PEER = "slicefs", "rclone"
SECONDS = "s"
SYSTEMS = (OURS, PEER)
_BIN = Path(sys.executable).parent
_SIZES = (0, 100, 1000, 4000, 16_000, 64_000)  # of small files; the mean is 14 KB


class SyncRun(NamedTuple):
    """What one command took."""

    seconds: float
    processor: float
    requests: int


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(prog="python -m tools.bench sync", description=__doc__)
    made.add_argument("--files", type=int, default=10_000)
    made.add_argument("--delay-ms", type=float, default=10.0)
    made.add_argument("--threads", default="default,32", help="files at once; default,32")
    made.add_argument("--repeat", type=int, default=3)
    made.add_argument("--dir", type=Path, default=Path("/dev/shm"))
    return made


def fill(top: Path, count: int) -> int:
    """Make `count` files, a hundred a directory; their bytes."""
    chance = random.Random(7)
    total = 0
    for number in range(count):
        folder = top / f"d{number // 100:04}"
        folder.mkdir(parents=True, exist_ok=True)
        size = chance.choice(_SIZES)
        (folder / f"f{number:06}").write_bytes(chance.randbytes(size))
        total += size
    return total


def command(system: str, source: str, target: str, threads: str) -> list[str]:
    """What copies `source` (a directory or prefix) to `target`."""
    if system == "slicefs":
        more = [] if threads == "default" else ["-p", threads]
        return [str(_BIN / "slicefs"), "sync", f"{source}/", f"{target}/", *more]
    more = [] if threads == "default" else ["--transfers", threads, "--checkers", threads]
    return [str(_BIN / "rclone"), "copy", source, target, "--config", "/dev/null", *more]


def place(system: str, bucket: S3, name: str) -> str:
    """A prefix of the bucket, in the words of a system."""
    if system == "slicefs":
        return f"{bucket.url('syncbench')}/{name}"
    return f":s3:syncbench/{name}"


def environment(bucket: S3) -> dict[str, str]:
    """The keys and the server, for both."""
    return {
        **os.environ,
        **bucket.environment(),
        "RCLONE_S3_PROVIDER": "Other",
        "RCLONE_S3_ENV_AUTH": "true",
        "RCLONE_S3_ENDPOINT": f"http://127.0.0.1:{bucket.port}",
        "RCLONE_S3_NO_CHECK_BUCKET": "true",
    }


def run(words: Sequence[str], env: Mapping[str, str], bucket: S3) -> SyncRun:
    """Run a command to its end. Raises: CalledProcessError."""
    asked, before = bucket.requests() or 0, resource.getrusage(resource.RUSAGE_CHILDREN)
    begin = time.monotonic()
    subprocess.run(words, env=dict(env), check=True, stdout=subprocess.DEVNULL)
    seconds = time.monotonic() - begin
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return SyncRun(seconds, spent, (bucket.requests() or 0) - asked)


def main(words: Sequence[str]) -> int:
    """Measure and print."""
    arguments = parser().parse_args(words)
    results = Results()
    workspace = Path(tempfile.mkdtemp(prefix="slicefs-bench-", dir=arguments.dir))
    try:
        source = workspace / "source"
        total = fill(source, arguments.files)
        print(f"{arguments.files} files, {total / 1e6:.0f} MB, {arguments.delay_ms} ms a request")
        with (
            s3.running(workspace) as server,
            delay.before(server, workspace, arguments.delay_ms, 0.0, 0.0) as bucket,
        ):
            env = environment(bucket)
            _make_bucket(env)
            for repeat in range(arguments.repeat):
                for threads in arguments.threads.split(","):
                    for system in SYSTEMS:
                        name = f"{system}-{threads}-{repeat}"
                        found = _round(system, threads, name, source, bucket, env)
                        note(results, system, threads, found)
    finally:
        shutil.rmtree(workspace, ignore_errors=True)
    print(f"\n{table(results.rows, OURS, [PEER])}\n")
    print("\n".join(verdicts(results.rows)))
    return 0


def note(results: Results, system: str, threads: str, runs: Mapping[str, SyncRun]) -> None:
    """Put what one system took into the table."""
    for what, (seconds, processor, requests) in runs.items():
        for value, unit in ((seconds, SECONDS), (processor, "CPU s"), (requests, "requests")):
            results.add(f"threads {threads}", system, Metric(what, value, unit))


def verdicts(rows: Sequence[Row]) -> list[str]:
    """A line for each kind of run: whether slicefs is no slower than rclone, by the medians."""
    lines = []
    for row in rows:
        ratio = times_better(row.unit, row.median(OURS), row.median(PEER))
        if row.unit == SECONDS and ratio is not None:
            said = "no slower" if ratio >= 1 else "slower"
            lines.append(f"{row.workload}, {row.operation}: {said} than {PEER} ({ratio:.2f} ×)")
    return lines


def _make_bucket(env: Mapping[str, str]) -> None:
    made = {**env, "RCLONE_S3_NO_CHECK_BUCKET": "false"}
    words = [str(_BIN / "rclone"), "mkdir", ":s3:syncbench", "--config", "/dev/null"]
    subprocess.run(words, env=made, check=True)


def _round(
    system: str, threads: str, name: str, source: Path, bucket: S3, env: Mapping[str, str]
) -> dict[str, SyncRun]:
    """There, once more with nothing to do, and back."""
    there, back = place(system, bucket, name), source.with_name(name)
    runs = {}
    for what, words in (
        ("up", command(system, str(source), there, threads)),
        ("again", command(system, str(source), there, threads)),
        ("down", command(system, there, str(back), threads)),
    ):
        found = runs[what] = run(words, env, bucket)
        print(
            f"{system:8} threads {threads:8} {what:6} {found.seconds:7.2f} s "
            f"{found.processor:7.2f} s of processor {found.requests:6} requests",
            flush=True,
        )
    shutil.rmtree(back)
    return runs
