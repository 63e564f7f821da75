"""O3: encrypted volumes as users have them: format, mount, rekey, wrong and lost keys."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from fsclient.cli.options.key_options import NEW_PASSPHRASE, PASSPHRASE, RSA_KEY, RSA_PASSPHRASES
from tests.faults.load import content
from tests.faults.places import rados_place, s3_place
from tests.faults.program import Mount, Volume, needs_mounts, slicefs, succeed, without_waits
from tests.fsclient.cli.trees import snapshot
from tests.support.ceph_cluster import CephCluster

WORDS = "correct horse battery"
NEEDLE = b"a line that nobody else may read\n"


@pytest.fixture(autouse=True)
def _no_keys_around(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (PASSPHRASE, NEW_PASSPHRASE, RSA_KEY, *RSA_PASSPHRASES):
        monkeypatch.delenv(name, raising=False)


def rsa_key(path: Path, passphrase: str = "") -> Path:
    """A key as users make it."""
    hide = ["-aes256", "-passout", f"pass:{passphrase}"] if passphrase else []
    command = ["openssl", "genrsa", *hide, "-out", str(path), "2048"]
    subprocess.run(command, check=True, capture_output=True)
    return path


def fill(mount: Mount) -> dict[str, bytes]:
    files = {"text": NEEDLE * 40_000, "noise": content(1, 5_000_000), "small": NEEDLE}
    for name, data in files.items():
        (mount.path / name).write_bytes(data)
    return files


def holds(mount: Mount, files: dict[str, bytes]) -> None:
    fd = os.open(mount.path / "noise", os.O_RDONLY)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
    for at in (4_900_000, 100, 2_000_000):
        assert os.pread(fd, 5000, at) == files["noise"][at : at + 5000]
    os.close(fd)
    for name, data in files.items():
        assert (mount.path / name).read_bytes() == data


def refused(*words: str | Path) -> str:
    """What a command says, in one line, that does not do it."""
    done = slicefs(*words)
    assert done.code in (1, 2), done
    assert done.out == ""
    assert without_waits(done.err).count("\n") == 1, done.err
    assert WORDS not in done.err
    return done.err


@needs_mounts
@pytest.mark.parametrize("compress", ["none", "zstd"])
def test_a_volume_with_a_passphrase(
    embedded: Volume, monkeypatch: pytest.MonkeyPatch, compress: str
) -> None:
    monkeypatch.setenv(PASSPHRASE, WORDS)
    embedded.format("--encrypt-passphrase", "--compress", compress)
    mount = embedded.mount()
    files = fill(mount)
    holds(mount, files)
    shown = [(mount.path / ".config").read_text(), succeed("config", embedded.meta)]
    shown += [succeed(each, embedded.meta, "--json") for each in ("status", "config")]
    for text in shown:
        assert re.search(r'wrap(": "|=)scrypt', text)
        assert "salt" not in text
        assert not re.search(r"\bkey\b", text), "wrapped as it is, it lets one try passphrases"
    assert "key wrapped by scrypt" in succeed("status", embedded.meta)
    mount.umount()
    for path in embedded.objects():
        assert NEEDLE[:12] not in path.read_bytes()
    mount = embedded.mount()
    holds(mount, files)
    mount.umount()
    embedded.fsck("--data")
    monkeypatch.delenv(PASSPHRASE)
    assert "is encrypted: set SLICEFS_PASSPHRASE" in refused(
        "mount", "-d", "--log", embedded.log, embedded.meta, mount.path
    )
    monkeypatch.setenv(PASSPHRASE, WORDS + "!")
    before = snapshot(embedded.base)
    assert "the passphrase does not open this volume" in refused(
        "mount", "-d", "--log", embedded.log, embedded.meta, mount.path
    )
    assert snapshot(embedded.base) == before
    monkeypatch.setenv(PASSPHRASE, WORDS)
    embedded.end("the mount has failed")


@needs_mounts
def test_a_volume_with_an_rsa_key(embedded: Volume, monkeypatch: pytest.MonkeyPatch) -> None:
    key = rsa_key(embedded.base / "key.pem", "inner words")
    other = rsa_key(embedded.base / "other.pem")
    option = ("--encrypt-rsa-key", str(key))
    where = ("format", embedded.meta, "testvol", "--bucket", embedded.bucket)
    assert "is protected: set SLICEFS_RSA_PASSPHRASE" in refused(*where, *option)
    monkeypatch.setenv(RSA_PASSPHRASES[0], "wrong words")
    assert "its passphrase is wrong" in refused(*where, *option)
    monkeypatch.delenv(RSA_PASSPHRASES[0])
    monkeypatch.setenv(RSA_PASSPHRASES[1], "inner words")
    embedded.format(*option)
    mount = embedded.mount(*option)
    files = fill(mount)
    mount.umount()
    mount = embedded.mount("-o", f"encrypt-rsa-key={key}")
    holds(mount, files)
    mount.umount()
    mounting = ("mount", embedded.meta, mount.path)
    assert "does not open this volume: give RSA key" in refused(
        *mounting, "--encrypt-rsa-key", other
    )
    assert "give RSA key" in refused(*mounting)
    assert "No such file" in refused(*mounting, "--encrypt-rsa-key", embedded.base / "none")
    monkeypatch.setenv(RSA_KEY, str(key))
    mount = embedded.mount()
    holds(mount, files)
    embedded.end()


@needs_mounts
def test_rekey_leaves_data_and_mounts_alone(
    embedded: Volume, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = rsa_key(embedded.base / "key.pem")
    monkeypatch.setenv(PASSPHRASE, WORDS)
    embedded.format("--encrypt-passphrase")
    mount = embedded.mount()
    files = fill(mount)
    before = {path: path.stat().st_mtime_ns for path in embedded.objects()}
    monkeypatch.setenv(NEW_PASSPHRASE, "other words")
    assert "choose" not in succeed("rekey", embedded.meta, "--to-passphrase")
    (mount.path / "after").write_bytes(NEEDLE)
    mount.umount()
    assert "does not open" in refused("rekey", embedded.meta, "--to-rsa-key", key)
    monkeypatch.setenv(PASSPHRASE, "other words")
    told = json.loads(succeed("rekey", embedded.meta, "--to-rsa-key", key, "--json"))
    assert told["volume"] == "testvol"
    assert "key" not in told, "nothing that helps to guess it"
    assert "give RSA key" in refused("mount", embedded.meta, mount.path)
    mount = embedded.mount("--encrypt-rsa-key", str(key))
    holds(mount, {**files, "after": NEEDLE})
    after = {path: path.stat().st_mtime_ns for path in embedded.objects()}
    assert after.items() >= before.items()
    monkeypatch.setenv(RSA_KEY, str(key))
    embedded.end()


def test_bad_input(embedded: Volume, monkeypatch: pytest.MonkeyPatch) -> None:
    where = ("format", embedded.meta, "testvol", "--bucket", embedded.bucket)
    assert "no terminal to ask at: set SLICEFS_PASSPHRASE" in refused(
        *where, "--encrypt-passphrase"
    )
    assert "choose one" in refused(*where, "--encrypt-passphrase", "--encrypt-rsa-key", "x")
    monkeypatch.setenv(PASSPHRASE, "short")
    assert "too short" in refused(*where, "--encrypt-passphrase")
    noise = embedded.base / "noise"
    noise.write_bytes(os.urandom(100))
    assert "no private key in PEM" in refused(*where, "--encrypt-rsa-key", noise)
    assert not embedded.bucket.exists(), "nothing was made"
    embedded.format()
    assert "is not encrypted" in refused(
        "mount", embedded.meta, embedded.base, "--encrypt-passphrase"
    ) or "no terminal" in refused("mount", embedded.meta, embedded.base, "--encrypt-passphrase")
    key = rsa_key(embedded.base / "key.pem")
    assert "is not encrypted: leave out" in refused(
        "mount", embedded.meta, embedded.base, "--encrypt-rsa-key", key
    )
    assert "is not encrypted" in refused("rekey", embedded.meta, "--to-rsa-key", key)
    assert "name the key that opens" in refused("rekey", embedded.meta)
    assert "name the key that opens" in refused(
        "rekey", embedded.meta, "--to-rsa-key", key, "--to-passphrase"
    )


@needs_mounts
@pytest.mark.parametrize("store", ["s3", "rados"])
def test_on_real_stores(
    base: Path, ceph: CephCluster, monkeypatch: pytest.MonkeyPatch, store: str
) -> None:
    monkeypatch.setenv(PASSPHRASE, WORDS)
    place = s3_place(base, ceph.endpoint) if store == "s3" else rados_place(ceph)
    volume = Volume(base, place=place)
    try:
        volume.format("--encrypt-passphrase", "--compress", "lz4", "--block-size", "1MiB")
        mount = volume.mount()
        files = fill(mount)
        mount.umount()
        mount = volume.mount()
        holds(mount, files)
        assert mount.numbers()["block_ranges_fetched_total"] > 0
        volume.end()
    finally:
        volume.clean_up()
