"""A new file of its full size, without content: it takes space only for what is written to it."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from statemgr.local import durable
from statemgr.local.transfer_files import NewFile
from statemgr.os_errors import disk_errors


class SparseFile(NewFile):
    """What was not written reads as zeros. Safe to write from many threads.

    Args:
        exists: the file is there, at its full size.

    Raises: DiskFull, InvalidError (it exists).
    """

    def __init__(self, path: Path, size: int, *, exists: bool = False) -> None:
        super().__init__(path, size, 1, exists=True)
        if exists:
            return
        with disk_errors(path), durable.create(path) as file:
            os.ftruncate(file.fileno(), size)

    def put(self, offset: int, data: bytes | bytearray | memoryview) -> None:
        """Write all of ``data`` at ``offset``. Raises: DiskFull, CorruptFile (the file is gone)."""
        with self.part() as fd:
            self.write(fd, offset, memoryview(data))


def has_hole(path: Path, offset: int, size: int) -> bool:
    """Whether a range of a file has bytes that were never written. False also if the file system does not know."""
    with suppress(OSError, AttributeError), durable.open_file(path) as file:
        return os.lseek(file.fileno(), offset, os.SEEK_HOLE) < offset + size
    return False
