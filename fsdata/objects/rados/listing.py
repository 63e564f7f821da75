"""The names of a namespace, from librados itself.

The binding's iterator ends at the first error as it ends after the last name, so a listing that an
OSD did not answer would look like a short one. This asks the library directly, by ctypes, on a
connection of its own: listings are rare, and the binding does not give its own away.

Called by `rados/rados`. Threading: any thread; each call has its own connection.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from errno import ENOENT
from os import strerror
from typing import Final

from fsmeta.errors import Unavailable

_LIBRARY: Final = "librados.so.2"  # the binding has loaded it already
_FLAGS: Final = ctypes.c_uint64(0)


def names(
    user: str, conf: str, options: Mapping[str, str], pool: str, namespace: str
) -> Iterator[str]:
    """The names of all objects, by hash. Raises: Unavailable, also in the middle."""
    library = ctypes.CDLL(_LIBRARY)

    def call(what: str, *arguments: object) -> None:
        code = getattr(library, what)(*arguments)
        if code < 0:
            raise Unavailable(f"pool {pool}: {what}: {strerror(-code)}")

    cluster, place, listing = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
    with ExitStack() as undo:
        by = ctypes.byref
        call("rados_create2", by(cluster), b"ceph", user.encode(), _FLAGS)
        undo.callback(library.rados_shutdown, cluster)
        call("rados_conf_read_file", cluster, conf.encode())
        for name, value in options.items():
            call("rados_conf_set", cluster, name.encode(), value.encode())
        call("rados_connect", cluster)
        call("rados_ioctx_create", cluster, pool.encode(), by(place))
        undo.callback(library.rados_ioctx_destroy, place)
        library.rados_ioctx_set_namespace(place, namespace.encode())
        call("rados_nobjects_list_open", place, by(listing))
        undo.callback(library.rados_nobjects_list_close, listing)
        entry = ctypes.c_char_p()
        while True:
            code = library.rados_nobjects_list_next(listing, by(entry), None, None)
            if code == -ENOENT:
                return
            if code < 0:
                raise Unavailable(f"pool {pool}: listing: {strerror(-code)}")
            assert entry.value is not None, "success comes with a name"
            yield entry.value.decode(errors="replace")
