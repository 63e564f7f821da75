"""What the demo works on: a source distribution from PyPI and a package from Debian.

Each is fetched once with the registry's own client and kept in a cache. Without a network (or
without that client) the Python installation's own library stands in, and the report says so.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, NamedTuple

SDIST: Final = "django==5.2.8"  # 7,000 files, 10 MB packed; fixed, so that the cache stays right
PACKAGE: Final = "tzdata"  # small, and a third of its 1,300 entries are symbolic links
FETCH_S: Final = 120
# Debian packs links last: with dpkg-deb -x they would give their directories the time of unpacking.
_UNTAR: Final = "tar -x -p --delay-directory-restore"
_UNDEB: Final = f'set -o pipefail; dpkg-deb --fsys-tarfile "$1" | {_UNTAR} -C "$2" -f -'
_LEFT_OUT: Final = ("site-packages", "__pycache__", "*.pyc", "test", "idle_test")


class Source(NamedTuple):
    """Files in one archive, and the command that unpacks it into a directory."""

    name: str
    archive: Path
    command: tuple[str, ...]

    def unpack(self, target: Path) -> None:
        """Unpack into the new directory `target`. Raises: CalledProcessError."""
        target.mkdir()
        words = [word.format(archive=self.archive, target=target) for word in self.command]
        subprocess.run(words, check=True, capture_output=True)


def _tar(archive: Path) -> Source:
    command = ("tar", "-x", "-p", "-f", "{archive}", "-C", "{target}")
    return Source(archive.name, archive, command)


def _deb(archive: Path) -> Source:
    return Source(archive.name, archive, ("bash", "-c", _UNDEB, "bash", "{archive}", "{target}"))


def sources(cache: Path, offline: bool) -> list[Source]:
    """Both sources; one of them, or Python's library, where they can't be had."""
    cache.mkdir(parents=True, exist_ok=True)
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:"]
    pip += ["--disable-pip-version-check", SDIST]
    found = [
        _fetched(cache, "django-*.tar.gz", [] if offline else pip, _tar),
        _fetched(
            cache, f"{PACKAGE}_*.deb", [] if offline else ["apt-get", "download", PACKAGE], _deb
        ),
    ]
    return [each for each in found if each is not None] or [_own_library(cache)]


def _fetched(
    cache: Path, pattern: str, command: Sequence[str], make: Callable[[Path], Source]
) -> Source | None:
    """The cached file, fetched if it is not there yet; None where that fails."""
    if not any(cache.glob(pattern)) and command and shutil.which(command[0]):
        work = cache / "fetching"
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir()
        try:
            subprocess.run(command, cwd=work, check=True, capture_output=True, timeout=FETCH_S)
            for file in work.glob(pattern):
                file.replace(cache / file.name)
        except subprocess.SubprocessError:
            pass  # no network, most likely: the caller does without
        finally:
            shutil.rmtree(work, ignore_errors=True)
    files = sorted(cache.glob(pattern))
    return make(files[-1]) if files else None


def _own_library(cache: Path) -> Source:
    """Python's standard library as an archive."""
    archive = cache / f"python-{sys.version_info.major}.{sys.version_info.minor}-library.tar"
    if not archive.exists():
        library = Path(sysconfig.get_path("stdlib"))
        excludes = [f"--exclude={pattern}" for pattern in _LEFT_OUT]
        part = archive.with_suffix(".part")
        command = ["tar", "-c", "-f", str(part), *excludes, "-C", str(library.parent), library.name]
        subprocess.run(command, check=True, capture_output=True)
        part.replace(archive)
    return _tar(archive)
