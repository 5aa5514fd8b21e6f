"""Blobs as files below one directory. Touches that directory only.

Each blob is written under a temporary name, synced, and linked to its own name, so that it is there whole or
not at all and nothing is ever overwritten. Its TTL is a record ``.<name>.expires`` beside it: epoch
milliseconds as text, written first, so that a blob without a record is always one to keep. Every directory on
the way is opened relative to its parent and without following links: no name and no planted link leads out of
the root.
"""

from __future__ import annotations

import errno
import io
import os
import stat
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from statemgr.blobs.body import CHUNK, BytesReader, open_body
from statemgr.blobs.file_errors import not_a_file, translated
from statemgr.blobs.names import BlobExists, check_blob_id, delete_each
from statemgr.errors import InvalidError, StatemgrError
from statemgr.ports import BlobInfo, BlobReader, Body, Clock, UnfinishedUpload

_TEMPORARY = ".tmp"
_DAY_MS = 24 * 3600 * 1000
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
# a planted FIFO must not make an open wait
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EMLINK}

#: A file cannot be sent to a file here.
_CANNOT_SEND = {errno.EINVAL, errno.ENOSYS, errno.ENOTSOCK, errno.EOPNOTSUPP, errno.ENOTSUP}


class FileBlobStore:
    """A blob store in a local (or mounted) directory, which is made when the first blob is written."""

    #: A file system takes no checksum with a write, so the bytes are read back.
    checks_uploads = False
    listing_tells_ttl = True
    most_deletes = 1

    def __init__(self, root: Path, clock: Clock) -> None:
        self._root = root
        self._clock = clock

    def put(self, blob_id: str, body: Body, *, ttl_days: int | None) -> None:
        """As the port says. Raises: BlobExists."""
        *parents, name = check_blob_id(blob_id)
        with open_body(body) as stream, translated(blob_id):
            for attempts_left in (2, 1, 0):
                try:
                    with self._directory(parents, create=True) as directory:
                        stream.seek(0)
                        self._write(directory, name, blob_id, stream, ttl_days)
                        return
                except FileNotFoundError:
                    # a delete took the directory away as it became empty
                    if not attempts_left:
                        raise

    def _write(self, directory: int, name: str, blob_id: str, body: IO[bytes], ttl_days: int | None) -> None:
        if _exists(directory, name):
            os.fsync(directory)  # the caller takes its own earlier blob for durable: its writer may have died before
            raise BlobExists("a blob of this name exists already", blob=blob_id)
        temporary = f".{uuid.uuid4().hex}{_TEMPORARY}"
        try:
            _write_new(directory, temporary, body)
            # left behind by a writer that died before it linked its blob
            with suppress(FileNotFoundError):
                os.unlink(_expiry(name), dir_fd=directory)
            if ttl_days is not None:
                expires = self._clock.time_ns() // 1_000_000 + ttl_days * _DAY_MS
                _write_new(directory, _expiry(name), io.BytesIO(str(expires).encode()))
            _link(directory, temporary, name, blob_id)
        finally:
            with suppress(FileNotFoundError):
                os.unlink(temporary, dir_fd=directory)
        os.fsync(directory)

    @contextmanager
    def get(self, blob_id: str, offset: int = 0, length: int | None = None) -> Iterator[BlobReader]:
        """As the port says."""
        with translated(blob_id):
            fd = self._open(blob_id)
        try:
            if length == 0:
                yield BytesReader(b"")
            else:
                os.lseek(fd, offset, os.SEEK_SET)
                yield _FileReader(fd, length, blob_id)
        finally:
            os.close(fd)

    def delete(self, blob_id: str) -> None:
        """As the port says; directories that become empty go too."""
        *parents, name = check_blob_id(blob_id)
        with translated(blob_id), suppress(FileNotFoundError):
            with self._directory(parents) as directory:
                for entry in (name, _expiry(name)):
                    with suppress(FileNotFoundError):
                        os.unlink(entry, dir_fd=directory)
                os.fsync(directory)
            self._prune(parents)

    def delete_many(self, blob_ids: Sequence[str]) -> Mapping[str, StatemgrError]:
        """As the port says: one by one."""
        return delete_each(blob_ids, self.delete)

    def remove_ttl(self, blob_id: str) -> None:
        """As the port says."""
        *parents, name = check_blob_id(blob_id)
        with translated(blob_id), self._directory(parents) as directory:
            _info(directory, name, blob_id)
            with suppress(FileNotFoundError):
                os.unlink(_expiry(name), dir_fd=directory)
            os.fsync(directory)  # also where a caller that died has removed it

    def stat(self, blob_id: str) -> BlobInfo:
        """As the port says."""
        *parents, name = check_blob_id(blob_id)
        with translated(blob_id), self._directory(parents) as directory:
            return _info(directory, name, blob_id)

    def list(self, prefix: str, after: str | None = None) -> Iterator[BlobInfo]:
        """As the port says, in the order of directories; blobs that vanish meanwhile may be left out."""
        start = after.split("/") if after else []
        return (info for info in self._listed(prefix, temporaries=False) if info.blob_id.split("/") > start)

    def unfinished(self, prefix: str) -> Iterator[UnfinishedUpload]:
        """The temporaries of writers that are at work, or have died."""
        for info in self._listed(prefix, temporaries=True):
            parent, _, name = info.blob_id.rpartition("/")
            yield UnfinishedUpload(parent, name, info.modified_ms)

    def abandon(self, upload: UnfinishedUpload) -> None:
        """Remove a temporary."""
        if not (upload.token.startswith(".") and upload.token.endswith(_TEMPORARY)) or "/" in upload.token:
            raise InvalidError(f"{upload.token!r} is not an unfinished upload", blob=upload.blob_id)
        parents = upload.blob_id.split("/")
        with translated(upload.blob_id), suppress(FileNotFoundError), self._directory(parents) as directory:
            os.unlink(upload.token, dir_fd=directory)

    def time_ms(self) -> int:
        """As the port says: the time that a new file gets, which is another machine's on a mounted directory."""
        with translated(str(self._root)), self._directory([], create=True) as directory:
            name = f".{uuid.uuid4().hex}{_TEMPORARY}"
            _write_new(directory, name, io.BytesIO(b"x"))
            try:
                return os.stat(name, dir_fd=directory, follow_symlinks=False).st_mtime_ns // 1_000_000
            finally:
                os.unlink(name, dir_fd=directory)

    def _listed(self, prefix: str, *, temporaries: bool) -> Iterator[BlobInfo]:
        parents = prefix.split("/")[:-1]
        if any(part in ("", ".", "..") for part in parents):
            return
        with translated(prefix):
            try:
                with self._directory(parents) as directory:
                    path = "".join(f"{part}/" for part in parents)
                    yield from self._walk(directory, path, prefix, temporaries)
            except FileNotFoundError:
                return

    def _walk(self, directory: int, path: str, prefix: str, temporaries: bool) -> Iterator[BlobInfo]:
        for name in sorted(os.listdir(directory)):
            blob_id = path + name
            if not (blob_id.startswith(prefix) or prefix.startswith(f"{blob_id}/")):
                continue
            own = name.startswith(".")  # temporaries and expiry records do
            if own and not (temporaries and name.endswith(_TEMPORARY)):
                continue
            try:
                mode = os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode
                if stat.S_ISDIR(mode):
                    fd = os.open(name, _DIRECTORY, dir_fd=directory)
                    try:
                        yield from self._walk(fd, f"{blob_id}/", prefix, temporaries)
                    finally:
                        os.close(fd)
                elif stat.S_ISREG(mode) and own == temporaries:
                    yield _info(directory, name, blob_id)
            except FileNotFoundError:
                continue

    def probe(self) -> Sequence[str]:
        """Whether the directory can be written to."""
        try:
            with translated(str(self._root)), self._directory([], create=True) as directory:
                name = f".{uuid.uuid4().hex}{_TEMPORARY}"
                _write_new(directory, name, io.BytesIO())
                os.unlink(name, dir_fd=directory)
        except StatemgrError as error:
            return (f"{self._root} cannot be written to: {error.message}",)
        return ()

    def close(self) -> None:
        """Nothing is kept open."""

    # --- directories ---

    @contextmanager
    def _directory(self, parts: Sequence[str], *, create: bool = False) -> Iterator[int]:
        if create and not self._root.is_dir():
            self._root.parent.mkdir(parents=True, exist_ok=True)
            self._root.mkdir(mode=0o700, exist_ok=True)
        # the root itself may be a link: it is the user's own word
        fd = os.open(self._root, _DIRECTORY & ~os.O_NOFOLLOW)
        try:
            for part in parts:
                if create:
                    with suppress(FileExistsError):
                        os.mkdir(part, 0o700, dir_fd=fd)
                    os.fsync(fd)  # also of one that another writer has just made
                below = os.open(part, _DIRECTORY, dir_fd=fd)
                os.close(fd)
                fd = below
            yield fd
        finally:
            os.close(fd)

    def _open(self, blob_id: str) -> int:
        *parents, name = check_blob_id(blob_id)
        with self._directory(parents) as directory:
            fd = os.open(name, _READ, dir_fd=directory)
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise not_a_file(blob_id)
        return fd

    def _prune(self, parents: Sequence[str]) -> None:
        for depth in range(len(parents), 0, -1):
            with self._directory(parents[: depth - 1]) as directory:
                try:
                    os.rmdir(parents[depth - 1], dir_fd=directory)
                except OSError:
                    return  # in use


class _FileReader:
    def __init__(self, fd: int, length: int | None, blob_id: str) -> None:
        self._fd = fd
        self._left = length
        self._blob_id = blob_id

    def readinto(self, buffer: memoryview) -> int:
        try:
            size = os.readv(self._fd, [buffer if self._left is None else buffer[: self._left]])
        except OSError:
            with translated(self._blob_id):  # entering it for each piece would cost as much as a small read
                raise
        if self._left is not None:
            self._left -= size
        return size

    def copy_to(self, fd: int, offset: int, size: int) -> int | None:
        """As the port says. Errors of either file are OSErrors here: the caller knows the target."""
        if not hasattr(os, "sendfile") or (self._left is not None and self._left < size):
            return None
        os.lseek(fd, offset, os.SEEK_SET)
        try:
            copied = os.sendfile(fd, self._fd, None, size)
        except OSError as error:
            if error.errno in _CANNOT_SEND:
                return None
            raise
        if self._left is not None:
            self._left -= copied
        return copied


def _write_new(directory: int, name: str, stream: IO[bytes]) -> None:
    fd = os.open(name, _NEW, 0o600, dir_fd=directory)
    try:
        while data := memoryview(stream.read(CHUNK)):
            while data:
                data = data[os.write(fd, data) :]
        os.fsync(fd)
    finally:
        os.close(fd)


def _link(directory: int, temporary: str, name: str, blob_id: str) -> None:
    try:
        os.link(temporary, name, src_dir_fd=directory, dst_dir_fd=directory, follow_symlinks=False)
    except FileExistsError:
        os.fsync(directory)
        raise BlobExists("a blob of this name exists already", blob=blob_id) from None
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        # no hard links here: names are unique per attempt, so that looking first is enough
        if _exists(directory, name):
            raise BlobExists("a blob of this name exists already", blob=blob_id) from None
        os.rename(temporary, name, src_dir_fd=directory, dst_dir_fd=directory)


def _exists(directory: int, name: str) -> bool:
    try:
        os.stat(name, dir_fd=directory, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


def _expiry(name: str) -> str:
    return f".{name}.expires"


def _info(directory: int, name: str, blob_id: str) -> BlobInfo:
    found = os.stat(name, dir_fd=directory, follow_symlinks=False)
    if not stat.S_ISREG(found.st_mode):
        raise not_a_file(blob_id)
    expires: int | None = None
    try:
        fd = os.open(_expiry(name), _READ, dir_fd=directory)
    except FileNotFoundError:
        pass
    else:
        try:
            text = os.read(fd, 32)
        finally:
            os.close(fd)
        # a record that was cut short is a TTL whose end is not known
        expires = int(text) if text.isdigit() else -1
    return BlobInfo(blob_id, found.st_size, found.st_mtime_ns // 1_000_000, expires)
