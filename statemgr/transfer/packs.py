"""Blobs of several sections, each at an offset, so that much costs few requests: packs of small files, and of segments.

A pack of files is held in memory while it is sent, and so is a run of neighbours while it is fetched: both are bounded
by ``PACK_SIZE``. A :class:`PackedBlob` moves to a scratch file when it grows. Touches the files that it is given, and
blobs through the transfer engine.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import BinaryIO, cast

from statemgr.errors import CorruptFile
from statemgr.local.transfer_files import SourceFile, disk_errors
from statemgr.model.checkpoint import BlobRef
from statemgr.model.diff import LocalFile
from statemgr.model.hashing import content_hash, hasher
from statemgr.model.snapshot import FileIndex
from statemgr.ports import Body, FileSlice
from statemgr.transfer.transfer import Transfer

#: Largest file that goes into a pack.
PACK_LIMIT = 1024 * 1024
#: Largest pack.
PACK_SIZE = 4 * 1024 * 1024
#: Bytes up to which a blob of sections is made in memory.
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
    """Used from one thread at a time.

    Args:
        path: a new file's path, made only when there is too much for memory.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._sink: BinaryIO = io.BytesIO()
        self._in_memory = True
        #: Bytes written so far, those of sections that failed included.
        self.size = 0

    def section(self, write: Callable[[BinaryIO], object], expected: int) -> BlobRef:
        """Add what ``write`` writes, about ``expected`` bytes.

        Returns: where it lies; its blob ID is empty, for this blob.
        Raises: DiskFull, and what ``write`` raises; other sections are whole all the same.
        """
        if self._in_memory and self.size + expected > IN_MEMORY:
            self._move_to_disk()
        section = _Section(self._sink)
        try:
            with disk_errors(self._path):
                write(cast(BinaryIO, section))
            return BlobRef("", section.size, section.digest(), offset=self.size)
        finally:
            self.size += section.size

    def body(self) -> Body:
        """All of it. Nothing can be added any more. Raises: DiskFull."""
        if self._in_memory:
            return cast(io.BytesIO, self._sink).getvalue()
        with disk_errors(self._path):
            self._sink.close()
        return FileSlice(self._path, 0, self.size)

    def close(self) -> None:
        """Let go of memory and file."""
        self._sink.close()
        if not self._in_memory:
            self._path.unlink(missing_ok=True)

    def _move_to_disk(self) -> None:
        so_far = cast(io.BytesIO, self._sink).getbuffer()
        with disk_errors(self._path):
            sink = self._path.open("xb", buffering=1 << 20)
            sink.write(so_far)
        self._sink, self._in_memory = sink, False


class _Section:
    """A sink that counts and hashes what goes through it."""

    def __init__(self, sink: BinaryIO) -> None:
        self._sink = sink
        self._hash = hasher()
        self.size = 0

    def write(self, data: bytes) -> int:
        written = self._sink.write(data)
        self._hash.update(data)
        self.size += len(data)
        return written

    def digest(self) -> bytes:
        return self._hash.digest()
