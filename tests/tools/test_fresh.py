"""What `make` does on a fresh machine: find a Python, or install one."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults.program import REPOSITORY

APT = """#!/bin/bash
echo "$*" >>"$0.log"
[[ " $* " != *" install "* ]] || ln -s {python} "${{0%/*}}/python3"
"""


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """A directory of programs that is all there is: no Python."""
    for name in ("bash", "env", "head", "id", "ln"):
        (tmp_path / name).symlink_to(shutil.which(name) or name)
    (tmp_path / "sudo").symlink_to("env")
    return tmp_path


def python(machine: Path, *words: str) -> tuple[int, str, str]:
    """What tools/python.sh does there."""
    command = ["/bin/bash", str(REPOSITORY / "tools/python.sh"), *words]
    env = {"PATH": str(machine)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout, done.stderr


def give_apt(machine: Path, brings: str) -> Path:
    program = machine / "apt-get"
    program.write_text(APT.format(python=brings))
    program.chmod(0o755)
    return machine / "apt-get.log"


def test_the_first_that_suits_is_taken(machine: Path) -> None:
    (machine / "python3.11").symlink_to("/bin/false")  # as a shim without its version
    (machine / "python3").symlink_to(sys.executable)
    code, out, err = python(machine)
    assert (code, err) == (0, "")
    assert os.path.samefile(out.strip(), sys.executable)


def test_where_there_is_none_debians_is_installed(machine: Path) -> None:
    """`make run` once ended at a Debian without python3-venv, after it had installed all else."""
    log = give_apt(machine, sys.executable)
    code, out, err = python(machine)
    assert code == 0, err
    assert os.path.samefile(out.strip(), sys.executable)
    assert "python3-venv" in log.read_text()


def test_where_apt_brings_an_old_one_it_is_said(machine: Path) -> None:
    give_apt(machine, "/bin/false")
    code, out, err = python(machine)
    assert (code, out) == (1, "")
    assert "SliceFS needs Python 3.11 or newer with venv; python3 is: " in err


def test_one_that_was_asked_for_is_not_replaced(machine: Path) -> None:
    log = give_apt(machine, sys.executable)
    code, out, err = python(machine, "python3.9")
    assert (code, out) == (1, "")
    assert "python3.9 is: command not found.\nInstall one, and name it: make PYTHON=" in err
    assert not log.exists()
