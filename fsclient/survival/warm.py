"""A worker that waits for its turn: what takes long is done, and nothing is opened.

Most of the start of a worker is the import of its modules. A warm worker has imported those that
the worker before it has used, and waits for the supervisor. It has no thread, no connection and no
lock, and nothing of its command line is looked at yet, so it is as a new worker in all but time.

Called by `fsclient.cli.main`. Threading: the main thread, while there is no other.
"""

from __future__ import annotations

import gc
import importlib
import os
import socket
import sys
from typing import Final, NoReturn

from fsclient.survival import channel

_NAMES_BYTES_MAX: Final = 48 << 10  # of a packet and of the environment
_SEPARATOR: Final = ","
_NOT_IMPORTED: Final = ("__main__", "__mp_main__")


def modules_used() -> bytes:
    """The modules of this process, in the order of their import, for `await_turn`."""
    names = [name for name in sys.modules if name.isascii() and name not in _NOT_IMPORTED]
    text = _SEPARATOR.join(names).encode()
    return text if len(text) <= _NAMES_BYTES_MAX else text[: text.rindex(b",", 0, _NAMES_BYTES_MAX)]


def await_turn() -> None:
    """Return when this process is needed; at once where it is not to wait."""
    names = os.environ.pop(channel.WARM_ENV, None)
    given = channel.inherited(stays=True)
    if names is None or given is None:
        return
    channel.show_as(channel.WARM_NAME)
    for name in names.split(_SEPARATOR):
        try:
            importlib.import_module(name)
        except Exception:  # noqa: BLE001  (whatever it is: it is met again where it is needed)
            continue
    gc.collect()
    with socket.socket(fileno=os.dup(given.channel)) as end:
        found = channel.receive(end)
    message, fd = found or (b"", -1)
    if not message.startswith(channel.NEEDED):
        _leave()
    if fd >= 0:
        channel.log_to(fd)  # the file may have begun anew since this process started
        os.close(fd)
    channel.enter(os.fsdecode(message[len(channel.NEEDED) :]))


def _leave() -> NoReturn:
    """The supervisor has ended, and the mount with it."""
    os._exit(0)
