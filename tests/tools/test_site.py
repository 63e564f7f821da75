"""`make docs` and `make wheel`: links lead to pages, and what help texts name is installed, too."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from fsclient.observe.registry import PREFIX
from tests.faults.program import REPOSITORY
from tools import site

PAGES = {"index.md", "LIMITS.md", "design/tikv.md"}


def test_the_site_is_built_without_a_warning() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tools.site"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    pages = Path(done.stdout.strip()).parent
    assert "slicefs quota set" in (pages / "reference/commands/index.html").read_text()
    assert f"{PREFIX}meta_commits_total" in (pages / "reference/metrics/index.html").read_text()
    assert "read_many" in (pages / "reference/python/index.html").read_text()
    assert not (pages / "NOTES").exists()


@pytest.mark.parametrize(
    ("page", "link", "expected"),
    [
        ("index.md", "[limits](docs/LIMITS.md#sqlite)", "[limits](LIMITS.md#sqlite)"),
        ("design/tikv.md", "[limits](../LIMITS.md)", "[limits](../LIMITS.md)"),
        ("LIMITS.md", "[start](../README.md)", "[start](index.md)"),
        ("LIMITS.md", "[unit](../packaging/x.service)", "unit (`packaging/x.service`)"),
        ("LIMITS.md", "[far](https://example.com/x)", "[far](https://example.com/x)"),
    ],
)
def test_links_lead_to_pages_of_the_site(page: str, link: str, expected: str) -> None:
    assert site._linked(link, page, PAGES) == expected


def test_the_wheel_has_manual_pages_and_docs() -> None:
    subprocess.run(["make", "-s", "wheel"], cwd=REPOSITORY, capture_output=True, check=True)
    (wheel,) = (REPOSITORY / "build/dist").glob("*.whl")
    with zipfile.ZipFile(wheel) as opened:
        names = {name.partition(".data/data/share/")[2] for name in opened.namelist()}
        licensed = [name for name in opened.namelist() if name.endswith(("LICENSE", "METADATA"))]
    assert {"man/man1/slicefs.1", "man/man1/slicefs-quota-set.1"} <= names
    assert {"doc/slicefs/OPERATING.md", "doc/slicefs/train/client.md"} <= names
    assert "doc/slicefs/examples/slicefs@.service" in names
    assert licensed
