"""T2: jobs for clones as a mount takes them from an xattr, whatever is written there."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from typing import Any

import pytest

from fsclient.client.client import MountClient
from fsclient.control.clone_jobs import CLONE_XATTR
from fsmeta.admin.clones import CloneTree
from fsmeta.types import ROOT_CALLER, ROOT_INO, Ino
from tests.conftest import LogWatch
from tests.posix.inproc import client, memory
from tests.support.waiting import wait_until

WORD = CLONE_XATTR + b"word"


def _ask(made: MountClient, **wish: Any) -> None:
    value = json.dumps({"preserve": False, **wish}).encode()
    made.vfs.xattrs.setxattr(ROOT_CALLER, ROOT_INO, WORD, value, 0)


def _outcome(made: MountClient) -> dict[str, Any]:
    reports: list[dict[str, Any]] = []

    def done() -> bool:
        answer = json.loads(made.vfs.xattrs.getxattr(ROOT_CALLER, ROOT_INO, WORD))
        reports.append(answer)
        return bool(answer["done"])

    wait_until(done)
    return reports[-1]


@pytest.mark.parametrize("name", [".", "..", "a/b", "a\0b", "", "n" * 256])
def test_t2_no_clone_gets_a_name_that_is_none(name: str) -> None:
    with client(memory()) as made:
        source = made.meta.create(ROOT_CALLER, ROOT_INO, b"source", 0o40755).ino
        with pytest.raises(OSError, match="name") as caught:
            _ask(made, source=source, name=name)
        assert caught.value.errno == (errno.ENAMETOOLONG if len(name) > 255 else errno.EINVAL)
        assert [each.name for each in made.meta.names(ROOT_INO)[0]] == [b"source"]


@pytest.mark.parametrize("source", [-1, 1 << 64, float("inf")])
def test_t2_what_is_no_inode_is_refused(source: float) -> None:
    with client(memory()) as made:
        with pytest.raises(OSError, match=r"not a request|no inode") as caught:
            _ask(made, source=source, name="x")
        assert caught.value.errno == errno.EINVAL


def test_t2_a_job_that_nobody_foresaw_has_failed(log_watch: LogWatch) -> None:
    """It had the errno 0, which the command takes for success."""

    def broken(_source: Ino, _stopped: Callable[[], bool]) -> CloneTree:
        raise RuntimeError("nobody foresaw this")

    log_watch.expect("clone of inode .*nobody foresaw this")
    with client(memory()) as made:
        source = made.meta.create(ROOT_CALLER, ROOT_INO, b"source", 0o40755).ino
        made.vfs.questions.cloner.tree = broken
        _ask(made, source=source, name="copy")
        assert _outcome(made)["errno"] == errno.EIO
