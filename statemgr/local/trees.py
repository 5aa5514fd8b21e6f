"""The files of one local directory: listed, checked, synced and cloned, never through a symbolic link.

Touches only the directories that it is given. OSErrors pass through.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Container, Mapping
from dataclasses import dataclass
from pathlib import Path

from statemgr.errors import CorruptFile, InvalidError, MissingFile
from statemgr.local import durable
from statemgr.model.snapshot import MAX_DEPTH, MAX_FILES
from statemgr.os_errors import translated
from statemgr.ports import CommittedDirectory

#: Files in a store's directory that are no part of its state: locks, logs, leftovers, input offsets of older software.
_NO_STATE = re.compile(r"(LOCK|LOG(\.old\.\d+)?|OFFSET.*|.*\.(log|tmp|dbtmp))\Z")

#: Files up to this size (bytes) are hashed whenever they are verified, instead of being synced when they are made.
SMALL = 64 * 1024
#: Never written again once they are complete, so that they can be shared by hard links.
_IMMUTABLE = (".sst", ".blob", ".segment")


@dataclass(frozen=True, slots=True)
class Tree:
    """A directory's regular files by relative path, with their status, and its sub-directories."""

    files: Mapping[str, os.stat_result]
    dirs: tuple[str, ...]


def scan(directory: Path) -> Tree:
    """Everything in a directory, at every depth.

    Raises: CorruptError when there is anything but files and directories (a symbolic link), or absurdly many; OSError.
    """
    files: dict[str, os.stat_result] = {}
    dirs: list[str] = []
    pending = [""]
    if not stat.S_ISDIR(os.lstat(directory).st_mode):
        raise CorruptFile("not a directory", path=directory)
    while pending:
        prefix = pending.pop()
        with os.scandir(directory / prefix) as entries:
            for entry in entries:
                path = prefix + entry.name
                if entry.is_dir(follow_symlinks=False):
                    dirs.append(path)
                    pending.append(path + "/")
                elif entry.is_file(follow_symlinks=False):
                    files[path] = entry.stat(follow_symlinks=False)
                else:
                    raise CorruptFile("neither a file nor a directory", path=directory / path)
        if len(files) + len(dirs) > MAX_FILES or prefix.count("/") > MAX_DEPTH:
            raise CorruptFile(f"more than {MAX_FILES} files or {MAX_DEPTH} levels", path=directory)
    return Tree(files, tuple(sorted(dirs)))


def is_state(path: str) -> bool:
    """Whether a file, by its path relative to the store's directory, is part of the state."""
    return not _NO_STATE.match(path) if "/" not in path else True


def state_files(directory: Path) -> Tree:
    """The files of a finished directory that are its state.

    Raises: InvalidError when a write-ahead log has content (it was not flushed); CorruptError, OSError as ``scan``.
    """
    tree = scan(directory)
    for path, status in tree.files.items():
        if not is_state(path) and path.endswith(".log") and status.st_size:
            raise InvalidError(
                "a write-ahead log has content that is in no table file",
                hint="flush the store first",
                path=directory / path,
            )
    return Tree({path: status for path, status in tree.files.items() if is_state(path)}, tree.dirs)


def only_state(staging: Path) -> Tree:
    """Remove what is no state from a finished directory, and say what is left."""
    tree = state_files(staging)
    for name in os.listdir(staging):
        if name not in tree.files and name not in tree.dirs:
            durable.remove(staging / name)
    return tree


def check_files(staging: Path, tree: Tree, files: Mapping[str, tuple[int, bytes | None]]) -> None:
    """Raises: CorruptError unless the directory holds exactly ``files`` (path → size and hash), by name and size."""
    if tree.files.keys() != files.keys():
        names = sorted(tree.files.keys() ^ files.keys())
        raise CorruptFile("a finished directory lacks a file, or has one too many", path=staging / names[0])
    for path, status in tree.files.items():
        if status.st_size != files[path][0]:
            raise CorruptFile(f"a file has {status.st_size} bytes instead of {files[path][0]}", path=staging / path)


def make_private(staging: Path, tree: Tree) -> None:
    """Take the rights of everybody else from directories and files that a library made."""
    for directory in ("", *tree.dirs):
        os.chmod(staging / directory, 0o700)
    for path, status in tree.files.items():
        if stat.S_IMODE(status.st_mode) & 0o077:
            os.chmod(staging / path, durable.PRIVATE)


def sync_tree(staging: Path, tree: Tree, held: Container[tuple[int, int]]) -> None:
    """Bring the content of large files to the disk, but for those (device, inode) that were brought there before.

    The others need no sync: a name that a power failure loses is found missing, and small files are hashed again
    whenever the directory is looked for.
    """
    for path, status in tree.files.items():
        if status.st_size > SMALL and (status.st_dev, status.st_ino) not in held:
            durable.sync(staging / path)


def cloned(directory: CommittedDirectory, target: Path) -> bool:
    """Make ``target``, which must not exist, a clone of a committed directory; False when that vanished meanwhile.

    Raises: DiskFull, InvalidError when the target exists.
    """
    with translated("cannot clone a local directory", target):
        os.mkdir(target)
        try:
            clone_tree(directory.path, target, directory.files)
        except (MissingFile, FileNotFoundError):
            durable.remove(target)
            return False
    return True


def unshare(directory: Path) -> None:
    """Before a store is opened in a directory: what it may write to gets an inode of its own. Raises: DiskFull."""
    with translated("cannot open a local directory", directory):
        for path, status in scan(directory).files.items():
            if status.st_nlink > 1 and not path.endswith(_IMMUTABLE):
                shared = directory / (path + ".shared")
                os.rename(directory / path, shared)
                durable.copy_file(shared, directory / path)
                os.unlink(shared)


def clone_tree(source: Path, target: Path, files: Mapping[str, object]) -> None:
    """Fill an empty directory: hard links to immutable files, copies of the others.

    Raises: MissingFile when the source does not hold exactly ``files`` any more; OSError.
    """
    tree = scan(source)
    if tree.files.keys() != files.keys():
        raise MissingFile("the local copy is not what it was", hint="restore it", path=source)
    link_files(source, target, tree)


def link_files(source: Path, target: Path, tree: Tree) -> None:
    """Fill an empty directory with the files of a tree below ``source``: links to immutable ones, copies of the others.

    Raises: OSError.
    """
    for path in tree.dirs:
        os.mkdir(target / path)
    for path in tree.files:
        copy = durable.link_or_copy if path.endswith(_IMMUTABLE) else durable.copy_file
        copy(source / path, target / path)
