"""Parts of files as zstandard frames (RFC 8878). Each is made in a scratch file, and decompressed while it arrives.

A part is stored as a frame only if that makes it smaller. A frame declares the size of its content and has no checksum:
its content is hashed like everything else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, cast

import zstandard

from statemgr.errors import CorruptFile
from statemgr.local import durable
from statemgr.local.transfer_files import SourceFile
from statemgr.model.hashing import hasher
from statemgr.os_errors import disk_errors
from statemgr.ports import BlobReader, FileSlice

_LEVEL = 3
#: A frame is used if it is at most this share of its content. A sample is tried first, then all of it.
_WORTH = 0.9
#: Bytes of frames that are read at once.
_PIECE = 256 * 1024
#: Most memory in bytes that a reader uses for one frame; level 3 makes windows of up to 2 MiB.
_MAX_WINDOW = 8 * 1024 * 1024


class DamagedFrame(Exception):
    """A blob cannot be decompressed."""


@contextmanager
def compressed(
    part: FileSlice, target: Path, buffer: memoryview, check: Callable[[], None]
) -> Iterator[FileSlice | None]:
    """The part as one frame, or None if a frame would not be much smaller.

    Args:
        target: a new file, which is removed at the end of the block.
        buffer: to read into.
        check: called between pieces; an exception from it ends the work.

    Raises: CorruptError (the file is shorter than the part, or has changed), DiskFull.
    """
    compressor = zstandard.ZstdCompressor(level=_LEVEL)
    with SourceFile(part.path) as source:
        for sample in source.pieces(part.offset, min(part.length, len(buffer)), buffer):
            if len(compressor.compress(sample)) > len(sample) * _WORTH:
                yield None
                return
        try:
            frame, size, content = compressor.compressobj(size=part.length), 0, hasher()
            with disk_errors(target), durable.create(target) as sink:
                for piece in source.pieces(part.offset, part.length, buffer):
                    check()
                    content.update(piece)
                    size += sink.write(frame.compress(piece))
                size += sink.write(frame.flush())
            if part.digest not in (None, content.digest()):
                raise CorruptFile("a file changed while it was uploaded", path=part.path)
            yield FileSlice(target, 0, size) if size <= part.length * _WORTH else None
        finally:
            with suppress(OSError):
                durable.remove(target)


class FrameReader:
    """Reads the content of a frame that a GET brings, as if the blob had it."""

    def __init__(self, reader: BlobReader) -> None:
        decompressor = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW)
        self._content = decompressor.stream_reader(cast(IO[bytes], _Source(reader)), read_size=_PIECE)

    def readinto(self, buffer: memoryview) -> int:
        """Raises: also DamagedFrame."""
        try:
            return int(self._content.readinto(buffer))
        except zstandard.ZstdError as error:
            raise DamagedFrame(str(error)) from error

    def copy_to(self, fd: int, offset: int, size: int) -> int | None:
        """Not possible: the content has to be decompressed."""
        return None


class _Source:
    """The decompressor reads from this. It has no reference to the reader that uses it: Python's garbage collector
    cannot find a cycle through the decompressor."""

    def __init__(self, reader: BlobReader) -> None:
        self._reader = reader
        self._buffer = memoryview(bytearray(_PIECE))

    def read(self, size: int) -> bytes:
        """The next bytes that arrive."""
        return bytes(self._buffer[: self._reader.readinto(self._buffer[:size])])
