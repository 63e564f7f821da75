"""Pages of the documents as scripts: which lines are commands, and where these can run.

A page's commands are its indented lines; what programs print stands in fences. The addresses on a
page are those of a cluster, so a table says what stands for them in a test.
"""

from __future__ import annotations

import os
import re
import signal
import string
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final, NamedTuple

from tests.faults.program import REPOSITORY, Volume, is_mounted

LAST_S: Final = 540.0  # a page of thirty commands, on a machine with other work to do
# each mount logs into the sandbox; /etc and /var are the machine's
_START: Final = r"""
slicefs() {
    if [[ $1 == mount ]]; then
        shift
        [[ " $* " == *" --cache-dir "* ]] || set -- --cache-dir none "$@"
        set -- mount --log "$SANDBOX/log" --fstab "$SANDBOX/fstab" "$@"
    fi
    command slicefs "$@"
}
"""
_END: Final = """
for place in $(grep -o "$SANDBOX[^ ]*" /proc/self/mounts | tac); do slicefs umount $place; done
"""
_VOLUMES: Final = ("redis", "redis2", "tikv")  # parts that have one in the end


class Command(NamedTuple):
    """A command of a page and the number of its first line."""

    number: int
    text: str


class Page(NamedTuple):
    """A page, and what its commands need to run: all texts are as the page has them."""

    path: str
    places: Mapping[str, str]  # what stands on the page → what is there; {base}, {redis}, … in it
    skipped: Mapping[str, str] = {}  # how commands begin that can't run here → why
    before: Mapping[str, str] = {}  # how commands begin → what is done before each of them
    start: str = ""

    def commands(self) -> list[Command]:
        """All of them."""
        return commands((REPOSITORY / self.path).read_text(encoding="utf-8"))

    def parts(self) -> set[str]:
        """What the places are made of: `base`, `redis`, `s3`, …"""
        fields = (string.Formatter().parse(place) for place in self.places.values())
        return {name for field in fields for _, name, _, _ in field if name}

    def script(self, parts: Mapping[str, str]) -> str:
        """What bash is given, with the values of `parts`."""
        lines = [self.start]
        for _, text in self.commands():
            if any(text.startswith(begin) for begin in self.skipped):
                continue
            lines += [what for begin, what in self.before.items() if text.startswith(begin)]
            lines.append(text)
        places = {text: place.format_map(parts) for text, place in self.places.items()}
        lines += [_END, *(f"slicefs fsck {parts[name]}" for name in _VOLUMES if name in parts)]
        longest_first = sorted(places, key=len, reverse=True)
        found = re.compile("|".join(map(re.escape, longest_first)))
        return found.sub(lambda match: places[match[0]], "\n".join(lines))

    def unused(self) -> list[str]:
        """Entries of the tables that fit nothing any more."""
        texts = [text for _, text in self.commands()]
        begins = [*self.skipped, *self.before]
        whole = "\n".join((self.start, *self.before.values(), *texts))
        return [
            *(each for each in begins if not any(text.startswith(each) for text in texts)),
            *(each for each in self.places if each not in whole),
        ]


def commands(page: str) -> list[Command]:
    """The indented lines of a page outside of fences; those that end in a backslash go on."""
    return list(_commands(page))


def _commands(page: str) -> Iterator[Command]:
    is_fenced, begun = False, Command(0, "")
    for number, line in enumerate(page.splitlines(), 1):
        if line.startswith("```"):
            is_fenced = not is_fenced
        if is_fenced or not line.startswith("    "):
            continue
        begun = Command(begun.number or number, begun.text + line[4:])
        if begun.text.endswith("\\"):
            begun = Command(begun.number, begun.text[:-1])
            continue
        yield begun
        begun = Command(0, "")


def run(script: str, base: Path, environment: Mapping[str, str]) -> None:
    """Run a page's script in `base`: every command succeeds, and no mount has a complaint."""
    program = Path(sys.executable).parent
    path = os.pathsep.join((str(program), os.environ["PATH"]))
    with (base / "output").open("w+") as output:
        process = subprocess.Popen(
            ["bash", "-exc", _START + script],
            cwd=base,
            env={**os.environ, **environment, "PATH": path, "SANDBOX": str(base)},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(LAST_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            code = process.wait()
        output.seek(0)
        assert code == 0, output.read()


def complaints(base: Path, expected: str) -> list[str]:
    """Lines of the mounts' log that are worth a look and don't match the pattern."""
    return Volume(base).complaints(expected)


def clean_up(base: Path) -> None:
    """Unmount what a script that failed has left."""
    for path in mounts_below(base):
        subprocess.run(["umount", "-l", path], check=False, capture_output=True)
        assert not is_mounted(path)


def mounts_below(base: Path) -> list[Path]:
    """Mount points in `base`, the inner ones first."""
    lines = Path("/proc/self/mounts").read_text().splitlines()
    found = [Path(line.split()[1]) for line in lines]
    return [path for path in reversed(found) if path.is_relative_to(base)]
