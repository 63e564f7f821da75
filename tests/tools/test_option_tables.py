"""No option of `format`, `mount` or a store is missing: in the site's tables, and in OPERATING."""

from __future__ import annotations

import re
from collections.abc import Iterator

import click
import pytest

from fsclient.cli.main import commands
from fsclient.volume.object_options import OPTIONS
from fsdata.objects.rados.rados import RadosSettings
from fsdata.objects.s3.http import Timeouts
from tests.faults.program import REPOSITORY
from tools.option_tables import COMMANDS, option_tables, shown_options

TABLES = "\n".join(option_tables())
OPERATING = (REPOSITORY / "docs/OPERATING.md").read_text(encoding="utf-8")


def _options(name: str) -> list[click.Option]:
    command = commands.get_command(click.Context(commands), name)
    assert command is not None
    return shown_options(command)


def _rows(text: str, heading: str) -> list[list[str]]:
    """The cells of the tables below a heading."""
    part = text.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    lines = [line for line in part.splitlines() if line.startswith("| `")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]


@pytest.mark.parametrize("name", COMMANDS)
def test_the_site_has_every_option(name: str) -> None:
    rows = _rows(TABLES, f"slicefs {name}")
    assert len(rows) == len(_options(name)) > 10
    for option, cells in zip(_options(name), rows, strict=True):
        assert option.opts[0] in cells[0]
        assert len(cells) == 4
        assert cells[3], f"{option.opts[0]} has no help"
        assert "Sentinel" not in cells[1]


@pytest.mark.parametrize("storage", [name for name, options in OPTIONS.items() if options])
def test_the_site_has_every_option_of_a_store(storage: str) -> None:
    rows = _rows(TABLES, f"--store-option, of --storage {storage}")
    assert [cells[0].strip("`").partition("=")[0] for cells in rows] == [*OPTIONS[storage]]
    assert all(cells[3] for cells in rows)


def test_units_and_defaults_are_told() -> None:
    rows = {cells[0].strip("`").split()[0]: cells for cells in _rows(TABLES, "slicefs mount")}
    assert rows["--heartbeat"][1:3] == ["5", "seconds, 0.1 to 20"]
    assert rows["--buffer-size"][1:3] == ["300MiB", "bytes; KiB, MiB, GiB, TiB"]
    assert rows["--threads"][1:3] == ["4", "1 to 64"]


@pytest.mark.parametrize("name", COMMANDS)
def test_operating_has_every_option(name: str) -> None:
    missing = [each.opts for each in _options(name) if not _is_told(each.opts)]
    assert missing == []


def _is_told(names: list[str]) -> bool:
    return any(re.search(rf"`[^`\n]*{re.escape(name)}(?![\w-])", OPERATING) for name in names)


def test_operating_has_every_option_of_a_store() -> None:
    names = {name for options in OPTIONS.values() for name in options}
    assert [name for name in sorted(names) if f"`{name}" not in OPERATING] == []


def test_defaults_told_are_those_of_the_stores() -> None:
    assert OPTIONS["s3"]["timeout"].default == f"{Timeouts().silent_s:g}"
    assert OPTIONS["rados"]["timeout"].default == f"{RadosSettings('pool', 'vol').operation_s:g}"
    assert f"client.{OPTIONS['rados']['user'].default}" == RadosSettings("pool", "vol").user


@pytest.mark.parametrize("name", COMMANDS)
def test_defaults_in_operating_are_those_of_the_code(name: str) -> None:
    told = dict(_told_defaults(name))
    of_code = {
        option.opts[-1]: cells[1].replace(",", "")
        for option, cells in zip(_options(name), _rows(TABLES, f"slicefs {name}"), strict=True)
    }
    assert len(told) > 5
    assert {each: of_code[each] for each in told} == told


def _told_defaults(name: str) -> Iterator[tuple[str, str]]:
    """The defaults that are one value, in the command's part of OPERATING."""
    part = OPERATING.partition(f"## slicefs {name} ")[2].partition("\n## ")[0]
    known = {option.opts[-1] for option in _options(name) if not option.is_flag}
    for line in part.splitlines():
        found = re.match(r"\| `(--[a-z-]+)[^|]*(?:\\\|[^|]*)*\| `?([\w,.-]+)`? \|", line)
        if found is not None and found[1] in known:
            yield found[1], found[2].replace(",", "")
