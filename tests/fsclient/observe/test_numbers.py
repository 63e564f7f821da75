"""`.stats` of a real mount: what was done is what it says."""

from __future__ import annotations

import os
import re
import sys

import pytest

from fsclient.observe.catalog import is_known
from tests.faults.program import Volume, needs_mounts
from tests.fsclient.observe import early_reader

PIECE = 300_000


@needs_mounts
def test_numbers_of_a_mount(embedded: Volume) -> None:
    embedded.format()
    mount = embedded.mount("--pack-below", "0")
    data = os.urandom(PIECE)
    (mount.path / "file").write_bytes(data)
    mount.umount()
    mount = embedded.mount("--pack-below", "0")
    assert (mount.path / "file").read_bytes() == data
    (mount.path / "other").write_bytes(data)
    numbers = mount.numbers()
    assert numbers['operation_bytes_total{op="read"}'] >= PIECE
    assert numbers['operation_bytes_total{op="write"}'] == PIECE
    assert numbers['operations_total{op="create"}'] == 1
    for word in ("p50", "p99"):
        assert numbers[f'operation_duration_{word}_seconds{{op="create"}}'] > 0
        assert numbers[f'meta_request_duration_{word}_seconds{{verb="commit",outcome="ok"}}'] > 0
        assert numbers[f'object_request_duration_{word}_seconds{{verb="put",outcome="ok"}}'] > 0
    assert numbers['cache_level_hits_total{level="store"}'] >= 1
    assert 'cache_level_hits_total{level="disk"}' in numbers
    assert 'kernel_leases{kind="inode"}' in numbers
    families = {name.partition("{")[0] for name in numbers}
    families = {re.sub(r"_p(50|99)_seconds$", "_seconds", name) for name in families}
    assert {name for name in families if not is_known(name)} == set()
    embedded.end()


@needs_mounts
def test_numbers_of_write_back(served: Volume) -> None:
    """The queue and the durable mark; each number has its sentence in the catalogue, here too."""
    served.format()
    staging = served.base / "staging"
    cache = served.base / "cache"
    mount = served.mount("--writeback", "--staging-dir", str(staging), "--cache-dir", str(cache))
    (mount.path / "file").write_bytes(b"x" * PIECE)
    numbers = mount.numbers()
    assert numbers["staging_durable_through_seconds"] > 0
    assert "staging_changes" in numbers
    families = {re.sub(r"_p(50|99)_seconds$", "_seconds", n.partition("{")[0]) for n in numbers}
    assert {name for name in families if not is_known(name)} == set()
    served.end()


@needs_mounts
def test_the_first_request_is_counted(embedded: Volume, monkeypatch: pytest.MonkeyPatch) -> None:
    """`.stats` has all numbers from the moment in which requests are served."""
    embedded.format()
    out = embedded.base / "early"
    monkeypatch.setenv(early_reader.OUT_ENV, str(out))
    embedded.mount(program=(sys.executable, early_reader.__file__))
    assert 'slicefs_operations_total{op="lookup"} 1' in out.read_text()
    embedded.end()
