"""Durable writes, hashing, copies and removals of local files, and private directories. Never follows a symbolic link.

Touches only the paths that it is given. OSErrors pass through to the caller, who knows what they mean.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import stat
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO

from statemgr.errors import InvalidError
from statemgr.model.hashing import content_hash, hasher, read_buffer
from statemgr.os_errors import CANNOT_LINK, translated

#: Bytes that are read and hashed at a time: they fit into the processor's cache.
_BUFFER = 256 * 1024
#: Suffix of temporary names.
TEMPORARY = ".tmp"
#: The mode of new files.
PRIVATE = 0o600
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_PRIVATE = 0o700


@cache
def boot_id() -> str:
    """An ID of this run of the operating system; empty if it has none.

    Within one run no written data is lost: only a crash of the machine loses data that was not synced.
    """
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""


def open_file(path: Path) -> BinaryIO:
    """Open a regular file for reading, unbuffered. Raises: OSError with ELOOP for anything else."""
    return open(open_regular(path, os.O_RDONLY), "rb", buffering=0)


def open_regular(path: Path, flags: int) -> int:
    """A descriptor of a regular file. A file that ``flags`` create belongs to this user alone.

    Raises: OSError with ELOOP for anything else: a link, a FIFO, a device.
    """
    # O_NONBLOCK: a planted FIFO must not make the open wait
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, PRIVATE)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.ELOOP, "not a regular file", str(path))
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def create(path: Path) -> BinaryIO:
    """Open a new file for writing, for this user alone. Raises: OSError (EEXIST if the path exists)."""
    return open(os.open(path, _NEW, PRIVATE), "wb")


def read_small(path: Path, limit: int) -> bytes:
    """The content of a regular file of at most ``limit`` bytes. Raises: OSError (EFBIG for a larger one)."""
    with open_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > limit:
            raise OSError(errno.EFBIG, f"larger than {limit} bytes", str(path))
        return file.read(size)


def read_note(path: Path, limit: int) -> Any:
    """What :func:`write_note` wrote. Raises: OSError, ValueError for a damaged one."""
    digest, _, text = read_small(path, limit).partition(b"\n")
    if content_hash(text).hex().encode() != digest:
        raise ValueError(f"{path} is damaged")
    return json.loads(text)


def write_note(path: Path, found: object) -> None:
    """Replace a small file of JSON with its hash, which is a cache and not synced. Raises: OSError."""
    text = json.dumps(found).encode()
    write_file(path, content_hash(text).hex().encode() + b"\n" + text, synced=False)


def hash_file(path: Path) -> tuple[int, bytes]:
    """Size in bytes and XXH3-128 of a file's content, read once."""
    state, size, view = hasher(), 0, read_buffer(_BUFFER)
    with open_file(path) as source:
        while count := source.readinto(view):  # type: ignore[attr-defined]
            state.update(view[:count])
            size += count
    return size, state.digest()


def copy_file(source: Path, target: Path) -> None:
    """Copy a regular file's content to a new file."""
    with open_file(source) as content, create(target) as copy:
        shutil.copyfileobj(content, copy, _BUFFER)


def link_or_copy(source: Path, target: Path) -> None:
    """A hard link to a regular file, or a copy if the file system refuses the link."""
    if not stat.S_ISREG(os.lstat(source).st_mode):
        raise OSError(errno.ELOOP, "not a regular file", str(source))
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError as error:
        if error.errno not in CANNOT_LINK:
            raise
        copy_file(source, target)


def empty_directory(path: Path) -> None:
    """Make a directory, or remove the content of one. Raises: DiskFull, AccessDenied, RetryableError."""
    with translated("cannot make a local directory", path):
        remove(path)
        os.makedirs(path, 0o700)


def exists(path: Path) -> bool:
    """Whether there is anything at a path, also a link to nothing."""
    return os.path.lexists(path)


def directories_with(parent: Path, name: str) -> set[str]:
    """The names of the directories below ``parent`` that have an entry ``name``; none if there is no ``parent``."""
    try:
        with os.scandir(parent) as found:
            return {
                entry.name
                for entry in found
                if entry.is_dir(follow_symlinks=False) and os.path.lexists(os.path.join(entry.path, name))
            }
    except FileNotFoundError:
        return set()


def changed_ns(path: Path) -> int:
    """When a directory or a file was last changed, or touched, in epoch nanoseconds. Raises: OSError."""
    return os.lstat(path).st_mtime_ns


def touch(path: Path, now_ns: int) -> None:
    """Set the time at which a directory or a file was last changed. Raises: OSError."""
    os.utime(path, ns=(now_ns, now_ns))


def sync(path: Path) -> None:
    """Write a file, or the entries of a directory, to the disk (fsync)."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_file(path: Path, data: bytes, *, synced: bool = True, like: os.stat_result | None = None) -> None:
    """Write a whole file or nothing: temporary name, fsync, rename. The caller syncs the directory.

    Without ``synced`` the file may be missing or torn after a crash of the machine. ``like``: a file whose owner, group
    and mode the new one gets; without the group and its rights if this user is the owner and not in it. Raises: OSError
    (EPERM if this user may not give it that owner).
    """
    temporary = path.with_name(path.name + TEMPORARY)
    with suppress(FileNotFoundError):
        os.unlink(temporary)
    file = create(temporary)
    try:
        with file:
            if like is not None:
                _make_alike(file.fileno(), like)
            file.write(data)
            file.flush()
            if synced:
                os.fsync(file.fileno())
        os.rename(temporary, path)
    except OSError:
        os.unlink(temporary)
        raise


def _make_alike(descriptor: int, like: os.stat_result) -> None:
    found, mode = os.fstat(descriptor), stat.S_IMODE(like.st_mode)
    if (found.st_uid, found.st_gid) != (like.st_uid, like.st_gid):  # some file systems refuse each change
        try:
            os.fchown(descriptor, like.st_uid, like.st_gid)
        except PermissionError:
            if found.st_uid != like.st_uid:
                raise
            mode &= ~stat.S_IRWXG  # its owner is not in that group: no other group gets its rights
    os.fchmod(descriptor, mode)


def remove(path: Path) -> None:
    """Remove a directory with its content, a file, or a link itself. A missing path is no error."""
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISDIR(mode):
        with suppress(FileNotFoundError):
            os.unlink(path)
        return
    try:
        shutil.rmtree(path)
    except FileNotFoundError:
        # another process removes it too
        shutil.rmtree(path, ignore_errors=True)


def remove_all_but(directory: Path, name: str) -> None:
    """Remove everything in a directory except one entry. Raises: OSError."""
    for path in sorted(directory.iterdir()):
        if path.name != name:
            remove(path)


def make_private(base: Path, *names: str, inside: Sequence[str] = ()) -> Path:
    """Create ``base`` and the levels below it where they are missing, with mode 0700, and directories ``inside`` the
    last one. Returns: the last one.

    The operator chooses ``base``, so it may be a link. Every level below must be a directory of this user (or of root).

    Raises: InvalidError if a level is not a directory of this user; OSError.
    """
    if not names:
        _make_parents(base)
    levels = list(accumulate(names, os.path.join, initial=os.fspath(base)))
    for path in [*levels[1:], *[os.path.join(levels[-1], name) for name in inside]]:
        if not _is_private(path):  # almost all are there
            _make_parents(Path(path))
            _is_private(path)
    return Path(levels[-1])


def check_private(base: Path, *names: str) -> Path:
    """The path of the last level. A missing level is no error.

    Raises: InvalidError if a level is not a directory of this user; OSError.
    """
    path = os.fspath(base)
    for name in names:
        path = os.path.join(path, name)
        _is_private(path)
    return Path(path)


def _make_parents(path: Path) -> None:
    if path.is_dir():
        return
    with suppress(FileExistsError):
        try:
            os.mkdir(path, _PRIVATE)
        except FileNotFoundError:
            _make_parents(path.parent)
            os.mkdir(path, _PRIVATE)


def _is_private(path: str) -> bool:
    """Whether a level exists. Raises: InvalidError if it is something else than a directory of this user."""
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        return False
    if not stat.S_ISDIR(status.st_mode):
        raise InvalidError(
            "a local directory is something else",
            hint="remove it; symbolic links below state.dir are never followed",
            path=path,
        )
    user = os.geteuid()
    if status.st_uid not in (user, 0) and user != 0:
        raise InvalidError(
            f"a local directory belongs to another user (ID {status.st_uid})",
            hint="set state.dir to a directory of this user, for a command with --set state.dir=DIRECTORY; remove the "
            "other one only if no job uses it",
            path=path,
        )
    return True
