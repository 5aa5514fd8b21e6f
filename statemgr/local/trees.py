"""Lists, checks, syncs and clones the files of one local directory. Never follows a symbolic link.

Touches only the directories that it is given. OSErrors pass through.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from statemgr.errors import CorruptFile, InvalidError, MissingFile
from statemgr.local import durable
from statemgr.model.snapshot import MAX_DEPTH, MAX_FILES
from statemgr.os_errors import translated
from statemgr.ports import CommittedDirectory

#: Files in a store's directory that are not part of its state: locks, logs, leftovers, input offsets of older software.
_NO_STATE = re.compile(r"(LOCK|LOG(\.old\.\d+)?|OFFSET.*|.*\.(log|tmp|dbtmp))\Z")

#: Files up to this size (bytes) are hashed at every verification, instead of being synced when they are created.
SMALL = 64 * 1024
#: Files that are never written again once they are complete, so hard links can share them.
_IMMUTABLE = (".sst", ".blob", ".segment")
#: Those of a database, which also never uses their names again. A store in memory writes its one file again and again.
_TABLES = (".sst", ".blob")


@dataclass(frozen=True, slots=True)
class Tree:
    """The regular files of a directory by relative path, with their status, and its sub-directories."""

    files: Mapping[str, os.stat_result]
    dirs: tuple[str, ...]


def scan(directory: Path) -> Tree:
    """List a directory at every depth.

    Raises: CorruptError for anything but files and directories (a symbolic link), or for absurdly many; OSError.
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


def look_up(directory: Path, files: Iterable[str]) -> Tree:
    """The status of these files, and all sub-directories. Ignores everything else, and follows no links.

    Raises: OSError, also for a file that is gone.
    """
    dirs: list[str] = []
    for found, below, _ in os.walk(directory, onerror=_raise):
        # os.walk lists links to directories here, and does not follow them
        inner = [name for name in below if not Path(found, name).is_symlink()]
        dirs += [Path(found, name).relative_to(directory).as_posix() for name in inner]
    return Tree({path: os.lstat(directory / path) for path in files}, tuple(sorted(dirs)))


def _raise(error: OSError) -> None:
    raise error


def is_state(path: str) -> bool:
    """Whether a file belongs to the state. ``path`` is relative to the store's directory."""
    return not _NO_STATE.match(path) if "/" not in path else True


def state_files(directory: Path) -> Tree:
    """The files of a finished directory that belong to its state.

    Raises: InvalidError if a write-ahead log has content (it was not flushed); CorruptError, OSError as ``scan``.
    """
    tree = scan(directory)
    files = {path: status for path, status in tree.files.items() if is_state(path)}
    for path, status in tree.files.items():
        if path not in files and path.endswith(".log") and status.st_size:
            raise InvalidError(
                "a write-ahead log has content that no table file has",
                hint="flush the store first",
                path=directory / path,
            )
    return Tree(files, tree.dirs)


def only_state(staging: Path) -> Tree:
    """Remove files that do not belong to the state from a finished directory. Returns: the rest."""
    tree = state_files(staging)
    for name in os.listdir(staging):
        if name not in tree.files and name not in tree.dirs:
            durable.remove(staging / name)
    return tree


def check_files(staging: Path, tree: Tree, files: Mapping[str, tuple[int, bytes | None]]) -> None:
    """Raises: CorruptError unless names and sizes in the directory equal ``files`` (path → size and hash)."""
    if tree.files.keys() != files.keys():
        names = sorted(tree.files.keys() ^ files.keys())
        raise CorruptFile("a finished directory has too few or too many files", path=staging / names[0])
    for path, status in tree.files.items():
        if status.st_size != files[path][0]:
            raise CorruptFile(f"a file has {status.st_size} bytes instead of {files[path][0]}", path=staging / path)


def make_private(staging: Path, tree: Tree) -> None:
    """Make directories and files that a library created private to this user."""
    for directory in ("", *tree.dirs):
        os.chmod(staging / directory, 0o700)
    for path, status in tree.files.items():
        if stat.S_IMODE(status.st_mode) & 0o077:
            os.chmod(staging / path, durable.PRIVATE)


def sync_tree(staging: Path, tree: Tree, held: Container[tuple[int, int]]) -> None:
    """Sync large files to the disk, except those in ``held`` (device, inode), which were synced before.

    Nothing else needs a sync: after a power failure a missing file is noticed, and small files are hashed at every
    verification.
    """
    for path, status in tree.files.items():
        if status.st_size > SMALL and (status.st_dev, status.st_ino) not in held:
            durable.sync(staging / path)


def cloned(directory: CommittedDirectory, target: Path) -> bool:
    """Clone a committed directory to ``target``, which must not exist. Returns: False if the directory vanished
    meanwhile.

    Raises: DiskFull, InvalidError if the target exists.
    """
    with translated("cannot clone a local directory", target):
        os.mkdir(target)
        try:
            clone_tree(directory.path, target, directory.files)
        except (MissingFile, FileNotFoundError):
            durable.remove(target)
            return False
    return True


def still_there(tree: Tree, tables: Mapping[str, tuple[int, bytes]]) -> dict[str, tuple[int, bytes | None]]:
    """The tables of a tree whose hashes ``tables`` has. They are unchanged, because a database never reuses the name of
    a table."""
    return {
        path: known
        for path, known in tables.items()
        if path.endswith(_TABLES) and path in tree.files and tree.files[path].st_size == known[0]
    }


def unshare(directory: Path) -> None:
    """Replace hard links by copies for every file that an open store may write to. Raises: DiskFull."""
    with translated("cannot open a local directory", directory):
        for path, status in scan(directory).files.items():
            if status.st_nlink > 1 and not path.endswith(_IMMUTABLE):
                shared = directory / (path + ".shared")
                os.rename(directory / path, shared)
                durable.copy_file(shared, directory / path)
                os.unlink(shared)


def clone_tree(source: Path, target: Path, files: Mapping[str, object]) -> None:
    """Fill an empty directory with hard links to immutable files and copies of the others.

    Raises: MissingFile if the source no longer has exactly ``files``; OSError.
    """
    tree = scan(source)
    if tree.files.keys() != files.keys():
        raise MissingFile(
            "the local copy has changed", hint="open the task again: the store is then restored", path=source
        )
    link_files(source, target, tree)


def link_files(source: Path, target: Path, tree: Tree) -> None:
    """Fill an empty directory with a tree's files below ``source``: links to immutable files, copies of the others.

    Raises: OSError.
    """
    for path in tree.dirs:
        os.mkdir(target / path)
    for path in tree.files:
        copy = durable.link_or_copy if path.endswith(_IMMUTABLE) else durable.copy_file
        copy(source / path, target / path)
