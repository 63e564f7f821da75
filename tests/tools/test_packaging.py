"""The systemd unit, as systemd reads it, and the Containerfile.

No engine builds the image here: what its steps name has to exist.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

from tests.faults.program import REPOSITORY, SLICEFS

CONTAINERFILE = REPOSITORY / "packaging" / "Containerfile"
UNIT = REPOSITORY / "packaging" / "slicefs@.service"


@pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="needs systemd-analyze: apt-get install systemd"
)
def test_systemd_finds_nothing_wrong_with_the_unit(tmp_path: Path) -> None:
    unit = tmp_path / "slicefs@vol.service"
    shutil.copy(UNIT, unit)
    judge = ["systemd-analyze", "verify", "--man=no", str(unit)]
    done = subprocess.run(judge, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout) == (0, "")
    assert "slicefs@vol" not in done.stderr  # it may warn of units of the machine
    unit.write_text(unit.read_text().replace("Type=notify", "Type=notif\nTypo=1"))
    done = subprocess.run(judge, capture_output=True, text=True, check=False, timeout=60)
    assert "Typo" in done.stderr, "and it does read it"


def test_what_the_image_is_made_of() -> None:
    """Its steps are shell that parses; extras, programs and the command of the image exist."""
    steps = _steps(CONTAINERFILE.read_text())
    assert [name for name, _ in steps] == ["FROM", "RUN", "COPY", "RUN", "ENTRYPOINT", "CMD"]
    for text in (text for name, text in steps if name == "RUN"):
        subprocess.run(["sh", "-n", "-c", text], check=True)
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    made = next(text for name, text in steps if name == "RUN" and "pip install" in text)
    (extras,) = re.findall(r"'/src\[([a-z,0-9]+)\]'", made)
    assert set(extras.split(",")) <= {*project["optional-dependencies"]}
    linked = re.findall(r"/opt/slicefs/bin/(\S+)(?= )", made)
    assert {*linked} - {"pip"} == {*project["scripts"]}
    (command,) = (text for name, text in steps if name == "CMD")
    words = json.loads(command)
    done = subprocess.run([SLICEFS, *words[1:]], capture_output=True, check=True, text=True)
    assert done.stdout.startswith("Usage: slicefs")


def _steps(text: str) -> list[tuple[str, str]]:
    """Instructions and their arguments; lines that end in a backslash go on."""
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    whole = "\n".join(lines).replace("\\\n", " ")
    return [(line.split()[0], line.partition(" ")[2]) for line in whole.splitlines() if line]
