"""Someone who is not root formats, mounts by fusermount3, uses and unmounts."""

from __future__ import annotations

from pathlib import Path

from tests.faults.user import as_user, needs_namespaces

pytestmark = needs_namespaces

SCRIPT = """
set -ex
umask 022
meta=sqlite:///$HOME/meta.db
mkdir "$HOME/mnt"
slicefs format $meta testvol --bucket $HOME/bucket
slicefs mount -d $meta $HOME/mnt -o noatime
findmnt -n -o FSTYPE,SOURCE $HOME/mnt
cd $HOME/mnt
echo data > file
mkdir folder
cp -a $B/repo/docs folder/
diff -r $B/repo/docs folder/docs
ln -s file link
chmod 600 file
stat -c '%n %a %U' file
if chown root file; then exit 1; fi
cd /
slicefs status $meta
slicefs info $HOME/mnt/file
if slicefs mount -d $meta $HOME/mnt; then exit 1; fi
slicefs umount $HOME/mnt
if findmnt $HOME/mnt; then exit 1; fi
slicefs fsck --data $meta
"""


def test_as_an_ordinary_user(base: Path) -> None:
    done = as_user(SCRIPT, base)
    assert done.code == 0, done.err
    assert "fuse.slicefs testvol" in done.out
    assert "file 600 nobody" in done.out
    assert done.out.splitlines()[-1] == "clean"
    log = (base / "home/.slicefs/slicefs.log").read_text()
    assert "is mounted already" in log
    assert log.count("WARNING") + log.count("Traceback") == 0, log
    assert log.count("ERROR") == 1, log


def test_signal_as_an_ordinary_user(base: Path) -> None:
    script = """
    set -e
    meta=sqlite:///$HOME/meta.db
    mkdir "$HOME/mnt"
    slicefs format $meta testvol --bucket $HOME/bucket
    slicefs mount $meta $HOME/mnt 2>$HOME/err &
    until findmnt $HOME/mnt >/dev/null; do sleep 0.1; done
    echo data > $HOME/mnt/file
    kill -TERM $!
    wait $!
    if findmnt $HOME/mnt; then exit 1; fi
    slicefs fsck --data $meta
    """
    done = as_user(script, base)
    assert done.code == 0, done
    assert "SIGTERM: unmounting" in (base / "home/err").read_text()
