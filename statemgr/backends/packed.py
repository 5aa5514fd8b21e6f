"""One blob of several sections, made in memory while it is small and else in a scratch file.

Touches the scratch directory only.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self, cast

from statemgr.backends.files import disk_errors
from statemgr.model.checkpoint import BlobRef
from statemgr.model.hashing import hasher
from statemgr.ports import Body, FileSlice

#: Bytes up to which a blob is made in memory.
IN_MEMORY = 8 * 1024 * 1024


class PackedBlob:
    """Use as a context manager: a scratch file goes at its end.

    Args:
        path: a new file's path, made only when ``expected`` bytes are too many for memory.
    """

    def __init__(self, path: Path, expected: int) -> None:
        self._path = path if expected > IN_MEMORY else None
        self._sink: BinaryIO = io.BytesIO()
        if self._path is not None:
            with disk_errors(self._path):
                self._sink = self._path.open("xb", buffering=1 << 20)
        self.size = 0

    def section(self, write: Callable[[BinaryIO], object]) -> BlobRef:
        """Add what ``write`` writes. Returns where it lies; its blob ID is empty, for this blob. Raises: DiskFull."""
        section = _Section(self._sink)
        with disk_errors(self._path or Path()):
            write(cast(BinaryIO, section))
        ref = BlobRef("", section.size, section.digest(), offset=self.size)
        self.size += section.size
        return ref

    def body(self) -> Body:
        """All of it. Nothing can be added any more. Raises: DiskFull."""
        if self._path is None:
            return cast(io.BytesIO, self._sink).getvalue()
        with disk_errors(self._path):
            self._sink.close()
        return FileSlice(self._path, 0, self.size)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._sink.close()
        if self._path is not None:
            self._path.unlink(missing_ok=True)


class _Section:
    """A sink that counts and hashes what goes through it."""

    def __init__(self, sink: BinaryIO) -> None:
        self._sink = sink
        self._hash = hasher()
        self.size = 0

    def write(self, data: bytes) -> int:
        self._hash.update(data)
        self.size += len(data)
        return self._sink.write(data)

    def digest(self) -> bytes:
        return self._hash.digest()
