"""The directory that a restore fills with files of a snapshot. Touches only the paths that it is given.

New files belong to this user alone. Nothing is synced.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from statemgr.errors import DiskFull
from statemgr.local import trees
from statemgr.local.durable import PRIVATE
from statemgr.os_errors import CANNOT_LINK, disk_errors

#: Errors of a source file that was deleted meanwhile, or that is on another file system.
_CANNOT_LINK = CANNOT_LINK | {errno.ENOENT}


def make(root: Path, dirs: Iterable[str], needed: int) -> None:
    """Create a directory, which must not exist, and its sub-directories.

    Args:
        needed: bytes that will be written there.

    Raises: DiskFull if they do not fit; InvalidError if something exists already.
    """
    with disk_errors(root):
        root.parent.mkdir(parents=True, exist_ok=True)
        check_space(root.parent, needed)
        # mkdir fails if something exists: a planted directory is never entered
        root.mkdir()
        for path in dirs:
            (root / path).mkdir()


def check_space(directory: Path, needed: int) -> None:
    """Raises: DiskFull if so many bytes do not fit."""
    with disk_errors(directory):
        free = shutil.disk_usage(directory).free
    if free < needed:
        raise DiskFull(
            f"the restore needs {needed} bytes, but only {free} are free",
            hint="free space and try again", path=directory,
        )  # fmt: skip


def drop_others(leftovers: Sequence[Path], wanted: Mapping[str, int]) -> None:
    """Remove from what earlier tries left all but the ``wanted`` files: relative path → size. Otherwise each try of a
    restore that never succeeds would leave more."""
    for leftover in leftovers:
        for directory, _, names in os.walk(leftover, topdown=False):
            for name in names:
                path = Path(directory, name)
                with suppress(OSError):
                    if path.lstat().st_size != wanted.get(path.relative_to(leftover).as_posix()):
                        path.unlink()
            with suppress(OSError):  # something is in it
                os.rmdir(directory)


def left_files(leftovers: Sequence[Path]) -> dict[str, tuple[Path, int]]:
    """Relative path → the file of that name that has the most on the disk, of those that earlier tries left, and its
    size. If they left a file under several paths, it keeps one."""
    found: dict[str, tuple[Path, int]] = {}
    most, seen = dict[str, int](), set[tuple[int, int]]()
    for leftover in leftovers:
        for directory, _, names in os.walk(leftover):
            for name in names:
                path = Path(directory, name)
                with suppress(OSError):
                    status, relative = path.lstat(), path.relative_to(leftover).as_posix()
                    inode = status.st_dev, status.st_ino
                    if inode in seen:
                        path.unlink()
                    elif status.st_blocks >= most.get(relative, 0):
                        found[relative], most[relative] = (path, status.st_size), status.st_blocks
                    seen.add(inode)
    return found


def bytes_left(left: Mapping[str, tuple[Path, int]], sizes: Mapping[str, int]) -> int:
    """Bytes on the disk that files of these sizes need no more, since :func:`take_over` takes them from ``left``."""
    found = 0
    for relative, size in sizes.items():
        if relative in left:
            with suppress(OSError):
                status = left[relative][0].lstat()
                found += min(status.st_blocks * 512, size) if _can_be_taken(status, size) else 0
    return found


def _can_be_taken(status: os.stat_result, size: int) -> bool:
    # if another directory has a hard link to the file, it must not change
    return stat.S_ISREG(status.st_mode) and status.st_nlink == 1 and status.st_size == size


def take_over(left: Path, target: Path, size: int) -> bool:
    """Move a file that an earlier try left. Returns: False if the file cannot be used; then there is no target."""
    try:
        os.rename(left, target)
    except OSError:
        return False  # another try was faster
    if _can_be_taken(target.lstat(), size):
        os.chmod(target, PRIVATE)
        return True
    target.unlink()
    return False


def link(source: Path, target: Path, size: int, mode: int) -> bool:
    """Link a file if it has this size and these permissions of the owner. Returns: whether it did; if not, there is no
    target."""
    with disk_errors(target):
        try:
            os.link(source, target, follow_symlinks=False)
        except OSError as error:
            if error.errno in _CANNOT_LINK:
                return False
            raise
        found = target.lstat()
        same_mode = found.st_mode & stat.S_IRWXU == mode  # setting another mode would change the source
        if stat.S_ISREG(found.st_mode) and found.st_size == size and same_mode:
            return True
        target.unlink()
        return False


def set_modes(root: Path, modes: Mapping[str, int]) -> None:
    """Set the permissions of files: relative path → mode."""
    with disk_errors(root):
        for path, mode in modes.items():
            if mode != PRIVATE:
                os.chmod(root / path, mode)


def sizes(root: Path) -> dict[str, int | None]:
    """Relative path → size of a file, None for a directory. Raises: CorruptError for anything else."""
    with disk_errors(root):
        tree = trees.scan(root)
    return {**{path: status.st_size for path, status in tree.files.items()}, **dict.fromkeys(tree.dirs)}
