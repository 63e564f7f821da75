"""sd_notify(3): the main process of a service says that the mount is served.

Called by a client without a supervisor, else by its supervisor: a service manager takes the message
of the main process only, unless its unit says otherwise. Imports the standard library only.
"""

from __future__ import annotations

import os
import socket


def tell_service_manager() -> str:
    """The mount is served, if a service manager has asked for that; why it could not be told."""
    place = os.environ.get("NOTIFY_SOCKET", "")
    if not place:
        return ""
    if place.startswith("@"):
        place = f"\0{place[1:]}"
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as end:
            end.sendto(b"READY=1", place)
    except OSError as error:
        return f"the service manager is not told that the mount is ready: {error}"
    return ""
