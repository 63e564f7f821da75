"""The verbs of a `Client` on names and attributes: those of `os`, with the same words.

`names` does the work. Threading: any thread.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

from fsmeta.types import SetAttr
from slicefs.client import names
from slicefs.client.names import DirEntry
from slicefs.client.paths import CallerView, Path


class Namespace:
    """What `os` and `shutil` can do by path. Each raises the `OSError` that a mount would."""

    def view(self) -> CallerView:
        """The volume as this client's caller sees it; `Client` has it."""
        raise NotImplementedError

    # --- attributes ------------------------------------------------------------------------------

    def stat(self, path: Path, *, follow_symlinks: bool = True) -> os.stat_result:
        """`os.stat`."""
        view = self.view()
        return view.run(path, lambda: names.stat_result(view.find(path, follow_symlinks)))

    def lstat(self, path: Path) -> os.stat_result:
        """`os.lstat`."""
        return self.stat(path, follow_symlinks=False)

    def exists(self, path: Path) -> bool:
        """Whether a path leads anywhere."""
        try:
            self.stat(path)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    def access(self, path: Path, mode: int) -> bool:
        """`os.access`."""
        view = self.view()
        try:
            view.run(path, lambda: view.vfs.access(view.caller, view.find(path).ino, mode))
        except (FileNotFoundError, NotADirectoryError, PermissionError):
            return False
        return True

    def _setattr(self, path: Path, want: SetAttr, follow: bool = True) -> None:
        view = self.view()
        view.run(path, lambda: names.setattr_(view, path, want, follow))

    def chmod(self, path: Path, mode: int) -> None:
        """`os.chmod`."""
        self._setattr(path, SetAttr(mode=mode & 0o7777))

    def chown(self, path: Path, uid: int, gid: int, *, follow_symlinks: bool = True) -> None:
        """`os.chown`; -1 leaves one as it is."""
        want = SetAttr(uid=None if uid == -1 else uid, gid=None if gid == -1 else gid)
        self._setattr(path, want, follow_symlinks)

    def utime(
        self,
        path: Path,
        times: tuple[float, float] | None = None,
        *,
        ns: tuple[int, int] | None = None,
        follow_symlinks: bool = True,
    ) -> None:
        """`os.utime`."""
        if times is not None and ns is not None:
            raise ValueError("utime: give times or ns, not both")
        if times is not None:
            ns = round(times[0] * 1e9), round(times[1] * 1e9)
        want = SetAttr(atime_now=True, mtime_now=True)
        if ns is not None:
            want = SetAttr(atime_ns=ns[0], mtime_ns=ns[1])
        self._setattr(path, want, follow_symlinks)

    def truncate(self, path: Path, length: int) -> None:
        """`os.truncate`."""
        self._setattr(path, SetAttr(size=length))

    def getxattr(self, path: Path, name: str, *, follow_symlinks: bool = True) -> bytes:
        """`os.getxattr`."""
        view, key = self.view(), os.fsencode(name)
        return view.run(
            path,
            lambda: view.vfs.xattrs.getxattr(
                view.caller, view.find(path, follow_symlinks).ino, key
            ),
        )

    def setxattr(
        self, path: Path, name: str, value: bytes, flags: int = 0, *, follow_symlinks: bool = True
    ) -> None:
        """`os.setxattr`."""
        view, key = self.view(), os.fsencode(name)
        view.run(
            path,
            lambda: view.vfs.xattrs.setxattr(
                view.caller, view.find(path, follow_symlinks).ino, key, value, flags
            ),
        )

    def listxattr(self, path: Path, *, follow_symlinks: bool = True) -> list[str]:
        """`os.listxattr`."""
        view = self.view()
        found = view.run(
            path,
            lambda: view.vfs.xattrs.listxattr(view.caller, view.find(path, follow_symlinks).ino),
        )
        return [os.fsdecode(name) for name in found]

    def removexattr(self, path: Path, name: str, *, follow_symlinks: bool = True) -> None:
        """`os.removexattr`."""
        view, key = self.view(), os.fsencode(name)
        view.run(
            path,
            lambda: view.vfs.xattrs.removexattr(
                view.caller, view.find(path, follow_symlinks).ino, key
            ),
        )

    def statvfs(self, path: Path = "/") -> os.statvfs_result:
        """`os.statvfs`, by the quota that leaves least."""
        view = self.view()
        found = view.run(path, lambda: view.vfs.statfs(view.caller, view.find(path).ino))
        return names.statvfs_result(found)

    # --- names -----------------------------------------------------------------------------------

    def listdir(self, path: Path = ".") -> list[str]:
        """`os.listdir`."""
        view = self.view()

        def read() -> list[str]:
            found = names.entries(view, view.find(path).ino, attrs=False)
            return [os.fsdecode(dentry.name) for dentry, _ in found]

        return view.run(path, read)

    def scandir(self, path: Path = ".") -> list[DirEntry]:
        """`os.scandir`, as a list: the attributes of all names come with it."""
        view = self.view()
        return view.run(path, lambda: list(names.scandir(view, path)))

    def walk(
        self, top: Path = ".", topdown: bool = True, followlinks: bool = False
    ) -> Iterator[tuple[str, list[str], list[str]]]:
        """`os.walk`; directories that can't be read are left out."""
        try:
            found = self.scandir(top)
        except OSError:
            return
        folder = os.fsdecode(top)
        dirs = [entry.name for entry in found if entry.is_dir()]
        links = {entry.name for entry in found if entry.is_symlink()}
        others = [entry.name for entry in found if not entry.is_dir()]
        if topdown:
            yield folder, dirs, others
        for name in list(dirs):
            if followlinks or name not in links:
                yield from self.walk(f"{folder.rstrip('/')}/{name}", topdown, followlinks)
        if not topdown:
            yield folder, dirs, others

    def mkdir(self, path: Path, mode: int = 0o777) -> None:
        """`os.mkdir`."""
        view = self.view()
        view.run(path, lambda: names.mkdir(view, path, mode))

    def makedirs(self, path: Path, mode: int = 0o777, exist_ok: bool = False) -> None:
        """`os.makedirs`."""
        view = self.view()
        view.run(path, lambda: names.makedirs(view, path, mode, exist_ok))

    def rename(self, src: Path, dst: Path) -> None:
        """`os.rename`: what is at `dst` is replaced."""
        view = self.view()
        view.run(src, lambda: names.rename(view, src, dst))

    def replace(self, src: Path, dst: Path) -> None:
        """`os.replace`."""
        self.rename(src, dst)

    def remove(self, path: Path) -> None:
        """`os.remove`."""
        view = self.view()
        view.run(path, lambda: names.unlink(view, path))

    def unlink(self, path: Path) -> None:
        """`os.unlink`."""
        self.remove(path)

    def rmdir(self, path: Path) -> None:
        """`os.rmdir`."""
        view = self.view()
        view.run(path, lambda: names.rmdir(view, path))

    def rmtree(self, path: Path) -> int:
        """Remove a directory with all that is below it; how many names. Links are not followed."""
        view = self.view()
        return view.run(path, lambda: names.rmtree(view, path))

    def link(self, src: Path, dst: Path) -> None:
        """`os.link`, of a symbolic link itself."""
        view = self.view()
        view.run(src, lambda: names.link(view, src, dst))

    def symlink(self, target: Path, path: Path) -> None:
        """`os.symlink`. An absolute target begins at the volume's root here."""
        view = self.view()
        view.run(path, lambda: names.symlink(view, target, path))

    def readlink(self, path: Path) -> str:
        """`os.readlink`."""
        view = self.view()
        return view.run(path, lambda: names.readlink(view, path))
