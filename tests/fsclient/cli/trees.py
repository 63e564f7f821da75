"""What is on a disk, to see whether a command that failed has changed it."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path


def snapshot(root: Path) -> dict[str, str]:
    """Every path below `root` with its kind, and for files a digest; only `log` is left out."""
    found: dict[str, str] = {}
    for folder, names, files in os.walk(root):
        for name in (*names, *files):
            path = Path(folder, name)
            if path.is_file() and not path.is_symlink():
                found[str(path)] = hashlib.sha256(path.read_bytes()).hexdigest()
            else:
                found[str(path)] = "directory" if path.is_dir() else "other"
    found.pop(str(root / "log"), None)
    return found
