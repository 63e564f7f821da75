"""What a mount says of itself: the content of `.config`, and its session's row.

Called by `MountClient`.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from typing import Any

from fsclient.client.client_options import ClientOptions
from fsclient.client.process_limits import find_limits
from fsclient.survival.survival import Survival
from fsmeta.rules.settings import VolumeFormat
from fsmeta.runtime import Runtime


def config_text(
    settings: VolumeFormat, options: ClientOptions, survival: Survival | None, staging: str | None
) -> bytes:
    """The volume's settings and the mount's options; `staging` is where its journal is."""
    mount = {"pid": os.getpid(), **options.shown()}
    shown = {"volume": settings.shown(), "mount": mount}
    if survival is not None and os.getppid() == survival.supervisor:  # it lives
        shown["mount"]["supervisor"] = survival.supervisor
        shown["mount"]["supervisor_address"] = survival.address
    if staging is not None:
        shown["mount"]["staging"] = staging
    return json.dumps(shown, indent=2).encode() + b"\n"


def session_info(options: ClientOptions, runtime: Runtime) -> dict[str, Any]:
    """What other clients can read of this one."""
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "mountpoint": options.mountpoint,
        "started": runtime.now_ns() // 10**9,
        "python": sys.version.split()[0],
        "limits": find_limits()._asdict(),
    }
