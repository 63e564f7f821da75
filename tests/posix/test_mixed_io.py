"""P4: processes that read and write one small file, some with O_DIRECT and some through pages.

As generic/095, 133 and 366 of xfstests do: nobody waits for ever, and each page is from one write.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from tests.posix.volumes import PATIENCE_S, can_mount, new_volume

PAGE: Final = 4096
SIZE: Final = 1 << 20
OPS: Final = 150  # of each process
KINDS: Final = ("direct write", "direct write", "direct read", "write", "write", "read")
_WORK: Final = """
import mmap, os, random, sys
path, kind, seed, ops, size = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:])
chance = random.Random(seed)
fd = os.open(path, os.O_RDWR | (os.O_DIRECT if "direct" in kind else 0))
buffer = memoryview(mmap.mmap(-1, 65536))  # aligned
for number in range(ops):
    length = chance.choice((4096, 16384, 65536))
    part, offset = buffer[:length], chance.randrange(size // length) * length
    if "write" in kind:
        part[:] = bytes([1 + (seed * 40 + number) % 255]) * length
        assert os.pwritev(fd, [part], offset) == length
        if number % 50 == 49:
            os.fsync(fd)
    else:
        assert os.preadv(fd, [part], offset) == length
"""


@pytest.mark.skipif(not can_mount(), reason="needs root and /dev/fuse")
def test_p4_direct_and_buffered_at_once_end_with_whole_pages(tmp_path: Path) -> None:
    folder = tmp_path / "volume"
    with new_volume(folder, f"sqlite://{folder}/meta.db") as volume:
        path = volume.mount() / "file"
        path.write_bytes(bytes(SIZE))
        command = [sys.executable, "-c", _WORK, str(path)]
        workers = [
            subprocess.Popen([*command, kind, str(seed), str(OPS), str(SIZE)])
            for seed, kind in enumerate(KINDS)
        ]
        try:
            for worker in workers:
                assert worker.wait(PATIENCE_S) == 0
        finally:
            for worker in workers:
                worker.kill()
                worker.wait()
        data = path.read_bytes()
        assert len(data) == SIZE
        pages = [data[at : at + PAGE] for at in range(0, SIZE, PAGE)]
        torn = [at for at, page in enumerate(pages) if page != page[:1] * PAGE]
        assert not torn
