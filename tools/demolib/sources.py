"""What the demo works on: a source distribution from PyPI and a source package from Debian.

Each is fetched once, with the registry's own client, and kept in a cache. Without it the demo can
show nothing, and says so.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import sys
import tarfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

from tools.demolib import debian, trees

SDIST: Final = "django==5.2.8"  # 7,000 files, 10 MB packed; fixed, so that the cache stays right
FETCH_S: Final = 120
_TAR: Final = ("tar", "-x", "-p", "--numeric-owner", "--delay-directory-restore")


class NoSource(Exception):
    """Something to work on can't be had; what to do is in the message."""


class SourceArchive(NamedTuple):
    """Files in archives that are unpacked into one directory."""

    name: str
    archives: tuple[Path, ...]
    members: trees.Tree

    def unpack(self, target: Path) -> None:
        """Unpack into the new directory `target`. Raises: CalledProcessError."""
        target.mkdir()
        for archive in self.archives:
            command = [*_TAR, "-f", str(archive), "-C", str(target)]
            subprocess.run(command, check=True, capture_output=True)


def part(source: SourceArchive, pattern: str) -> tuple[Path, trees.Tree]:
    """The first directory that matches, and what is below it. Raises: NoSource."""
    for top in source.members:
        if top.match(pattern) and len(top.parts) == pattern.count("/") + 1:
            below = {
                path.relative_to(top): seen
                for path, seen in source.members.items()
                if top in path.parents
            }
            return top, below
    raise NoSource(f"{source.name} has no {pattern}: tell the authors")


def sources(cache: Path, offline: bool) -> list[SourceArchive]:
    """Both sources. Raises: NoSource."""
    cache.mkdir(parents=True, exist_ok=True)
    python = _fetched(
        cache, "django-*.tar.gz", None if offline else _from_pypi, "PyPI; check pip's settings"
    )
    described = _fetched(
        cache,
        f"{debian.PACKAGE}_*.dsc",
        None if offline else _from_debian,
        "a Debian mirror's source packages; check /etc/apt and the network",
    )
    archives = _described(described)
    return [_source(python.name, (python,)), _source(described.stem, archives)]


def _source(name: str, archives: tuple[Path, ...]) -> SourceArchive:
    """Raises: NoSource."""
    try:
        return SourceArchive(name, archives, trees.members(archives))
    except (tarfile.TarError, EOFError, zlib.error) as error:
        raise NoSource(f"{archives[0]} is damaged: remove it and run the demo again") from error


def _from_pypi(target: Path, work: Path) -> None:
    del work
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:"]
    command = [*pip, "--disable-pip-version-check", SDIST]
    subprocess.run(command, cwd=target, check=True, capture_output=True, timeout=FETCH_S)


def _from_debian(target: Path, work: Path) -> None:
    debian.fetch(target, work)


def _fetched(
    cache: Path, pattern: str, fetch: Callable[[Path, Path], None] | None, where: str
) -> Path:
    """The cached file, fetched with what belongs to it if it is not there yet. Raises: NoSource."""
    if not any(cache.glob(pattern)):
        if fetch is None:
            raise NoSource(f"{cache} has no {pattern}: run the demo without --offline once")
        work = cache / "fetching"
        shutil.rmtree(work, ignore_errors=True)
        (work / "files").mkdir(parents=True)
        try:
            fetch(work / "files", work / "apt")
            # the one that is looked for comes last: with it everything is there
            for file in sorted((work / "files").iterdir(), key=lambda each: each.match(pattern)):
                file.replace(cache / file.name)
        except (OSError, subprocess.SubprocessError) as error:
            raise NoSource(f"no {pattern} from {where} ({_why(error)})") from error
        finally:
            shutil.rmtree(work, ignore_errors=True)
    return max(cache.glob(pattern), key=lambda each: each.stat().st_mtime)


def _why(error: Exception) -> str:
    said = error.stderr if isinstance(error, subprocess.CalledProcessError) else str(error).encode()
    lines = said.decode(errors="replace").strip().splitlines()
    return lines[0].rstrip(".:")[:200] if lines else "no reason given"


def _described(described: Path) -> tuple[Path, ...]:
    """The archives of a .dsc file, whose sums are in it. Raises: NoSource."""
    text = described.read_text()
    sums = re.search(r"^Checksums-Sha256:[ ]*\n((?: .*\n)+)", text, re.MULTILINE)
    found = []
    for line in sums[1].splitlines() if sums is not None else ():
        digest, _, name = line.split()
        path = described.parent / name
        try:
            right = hashlib.sha256(path.read_bytes()).hexdigest() == digest
        except FileNotFoundError:
            right = False
        if not right:
            raise NoSource(f"{path} is not what {described.name} says: remove both, run it again")
        if ".tar." in name and not name.endswith(".asc"):
            found.append(path)
    if not found:
        raise NoSource(f"{described} lists no archives: remove it and run the demo again")
    return tuple(found)
