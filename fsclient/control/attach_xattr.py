"""What `slicefs attach` asks of a client by xattrs: make attached files, say what they show.

The first request raises the version of the volume before it makes a file: a client that knows no
attached files would show zeros. A mount that writes back takes none, since its commits wait.

Threading: any thread.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Sequence
from typing import Any, Final

from fsclient.kernel.cache_leases import CacheLeases
from fsmeta.admin.quota_admin import change_settings
from fsmeta.meta.meta import Meta
from fsmeta.ops.names.attach import FILES_MAX, NewAttached, attach, attached_object
from fsmeta.rules.settings import ATTACHED_VERSION, VolumeFormat
from fsmeta.types import AttachedObject, Caller, Ino, is_name

_MODE: Final = 0o444


class Attacher:
    """Answers for one client."""

    def __init__(self, meta: Meta, coherence: CacheLeases) -> None:
        self._meta = meta
        self._coherence = coherence

    def attach(self, caller: Caller, parent: Ino, value: bytes, holds_back: bool) -> None:
        """Make the files that `value` names. `holds_back`: the client writes back.

        Raises: EPERM, EINVAL, EEXIST, EOPNOTSUPP, ENOSPC, EDQUOT.
        """
        if caller.uid != 0:
            raise OSError(errno.EPERM, "only root attaches objects")
        if holds_back:
            raise OSError(errno.EOPNOTSUPP, "a mount that writes back attaches nothing")
        files = self._parse(value)
        if self._meta.format.version < ATTACHED_VERSION:
            change_settings(self._meta, VolumeFormat.with_attached)
        self._meta.run(attach, caller, parent, _MODE, files)
        self._coherence.named(parent)

    def _parse(self, value: bytes) -> Sequence[NewAttached]:
        """Raises: EINVAL."""
        try:
            wish: dict[str, Any] = json.loads(value)
            endpoint, region, bucket = wish["endpoint"], wish["region"], wish["bucket"]
            files: list[NewAttached] = []
            for name, key, etag, size, mtime_ns in wish["files"]:
                found = AttachedObject(str(endpoint), str(region), str(bucket), str(key), str(etag))
                ino = self._meta.new_ino()
                new = NewAttached(os.fsencode(name), ino, found, int(size), int(mtime_ns))
                if not is_name(new.name) or not all(found[2:]) or new.size < 0:
                    raise ValueError(name)
                files.append(new)
        except (ValueError, KeyError, TypeError) as error:
            raise OSError(errno.EINVAL, f"no list of objects: {error!r}") from error
        if not 0 < len(files) <= FILES_MAX:
            raise OSError(errno.EINVAL, f"{len(files)} objects: name 1 to {FILES_MAX}")
        return files

    def tell(self, caller: Caller, ino: Ino) -> bytes:
        """What a file shows, as JSON. Raises: ENODATA where that is no object."""
        found = self._meta.run(attached_object, caller, ino)
        return json.dumps(found._asdict()).encode()
