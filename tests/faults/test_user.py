"""Someone who is not root formats, mounts by fusermount3, uses and unmounts."""

from __future__ import annotations

import os
import re
import shlex
import sys
from pathlib import Path

from tests.faults.user import NOBODY, as_user, needs_namespaces

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
    until grep -q "mounted on" $HOME/err; do kill -0 $!; sleep 0.1; done  # before it signals fail
    echo data > $HOME/mnt/file
    kill -TERM $!
    wait $!
    if findmnt $HOME/mnt; then exit 1; fi
    slicefs fsck --data $meta
    """
    done = as_user(script, base)
    assert done.code == 0, done
    assert "SIGTERM: unmounting" in (base / "home/err").read_text()


INSIDE = """
set -ex
slicefs mount -d $meta $HOME/mnt --cache-dir $HOME/cache --log $HOME/log $options
cd $HOME/mnt
stat -c 'outside is %u inside' made
echo more >> made
echo data > file
stat -c 'inside is %u:%g' file
ls -ln . | grep -c ' 0 0 '
chown 0:0 file
if chown 1 file; then exit 1; fi
mkfifo pipe
setfattr -n user.name -v value file
getfattr --only-values -n user.name file
setfacl -m u:0:r file
getfacl -cn file | grep 'user:0:r--'
flock file echo locked
mkdir -m 700 folder
mv file folder/moved
python3 -c "
import mmap, os
with open('mapped', 'w+b') as file:
    file.truncate(1 << 20)
    with mmap.mmap(file.fileno(), 0) as view:
        view[5000:5004] = b'here'
    assert os.pread(file.fileno(), 4, 5000) == b'here'
    os.posix_fallocate(file.fileno(), 0, 2 << 20)
    assert os.lseek(file.fileno(), 0, os.SEEK_DATA) in range(1, 5001)
with open('copy', 'wb') as copy, open('mapped', 'rb') as file:
    assert os.copy_file_range(file.fileno(), copy.fileno(), 1 << 20) == 1 << 20
"
head -c 100 .config >/dev/null
cd /
slicefs clone $HOME/mnt/folder $HOME/mnt/cloned
slicefs flush $HOME/mnt
slicefs info $HOME/mnt/made
slicefs umount $HOME/mnt
"""

NAMESPACE = """
set -ex
umask 022
meta=sqlite:///$HOME/meta.db
export meta options
mkdir $HOME/mnt $HOME/cache $HOME/staging
slicefs format $meta testvol --bucket $HOME/bucket --trash-days 0
slicefs mount -d $meta $HOME/mnt --log $HOME/log
echo data > $HOME/mnt/made
slicefs umount $HOME/mnt
options='-o acl' unshare --user --map-root-user --mount sh -c "$INSIDE"
slicefs mount -d $meta $HOME/mnt --log $HOME/log -o acl
stat -c 'outside is %u:%g' $HOME/mnt/folder/moved $HOME/mnt/cloned/moved $HOME/mnt/pipe
getfacl -cn $HOME/mnt/folder/moved
cat $HOME/mnt/made
slicefs umount $HOME/mnt
rm -r $HOME/bucket $HOME/meta.db*
export options="--writeback --staging-dir $HOME/staging -o acl"
unshare --user --map-root-user --mount sh -ec "
    slicefs format $meta testvol --bucket $HOME/bucket --trash-days 0
    slicefs mount -d $meta $HOME/mnt --log $HOME/log
    touch $HOME/mnt/made
    slicefs umount $HOME/mnt
    $INSIDE"
slicefs fsck --data $meta
"""


def test_p1_in_a_user_namespace(base: Path) -> None:
    """Root of a namespace mounts without fusermount3; its ids are the user's own in the volume."""
    prepare = f"INSIDE={shlex.quote(INSIDE)}; export INSIDE"
    done = as_user(NAMESPACE, base, prepare)
    assert done.code == 0, done.err + done.out
    assert done.out.count("outside is 0 inside") == 2
    assert done.out.count("inside is 0:0") == 2
    assert done.out.count(f"outside is {NOBODY}:{NOBODY}") == 3
    assert f"user:{NOBODY}:r--" in done.out
    assert done.out.count("locked") == 2
    assert done.out.splitlines()[-1] == "clean"
    log = (base / "home/log").read_text()
    assert not re.search("WARNING|ERROR|Traceback", log), log


HOME = """
set -ex
cd
git init -q project
cd project
git config user.name user
git config user.email user@example.org
cp -r $B/repo/fsmeta .
git add .
git commit -qm first
git gc -q
git fsck --strict
git status --porcelain | wc -l
cd
$PYTHON -m venv --without-pip --system-site-packages env
env/bin/python -c 'import sys; print("venv in", sys.prefix)'
env/bin/python -c '
import sqlite3
for mode in ("delete", "wal"):
    with sqlite3.connect(f"{mode}.db") as db:
        db.execute(f"pragma journal_mode={mode}")
        db.execute("create table t (a)")
        db.executemany("insert into t values (?)", [(n,) for n in range(1000)])
    assert db.execute("pragma integrity_check").fetchone() == ("ok",)
    db.close()
'
tar -cf all.tar project
mkdir out
tar -xf all.tar -C out
diff -r project out/project
test -f .bash_history || history -a || :
"""

LOGIN = """
set -ex
meta=sqlite:///$B/own/meta.db
slicefs format $meta homes --bucket $B/own/bucket --trash-days 0
slicefs mount -d $meta $HOME --cache-dir $B/own/cache --log $B/own/log
echo 'export GREETING="profile was read"' > $HOME/.bash_profile
cd $HOME
env -u B -u PYTHONPATH B=$B bash --login -c 'echo $GREETING; pwd'
bash --login -c "$SESSION"
cd /
slicefs umount $HOME
slicefs fsck --data $meta
"""


def test_p1_a_home_on_the_mount(base: Path) -> None:
    """The mount covers the home of the user: shell, git, a venv, SQLite and tar live in it."""
    own = base / "own"
    own.mkdir()
    os.chown(own, NOBODY, NOBODY)
    python = f"{base}/python/bin/python{sys.version_info.major}.{sys.version_info.minor}"
    prepare = f"SESSION={shlex.quote(HOME)} PYTHON={python}; export SESSION PYTHON"
    done = as_user(LOGIN, base, prepare)
    assert done.code == 0, done.err + done.out
    assert "profile was read" in done.out
    assert f"venv in {base}/home/env" in done.out
    assert done.out.splitlines()[-1] == "clean"
    log = (own / "log").read_text()
    assert not re.search("WARNING|ERROR|Traceback", log), log
