"""`mount --trace`: what a collector receives of real mounts, and what becomes of them without."""

from __future__ import annotations

import errno
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from fsclient.fuse.wire import abi
from fsclient.fuse.wire.pack import Answer
from fsclient.fuse.wire.protocol import Opcode
from fsclient.kernel.later import Later, Take
from fsclient.observe.access_line import Line, parse_line
from fsclient.tracing.layers import Layers
from fsclient.tracing.options import TraceOptions, parse_trace
from fsclient.tracing.otlp import resource
from fsclient.tracing.request_spans import traced
from fsclient.tracing.sender import QUEUE_MAX, Sender
from fsclient.tracing.tracing import Tracing
from fsdata.objects.wrappers import Metered
from fsdata.resources.worker_pool import WorkerPool
from fsmeta.errors import ConfigError
from fsmeta.meta.meta import Meta
from fsmeta.runtime import SystemRuntime
from fsmeta.spans import Spans, TraceSpan
from fsmeta.store.metered import MeteredStore
from fsmeta.types import Caller
from tests.faults.program import SLICEFS, Volume, needs_mounts, slicefs, wait_until
from tests.fsclient.observe.ports import free_port
from tests.fsclient.tracing.collector import Collector, Received, collecting

SECRET = "a-value-that-no-trace-shows"
SERVER, CLIENT, INTERNAL = 2, 3, 1  # SpanKind


@pytest.fixture
def collector() -> Iterator[Collector]:
    with collecting() as made:
        yield made


def _path_to_root(span: Received, spans: dict[bytes, Received]) -> list[str]:
    """Names from the first span of the request to `span`; each lies within its parent."""
    names = [span.name]
    while span.parent:
        around = spans[span.parent]
        assert around.trace == span.trace
        assert around.begun_ns <= span.begun_ns <= span.ended_ns
        span = around
        names.insert(0, span.name)
    return names


def _paths(collector: Collector) -> set[tuple[str, ...]]:
    spans = {span.id: span for span in collector.spans}
    assert len(spans) == len(collector.spans), "each has an id of its own"
    return {tuple(_path_to_root(span, spans)) for span in collector.spans}


def _access_lines(file: Path) -> dict[int, Line]:
    found = [parse_line(line) for line in file.read_text().splitlines()]
    return {line.request: line for line in found if line is not None}


@needs_mounts
@pytest.mark.parametrize("redis", [True, False], ids=["redis", "sqlite"])
def test_one_request_is_one_trace_through_all_layers(
    redis: bool, request: pytest.FixtureRequest, collector: Collector
) -> None:
    """From the kernel's request over verb and transaction to both stores, with the id that the
    access log and the log of slow operations have."""
    volume: Volume = request.getfixturevalue("served" if redis else "embedded")
    volume.format()
    words = ("--trace", collector.url, "--slow-op-log", "0.001", "--access-log")
    logs = [volume.base / "access-1", volume.base / "access-2"]
    mount = volume.mount(*words, str(logs[0]))
    pids = [mount.pid]
    file = mount.path / f"{SECRET}-name"
    file.write_bytes(os.urandom(100_000))
    os.setxattr(file, "user.key", SECRET.encode())
    os.rename(file, mount.path / "new")
    inode = os.stat(mount.path / "new").st_ino
    with pytest.raises(FileNotFoundError):
        os.stat(mount.path / "absent")
    mount.umount()
    mount = volume.mount(*words, str(logs[1]))  # nothing is cached
    pids.append(mount.pid)
    assert len((mount.path / "new").read_bytes()) == 100_000
    os.unlink(mount.path / "new")
    mount.umount()
    engine = "redis" if redis else "sqlite"
    commit = ("transaction", "store.commit")
    assert {
        ("create", "meta.create", *commit),
        ("flush", "meta.write_slices", *commit),
        ("flush", "object.put"),
        ("rename", "meta.rename", *commit),
        ("unlink", "meta.unlink", *commit),
        ("lookup", "meta.lookup", "transaction", "store.read"),
        ("read", "object.get"),
    } <= _paths(collector)
    lines = {pid: _access_lines(log) for pid, log in zip(pids, logs, strict=True)}
    for spans in collector.trees().values():
        (first,) = (span for span in spans if not span.parent)
        told = lines[first.sender["process.pid"]][first.attributes["slicefs.request"]]
        assert told.verb == first.name
        assert told.ino == first.attributes["slicefs.ino"]
        assert told.uid == first.attributes["slicefs.uid"]
        assert told.pid == first.attributes["slicefs.pid"]
        outcome = first.attributes.get("slicefs.errno", "OK")
        assert told.outcome in (outcome, "LATER")
        assert first.kind == SERVER
        assert not first.failed
    for pid, told_lines in lines.items():
        own = [span for span in collector.spans if span.sender["process.pid"] == pid]
        traced = {span.attributes.get("slicefs.request") for span in own}
        unanswered = ("forget", "batch_forget")
        assert {n for n, line in told_lines.items() if line.verb not in unanswered} <= traced
    slow = "".join(volume.log_lines())
    (created,) = collector.requests("create")
    assert f"req:{created.attributes['slicefs.request']}] create" in slow
    assert any(span.attributes["slicefs.ino"] == inode for span in collector.requests("read"))
    for span in collector.spans:
        if span.name.startswith(("store.", "object.")):
            assert span.kind == CLIENT
        if span.name.startswith("store."):
            assert span.attributes["slicefs.engine"] == engine
        assert span.sender["service.name"] == "slicefs"
        assert span.sender["slicefs.volume"] == "testvol"
        assert span.sender["slicefs.mountpoint"] == str(mount.path)
    assert SECRET.encode() not in collector.bytes
    volume.end(expected="slow operation")


@needs_mounts
def test_work_that_other_threads_do_belongs_to_the_request(
    embedded: Volume, collector: Collector
) -> None:
    """Blocks of a large file: stored by upload threads, and read ahead by others."""
    embedded.format()
    mount = embedded.mount("--trace", collector.url)
    (mount.path / "file").write_bytes(os.urandom(12 << 20))
    mount.umount()
    mount = embedded.mount("--trace", collector.url)
    assert len((mount.path / "file").read_bytes()) == 12 << 20
    mount.umount()
    assert {("write", "object.put"), ("read", "object.get")} <= _paths(collector)
    stored = [span for span in collector.spans if span.name == "object.put"]
    assert sum(span.attributes["slicefs.bytes"] for span in stored) >= 12 << 20
    embedded.end()


def test_requests_that_wait_end_with_their_answer() -> None:
    """The thread that serves them goes on; the span lasts until the outcome comes."""
    ended: list[TraceSpan] = []
    spans = Spans(SystemRuntime(), ended.append, 1.0)
    waiting: list[Take[Answer | int]] = []
    later: Later[Answer | int] = Later(waiting.append)
    header = abi.IN_HEADER.pack(40, Opcode.FSYNC, 77, 5, 1, 2, 3, 0)
    serve = traced(spans, lambda *_: later)
    answer = serve(Opcode.FSYNC, Caller(1, 2), 5, memoryview(header), 40)
    assert isinstance(answer, Later)
    outcomes: list[Answer | int] = []
    answer.begin(lambda outcome: outcomes.append(outcome()))
    assert ended == []
    waiting[0](lambda: errno.EIO)
    assert outcomes == [errno.EIO]
    (span,) = ended
    assert (span.name, span.failed) == ("fsync", True)
    assert span.attributes["slicefs.request"] == 77


@needs_mounts
def test_errors_are_marked(served: Volume, collector: Collector) -> None:
    """An errno that programs expect is none; EIO of a damaged object is."""
    served.format()
    mount = served.mount("--trace", collector.url)
    (mount.path / "file").write_bytes(b"x" * 200_000)
    os.makedirs(mount.path / "directory" / "below")
    with pytest.raises(OSError, match="not empty"):
        os.rmdir(mount.path / "directory")
    mount.umount()
    for path in served.objects():
        path.write_bytes(b"damaged")
    mount = served.mount("--trace", collector.url)
    with pytest.raises(OSError, match="Input/output error"):
        (mount.path / "file").read_bytes()
    mount.umount()
    (wrong,) = {span.name for span in collector.spans if span.failed and not span.parent}
    assert wrong == "read"
    (refused,) = collector.requests("rmdir")
    assert refused.attributes["slicefs.errno"] == "ENOTEMPTY"
    assert all(read.attributes["slicefs.errno"] == "EIO" for read in collector.requests("read"))


@needs_mounts
def test_sampled_and_off(embedded: Volume, collector: Collector) -> None:
    """A share of requests; a mount that traces none makes its layers as one without the option."""
    embedded.format()
    mount = embedded.mount("-o", f"trace={collector.url},trace-sample=0.5")
    for number in range(300):
        (mount.path / f"file-{number}").write_bytes(b"x")
    mount.umount()
    assert 75 < len(collector.requests("create")) < 225  # 5e-18 that it is not, of 300 coins
    for spans in collector.trees().values():
        assert len([span for span in spans if not span.parent]) == 1, "no half traces"
    before = len(collector.spans)
    mount = embedded.mount("--trace", collector.url, "--trace-sample", "0")
    (mount.path / "file").write_bytes(b"x")
    assert "trace_spans_sent_total" not in mount.numbers()
    mount.umount()
    assert len(collector.spans) == before
    assert Tracing(None, SystemRuntime()).layers == Layers(Meta, MeteredStore, Metered, WorkerPool)
    embedded.end()


@needs_mounts
def test_the_environment_asks(
    embedded: Volume, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As libraries of OpenTelemetry take it; keys are sent to the collector and shown nowhere."""
    embedded.format()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"{collector.url}/")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", f"x-key={SECRET}")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment=lab")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "training-data")
    mount = embedded.mount()
    (mount.path / "file").write_bytes(b"x")
    wait_until("they arrive", 60, lambda: collector.requests("create"))
    wait_until("they are counted", 60, lambda: mount.numbers()["trace_spans_sent_total"] > 0)
    assert SECRET not in (mount.path / ".config").read_text()
    mount.umount()
    assert f"x-key: {SECRET}".encode() in collector.bytes
    (created,) = collector.requests("create")
    assert created.sender["service.name"] == "training-data"
    assert created.sender["deployment.environment"] == "lab"
    assert SECRET not in str(collector.spans)
    assert SECRET not in "".join(embedded.log_lines())
    embedded.end()


@needs_mounts
@pytest.mark.parametrize("how", ["closed", "silent", "refusing"])
def test_a_collector_that_is_away(
    embedded: Volume, how: str, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing waits for it, unmounting no longer than its grace; it is one warning."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "2")  # seconds, to this library
    embedded.format()
    collector.code = 503
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen(64)
        silent = f"http://127.0.0.1:{listening.getsockname()[1]}"
        closed = f"http://127.0.0.1:{free_port()}"
        url = {"closed": closed, "silent": silent, "refusing": collector.url}[how]
        mount = embedded.mount("--trace", url)
        for number in range(700):  # spans of several batches
            (mount.path / f"file-{number}").write_bytes(b"x")
        dropped = "trace_spans_dropped_total"
        wait_until("it is noticed", 60, lambda: mount.numbers()[dropped] > 0)
        for number in range(700):
            os.unlink(mount.path / f"file-{number}")
        mount.umount()
    told = [line for line in embedded.log_lines() if " WARNING " in line]
    assert len([line for line in told if "takes no traces" in line]) == 1, told
    embedded.end(expected=r"takes no traces: they are dropped until it does")


@needs_mounts
def test_a_collector_that_comes_back(embedded: Volume, collector: Collector) -> None:
    embedded.format()
    collector.code = 400  # one that is not worth another try
    mount = embedded.mount("--trace", collector.url)
    (mount.path / "file").write_bytes(b"x")
    wait_until("refused", 60, lambda: mount.numbers()["trace_spans_dropped_total"] > 0)
    collector.code = 200
    os.mkdir(mount.path / "directory")
    wait_until("they arrive", 60, lambda: collector.requests("mkdir"))
    mount.umount()
    assert any("again" in line for line in embedded.log_lines() if "traces go to" in line)
    embedded.end(expected="takes no traces")


@needs_mounts
def test_the_next_client_of_a_supervisor_traces(embedded: Volume, collector: Collector) -> None:
    """Both wrap requests: what is noted for the next client, and its span."""
    embedded.format()
    mount = embedded.mount("--supervisor", "--trace", collector.url)
    (mount.path / "before").write_bytes(b"x")
    with (mount.path / "open").open("wb") as file:
        os.kill(mount.pid, signal.SIGKILL)
        file.write(b"kept")
        os.mkdir(mount.path / "after")
    assert (mount.path / "open").read_bytes() == b"kept"
    mount.umount()
    (made,) = collector.requests("mkdir")
    assert made.sender["process.pid"] != mount.pid
    embedded.end(expected="ended with signal 9")


@needs_mounts
def test_without_the_packages(embedded: Volume, tmp_path: Path) -> None:
    """The option names the extra in one line; a variable that is set for all programs of a host
    only has the mount say why it does not trace."""
    embedded.format()
    (tmp_path / "opentelemetry.py").write_text("raise ImportError('not installed')\n")
    program = ("env", f"PYTHONPATH={tmp_path}", SLICEFS)
    path = embedded.base / "mnt"
    path.mkdir()
    words = ("mount", "--cache-dir", "none", embedded.meta, path)
    refused = slicefs(*words, "--trace", "http://127.0.0.1:4318", program=program)
    assert refused.code == 1
    assert refused.err.count("\n") == 1
    assert "pip install 'slicefs[trace]'" in refused.err
    variable = "OTEL_EXPORTER_OTLP_ENDPOINT=http://127.0.0.1:4318"
    mount = embedded.mount(program=("env", variable, *program[1:]))
    (mount.path / "file").write_bytes(b"x")
    embedded.end(expected=r"no traces, though .*pip install 'slicefs\[trace\]'")


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("127.0.0.1:4318", "write a URL"),
        ("ftp://host", "write a URL"),
        ("http://", "write a URL"),
        ("http://host:port", "write a URL"),
        ("", "write a URL"),
        (f"http://user:{SECRET}@host", "OTEL_EXPORTER_OTLP_HEADERS"),
        (f"http://host/?key={SECRET}", "OTEL_EXPORTER_OTLP_HEADERS"),
    ],
)
def test_bad_urls(url: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told) as refused:
        parse_trace(url, None, {})
    assert SECRET not in str(refused.value)
    if url:  # in the environment it can't keep a mount from being made
        found = parse_trace(None, None, {"OTEL_EXPORTER_OTLP_ENDPOINT": url})
        assert found is not None
        assert told in found.obstacle


_AT = "http://host:4318"
_VARIABLE = {"OTEL_EXPORTER_OTLP_ENDPOINT": _AT}


@pytest.mark.parametrize(
    ("url", "ratio", "environment", "found"),
    [
        (None, None, {}, None),
        (_AT, None, {}, TraceOptions(f"{_AT}/v1/traces")),
        (f"{_AT}/otlp/", 0.5, {}, TraceOptions(f"{_AT}/otlp/v1/traces", 0.5)),
        (f"{_AT}/v1/traces", None, {}, TraceOptions(f"{_AT}/v1/traces")),
        (_AT, 0.0, _VARIABLE, None),
        (None, None, _VARIABLE, TraceOptions(f"{_AT}/v1/traces", asked=False)),
        (None, 0.1, _VARIABLE, TraceOptions(f"{_AT}/v1/traces", 0.1, asked=False)),
        (None, None, {**_VARIABLE, "OTEL_SDK_DISABLED": "true"}, None),
        (None, None, {**_VARIABLE, "OTEL_TRACES_EXPORTER": "none"}, None),
        (
            None,
            None,
            {**_VARIABLE, "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://other/path"},
            TraceOptions("http://other/path", asked=False),
        ),
        (
            _AT,
            None,
            {"OTEL_TRACES_SAMPLER": "parentbased_traceidratio", "OTEL_TRACES_SAMPLER_ARG": "0.25"},
            TraceOptions(f"{_AT}/v1/traces", 0.25),
        ),
        (_AT, None, {"OTEL_TRACES_SAMPLER": "always_off"}, None),
        (_AT, 1.0, {"OTEL_TRACES_SAMPLER": "always_off"}, TraceOptions(f"{_AT}/v1/traces")),
    ],
)
def test_what_options_and_environment_say(
    url: str | None, ratio: float | None, environment: dict[str, str], found: TraceOptions | None
) -> None:
    assert parse_trace(url, ratio, environment) == found


def test_other_protocols_are_an_obstacle() -> None:
    found = parse_trace(None, None, {**_VARIABLE, "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"})
    assert found is not None
    assert "grpc" in found.obstacle


def test_words_of_the_command_stay_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some versions of the SDK tell them where the environment asks for all about the process."""
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", f"process.command_args={SECRET},team=a")
    monkeypatch.setenv("OTEL_EXPERIMENTAL_RESOURCE_DETECTORS", "*")
    found = resource({"service.version": "1"})
    assert found.attributes["team"] == "a"
    assert SECRET not in found.to_json()


def test_a_ratio_of_nothing() -> None:
    with pytest.raises(ConfigError, match="--trace-sample: there are no traces"):
        parse_trace(None, 0.5, {})


def test_a_queue_that_is_full_drops(collector: Collector) -> None:
    sender = Sender(TraceOptions(f"{collector.url}/v1/traces"), SystemRuntime())
    span = TraceSpan("read", 1, 1, 0, 1)
    for _ in range(QUEUE_MAX + 3):
        sender.take(span)
    assert sender.numbers()["trace_spans_dropped_total"] == 3
    sender.close()
