"""A new file of its full size, without content: it takes space only for what is written to it."""

from __future__ import annotations

import os
from pathlib import Path

from statemgr.local import durable
from statemgr.local.transfer_files import disk_errors


class SparseFile:
    """What was not written reads as zeros. Safe to write from many threads.

    Args:
        exists: the file is there, at its full size.

    Raises: DiskFull, InvalidError (it exists).
    """

    def __init__(self, path: Path, size: int, *, exists: bool = False) -> None:
        self.path = path
        if exists:
            return
        with disk_errors(path), durable.create(path) as file:
            os.ftruncate(file.fileno(), size)

    def write(self, offset: int, data: bytes | bytearray | memoryview) -> None:
        """Write all of ``data`` at ``offset``. Raises: DiskFull, MissingFile."""
        view = memoryview(data)
        with disk_errors(self.path), open(self.path, "r+b", buffering=0) as file:
            while view:
                written = os.pwrite(file.fileno(), view, offset)
                view, offset = view[written:], offset + written
