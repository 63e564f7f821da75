"""The line of a mount in /etc/fstab: what `slicefs mount --update-fstab` writes.

Every user reads that file, so nothing secret goes there. Threading: one thread.
"""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Sequence
from typing import Final

from fsmeta.errors import ConfigError
from fsmeta.store.url import shown_url

FSTAB: Final = "/etc/fstab"
FSTYPE: Final = "slicefs"
_ALWAYS: Final = ("_netdev", "nofail")  # after the network is up; a boot goes on without it
_ESCAPES: Final = (("\\", "\\134"), (" ", "\\040"), ("\t", "\\011"), ("\n", "\\012"))


def fstab_line(meta: str, mountpoint: str, options: Sequence[str]) -> str:
    """The line. Raises: ConfigError where it would have a secret."""
    if shown_url(meta) != meta:
        raise ConfigError(
            "--update-fstab: the metadata URL has a password, and every user may read the fstab: "
            "use a systemd unit that only root may read (see docs/OPERATING.md)"
        )
    words = ",".join(dict.fromkeys((*options, *_ALWAYS)))
    return " ".join((*map(_escaped, (meta, mountpoint)), FSTYPE, _escaped(words), "0", "0"))


def update_fstab(line: str, path: str = FSTAB) -> bool:
    """Put `line` in place of the one for its mount point, or at the end; False: it is there.

    Raises: ConfigError where another file system has the mount point, or the file can't be written.
    """
    place = line.split()[1]
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as file:
            lines = file.read().splitlines()
        mode = stat.S_IMODE(os.stat(path).st_mode)
    except FileNotFoundError:
        lines, mode = [], 0o644
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    for number, old in enumerate(lines):
        fields = old.split()
        if len(fields) < 3 or fields[0].startswith("#") or fields[1] != place:
            continue
        if fields[2] not in (FSTYPE, f"fuse.{FSTYPE}"):
            raise ConfigError(f"{path} has a {fields[2]} file system on {place}: remove that line")
        if old == line:
            return False
        lines[number] = line
        break
    else:
        lines.append(line)
    _replace(path, "\n".join(lines) + "\n", mode)
    return True


def _replace(path: str, text: str, mode: int) -> None:
    """Write a file anew: it has all of its lines, or stays as it was. Raises: ConfigError."""
    real = os.path.realpath(path)
    temporary = ""
    try:
        fd, temporary = tempfile.mkstemp(prefix=".fstab.", dir=os.path.dirname(real))
        with os.fdopen(fd, "w", encoding="utf-8", errors="surrogateescape") as file:
            file.write(text)
            file.flush()
            os.fchmod(fd, mode)
            os.fsync(fd)
        os.rename(temporary, real)
    except OSError as error:
        if temporary and os.path.exists(temporary):
            os.unlink(temporary)
        raise ConfigError(f"{path}: {error.strerror}: --update-fstab is for root") from error


def _escaped(field: str) -> str:
    for character, code in _ESCAPES:
        field = field.replace(character, code)
    return field
