"""The rooms: each folder of the product, its rank, and how many files it may hold.

A module imports its own folder and folders of a lower rank; folders of equal rank do not see each
other. Called by `tools/house.py`; docs/ARCHITECTURE.md shows the same table to readers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import PurePosixPath
from typing import Final

from tools.houselib.imports import imports_of
from tools.houselib.tree import Finding, SourceFile

FILES_MAX: Final = 15  # a longer list of a folder goes unread
ROOMS: Mapping[str, tuple[tuple[str, ...], ...]] = {
    "fsmeta": (
        ("", "ops"),
        ("store",),
        ("store/redis", "store/tikv", "schema"),
        ("txn",),
        ("rules",),
        ("ops/data", "ops/sessions"),
        ("ops/names", "meta/ids"),
        ("ops/trees",),
        ("meta", "writeback/overlay"),
        ("admin", "writeback/entries"),
        ("check", "writeback/backlog"),
        ("writeback",),
    ),
    "fsdata": (
        ("",),
        ("resources", "objects"),
        ("objects/s3", "objects/rados", "format", "disk_cache/directory"),
        ("disk_cache", "staging"),
        ("blocks",),
        ("files", "attached"),
    ),
    "fsclient": (
        ("", "fuse"),
        ("survival",),
        ("kernel", "listings", "volume", "trees", "attached"),
        ("files/handles", "fuse/wire", "sync"),
        ("files",),
        ("fuse/dispatch", "background", "vfs/locks"),
        ("fuse/mount", "writeback", "tracing", "qos"),
        ("fuse/session", "control"),
        ("vfs", "upkeep", "observe", "fuse/pyfuse3"),
        ("client",),
        ("mount",),
        ("cli/options",),
        ("cli/volume", "cli/mount", "cli/tree", "cli/watch"),
        ("cli/upkeep",),
        ("cli",),
    ),
    "slicefs": (
        ("client",),
        ("stores",),
        ("checkpoint", "manifests"),
        ("lifecycle/shards",),
        ("data", "lifecycle"),
        ("torch",),
        ("", "cli"),
        ("compat",),
        ("compat/dataflux", "compat/s3torch"),
        ("compat/dataflux/lightning",),
    ),
    "csi": (
        ("",),
        ("proto", "host"),
        ("cluster",),
        ("clients",),
        ("volumes",),
        ("services",),
        ("server",),
    ),
}
RANKS: Mapping[str, int] = {
    f"{top}/{folder}".rstrip("/"): rank
    for top, ranks in ROOMS.items()
    for rank, folders in enumerate(ranks)
    for folder in folders
}


def check_rooms(sources: Iterable[SourceFile], modules: frozenset[str]) -> Iterator[Finding]:
    """Folders without a rank, folders that are too full, and imports upward or sideways."""
    packages = {source.module for source in sources if source.is_package}
    counts = Counter(_folder(source.path) for source in sources if source.top in ROOMS)
    for folder, count in sorted(counts.items()):
        if folder not in RANKS:
            message = "has no rank; give it one in tools/houselib/rooms.py and docs/ARCHITECTURE.md"
            yield Finding(folder, 1, "room", message)
        if count > FILES_MAX:
            message = f"holds {count} files, at most {FILES_MAX}; split it by subject"
            yield Finding(folder, 1, "room", message)
    for source in sources:
        if _folder(source.path) in RANKS:
            yield from _upward(source, modules, packages)


def _upward(
    source: SourceFile, modules: frozenset[str], packages: Iterable[str]
) -> Iterator[Finding]:
    own = _folder(source.path)
    for imported in imports_of(source, modules):
        target = imported.target
        if target.split(".")[0] != source.top or target not in modules:
            continue
        folder = target if target in packages else target.rpartition(".")[0]
        folder = folder.replace(".", "/")
        if folder != own and folder in RANKS and RANKS[folder] >= RANKS[own]:
            message = (
                f"{own} (rank {RANKS[own]}) may not import {target} (rank {RANKS[folder]}); "
                "move the code down, or pass what it needs as an argument"
            )
            yield Finding(source.path, imported.line, "room", message)


def _folder(path: str) -> str:
    return str(PurePosixPath(path).parent)
