"""K3: the FUSE pod of a Fluid data set: the configuration that Fluid writes, and a real mount."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from csi.clients.mounting import for_pods
from csi.errors import CsiError
from csi.server.fluid import parse_config
from tests.csi.deploy.test_manifests import DEPLOY, by_kind, documents
from tests.csi.driver import SECRET, Driver
from tests.faults.program import REPOSITORY, needs_mounts, succeed
from tests.support.outcome import errno_of
from tests.support.waiting import wait_until


def config_of(directory: Path, secrets: dict[str, str]) -> dict[str, Any]:
    """What Fluid makes of examples/fluid.yaml: `transformFuseConfig` of its package `ddc/thin`.

    The secrets are in `directory`, where Fluid mounts them in /etc/fluid/secrets.
    """
    spec = by_kind(documents((DEPLOY / "examples/fluid.yaml").read_text()))["Dataset", "datasets"][
        "spec"
    ]
    mounts = []
    for mount in spec["mounts"]:
        options = dict(mount["options"])
        for each in mount["encryptOptions"]:
            found = each["valueFrom"]["secretKeyRef"]
            place = directory / found["name"] / found["key"]
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(secrets.get(found["key"], "none") + "\n")
            options[each["name"]] = str(place)
        mounts.append(
            {"mountPoint": mount["mountPoint"], "name": mount["name"], "options": options}
        )
    target = str(directory / "runtime-mnt/thin/default/datasets/thin-fuse")
    return {"mounts": mounts, "targetPath": target, "accessModes": spec["accessModes"]}


@pytest.fixture
def config(tmp_path: Path) -> dict[str, Any]:
    return config_of(tmp_path, {"metaurl": "redis://:pass@redis/1", "secret-key": "secret"})


def test_words_and_secrets(config: dict[str, Any]) -> None:
    found = parse_config(config)
    words = ("-o", "buffer-size=1GiB", "--read-only", "--subdir", "/datasets")
    assert found.words == for_pods(words)
    assert found.environment == {
        "SLICEFS_META": "redis://:pass@redis/1",
        "ACCESS_KEY": "none",
        "SECRET_KEY": "secret",
    }
    written = {**config, "accessModes": ["ReadWriteMany"], "runtimeOptions": {"writeback": ""}}
    options = ("-o", "writeback", "-o", "buffer-size=1GiB", "--subdir", "/datasets")
    assert parse_config(written).words == for_pods(options)


@pytest.mark.parametrize(
    "change",
    [
        {"mountPoint": "s3://bucket"},
        {"mountPoint": "slicefs:///../etc"},
        {"options": {"buffer-size": "1GiB"}},
        {"options": {"metaurl": "redis://redis/1", "log": "/etc/passwd"}},
    ],
    ids=["scheme", "path", "no-metaurl", "option"],
)
def test_refused(config: dict[str, Any], change: dict[str, Any]) -> None:
    [mount] = config["mounts"]
    with pytest.raises((ValueError, CsiError)):
        parse_config({**config, "mounts": [{**mount, **change}]})


@pytest.mark.parametrize("text", ["", "{}", '{"mounts": []}', "[]"])
def test_no_configuration(tmp_path: Path, text: str) -> None:
    """One line for the log of the pod."""
    path = tmp_path / "config.json"
    path.write_text(text)
    done = fluid(path)
    out, err = done.communicate(timeout=60)
    assert (done.returncode, out) == (1, "")
    assert err.startswith("slicefs-csi-fluid: ")
    assert err.count("\n") == 1


def fluid(path: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "csi.server.fluid", path],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.fixture
def formatted(driver: Driver) -> Driver:
    """A volume with a directory `datasets`."""
    driver.create("datasets")
    root = next((driver.state / "stores").iterdir()) / "mnt"
    (root / "datasets/file").write_text("tokens")
    return driver


@needs_mounts
def test_a_data_set_is_mounted(formatted: Driver) -> None:
    """From the data set's manifest to its file, read-only; no argument shows the secret."""
    driver = formatted
    config = config_of(driver.base / "fluid", driver.secrets)
    path = driver.base / "config.json"
    path.write_text(json.dumps(config))
    target = Path(config["targetPath"])
    with fluid(path) as program:
        wait_until(lambda: (target / "file").exists() or program.poll() is not None)
        assert program.poll() is None, program.communicate()[1]
        assert (target / "file").read_text() == "tokens"
        assert errno_of(lambda: (target / "new").touch()) is not None
        for cmdline in Path("/proc").glob(f"{program.pid}/cmdline"):
            assert SECRET.encode() not in cmdline.read_bytes()
        succeed("umount", str(target))
        assert program.wait(60) == 0
    driver.delete("datasets")
    driver.finish()


def test_the_profile_runs_it() -> None:
    profile = by_kind(documents((DEPLOY / "examples/fluid.yaml").read_text()))[
        "ThinRuntimeProfile", "slicefs"
    ]
    [command] = profile["spec"]["fuse"]["command"]
    project = (REPOSITORY / "pyproject.toml").read_text()
    assert f'{command} = "csi.server.fluid:main"' in project
