"""Things one may not do: said in one line, by root without means and by an ordinary user."""

from __future__ import annotations

import re
import stat
from pathlib import Path

import pytest

from fsdata.objects.file import FileObjects
from fsmeta.runtime import SystemRuntime
from tests.conftest import LogWatch
from tests.faults.program import Done, Volume, succeed, without_waits
from tests.faults.user import as_root, as_user, needs_namespaces

pytestmark = needs_namespaces


def refused(done: Done, expected: str) -> None:
    assert done.code == 1, done
    assert re.fullmatch(r"slicefs: [^\n]+\n", without_waits(done.err)), done
    assert re.search(expected, done.err), done


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("format sqlite:///$B/x.db vol --bucket $HOME/b", "slicefs-test-.* may not write to it"),
        ("format sqlite:///$B/hidden/x.db vol --bucket $HOME/b", "metadata file"),
        ("format sqlite:///$HOME/x.db vol --bucket $B/b", "b/vol': Permission denied; name a"),
        ("format sqlite:///$HOME/x.db vol --bucket $B/b --dry-run", "you may not write to /tmp"),
        ("status sqlite:///$B/roots.db", "roots.db: you may not read and write it"),
        ("status sqlite:///$B/hidden/x.db", "hidden of the metadata file: you may not enter it"),
        (
            "mount sqlite:///$HOME/meta.db $B/bin",
            "can't mount on .*/bin: .*fusermount3: user has no",
        ),
        ("mount sqlite:///$HOME/meta.db $HOME/mnt -o allow_other", "user_allow_other"),
        ("mount -d --log /var/log/x sqlite:///$HOME/meta.db $HOME/mnt", "can't write the log /var"),
        ("umount $B/roots", "roots is not a SliceFS mount"),
        ("info $B/hidden/x", "Permission denied"),
    ],
)
def test_as_nobody(base: Path, words: str, expected: str) -> None:
    (base / "hidden").mkdir(mode=0o700)
    (base / "roots.db").touch(mode=0o600)
    made = as_user(
        "mkdir $HOME/mnt && slicefs format sqlite:///$HOME/meta.db testvol --bucket $HOME/bucket",
        base,
    )
    assert made.code == 0, made
    before = sorted(path.name for path in (base / "home").rglob("*"))
    prepare = "mkdir $B/roots; mount -t tmpfs -o mode=0700 none $B/roots"
    refused(as_user(f"slicefs {words}", base, prepare), expected)
    assert sorted(path.name for path in (base / "home").rglob("*")) == before


def test_nobody_else_reads_what_is_beneath_a_volume(embedded: Volume) -> None:
    """P1: the modes of files in it would be worth nothing; both were once readable by all."""
    embedded.format()
    mount = embedded.mount()
    (mount.path / "file").write_text("secret")
    (mount.path / "file").chmod(0o600)
    for path in sorted(embedded.base.glob("meta.db*")):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, path
    for path in ((embedded.bucket / "testvol"), *(embedded.bucket / "testvol").rglob("*")):
        expected = 0o700 if path.is_dir() else 0o600
        assert stat.S_IMODE(path.stat().st_mode) == expected, path
    script = "cat $B/meta.db $B/bucket/testvol/chunks/*/*/*; find $B/bucket -type f"
    done = as_user(script, embedded.base)
    assert done.out == ""
    assert done.err.count("Permission denied") >= 3, done
    mount.umount()
    prepared = embedded.base / "shared/vol"
    prepared.mkdir(parents=True)
    prepared.chmod(0o2775)
    succeed("format", f"sqlite://{embedded.base}/2.db", "vol", "--bucket", prepared.parent)
    assert stat.S_IMODE(prepared.stat().st_mode) == 0o2775, "it was made so by intention"
    embedded.end()


def test_what_is_in_a_shared_data_directory_is_shared(tmp_path: Path, log_watch: LogWatch) -> None:
    """P1: with whom it was made to be; and everybody's is told of."""
    for mode, objects, folders in ((0o2770, 0o640, 0o770), (0o755, 0o644, 0o755)):
        root = tmp_path / f"{mode:o}"
        root.mkdir()
        root.chmod(mode)
        store = FileObjects(SystemRuntime(), str(root))
        store.put("chunks/0/0/1_0_1", (b"v",))
        found = [path for path in root.rglob("*") if path.name != ".tmp"]
        modes = {stat.S_IMODE(path.stat().st_mode) & 0o777 for path in found}
        assert modes == {objects, folders}
    (tmp_path / "all").mkdir()
    (tmp_path / "all").chmod(0o777)
    log_watch.expect("any user may write to the object directory")
    FileObjects(SystemRuntime(), str(tmp_path / "all"))


def test_a_data_directory_that_is_not_ours(base: Path) -> None:
    """Read-only as it is, it can be mounted read-only."""
    script = """
    mkdir $HOME/mnt
    slicefs format sqlite:///$HOME/meta.db testvol --bucket $HOME/bucket >/dev/null
    chmod 0555 $HOME/bucket/testvol
    slicefs mount -d sqlite:///$HOME/meta.db $HOME/mnt
    """
    refused(as_user(script, base), "may not write to the data directory .*: mount it with -o ro")
    script = """
    slicefs mount -d sqlite:///$HOME/meta.db $HOME/mnt -o ro && slicefs umount $HOME/mnt
    """
    done = as_user(script, base)
    assert (done.code, done.err) == (0, "")


def test_a_bucket_on_a_read_only_disk(embedded: Volume) -> None:
    embedded.format()
    mount = embedded.mount()
    (mount.path / "file").write_text("data")
    mount.umount()
    prepare = "mount --bind $B/bucket $B/bucket; mount -o remount,bind,ro $B/bucket"
    meta, base = embedded.meta, embedded.base
    words = f"slicefs mount -d --log $B/log {meta} $B/mnt"
    refused(as_root(f"{prepare}; {words}", base), "may not write to the data directory .*-o ro")
    refused(
        as_root(f"{prepare}; slicefs format sqlite:///$B/2.db vol2 --bucket $B/bucket", base),
        "Read-only file system; name a directory",
    )
    done = as_root(f"{prepare}; {words} -o ro; cat $B/mnt/file; slicefs umount $B/mnt", base)
    assert (done.code, done.out, done.err) == (0, "data", "")
    assert not (base / "2.db").exists()
    embedded.end("may not write to the data directory")


def test_no_device(embedded: Volume) -> None:
    embedded.format()
    (embedded.base / "mnt").mkdir()
    hide = "mkdir $B/dev; mknod -m 666 $B/dev/null c 1 3; mount --bind $B/dev /dev"
    words = f"slicefs mount {embedded.meta} $B/mnt"
    refused(as_root(f"{hide}; {words}", embedded.base), "no /dev/fuse: `modprobe fuse`")
    close = "mknod $B/fuse0 c 10 229; chmod 0 $B/fuse0; mount --bind $B/fuse0 /dev/fuse"
    drop = f"exec setpriv --bounding-set -sys_admin,-dac_override -- {words}"
    refused(as_root(f"{close}; {drop}", embedded.base), "/dev/fuse|CAP_SYS_ADMIN")
    embedded.end()
