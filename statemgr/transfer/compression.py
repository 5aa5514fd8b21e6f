"""Parts of files as zstandard frames (RFC 8878): made in a scratch file each, read while they arrive.

Only what gets smaller is stored so. A frame declares the size of its content, and has no checksum of its own: what
comes out of it is hashed like everything else.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, cast

import zstandard

from statemgr.local.transfer_files import SourceFile, disk_errors
from statemgr.ports import BlobReader, FileSlice

_LEVEL = 3
#: A frame is worth its time where it is at most this share of its content, first of a sample and then of all.
_WORTH = 0.9
#: Bytes of frames that are read at once.
_PIECE = 256 * 1024
#: What a reader spends on one frame at most; level 3 makes windows of up to 2 MiB.
_MAX_WINDOW = 8 * 1024 * 1024


class DamagedFrame(Exception):
    """What a blob holds cannot be decompressed."""


@contextmanager
def compressed(
    part: FileSlice, scratch: Path, buffer: memoryview, check: Callable[[], None]
) -> Iterator[FileSlice | None]:
    """The part as one frame in a new file in ``scratch``, which is removed at the end; None where that is not worth it.

    Args:
        buffer: to read into.
        check: called between pieces; what it raises ends the work.

    Raises: CorruptError (the file is shorter than the part), DiskFull.
    """
    compressor = zstandard.ZstdCompressor(level=_LEVEL)
    with SourceFile(part.path) as source:
        for sample in source.pieces(part.offset, min(part.length, len(buffer)), buffer):
            if len(compressor.compress(sample)) > len(sample) * _WORTH:
                yield None
                return
        with disk_errors(scratch):
            descriptor, name = tempfile.mkstemp(dir=scratch, prefix="frame-")
        path = Path(name)
        try:
            frame, size = compressor.compressobj(size=part.length), 0
            with disk_errors(path), os.fdopen(descriptor, "wb") as sink:
                for piece in source.pieces(part.offset, part.length, buffer):
                    check()
                    size += sink.write(frame.compress(piece))
                size += sink.write(frame.flush())
            yield FileSlice(path, 0, size) if size <= part.length * _WORTH else None
        finally:
            with suppress(OSError):
                path.unlink()


class FrameReader:
    """The content of a frame that a GET brings, as a GET of its own."""

    def __init__(self, reader: BlobReader) -> None:
        decompressor = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW)
        self._content = decompressor.stream_reader(cast(IO[bytes], _Source(reader)), read_size=_PIECE)

    def readinto(self, buffer: memoryview) -> int:
        """As of a GET, of the content. Raises: DamagedFrame."""
        try:
            return int(self._content.readinto(buffer))
        except zstandard.ZstdError as error:
            raise DamagedFrame(str(error)) from error

    def copy_to(self, fd: int, offset: int, size: int) -> int | None:
        """Not from here."""
        return None


class _Source:
    """What the decompressor reads from. It must not know who holds that: no collector finds a cycle through it."""

    def __init__(self, reader: BlobReader) -> None:
        self._reader = reader
        self._buffer = memoryview(bytearray(_PIECE))

    def read(self, size: int) -> bytes:
        """What arrives next."""
        return bytes(self._buffer[: self._reader.readinto(self._buffer[:size])])
