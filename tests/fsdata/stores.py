"""Buckets and pools of the real servers, as the tests of object stores want them."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Any, Final

import pytest

from fsdata.objects.rados.rados import RadosObjects, RadosSettings
from fsdata.objects.s3.credentials import S3Account
from fsdata.objects.s3.http import Timeouts
from fsdata.objects.s3.s3 import S3Objects, S3Settings
from fsmeta.runtime import Runtime, SystemRuntime
from tests.support.ceph_cluster import ACCESS_KEY, SECRET_KEY, CephCluster

_NUMBERS: Final = itertools.count(1)
POOL: Final = "data"
PATIENT: Final = Timeouts(connect_s=60, silent_s=60, whole_s=120)  # the machine may be busy
QUICK: Final = Timeouts(connect_s=2, silent_s=1, whole_s=3)  # for who waits for them to pass


def fresh_name() -> str:
    """A bucket or namespace that nobody else in this cluster uses."""
    return f"t{os.getpid()}-{next(_NUMBERS)}"


def credentials_file(
    directory: Path, access: str = ACCESS_KEY, secret: str = SECRET_KEY, token: str = ""
) -> Path:
    """Keys in a file, as AWS programs keep them."""
    path = directory / "credentials"
    lines = ["[default]", f"aws_access_key_id = {access}", f"aws_secret_access_key = {secret}"]
    if token:
        lines.append(f"aws_session_token = {token}")
    written = path.with_suffix(".new")
    written.write_text("\n".join(lines) + "\n")
    written.rename(path)  # a mount may read it just now
    return path


def hide_own_keys(patch: pytest.MonkeyPatch, directory: Path) -> None:
    """Nothing of the machine's own keys and profiles takes part."""
    for name in [*os.environ]:
        if name.startswith("AWS_") or name in ("ACCESS_KEY", "SECRET_KEY", "SESSION_TOKEN"):
            patch.delenv(name)
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        patch.setenv(name, str(directory / "absent"))
    patch.setenv("AWS_EC2_METADATA_DISABLED", "true")


def s3_settings(
    endpoint: str, directory: Path, bucket: str = "", timeouts: Timeouts = PATIENT, **more: Any
) -> S3Settings:
    """A bucket at `endpoint`, with the tests' keys."""
    account = S3Account(endpoint, credentials=str(credentials_file(directory)))
    return S3Settings(bucket or fresh_name(), account, timeouts=timeouts, **more)


def s3_bucket(
    ceph: CephCluster, directory: Path, runtime: Runtime | None = None, **more: Any
) -> S3Objects:
    """An empty bucket of radosgw."""
    store = S3Objects(runtime or SystemRuntime(), s3_settings(ceph.endpoint, directory, **more))
    store.make_bucket()
    return store


def rados_settings(ceph: CephCluster, **more: Any) -> RadosSettings:
    """An empty namespace of the cluster's pool."""
    return RadosSettings(POOL, fresh_name(), conf=str(ceph.conf), **more)


def rados_namespace(ceph: CephCluster) -> RadosObjects:
    """An empty namespace, connected to."""
    return RadosObjects(SystemRuntime(), rados_settings(ceph))
