"""The pure parts of the benchmark: reading what programs print, medians, ratios, the table."""

from __future__ import annotations

import socket
import threading
import time
from pathlib import Path

import pytest

from tools import bench
from tools.benchlib import client, delay, procs, redis, sync
from tools.benchlib.results import (
    OF_RAW,
    RATE,
    Metric,
    Results,
    as_json,
    number,
    table,
    times_better,
)
from tools.benchlib.s3 import S3
from tools.benchlib.systems import JUICEFS, RCLONE, SLICEFS, adjusted
from tools.benchlib.volume import BenchVolume


def test_timings_are_read_from_the_client() -> None:
    create, write = client.parse("create 2000000 1000 0\nwrite 500000000 8 1000000000\n")
    assert (create.phase, create.us_per_op) == ("create", 2.0)
    assert write.mb_per_s == 2000.0


def test_a_line_that_is_no_timing_is_an_error() -> None:
    with pytest.raises(ValueError, match="not enough values"):
        client.parse("create 1\n")


def test_cpu_ticks_survive_brackets_in_the_name() -> None:
    line = b"12 (a) b) S 1 12 12 0 -1 4194304 99 0 0 0 250 50 0 0 20 0 3 0 100 200\n"
    assert procs.parse_cpu_ticks(line) == 300
    assert procs.parse_cpu_ticks(b"") == 0


def test_peak_rss_is_in_bytes() -> None:
    assert procs.parse_peak_rss(b"Name:\tx\nVmHWM:\t    2048 kB\nVmRSS:\t 1 kB\n") == 2 << 20
    assert procs.parse_peak_rss(b"") == 0


def test_used_memory_is_not_mistaken_for_its_neighbours() -> None:
    info = "# Memory\r\nused_memory_rss:99\r\nused_memory:42\r\nused_memory_peak:7\r\n"
    assert redis.parse_info(info, "used_memory") == 42
    with pytest.raises(ValueError, match="used_memory"):
        redis.parse_info("", "used_memory")


@pytest.mark.parametrize(
    ("unit", "ours", "peer", "expected"),
    [
        ("µs/op", 100.0, 300.0, 3.0),
        (RATE, 300.0, 100.0, 3.0),
        (OF_RAW, 0.9, 0.3, 3.0),
        ("CPU s/GB", 2.0, 1.0, 0.5),
        ("MiB", None, 1.0, None),
        ("MiB", 0.0, 1.0, None),
    ],
)
def test_times_better(
    unit: str, ours: float | None, peer: float | None, expected: float | None
) -> None:
    assert times_better(unit, ours, peer) == expected


@pytest.mark.parametrize(
    ("value", "text"), [(None, "-"), (1234.5, "1,234"), (12.34, "12.3"), (1.234, "1.23")]
)
def test_number(value: float | None, text: str) -> None:
    assert number(value) == text


def sample() -> Results:
    results = Results()
    for value in (10.0, 30.0, 20.0):
        results.add("meta", "slicefs", Metric("create", value, "µs/op"))
        results.add("meta", "juicefs", Metric("create", value * 4, "µs/op"))
    results.add("bigfile", "juicefs", Metric("read", 500.0, RATE))
    return results


def test_the_table_shows_medians_and_ratios() -> None:
    assert table(sample().rows, "slicefs", ["juicefs"]).splitlines() == [
        "operation   unit   slicefs      spread  juicefs     spread  × better",
        "-- meta",
        "create      µs/op     20.0  10.0..30.0     80.0  40.0..120      4.00",
        "-- bigfile",
        "read        MB/s         -                  500                    -",
    ]


def test_json_keeps_every_value() -> None:
    first = as_json(sample().rows, "slicefs", ["juicefs"])[0]
    assert first["values"] == {"slicefs": [10.0, 30.0, 20.0], "juicefs": [40.0, 120.0, 80.0]}
    assert first["times_better"] == {"juicefs": 4.0}


def test_commands_are_filled_in_without_a_shell() -> None:
    ours = adjusted(SLICEFS, "python -m fsclient", "--compression none", "")
    template = ours.format.replace("{place}", ours.place("file", store="'/a b'"))
    command = ours.command(template, meta="redis://h/1", volume="one")
    assert command[:6] == ["python", "-m", "fsclient", "format", "redis://h/1", "one"]
    assert "/a b/" in command
    peer = RCLONE.format.replace("{place}", RCLONE.place("s3", endpoint="http://h:1"))
    assert RCLONE.command(peer)[2].endswith(",endpoint='http://h:1':bench-rclone")
    assert command[-2:] == ["--compression", "none"]
    assert JUICEFS.command(JUICEFS.umount, mountpoint="/m")[1:] == ["umount", "/m"]


def test_the_command_line_chooses_systems_and_place(tmp_path: Path) -> None:
    both = bench.parser().parse_args(["meta", "--threads", "1,8", "--dir", str(tmp_path)])
    assert both.threads == (1, 8)
    chosen = bench.chosen_systems(both)
    assert [system.name for system in chosen] == ["slicefs", "slicefs-auto", "juicefs"]
    assert [system.mount.split()[-2:] for system in chosen[:2]] == [
        ["--idle-poll", "never"],
        ["--idle-poll", "auto"],
    ]
    assert len({system.meta_urls["redis"] for system in chosen}) == len(chosen)
    assert bench.chosen_directory(both) == tmp_path
    alone = bench.parser().parse_args(["all", "--only", "juicefs"])
    assert [system.name for system in bench.chosen_systems(alone)] == ["juicefs"]
    ours = bench.parser().parse_args(["all", "--peer", "none"])
    assert [system.name for system in bench.chosen_systems(ours)] == ["slicefs"]


def test_a_delay_is_refused_where_no_proxy_can_be(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["--store", "rados", "--delay-ms", "1"], ["--downlink-mib", "9"]):
        with pytest.raises(SystemExit):
            bench.main(["bigfile", *words])
        assert "--store s3 or radosgw" in capsys.readouterr().err


def test_who_has_no_librados_goes_through_the_radosgw(tmp_path: Path) -> None:
    server = S3(8000, ceph=tmp_path / "ceph.conf")
    direct, through = (
        BenchVolume(system, tmp_path, "redis://h/1", server).place()
        for system in (SLICEFS, JUICEFS)
    )
    assert direct == f"--storage rados --bucket bench --store-option conf={tmp_path}/ceph.conf"
    assert through == "--storage s3 --bucket http://127.0.0.1:8000/bench-juicefs"


def test_a_narrow_downlink_takes_its_time(tmp_path: Path) -> None:
    size, mib_s = 1 << 20, 4.0
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(1)
                connection.sendall(bytes(size))

        thread = threading.Thread(target=answer)
        thread.start()
        with (
            delay.before(S3(server.getsockname()[1]), tmp_path, 0.0, 0.0, mib_s) as reached,
            socket.create_connection(("127.0.0.1", reached.port), 30) as client_side,
        ):
            begin = time.monotonic()
            client_side.sendall(b"?")
            left = size
            while left:
                left -= len(client_side.recv(1 << 20))
            took = time.monotonic() - begin
        thread.join()
    assert took > 0.9 * size / (mib_s * (1 << 20))


def test_mapped_records_are_each_read_once(tmp_path: Path) -> None:
    path = tmp_path / "file"
    client.run("dataloop", "write", path, 1 << 20, 1 << 18)
    (timing,) = client.run("dataloop", "mapped", path, 100 << 10, 99, 1)
    assert (timing.ops, timing.bytes) == (10, 10 * 100 << 10)


def test_context_switches_of_both_kinds_count() -> None:
    status = b"Name:\tx\nvoluntary_ctxt_switches:\t12\nnonvoluntary_ctxt_switches:\t3\n"
    assert procs.parse_switches(status) == 15
    assert procs.parse_switches(b"") == 0


def test_sync_says_where_it_is_no_slower() -> None:
    results = Results()
    for what, ours, peer in (("up", 30.0, 90.0), ("again", 9.0, 9.0), ("down", 50.0, 40.0)):
        for system, seconds in (("slicefs", ours), ("rclone", peer)):
            sync.note(results, system, "32", {what: sync.SyncRun(seconds, 1.0, 10)})
    assert sync.verdicts(results.rows) == [
        "threads 32, up: no slower than rclone (3.00 ×)",
        "threads 32, again: no slower than rclone (1.00 ×)",
        "threads 32, down: slower than rclone (0.80 ×)",
    ]
