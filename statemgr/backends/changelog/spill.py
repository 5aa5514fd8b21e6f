"""Changes in a local file without a name: gone when it is dropped, and after a crash too.

Touches the scratch directory that it is given.
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
    """A change segment, iterated as often as needed. Takes over the descriptor; one iteration at a time."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._closed = weakref.finalize(self, os.close, fd)

    @classmethod
    def write(cls, scratch: Path, changes: Iterable[Change]) -> SpilledChanges:
        """Keep what ``changes`` yields. Raises: DiskFull."""
        with disk_errors(scratch):
            fd, name = tempfile.mkstemp(dir=scratch, prefix="spill-")
            os.unlink(name)
        spilled = cls(fd)
        with disk_errors(scratch), os.fdopen(os.dup(fd), "wb", buffering=1 << 20) as sink:
            write_segment(changes, sink)
        return spilled

    @classmethod
    def take(cls, path: Path) -> SpilledChanges:
        """Take a segment's file over; its name goes at once. Raises: CorruptBlob when it is not whole."""
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
