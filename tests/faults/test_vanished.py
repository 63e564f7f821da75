"""The directory on which a volume is mounted is removed where the mount is not seen."""

from __future__ import annotations

import re
from pathlib import Path

from tests.faults.user import as_root, needs_namespaces

pytestmark = needs_namespaces

SCRIPT = """
set -e
meta=sqlite://$B/meta.db
mkdir $B/mnt
slicefs format $meta testvol --bucket $B/bucket --trash-days 0 >/dev/null
mkfifo $B/ready $B/go
unshare --mount --propagation private sh -ec "
    slicefs mount $meta $B/mnt 2>$B/log &
    client=\\$!
    until grep -q 'mounted on' $B/log; do kill -0 \\$client; sleep 0.05; done
    exec 5>$B/mnt/file
    echo data >&5
    echo ready >$B/ready
    read -r go <$B/go
    exec 5>&-
    wait \\$client
" &
read -r ready <$B/ready
rmdir $B/mnt
mkdir $B/elsewhere
echo go >$B/go
wait $!
slicefs mount -d $meta $B/elsewhere --log $B/log2
cat $B/elsewhere/file
slicefs umount $B/elsewhere
slicefs fsck --data $meta
"""


def test_r3_a_mount_point_that_vanishes(base: Path) -> None:
    """Linux detaches the mount; the client stores what was written, and ends as after `umount`."""
    done = as_root(SCRIPT, base)
    log = (base / "log").read_text()
    assert done.code == 0, done.err + done.out + log
    assert done.out.splitlines()[0] == "data"
    assert done.out.splitlines()[-1] == "clean"
    assert "unmounted" in log
    assert not re.search("WARNING|ERROR|Traceback", log), log
