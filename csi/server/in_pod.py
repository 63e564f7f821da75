"""`slicefs-csi-client HOME`: the program of a mount pod. It runs one client until it is unmounted.

Where the mount has a client in an older pod, it takes the mount over, and that pod ends.

SIGTERM does not end it once it mounts: a pod that is evicted goes when kubelet has unstaged the
volume, or after its grace period.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import signal
import subprocess
import sys
from typing import Final

from csi.clients.backend import META
from csi.clients.starters import Launch
from csi.errors import CsiError
from csi.host import mounts
from csi.host.commands import find_slicefs

_LOOK_S: Final = 0.05


def main() -> None:
    """The `slicefs-csi-client` program."""
    if len(sys.argv) != 2:
        sys.exit("usage: slicefs-csi-client HOME, in a mount pod of slicefs-csi")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        sys.exit(_run(sys.argv[1]))
    except (CsiError, OSError) as error:
        sys.exit(f"slicefs-csi-client: {error}")


def _run(home: str) -> int:
    """The exit code of the client. Raises: CsiError, OSError."""
    lock = os.open(os.path.join(home, "lock"), os.O_RDWR | os.O_CLOEXEC)
    launch, is_ours = asyncio.run(_turn(home, lock))
    if launch is None:
        return 0
    return _mount(launch, () if is_ours else ("--take-over",), (lock,) if is_ours else ())


async def _turn(home: str, lock: int) -> tuple[Launch | None, bool]:
    """What to start, and whether no other client serves the mount; it waits for either.

    None where the volume was unstaged meanwhile.
    """
    while True:
        is_ours = _try_lock(lock)
        launch = Launch.read(home)
        if launch is None or not os.path.samestat(os.fstat(lock), os.stat(launch.lock)):
            return None, is_ours
        if is_ours or _has_supervisor(launch.mountpoint):
            return launch, is_ours
        await asyncio.sleep(_LOOK_S)


def _mount(launch: Launch, how: tuple[str, ...], held: tuple[int, ...]) -> int:
    """The exit code of the client, which has the descriptors `held`. Raises: CsiError, OSError."""
    signal.signal(signal.SIGTERM, lambda *_: None)
    words = [find_slicefs(), "mount", *how, "--log", launch.log, *launch.words]
    environment = {**os.environ, "LC_ALL": "C.UTF-8", **launch.environment}
    environment["SLICEFS_RUNTIME_DIR"] = launch.home  # both pods see it, and no other pod does
    with subprocess.Popen(
        [*words, META, launch.mountpoint], env=environment, pass_fds=held
    ) as client:
        for fd in held:
            os.close(fd)
        return client.wait()


def _try_lock(fd: int) -> bool:
    """Whether no client runs, and none can be started beside ours."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _has_supervisor(mountpoint: str) -> bool:
    """Whether a client serves the mount whose supervisor can be asked for it."""
    if mounts.find(mountpoint) is None:
        return False
    try:
        with open(os.path.join(mountpoint, ".config"), encoding="utf-8") as file:
            return "supervisor_address" in json.load(file)["mount"]
    except (OSError, ValueError, KeyError):
        return False  # it dies, or begins


if __name__ == "__main__":
    main()
