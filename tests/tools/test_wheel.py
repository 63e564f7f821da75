"""The first minutes, from the wheel: README's quick start in an empty venv, and what is in it then.

It installs from a package index, so it is for --soak.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from fsclient.cli.main import commands
from tests.demo import pages
from tests.demo.test_pages import README
from tests.faults.program import REPOSITORY, needs_mounts
from tests.support.redis_server import RedisServer, free_port
from tools.man import pages as manual_pages

pytestmark = [pytest.mark.soak, needs_mounts, pytest.mark.timeout(pages.LAST_S + 60)]
# SeaweedFS itself this time, on ports of this test
QUICK_START = README._replace(
    places={
        "/tmp/demo": "{base}",
        "6390": "{port}",
        "8333": "{s3_port}",
        "'.[s3]'": "'{wheel}[s3]'",
        "weed server -s3": "weed server -s3 -s3.port {s3_port} -master.port {port2}"
        " -volume.port {port3} -filer.port {port4}",
    },
    skipped={
        "make ": "of a tree for development",
        "apt-get ": "they are installed",
        "ACCESS_KEY=": "for several hosts",
        "slicefs format redis://HOST/2": "the same",
    },
)


@pytest.fixture(scope="module")
def venv(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The environment that the quick start made, and worked with."""
    if not RedisServer.is_installed():
        pytest.skip("needs redis-server")
    subprocess.run(["make", "-s", "wheel"], cwd=REPOSITORY, capture_output=True, check=True)
    (wheel,) = (REPOSITORY / "build/dist").glob("*.whl")
    base = tmp_path_factory.mktemp("demo")
    ports = {name: str(free_port()) for name in QUICK_START.parts() if "port" in name}
    parts = {"base": str(base), "wheel": str(wheel), **ports}
    try:
        pages.run(QUICK_START.script(parts), base, {})
        assert pages.complaints(base, "") == []
        yield base / "venv"
    finally:
        pages.clean_up(base)


def test_the_programs_run(venv: Path) -> None:
    done = subprocess.run(
        [venv / "bin/slicefs", "version", "--json"], capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout)["slicefs"]
    assert {"mount.slicefs", "slicefs-csi"} <= {path.name for path in (venv / "bin").iterdir()}


def test_each_command_has_a_manual_page(venv: Path) -> None:
    expected = {page.split()[1].lower() + ".1" for page in manual_pages(commands, "slicefs")}
    assert {path.name for path in (venv / "share/man/man1").glob("slicefs*")} == expected


def test_documents_that_help_texts_name_are_there(venv: Path) -> None:
    named = {
        name for text in _helps(commands, None) for name in re.findall(r"docs/(\S+\.md)", text)
    }
    assert "OPERATING.md" in named
    assert [name for name in named if not (venv / "share/doc/slicefs" / name).is_file()] == []


def _helps(command: click.Command, parent: click.Context | None) -> Iterator[str]:
    context = click.Context(command, parent=parent, info_name=command.name, max_content_width=1000)
    yield command.get_help(context)
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            inner = command.get_command(context, name)
            assert inner is not None
            yield from _helps(inner, context)


def test_the_metadata_name_the_extras(venv: Path) -> None:
    asks = (
        "from importlib.metadata import metadata\n"
        "print(*metadata('slicefs').get_all('Provides-Extra'))"
    )
    done = subprocess.run(
        [venv / "bin/python", "-c", asks], capture_output=True, text=True, check=True
    )
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    assert set(done.stdout.split()) == {*project["optional-dependencies"]}


def test_pipx_installs_it(venv: Path, tmp_path: Path) -> None:
    """As docs/OPERATING.md has it: both programs are on the path of the user."""
    del venv  # its wheel is there
    (wheel,) = (REPOSITORY / "build/dist").glob("*.whl")
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    subprocess.run([tmp_path / "venv/bin/pip", "install", "-q", "pipx"], check=True)
    places = {"PIPX_HOME": str(tmp_path / "home"), "PIPX_BIN_DIR": str(tmp_path / "bin")}
    subprocess.run(
        [tmp_path / "venv/bin/pipx", "install", f"{wheel}[s3]"],
        env={**os.environ, **places},
        check=True,
        capture_output=True,
    )
    assert {"slicefs", "mount.slicefs"} <= {path.name for path in (tmp_path / "bin").iterdir()}
    done = subprocess.run(
        [tmp_path / "bin/slicefs", "version", "--json"], capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout)["boto3"]
