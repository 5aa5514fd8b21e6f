"""A tree of directories without links that lead out of it. Touches only files below its root.

Every directory in a path is opened relative to its parent and without following links. Errors of the operating system
become those of a blob store.
"""

from __future__ import annotations

import io
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TypeVar

from statemgr import os_errors
from statemgr.blobs.body import CHUNK
from statemgr.blobs.names import BlobExists, unique_name
from statemgr.errors import CorruptBlob, MissingBlob, StatemgrError, UnavailableError
from statemgr.os_errors import Fault
from statemgr.ports import BlobInfo

T = TypeVar("T")

TEMPORARY = ".tmp"
_EXPIRES = ".expires"
#: How often a write creates a directory that deletes remove.
_ATTEMPTS = 10
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
# a planted FIFO must not make an open wait
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC

_LINKS_HINT = "links below blob.store.uri are never followed"
_KINDS = {
    Fault.GONE: MissingBlob,
    **dict.fromkeys((Fault.EXISTS, Fault.ALTERED), CorruptBlob),
    # a retry may help
    **dict.fromkeys((Fault.LIMIT, Fault.FAILED), UnavailableError),
}
_HINTS = {
    Fault.GONE: "it was deleted, or its TTL has passed",
    **dict.fromkeys((Fault.EXISTS, Fault.ALTERED), _LINKS_HINT),
    Fault.REFUSED: "check owner and mode of the directory of blob.store.uri",
    Fault.FAILED: "check the disk or the mount of blob.store.uri",
}


@contextmanager
def translated(blob_id: str) -> Iterator[None]:
    """A context manager that raises OSErrors as those of a blob store, and names the blob in its own errors.

    Raises: MissingBlob, CorruptBlob (not a regular file), DiskFull, AccessDenied, UnavailableError.
    """
    try:
        with os_errors.translated("the blob cannot be read or written", None, kinds=_KINDS, hints=_HINTS, blob=blob_id):
            yield
    except UnavailableError as error:
        error.with_where(blob=blob_id)
        raise


class Tree:
    """The directories below ``root``.

    The first write creates the root. If the root is missing or another directory afterwards, its disk is no longer
    mounted: what would be written to the directory below the mount point would be lost. The same is true of a root that
    is empty although a reader knows a blob in it, or that lacks a directory which is expected.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._is_synced = False
        #: Device and inode of the root that this process uses, and the last directory in it that was used.
        self._used: tuple[int, int] | None = None
        self._inside: str | None = None

    def expect(self, directory: str) -> None:
        """Take the root only if it has this directory."""
        if self._inside is None:
            self._used, self._inside = None, directory  # a listing may have used another root

    @contextmanager
    def directory(self, parts: Sequence[str], *, may_be_new: bool = False) -> Iterator[int]:
        """A descriptor of a directory. Raises: FileNotFoundError; UnavailableError if the root is not mounted.

        Args:
            may_be_new: whether the root may be empty because nothing was written yet.
        """
        with self._directory(parts, create=False, may_be_new=may_be_new) as fd:
            yield fd

    def write(self, parts: Sequence[str], work: Callable[[int], T]) -> T:
        """Call ``work`` with the descriptor of a directory, which is created if it is missing.

        A delete removes directories that become empty, also one that this call has just made or opened. Then this call
        begins again.

        Raises: UnavailableError, if that happens again and again or the root is not mounted; what ``work`` raises, but
        for FileNotFoundError.
        """
        for _ in range(_ATTEMPTS):
            with suppress(FileNotFoundError), self._directory(parts, create=True) as fd:
                return work(fd)
        raise UnavailableError(
            "deletes removed the directory each time that it was created",
            directory="/".join(parts),
            hint="try again; if nothing else writes to blob.store.uri, check its disk or mount",
        )

    @contextmanager
    def _directory(self, parts: Sequence[str], *, create: bool, may_be_new: bool = False) -> Iterator[int]:
        if create and not self._is_synced:
            self._make_root()
        try:
            # the root itself may be a link: the user chose it
            fd = os.open(self.root, _DIRECTORY & ~os.O_NOFOLLOW)
        except FileNotFoundError:
            raise self._unmounted("does not exist") from None
        try:
            self._check_root(fd, create=create, may_be_new=may_be_new)
            for part in parts:
                if create:
                    with suppress(FileExistsError):
                        os.mkdir(part, 0o700, dir_fd=fd)
                    os.fsync(fd)  # also when another writer has just made it
                below = os.open(part, _DIRECTORY, dir_fd=fd)
                os.close(fd)
                fd = below
            if parts:
                self._inside = parts[0]
            yield fd
        finally:
            os.close(fd)

    def _check_root(self, fd: int, *, create: bool, may_be_new: bool) -> None:
        """Whether this is still the root that this process uses. Where a disk is mounted again, numbers may change."""
        status = os.fstat(fd)
        found = status.st_dev, status.st_ino
        if found == self._used:
            return
        if self._inside is not None:
            if not exists(fd, self._inside):
                raise self._unmounted("is another one than before" if self._used else f"has no {self._inside}")
        elif not (create and self._used is None) and not os.listdir(fd):
            if may_be_new:
                return
            raise self._unmounted("is empty")
        self._used = found

    @property
    def _is_known(self) -> bool:
        return self._used is not None or self._inside is not None

    def _unmounted(self, problem: str) -> UnavailableError:
        lost = self.root / (self._inside or "<job.name>")
        return UnavailableError(
            f"the directory of blob.store.uri {problem}",
            hint=f"check the URI, and that its disk is mounted; if the blobs are lost for good, create {lost}",
            directory=self.root,
        )

    def _make_root(self) -> None:
        """Make the root, also durably: another writer may have just made it."""
        was_known = self._is_known  # before the look: another thread may make the root and use it meanwhile
        missing = [path for path in (self.root, *self.root.parents) if not path.exists()]
        if missing and was_known:
            raise self._unmounted("does not exist")
        self.root.parent.mkdir(parents=True, exist_ok=True)
        self.root.mkdir(mode=0o700, exist_ok=True)
        for parent in {self.root.parent, *(path.parent for path in missing)}:
            with suppress(PermissionError):  # then this user has not made what is in it
                fd = os.open(parent, _DIRECTORY & ~os.O_NOFOLLOW)
                try:
                    os.fsync(fd)
                finally:
                    os.close(fd)
        self._is_synced = True

    def remove_empty(self, parents: Sequence[str]) -> None:
        """Remove a directory and its parents if they are empty."""
        for depth in range(len(parents), 0, -1):
            with self.directory(parents[: depth - 1]) as directory:
                try:
                    os.rmdir(parents[depth - 1], dir_fd=directory)
                except OSError:
                    return  # in use
        self._inside = None  # this was the last blob

    def walk(self, prefix: str, after: list[str], *, temporaries: bool) -> Iterator[BlobInfo]:
        """The blobs (or the temporary files) below ``prefix`` after the name ``after``, in the order of directories.

        Files that vanish meanwhile may be left out. A root that this process has not used may not exist yet.
        """
        parents = prefix.split("/")[:-1]
        if any(part in ("", ".", "..") for part in parents):
            return
        with translated(prefix):
            if not self._is_known and not self.root.exists():
                return
            with suppress(FileNotFoundError), self.directory(parents, may_be_new=True) as directory:
                yield from _walk(directory, parents, prefix, after, temporaries)


def _walk(
    directory: int, parents: Sequence[str], prefix: str, after: list[str], temporaries: bool
) -> Iterator[BlobInfo]:
    names = set(os.listdir(directory))
    for name in sorted(names):
        parts = [*parents, name]
        blob_id = "/".join(parts)
        if not (blob_id.startswith(prefix) or prefix.startswith(f"{blob_id}/")) or parts < after[: len(parts)]:
            continue
        own = name.startswith(".")  # temporaries and expiry records do
        if own and not (temporaries and is_unfinished(name) and name[1:].removesuffix(_EXPIRES) not in names):
            continue
        try:
            mode = os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode
            if stat.S_ISDIR(mode):
                fd = os.open(name, _DIRECTORY, dir_fd=directory)
                try:
                    yield from _walk(fd, parts, prefix, after, temporaries)
                finally:
                    os.close(fd)
            elif stat.S_ISREG(mode) and own == temporaries and parts > after:
                yield info(directory, name, blob_id)
        except FileNotFoundError:
            continue


def open_blob(directory: int, name: str, blob_id: str) -> int:
    """A descriptor for reading."""
    fd = os.open(name, _READ, dir_fd=directory)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise _not_a_file(blob_id)
    return fd


def write_new(directory: int, name: str, stream: IO[bytes]) -> None:
    """Write a new file, as a whole or not at all. On return its content is durable, but not yet its name."""
    fd = os.open(name, _NEW, 0o600, dir_fd=directory)
    try:
        while data := memoryview(stream.read(CHUNK)):
            while data:
                data = data[os.write(fd, data) :]
        os.fsync(fd)
    except BaseException:
        with suppress(OSError):
            os.unlink(name, dir_fd=directory)
        raise
    finally:
        os.close(fd)


@contextmanager
def temporary(directory: int, stream: IO[bytes]) -> Iterator[str]:
    """A new file under a name of its own, removed at the end."""
    name = f".{unique_name()}{TEMPORARY}"
    try:
        write_new(directory, name, stream)
        yield name
    finally:
        with suppress(FileNotFoundError):
            os.unlink(name, dir_fd=directory)


def link(directory: int, source: str, name: str, blob_id: str) -> None:
    """Give a file its name. Raises: BlobExists."""
    try:
        os.link(source, name, src_dir_fd=directory, dst_dir_fd=directory, follow_symlinks=False)
    except FileExistsError:
        own, found = (os.stat(file, dir_fd=directory, follow_symlinks=False) for file in (source, name))
        if not os.path.samestat(own, found):  # NFS repeats a link whose answer is lost
            raise exists_error(directory, blob_id) from None
    except OSError as error:
        if error.errno not in os_errors.CANNOT_LINK:
            raise
        # no hard links here; names are unique per attempt, so it is enough to check first
        if exists(directory, name):
            raise exists_error(directory, blob_id) from None
        os.rename(source, name, src_dir_fd=directory, dst_dir_fd=directory)


def exists(directory: int, name: str) -> bool:
    """Whether there is a file, a link or a directory of this name."""
    try:
        os.stat(name, dir_fd=directory, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


def exists_error(directory: int, blob_id: str) -> BlobExists:
    """The error for a name that exists.

    It syncs the directory: if the caller finds its own earlier blob there, it assumes that the blob is durable, but
    that writer may have died before its sync.
    """
    os.fsync(directory)
    return BlobExists("a blob of this name exists already", blob=blob_id)


@contextmanager
def expiring(directory: int, name: str, expires_ms: int | None) -> Iterator[None]:
    """A block that gives a blob its name. The blob's expiry record is written before, and removed if the block fails:
    the name may be that of a blob which another writer has published meanwhile.

    A record that is there already stays. It is of another writer, or of one that has died.
    """
    own = False
    if expires_ms is None:
        remove_expiry(directory, name)
    else:
        with suppress(FileExistsError):
            write_new(directory, expiry(name), io.BytesIO(str(expires_ms).encode()))
            own = True
    try:
        yield
    except BaseException:
        if own:
            with suppress(OSError):
                remove_expiry(directory, name)
        raise


def remove_expiry(directory: int, name: str) -> None:
    """Remove the expiry record of a blob, if there is one."""
    with suppress(FileNotFoundError):
        os.unlink(expiry(name), dir_fd=directory)


def expiry(name: str) -> str:
    """The name of a blob's expiry record."""
    return f".{name}{_EXPIRES}"


def is_unfinished(name: str) -> bool:
    """Whether a file may be a rest of a write or a delete: a temporary file, or an expiry record."""
    return name.startswith(".") and name.endswith((TEMPORARY, _EXPIRES))


def info(directory: int, name: str, blob_id: str) -> BlobInfo:
    """Describe a blob from its file and its expiry record."""
    found = os.stat(name, dir_fd=directory, follow_symlinks=False)
    if not stat.S_ISREG(found.st_mode):
        raise _not_a_file(blob_id)
    expires: int | None = None
    try:
        fd = os.open(expiry(name), _READ, dir_fd=directory)
    except FileNotFoundError:
        pass
    else:
        try:
            text = os.read(fd, 32)
        finally:
            os.close(fd)
        # a truncated record means that there is a TTL whose end is unknown
        expires = int(text) if text.isdigit() else -1
    return BlobInfo(blob_id, found.st_size, found.st_mtime_ns // 1_000_000, expires)


def _not_a_file(blob_id: str) -> StatemgrError:
    return CorruptBlob("the blob is not a regular file", blob=blob_id, hint=_LINKS_HINT)
