"""`make man`: every command has its page, which troff(1) takes without a word."""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest

from fsclient.cli.main import commands
from tools.man import pages

PAGES = list(pages(commands, "slicefs"))


def test_every_command_has_a_page() -> None:
    named = {page.split()[1] for page in PAGES}
    assert {"SLICEFS", "SLICEFS-MOUNT", "SLICEFS-QUOTA-SET", "SLICEFS-RESTORE-META"} <= named
    assert len(named) == len(PAGES)
    mount = next(page for page in PAGES if page.startswith(".TH SLICEFS-MOUNT "))
    assert r"\fB\-\-writeback" in mount
    assert re.search(r"^\.SH NAME\nslicefs\\-mount \\- Mount the volume", mount, re.MULTILINE)


def test_lines_are_no_requests_by_accident() -> None:
    known = ("TH", "SH", "TP", "PP", "B", "nf", "fi")
    for page in PAGES:
        for line in page.splitlines():
            assert not line.startswith("'")
            assert not line.startswith(".") or line.split()[0][1:] in known, line


@pytest.mark.skipif(shutil.which("groff") is None, reason="needs groff")
def test_troff_takes_them() -> None:
    for page in PAGES:
        done = subprocess.run(
            ["groff", "-man", "-Tutf8", "-ww", "-k", "-z"],
            input=page,
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stderr == "", page
