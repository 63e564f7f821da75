"""C1: a mount with cache disks where few files may be open."""

from __future__ import annotations

from pathlib import Path

from tests.faults.load import content
from tests.faults.program import SLICEFS, Mount, Volume, needs_mounts, wait_until
from tests.support.processes import descriptors

pytestmark = needs_mounts

OPEN_FILES = 96  # `ulimit -n`: a mount without cache disks has some 30 of its own
DISKS = 4
FILES = 300
SIZE = 5_000


def cache_files(mount: Mount, base: Path) -> int:
    """How many copies the client has open."""
    return sum(place.startswith(f"{base}/ssd") for place in descriptors(mount.pid))


def test_c1_kept_descriptors_leave_room_for_others(embedded: Volume, base: Path) -> None:
    """Copies that are kept open are half of `ulimit -n` at most, on all disks together."""
    embedded.format()
    disks = ":".join(f"{base}/ssd{number}" for number in range(DISKS))
    cache = ("--cache-dir", disks, "--free-space-ratio", "0")
    limited = ("sh", "-c", f'ulimit -n {OPEN_FILES}; exec "$0" "$@"', SLICEFS)
    mount = embedded.mount(*cache, "--cache-writes", program=limited)
    files = {mount.path / f"f{number}": content(number, SIZE) for number in range(FILES)}
    for path, data in files.items():
        path.write_bytes(data)
    wait_until("all is copied", 60, lambda: not mount.numbers()["disk_cache_queue_bytes"])
    mount.umount()
    mount = embedded.mount(*cache, program=limited)
    for path, data in files.items():
        assert path.read_bytes() == data
    kept = cache_files(mount, base)
    assert OPEN_FILES // 4 < kept <= OPEN_FILES // 2 + DISKS  # and what counts each disk
    numbers = mount.numbers()
    assert numbers["disk_cache_hits_total"] >= FILES
    assert numbers["disk_cache_errors_total"] == numbers["disk_cache_drops_total"] == 0
    embedded.end(f"may have {OPEN_FILES} files open")
