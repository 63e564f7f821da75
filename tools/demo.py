"""What `make run` shows: a volume is made, mounted, worked on and removed, in a minute or two.

    python -m tools.demo [--offline] [--cache DIR] [--dir DIR]

Embedded (SQLite and a local directory), as root or as an ordinary user, on real files: a source
distribution from PyPI and a source package from Debian. Prints each step with what it has seen and
its time; exits with 1 where one fails. Whatever happens, nothing stays mounted and no file is left
but the downloads in the cache.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from tools.demolib import debian, steps
from tools.demolib.sources import NoSource, SourceArchive, part, sources
from tools.demolib.trees import Differs
from tools.demolib.volume import DemoVolume

LOG_LINES_MAX = 5  # shown where a step fails
FAILURES = (steps.Failed, Differs, NoSource, RuntimeError, OSError, subprocess.SubprocessError)


class Report:
    """A line for each step, printed when it is done."""

    def __init__(self) -> None:
        self._begin = time.monotonic()
        self.steps = 0

    def step(self, name: str, act: Callable[[], str]) -> None:
        """Run one step and print it. Raises: what it raises."""
        begin = time.monotonic()
        print(f"  {name:<42}", end="", flush=True)
        seen = act()
        self.steps += 1
        print(f" {seen:<52} {time.monotonic() - begin:6.1f} s", flush=True)

    def total(self) -> float:
        """Seconds since the beginning."""
        return time.monotonic() - self._begin


def demonstrate(report: Report, base: Path, found: Sequence[SourceArchive]) -> None:
    """All steps, on a volume below `base`. Raises: one of FAILURES."""
    volume = DemoVolume(base)
    try:
        report.step("slicefs format", partial(_format, volume))
        one, two = base / "one", base / "two"
        report.step("slicefs mount, and a second time", partial(_mount, volume, (one, two)))
        _unpack(report, base, found)
        top, members = part(found[1], debian.PART)
        some, clone = Path("source1") / top, one / "clone"
        report.step(
            "both mounts copy into each other at once",
            partial(steps.two_mounts, some, one, two, members),
        )
        report.step("slicefs umount, the second", partial(_umount, volume, two))
        report.step("git init, add, commit, clone, fsck", partial(steps.git, one / some, clone))
        report.step("gcc -shared, load it", partial(steps.extension, one / "extension"))
        report.step("SQLite with concurrent writers", partial(steps.database, one / "database"))
        report.step("rm -rf", partial(steps.remove, one, volume))
        report.step("slicefs umount", partial(_umount, volume, one))
        report.step("slicefs fsck --data", partial(steps.check, volume))
    except FAILURES as error:
        for line in volume.complaints()[:LOG_LINES_MAX]:
            error.add_note(line)  # the log goes with all the rest
        raise
    finally:
        volume.leave()


def _format(volume: DemoVolume) -> str:
    volume.format()
    return "SQLite, blocks in a directory"


def _mount(volume: DemoVolume, paths: Sequence[Path]) -> str:
    for path in paths:
        volume.mount(path)
    return "on " + " and ".join(path.name for path in paths)


def _umount(volume: DemoVolume, path: Path) -> str:
    volume.umount(path)
    return "everything stored, the client has ended"


def _unpack(report: Report, base: Path, found: Sequence[SourceArchive]) -> None:
    for number, source in enumerate(found):
        copy = base / "one" / f"source{number}"
        report.step(f"unpack {source.name[:34]}", partial(steps.unpack, source, copy))
        report.step("compare with the archive", partial(steps.compare, source, copy))


def parser() -> argparse.ArgumentParser:
    """The command line."""
    out = argparse.ArgumentParser(prog="python -m tools.demo", description=__doc__.split("\n")[0])
    cache = Path.home() / ".cache" / "slicefs-demo"
    out.add_argument("--cache", type=Path, default=cache, help=f"for downloads; {cache}")
    out.add_argument("--dir", type=Path, default=None, help="where to work; the system's /tmp")
    out.add_argument("--offline", action="store_true", help="download nothing")
    return out


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt  # so that SIGTERM cleans up as well


def main(words: Sequence[str]) -> int:
    """Run the demo; 0 if every step has shown what it should."""
    arguments = parser().parse_args(words)
    signal.signal(signal.SIGTERM, _interrupt)
    if missing := steps.missing_tools():
        print(f"the demo needs {', '.join(missing)}: run `make packages`", file=sys.stderr)
        return 1
    report = Report()
    base = None
    try:
        found = sources(arguments.cache, arguments.offline)
        base = Path(tempfile.mkdtemp(prefix="slicefs-demo-", dir=arguments.dir))
        who = "root" if os.geteuid() == 0 else "an ordinary user"
        print(f"SliceFS as {who} in {base}, on {', '.join(each.name for each in found)}")
        demonstrate(report, base, found)
    except FAILURES as error:
        notes = [f"  log: {line}" for line in getattr(error, "__notes__", ())]
        print("\n".join([f"\nFAILED: {error}", *notes]), flush=True)
        return 1
    except KeyboardInterrupt:
        print("\nFAILED: interrupted", flush=True)
        return 1
    finally:
        if base is not None:
            shutil.rmtree(base, ignore_errors=True)
    if base.exists():
        print(f"FAILED: {base} could not be removed", flush=True)
        return 1
    print(f"all right: {report.steps} steps in {report.total():.0f} s, nothing left behind")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
