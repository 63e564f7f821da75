"""Extended attributes by which `slicefs mount`, `umount` and `attach` speak to a client.

A module of its own, because these commands import as little as they can.
"""

from __future__ import annotations

from typing import Final

# asked of a mount whose flags the kernel has just changed
REMOUNTED_XATTR: Final = b"user.slicefs.remounted"
# asked of a mount that is to go: readers of the access log find its end
STREAMS_XATTR: Final = b"user.slicefs.end-streams"
# set on a directory: JSON of objects, a new file for each, in one commit
ATTACH_XATTR: Final = b"user.slicefs.attach"
# asked of a file: JSON of the object that it shows
ATTACHED_XATTR: Final = b"user.slicefs.attached"
