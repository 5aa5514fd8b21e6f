"""A new file of its full size, without content: it takes space only for what is written to it."""

from __future__ import annotations

import os
from pathlib import Path

from statemgr.local import durable
from statemgr.local.transfer_files import NewFile, disk_errors


class SparseFile:
    """What was not written reads as zeros. Safe to write from many threads.

    Args:
        exists: the file is there, at its full size.

    Raises: DiskFull, InvalidError (it exists).
    """

    def __init__(self, path: Path, size: int, *, exists: bool = False) -> None:
        self.path = path
        self._file = NewFile(path, size, 1, exists=True)
        if exists:
            return
        with disk_errors(path), durable.create(path) as file:
            os.ftruncate(file.fileno(), size)

    def write(self, offset: int, data: bytes | bytearray | memoryview) -> None:
        """Write all of ``data`` at ``offset``. Raises: DiskFull, CorruptFile (the file is gone)."""
        with self._file.part() as fd:
            self._file.write(fd, offset, memoryview(data))
