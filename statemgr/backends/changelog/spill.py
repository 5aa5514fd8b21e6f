"""Keeps changes in a local file without a name, which vanishes when it is closed and after a crash.

Touches only the scratch directory that it is given.
"""

from __future__ import annotations

import os
import tempfile
import weakref
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from statemgr.local.transfer_files import disk_errors
from statemgr.model.commit import Change
from statemgr.model.segment import read_segment, verify_segment, write_segment


class SpilledChanges:
    """A change segment that can be iterated any number of times, one iteration at a time. Owns the descriptor."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._closed = weakref.finalize(self, os.close, fd)

    @classmethod
    def write(cls, scratch: Path, changes: Iterable[Change]) -> SpilledChanges:
        """Write changes to a new file without a name. Raises: DiskFull."""
        with disk_errors(scratch):
            fd, name = tempfile.mkstemp(dir=scratch, prefix="spill-")
            os.unlink(name)
        spilled = cls(fd)
        with disk_errors(scratch), os.fdopen(os.dup(fd), "wb", buffering=1 << 20) as sink:
            write_segment(changes, sink)
        return spilled

    @classmethod
    def take(cls, path: Path) -> SpilledChanges:
        """Take over a segment's file and remove its name. Raises: CorruptBlob if the segment is not whole."""
        with disk_errors(path):
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            os.unlink(path)
        spilled = cls(fd)
        with spilled._open() as source:
            verify_segment(source)
        return spilled

    def __iter__(self) -> Iterator[Change]:
        with self._open() as source:
            yield from read_segment(source)

    def _open(self) -> BinaryIO:
        os.lseek(self._fd, 0, os.SEEK_SET)
        return os.fdopen(os.dup(self._fd), "rb", buffering=1 << 20)
