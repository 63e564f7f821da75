"""X2: scanning again keeps what was written; a server that can't be reached is named soon."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from typing import Any

import pytest

from fsclient.cli.main import run as command
from fsmeta.errors import ConfigError
from slicefs.client.client import Client
from slicefs.lifecycle.attach import TEMPORARY, attach
from slicefs.stores.tree import Tree
from tests.posix.volumes import Volume, can_mount
from tests.slicefs.attached_objects import OBJECTS, found

needs_mount = pytest.mark.skipif(not can_mount(), reason="mounting takes root and /dev/fuse")


def before_replacing(
    monkeypatch: pytest.MonkeyPatch, place: Any, name: str, act: Callable[[], object]
) -> None:
    """Have `act` run in the moment before `place.replace` is called for `name`."""
    real: Callable[..., Any] = place.replace

    def replace(*words: Any) -> Any:
        if words[-1].endswith(name):
            act()
        return real(*words)

    monkeypatch.setattr(place, "replace", replace)


@needs_mount
def test_what_is_written_in_the_moment_of_the_rename_is_kept_on_a_mount(
    source: Tree, volume: Volume, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, other = volume.mount("one"), volume.mount("two")
    attach(source.url, str(root / "data"))
    for name in ("a/one", "a/b/two"):
        source.write_atomic(name, (b"new",))
    before_replacing(monkeypatch, os, "/a/one", lambda: (other / "data/a/one").write_bytes(b"own"))
    report = attach(source.url, str(root / "data"))
    assert (report.replaced, report.kept, report.skipped) == (1, 1, 0)
    assert report.kept_examples == (str(root / "data/a/one"),)
    wanted = {**OBJECTS, "a/one": b"own", "a/b/two": b"new"}
    assert found(root / "data") == found(other / "data") == wanted  # and no temporary file
    monkeypatch.undo()


def test_what_is_written_in_the_moment_of_the_rename_is_kept(
    source: Tree, volume: Volume, fs: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    attach(source.url, f"{volume.meta}#set")

    def replace_object() -> None:
        """As a scan of another host does: the file shows another object then."""
        fs.unlink("set/a/one")
        attach(f"{source.url}/a", f"{volume.meta}#other")
        fs.rename("other/b/two", "set/a/one")

    source.write_atomic("a/one", (b"new",))
    before_replacing(monkeypatch, Client, "/a/one", replace_object)
    report = attach(source.url, f"{volume.meta}#set")
    assert (report.replaced, report.kept) == (0, 1)
    with fs.open("set/a/one") as file:
        assert file.read() == OBJECTS["a/b/two"]
    assert not any(name.startswith(TEMPORARY) for name in fs.listdir("set/a"))


def test_files_that_were_written_are_no_failure(
    source: Tree, volume: Volume, fs: Client, capsys: pytest.CaptureFixture[str]
) -> None:
    attach(source.url, f"{volume.meta}#set")
    with fs.open("set/a/one", "r+b") as file:
        file.write(b"own")
    source.write_atomic("a/one", (b"new",))
    assert command(["attach", source.url, f"{volume.meta}#set"]) == 0
    told = capsys.readouterr()
    assert "1 kept" in told.out
    assert told.err == "kept: /set/a/one\n"
    assert command(["attach", "--json", source.url, f"{volume.meta}#set"]) == 0
    assert json.loads(capsys.readouterr().out)["kept"] == 1
    with fs.open("set/a/one") as file:
        assert file.read() == b"own" + OBJECTS["a/one"][3:]


@pytest.mark.parametrize("silent", [False, True])
def test_a_server_that_can_not_be_reached_is_named(
    source: Tree, volume: Volume, fs: Client, monkeypatch: pytest.MonkeyPatch, silent: bool
) -> None:
    """It refuses connections, or takes them and says nothing."""
    assert source.url.startswith("s3://")  # the fixture names the server
    monkeypatch.setattr("slicefs.stores.s3.REACH_S", 1.0)
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        if silent:
            server.listen()
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.getsockname()[1]}")
        with pytest.raises(ConfigError, match=r"whether the store\s+runs and can be reached"):
            attach(source.url, f"{volume.meta}#set")
    assert fs.listdir("/") == []
