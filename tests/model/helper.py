"""A helper process: one user in one root directory, serving operations over a pipe.

Started by `drivers.OsDriver` as `python -m tests.model.helper ROOT UID GID GROUPS`; ends when its
standard input does, so it never outlives the tests. A fresh process and not a fork: the tests may
have threads, FUSE descriptors and clients of stores that must not be copied.

It changes its root directory, so that absolute symlinks and `..` stay inside the tree. Requests are
pickled: an Op, or one of the words RESET (close everything) and WIPE (empty the tree too).
"""

from __future__ import annotations

import os
import pickle
import sys

from tests.model.syscalls import Kernel, wipe

RESET = "reset"
WIPE = "wipe"


def become(root: bytes, uid: int, gid: int, groups: list[int]) -> None:
    """Enter `root` and drop to the user for good."""
    os.umask(0)
    os.chroot(root)
    os.chdir(b"/")
    os.setgroups(groups)
    os.setgid(gid)
    os.setuid(uid)


def serve() -> None:
    """Answer requests until there are no more."""
    kernel = Kernel()
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    while True:
        try:
            request = pickle.load(requests)
        except EOFError:
            return
        answer = None
        if isinstance(request, str):
            kernel.close_all()
            if request == WIPE:
                wipe()
        else:
            answer = kernel.run(request)
        pickle.dump(answer, answers)
        answers.flush()


def main() -> None:
    root, uid, gid, groups = sys.argv[1:]
    become(os.fsencode(root), int(uid), int(gid), [int(g) for g in groups.split(",") if g])
    serve()


if __name__ == "__main__":
    main()
