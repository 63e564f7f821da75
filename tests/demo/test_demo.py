"""The demo does what it shows, leaves nothing behind, and fails where it should."""

from __future__ import annotations

import hashlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.faults.program import REPOSITORY, needs_mounts
from tests.support.waiting import SOON_S
from tools.demolib import debian, steps, trees
from tools.demolib.sources import NoSource, SourceArchive, sources
from tools.demolib.volume import DemoVolume

# A mount namespace that others make meanwhile would have copies of its mounts, and keep them. Of
# the mounts that others have now it lets go: it would keep them, too.
_LET_GO = 'umount -a -l -t fuse.slicefs; exec "$@"'
APART = ["unshare", "--mount", "sh", "-c", _LET_GO, "sh"] if os.geteuid() == 0 else []
DEMO_S = 840  # a hang; a quiet machine needs 60 s, one with other work to do a multiple
pytestmark = pytest.mark.timeout(DEMO_S + 60)


def demo(*words: str) -> subprocess.CompletedProcess[str]:
    """Run it to its end; where it hangs it is told to clean up."""
    command = [*APART, sys.executable, "-m", "tools.demo", *words]
    out = subprocess.PIPE
    with subprocess.Popen(command, cwd=REPOSITORY, stdout=out, stderr=out, text=True) as process:
        try:
            said = process.communicate(timeout=DEMO_S)
        except subprocess.TimeoutExpired:
            process.terminate()
            raise
        return subprocess.CompletedProcess(command, process.returncode, *said)


def running() -> Iterator[bytes]:
    """The command lines of all processes; a mount has one that serves it."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(FileNotFoundError, ProcessLookupError):
            yield path.read_bytes()


@needs_mounts
def test_the_demo(tmp_path: Path) -> None:
    work = tmp_path / "work"
    work.mkdir()
    done = demo("--dir", str(work))
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.fullmatch(r"all right: 1\d steps in \d+ s, nothing left behind", last_line(done))
    assert "clean: 1 inode, 0 objects" in done.stdout
    assert "integrity_check ok" in done.stdout
    assert "each right on the other mount" in done.stdout
    assert list(work.iterdir()) == []
    assert not any(os.fsencode(work) in command for command in running())


def test_a_demo_that_can_not_work() -> None:
    done = demo("--dir", "/proc")
    assert done.returncode == 1
    assert last_line(done).startswith("FAILED: ")


def test_leaving_hides_no_failure(tmp_path: Path) -> None:
    """An unmount that had failed was once reported as the second one, which found no mount."""
    volume = DemoVolume(tmp_path)
    with subprocess.Popen(["sleep", "60"]) as client:
        volume._mounted[tmp_path] = client.pid
        volume.leave()
        assert client.wait(SOON_S) == -signal.SIGTERM


def test_an_archive_that_tar_can_t_unpack(tmp_path: Path) -> None:
    """What tar says is shown: a system without xz-utils once got tar's command line alone."""
    archive = tmp_path / "x.tar.xz"
    archive.write_bytes(b"no archive")
    with pytest.raises(steps.Failed, match=r"^tar: .+"):
        steps.unpack(SourceArchive("x", (archive,), {}), tmp_path / "target")


def last_line(done: subprocess.CompletedProcess[str]) -> str:
    return done.stdout.splitlines()[-1]


def test_without_anything_to_work_on(tmp_path: Path) -> None:
    done = demo("--offline", "--cache", str(tmp_path / "cache"), "--dir", str(tmp_path))
    assert done.returncode == 1
    line = r"FAILED: \S+ has no django\S+: run the demo without --offline once"
    assert re.fullmatch(line, done.stdout.strip()), done


def test_a_mirror_that_is_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One line with the remedy; no other files stand in."""
    (tmp_path / "django-5.tar.gz").touch()
    (tmp_path / "etc").mkdir()
    line = "deb [trusted=yes] http://127.0.0.1:1/debian some main\n"
    (tmp_path / "etc/sources.list").write_text(line)
    monkeypatch.setattr(debian, "ETC", tmp_path / "etc")
    with pytest.raises(NoSource, match=r"source packages; check /etc/apt .*127.0.0.1") as caught:
        sources(tmp_path, offline=False)
    assert "\n" not in str(caught.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["django-5.tar.gz", "etc"]


def test_a_torn_download_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "django-5.tar.gz").touch()
    (tmp_path / "x.tar.xz").write_text("half")
    described = f"Source: x\nChecksums-Sha256:\n {'0' * 64} 9 x.tar.xz\nFiles:\n"
    (tmp_path / f"{debian.PACKAGE}_1.dsc").write_text(described)
    with pytest.raises(NoSource, match=r"x.tar.xz is not what \S+ says: remove both"):
        sources(tmp_path, offline=True)
    digest = hashlib.sha256(b"half").hexdigest()
    (tmp_path / f"{debian.PACKAGE}_1.dsc").write_text(described.replace("0" * 64, digest))
    with pytest.raises(NoSource, match=r"django-5.tar.gz is damaged: remove it and run"):
        sources(tmp_path, offline=True)


def test_the_archives_of_this_release(tmp_path: Path) -> None:
    """Both ways to write them; not those of others, unless there is nothing else."""
    folder = tmp_path / "sources.list.d"
    folder.mkdir()
    (tmp_path / "sources.list").write_text(
        "# deb http://a/debian trixie main\ndeb [arch=amd64 trusted=yes] http://b/x trixie main\n"
        "deb http://c/x trixie-updates main\ndeb-src http://d/x trixie main\n"
    )
    (folder / "debian.sources").write_text(
        "Types: deb deb-src\n# comment\nURIs: http://e/debian\nSuites: trixie trixie-updates\n"
        "Components: main\nSigned-By:\n -----BEGIN\n .\n\n"
        "Types: deb\nURIs: http://f/\nSuites: trixie\nComponents: main\nEnabled: no\n\n"
        "Types: deb\nURIs: http://g/\nSuites: other\nComponents: main\n"
    )
    (folder / "old.sources.bak").write_text("Types: deb\nURIs: http://h/\nSuites: trixie\n")
    assert list(debian.source_lists(tmp_path, "trixie")) == [
        (".list", "deb-src [arch=amd64 trusted=yes] http://b/x trixie main\n"),
        (
            ".sources",
            "Types: deb-src\nSuites: trixie\nURIs: http://e/debian\nComponents: main\n"
            "Signed-By:\n -----BEGIN\n .\n",
        ),
    ]
    every = [text for _, text in debian.source_lists(tmp_path, "nowhere")]
    assert [re.findall("http://(.)", text) for text in every] == [["b"], ["c"], ["e"], ["g"]]


def pair(tmp_path: Path) -> tuple[Path, trees.Tree]:
    """A tree, and what an archive says of it."""
    tree, archive = tmp_path / "tree", tmp_path / "tree.tar"
    tree.mkdir()
    (tree / "file").write_text("same")
    (tree / "other").hardlink_to(tree / "file")
    (tree / "link").symlink_to("file")
    (tree / "folder").mkdir()
    for each in tree.iterdir():
        os.utime(each, ns=(0, 10**18 + 5), follow_symlinks=False)
    command = ["tar", "-c", "--format=posix", "-f", str(archive), "-C", str(tree)]
    subprocess.run([*command, *sorted(os.listdir(tree))], check=True)
    members = trees.members([archive])
    assert trees.compare(members, tree) == 4
    return tree, members


def with_same_times(path: Path, act: Callable[[Path], object]) -> None:
    act(path)
    os.utime(path, ns=(0, 10**18 + 5), follow_symlinks=False)


def other_link(path: Path) -> None:
    path.unlink()
    path.symlink_to("filf")


def no_hard_link(path: Path) -> None:
    path.unlink()
    path.write_text("same")


@pytest.mark.parametrize(
    ("name", "act", "differing"),
    [
        ("file", lambda path: path.write_text("sane"), "2 of 4"),  # it has two names
        ("file", lambda path: path.chmod(0o600), "2 of 4"),
        ("folder", lambda path: path.chmod(0o700), "1 of 4"),
        ("link", other_link, "1 of 4"),
        ("other", no_hard_link, "2 of 4"),
        ("new", lambda path: path.touch(), "1 of 5"),
    ],
)
def test_differences_are_seen(
    tmp_path: Path, name: str, act: Callable[[Path], object], differing: str
) -> None:
    tree, members = pair(tmp_path)
    with_same_times(tree / name, act)
    with pytest.raises(trees.Differs, match=f"{differing} differ: .*Seen"):
        trees.compare(members, tree)


def test_other_times_are_seen(tmp_path: Path) -> None:
    tree, members = pair(tmp_path)
    os.utime(tree / "link", ns=(0, 10**18 + 6), follow_symlinks=False)
    with pytest.raises(trees.Differs, match="1 of 4 differ: link: Seen"):
        trees.compare(members, tree)
