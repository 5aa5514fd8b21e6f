"""Blobs of several sections, each at an offset, so that many small files or segments need few requests.

A pack of files is in memory while it is sent, and its size is limited. A :class:`PackedBlob` moves to a scratch file
when it grows.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import BinaryIO, cast

from statemgr.errors import CorruptFile
from statemgr.local import durable
from statemgr.local.transfer_files import SourceFile
from statemgr.model.checkpoint import BlobRef
from statemgr.model.diff import LocalFile
from statemgr.model.hashing import content_hash, hasher
from statemgr.model.snapshot import FileIndex
from statemgr.os_errors import disk_errors
from statemgr.ports import Body, FileSlice
from statemgr.transfer.transfer import Transfer

#: Largest file that goes into a pack.
PACK_LIMIT = 1024 * 1024
#: Largest pack.
PACK_SIZE = 4 * 1024 * 1024
#: Bytes up to which a :class:`PackedBlob` is made in memory.
IN_MEMORY = 8 * 1024 * 1024


def read_file(root: Path, file: LocalFile) -> tuple[bytes, bytes]:
    """The content of a small local file, and its hash. Raises: CorruptError when it is not what was committed."""
    with SourceFile(root / file.path) as source:
        data = bytearray(file.size)
        for _ in source.pieces(0, file.size, memoryview(data)):
            pass
    digest = content_hash(data)
    if source.size != file.size or file.hash not in (None, digest):
        raise CorruptFile("a local file has changed since it was committed", path=root / file.path)
    return bytes(data), digest


def upload_packs(
    transfer: Transfer, root: Path, files: Iterable[LocalFile], blob_name: Callable[[int], str]
) -> dict[str, FileIndex]:
    """Upload files of at most ``PACK_LIMIT`` in packs. Returns: path → file. Raises: as ``Transfer.upload_files``."""
    found: dict[str, FileIndex] = {}
    with transfer.batch() as batch:
        for number, group in enumerate(_groups(files)):
            job = partial(_upload_pack, transfer, root, group, blob_name(number), found)
            batch.submit(job, sum(file.size for file in group))
    return found


def _upload_pack(
    transfer: Transfer, root: Path, group: Sequence[LocalFile], blob_id: str, found: dict[str, FileIndex]
) -> None:
    content = [read_file(root, file) for file in group]
    transfer.put(blob_id, b"".join(data for data, _ in content))
    offset = 0
    for file, (_, digest) in zip(group, content, strict=True):
        part = BlobRef(blob_id, file.size, digest, offset)
        found[file.path] = FileIndex(file.path.rpartition("/")[2], file.size, digest, parts=(part,))
        offset += file.size


def _groups(files: Iterable[LocalFile]) -> Iterator[list[LocalFile]]:
    group: list[LocalFile] = []
    size = 0
    for file in files:
        if group and size + file.size > PACK_SIZE:
            yield group
            group, size = [], 0
        group.append(file)
        size += file.size
    if group:
        yield group


class PackedBlob:
    """A blob of several sections, made in memory while it is small. Used by one thread at a time.

    Args:
        path: the path of a new file, which is created when the blob is too large for memory.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._sink: BinaryIO = io.BytesIO()
        self._in_memory = True
        self._written = 0
        #: What went to the file.
        self._hash = hasher()
        #: The error after which the file ends with a part of a section: nothing may follow it.
        self._failed: OSError | None = None
        #: Bytes of all sections, also of those that failed.
        self.size = 0

    def section(self, write: Callable[[BinaryIO], object]) -> BlobRef:
        """Add the bytes that ``write`` writes.

        Returns: the place of the section; its blob ID is empty, for this blob.
        Raises: DiskFull, and the errors of ``write``; the other sections stay whole.
        """
        section = _Section(self)
        try:
            with disk_errors(self._path):
                write(cast(BinaryIO, section))
            return BlobRef("", section.size, section.digest(), offset=self.size)
        finally:
            self.size += section.size

    def append(self, data: bytes) -> int:
        """Add bytes to the current section. Returns: how many."""
        if self._failed is not None:
            raise self._failed
        if self._in_memory and self._written + len(data) > IN_MEMORY:
            self._move()
        try:
            added = self._sink.write(data)
        except OSError as error:
            self._failed = error
            raise
        self._written += added
        if not self._in_memory:
            self._hash.update(data)
        return added

    def _move(self) -> None:
        """Go on in the file; if that fails, the blob stays in memory. Raises: OSError."""
        sink = durable.create(self._path)
        content = cast(io.BytesIO, self._sink).getvalue()
        try:
            sink.write(content)
        except OSError:
            with suppress(OSError):
                sink.close()
            durable.remove(self._path)
            raise
        self._hash.update(content)
        self._sink, self._in_memory = sink, False

    def body(self) -> Body:
        """The whole blob. Nothing can be added afterwards. Raises: DiskFull."""
        if self._in_memory:
            return cast(io.BytesIO, self._sink).getvalue()
        with disk_errors(self._path):
            self._sink.close()
        return FileSlice(self._path, 0, self.size, self._hash.digest())

    def close(self) -> None:
        """Release memory and file."""
        with suppress(OSError):  # nobody needs what cannot be written
            self._sink.close()
        if not self._in_memory:
            durable.remove(self._path)


class _Section:
    """A sink that counts and hashes the bytes of one section."""

    def __init__(self, blob: PackedBlob) -> None:
        self._blob = blob
        self._hash = hasher()
        self.size = 0

    def write(self, data: bytes) -> int:
        self._blob.append(data)
        self._hash.update(data)
        self.size += len(data)
        return len(data)

    def digest(self) -> bytes:
        return self._hash.digest()
