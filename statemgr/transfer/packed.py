"""One blob of several sections, made in memory while it is small and else in a scratch file.

Touches the scratch file only.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, cast

from statemgr.local.transfer_files import disk_errors
from statemgr.model.checkpoint import BlobRef
from statemgr.model.hashing import hasher
from statemgr.ports import Body, FileSlice

#: Bytes up to which a blob is made in memory.
IN_MEMORY = 8 * 1024 * 1024


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
