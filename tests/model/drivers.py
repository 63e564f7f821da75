"""Who can run operations: the `Driver` seam, the model, and the kernel under a directory.

`fsdriver.FsDriver` is the third kind: a `FileSystem` without any kernel.
"""

from __future__ import annotations

import errno
import os
import pickle
import posixpath
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from tests.model.helper import RESET, WIPE
from tests.model.model import ModelFS
from tests.model.ops import (
    NOW,
    ROOT,
    USERS,
    Chmod,
    Chown,
    Listdir,
    ListXattr,
    Op,
    RemoveXattr,
    Result,
    Rmdir,
    SetFlags,
    Unlink,
    User,
    Utimens,
)
from tests.model.tree import Sysctls

_REPOSITORY = Path(__file__).parents[2]


class Driver(Protocol):
    """One file system under test. Not for several threads."""

    name: str

    def run(self, user: User, op: Op) -> Result:
        """Do `op` as `user`."""

    def reset(self) -> None:
        """Close all slots and empty the tree: its root is root's again, mode 0777."""

    def close(self) -> None:
        """Let go of everything; idempotent."""


def wipe(driver: Driver) -> None:
    """`Driver.reset` in terms of operations; slots are closed already."""
    driver.run(ROOT, SetFlags(b"/", 0))
    _empty(driver, b"/")
    found = driver.run(ROOT, ListXattr(b"/")).value
    names = found if isinstance(found, tuple) else ()
    for name in names:
        assert isinstance(name, bytes)
        driver.run(ROOT, RemoveXattr(b"/", name))
    for op in (Chown(b"/", 0, 0), Chmod(b"/", 0o777), Utimens(b"/", NOW, NOW)):
        result = driver.run(ROOT, op)
        assert not result.errno, f"{op} → {result}"


def _empty(driver: Driver, directory: bytes) -> None:
    names = driver.run(ROOT, Listdir(directory)).value
    assert isinstance(names, tuple), directory
    for name in names:
        assert isinstance(name, bytes)
        path = posixpath.join(directory, name)
        code = driver.run(ROOT, Unlink(path)).errno
        if code == errno.EPERM:
            for flagged in (directory, path):
                driver.run(ROOT, SetFlags(flagged, 0))
            code = driver.run(ROOT, Unlink(path)).errno
        if code:
            _empty(driver, path)
            result = driver.run(ROOT, Rmdir(path))
            assert not result.errno, f"rmdir {path!r} → {result}"


class ModelDriver:
    """The model."""

    name = "model"

    def __init__(self, sysctls: Sysctls | None = None, flags_last: bool = False) -> None:
        self._sysctls = sysctls
        self._flags_last = flags_last
        self.model = ModelFS(sysctls, flags_last)

    def run(self, user: User, op: Op) -> Result:
        return self.model.run(user, op)

    def reset(self) -> None:
        self.model = ModelFS(self._sysctls, self._flags_last)

    def close(self) -> None:
        pass


class _Helper:
    """The other end of `helper`."""

    def __init__(self, root: bytes, user: User) -> None:
        groups = ",".join(map(str, user.groups))
        arguments = [os.fsdecode(root), str(user.uid), str(user.gid), groups]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.model.helper", *arguments],
            cwd=_REPOSITORY,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def ask(self, request: Op | str) -> Result | None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        pickle.dump(request, self._process.stdin)
        self._process.stdin.flush()
        answer: Result | None = pickle.load(self._process.stdout)
        return answer

    def close(self) -> None:
        self._process.communicate()


class OsDriver:
    """The kernel, under the directory `root`; needs to be root. One helper process for each user.

    The directory itself is the caller's: `reset` empties it, `close` leaves it.
    """

    def __init__(self, root: bytes, users: Sequence[User] = USERS, name: str = "os") -> None:
        self.name = name
        self._helpers = {user: _Helper(root, user) for user in {ROOT: None} | dict.fromkeys(users)}
        self.reset()

    def run(self, user: User, op: Op) -> Result:
        answer = self._helpers[user].ask(op)
        assert answer is not None
        return answer

    def reset(self) -> None:
        for helper in self._helpers.values():
            helper.ask(RESET)
        self._helpers[ROOT].ask(WIPE)

    def close(self) -> None:
        for helper in self._helpers.values():
            helper.close()
        self._helpers = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


_CONFORMS: tuple[type[Driver], ...] = (ModelDriver, OsDriver)
