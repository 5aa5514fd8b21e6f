"""Blobs as files below one directory. Touches that directory only.

Each blob is written under a temporary name, synced, and linked to its own name. So it exists whole or not at all, and
nothing is ever overwritten. Its TTL is a record ``.<name>.expires`` next to it: epoch milliseconds as text. The record
is written first, so a blob without a record has no TTL.
"""

from __future__ import annotations

import errno
import io
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import IO
from urllib.parse import unquote, urlsplit

from statemgr.blobs import file_tree
from statemgr.blobs.body import BytesReader, open_body
from statemgr.blobs.file_tree import Tree, translated
from statemgr.blobs.names import check_blob_id, delete_each, page_of
from statemgr.config import JobConfig
from statemgr.config.units import DAY_MS
from statemgr.errors import InvalidError, StatemgrError
from statemgr.os_errors import CANNOT_LINK
from statemgr.ports import (
    BlobAdministration,
    BlobInfo,
    BlobPage,
    BlobReader,
    BlobStore,
    Body,
    Clock,
    UnfinishedUpload,
)

#: Errors of a system that cannot send a file to a file.
_CANNOT_SEND = {errno.EINVAL, errno.ENOSYS, errno.ENOTSOCK, errno.EOPNOTSUPP, errno.ENOTSUP}


class FileBlobStore:
    """A blob store in a local (or mounted) directory, and its administration."""

    #: A file system takes no checksum with a write, so the bytes are read back.
    checks_uploads = False
    listing_tells_ttl = True

    def __init__(self, root: Path, clock: Clock) -> None:
        self._tree = Tree(root)
        self._clock = clock

    @property
    def administration(self) -> BlobAdministration:
        return self

    def expect(self, job_name: str) -> None:
        """The job has blobs: a root without its directory is the wrong one, or its disk is not mounted."""
        self._tree.expect(job_name)

    def put(self, blob_id: str, body: Body, *, ttl_days: int | None) -> None:
        *parents, name = check_blob_id(blob_id)
        with open_body(body) as stream, translated(blob_id):

            def write(directory: int) -> None:
                stream.seek(0)
                self._write(directory, name, blob_id, stream, ttl_days)

            self._tree.write(parents, write)

    def copy_from(self, source: BlobStore, wanted: BlobInfo, blob_id: str, *, ttl_days: int) -> bool:
        """By a hard link, which takes no time and no space; False where the system makes none."""
        if not isinstance(source, FileBlobStore):
            return False
        (*source_parents, source_name), (*parents, name) = check_blob_id(wanted.blob_id), check_blob_id(blob_id)
        expires = self._clock.time_ns() // 1_000_000 + ttl_days * DAY_MS

        def link(there: int, directory: int) -> bool:
            with translated(wanted.blob_id):
                os.close(file_tree.open_blob(there, source_name, wanted.blob_id))
            if file_tree.exists(directory, name):
                raise file_tree.exists_error(directory, blob_id)
            try:
                with file_tree.expiring(directory, name, expires):
                    os.link(source_name, name, src_dir_fd=there, dst_dir_fd=directory, follow_symlinks=False)
                    try:
                        os.utime(name, dir_fd=directory)  # both names get it: garbage collection goes by this time
                    except OSError:
                        os.unlink(name, dir_fd=directory)
                        raise
            except FileExistsError:
                # also of the same file: a repeated link, or a copy that somebody has published
                raise file_tree.exists_error(directory, blob_id) from None
            except OSError as error:
                if error.errno not in CANNOT_LINK:
                    raise
                return False
            os.fsync(directory)
            return True

        with translated(wanted.blob_id), source._tree.directory(source_parents) as there, translated(blob_id):
            return self._tree.write(parents, partial(link, there))

    def _write(self, directory: int, name: str, blob_id: str, body: IO[bytes], ttl_days: int | None) -> None:
        if file_tree.exists(directory, name):
            raise file_tree.exists_error(directory, blob_id)
        with file_tree.temporary(directory, body) as temporary:
            expires = None if ttl_days is None else self._clock.time_ns() // 1_000_000 + ttl_days * DAY_MS
            with file_tree.expiring(directory, name, expires):
                file_tree.link(directory, temporary, name, blob_id)
        os.fsync(directory)

    @contextmanager
    def get(self, blob_id: str, offset: int = 0, length: int | None = None) -> Iterator[BlobReader]:
        *parents, name = check_blob_id(blob_id)
        with translated(blob_id), self._tree.directory(parents) as directory:
            fd = file_tree.open_blob(directory, name, blob_id)
        try:
            if length == 0:
                yield BytesReader(b"")
            else:
                os.lseek(fd, offset, os.SEEK_SET)
                yield _FileReader(fd, length, blob_id)
        finally:
            os.close(fd)

    def stat(self, blob_id: str) -> BlobInfo:
        *parents, name = check_blob_id(blob_id)
        with translated(blob_id), self._tree.directory(parents) as directory:
            return file_tree.info(directory, name, blob_id)

    def remove_ttl(self, blob_id: str) -> None:
        *parents, name = check_blob_id(blob_id)
        with translated(blob_id), self._tree.directory(parents) as directory:
            file_tree.info(directory, name, blob_id)
            file_tree.remove_expiry(directory, name)
            os.fsync(directory)  # also when a caller that died has removed the record

    def delete(self, blob_id: str) -> None:
        """Also removes directories that become empty."""
        with translated(blob_id):
            failed = self._delete(check_blob_id(blob_id)[:-1], [blob_id])
        if failed:
            raise failed[blob_id]

    def delete_many(self, blob_ids: Sequence[str]) -> Mapping[str, StatemgrError]:
        """Syncs each directory once."""
        failed: dict[str, StatemgrError] = {}
        for parent, group in groupby(sorted(blob_ids, key=_parent), _parent):
            found = list(group)
            for blob_id in found:
                check_blob_id(blob_id)
            try:
                with translated(parent):
                    failed |= self._delete(parent.split("/") if parent else [], found)
            except StatemgrError as error:
                failed |= dict.fromkeys(found, error)
        return failed

    def _delete(self, parents: Sequence[str], blob_ids: Sequence[str]) -> Mapping[str, StatemgrError]:
        """Delete blobs of one directory. Returns: those that could not be deleted, and why. Raises: OSError."""

        def delete(blob_id: str) -> None:
            name = check_blob_id(blob_id)[-1]
            for entry in (name, file_tree.expiry(name)):
                with translated(blob_id), suppress(FileNotFoundError):
                    os.unlink(entry, dir_fd=directory)

        failed: Mapping[str, StatemgrError] = {}
        with suppress(FileNotFoundError):
            with self._tree.directory(parents) as directory:
                failed = delete_each(blob_ids, delete)
                os.fsync(directory)
            self._tree.remove_empty(parents)
        return failed

    def close(self) -> None:
        """Nothing is kept open."""

    # --- administration ---

    def list(self, prefix: str, token: str | None = None) -> BlobPage:
        """Lists in the order of directories. The token is the last name."""
        return page_of(self._tree.walk(prefix, token.split("/") if token else [], temporaries=False))

    def unfinished(self, prefix: str) -> Iterator[UnfinishedUpload]:
        """The temporary files of writers that are at work or have died, and expiry records whose blob is gone."""
        for found in self._tree.walk(prefix, [], temporaries=True):
            parent, _, name = found.blob_id.rpartition("/")
            yield UnfinishedUpload(parent, name, found.modified_ms)

    def abandon(self, upload: UnfinishedUpload) -> None:
        if not file_tree.is_unfinished(upload.token) or "/" in upload.token:
            raise InvalidError(f"{upload.token!r} is not an unfinished upload", blob=upload.blob_id)
        parents = upload.blob_id.split("/")
        with translated(upload.blob_id), suppress(FileNotFoundError):
            with self._tree.directory(parents) as directory:
                os.unlink(upload.token, dir_fd=directory)
            self._tree.remove_empty(parents)

    def time_ms(self) -> int:
        """The time that a new file gets. For a mounted directory this is the clock of another machine."""

        with (
            translated(str(self._tree.root)),
            self._tree.directory([], may_be_new=True) as directory,
            file_tree.temporary(directory, io.BytesIO(b"x")) as name,
        ):
            return os.stat(name, dir_fd=directory, follow_symlinks=False).st_mtime_ns // 1_000_000

    def probe(self) -> Sequence[str]:
        """Try to write to the directory. One that does not exist is not made: it may be mistyped."""
        try:
            self.time_ms()
        except StatemgrError as error:
            return (f"{self._tree.root} cannot be written to: {error.message}",)
        return ()

    def fix(self) -> Sequence[str]:
        return ()


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
        """Errors of either file are OSErrors, because the caller knows the target."""
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


def _parent(blob_id: str) -> str:
    return blob_id.rpartition("/")[0]


def open_store(uri: str, config: JobConfig, clock: Clock) -> FileBlobStore:
    """The store of ``file:///directory``."""
    return FileBlobStore(Path(unquote(urlsplit(uri).path)), clock)
