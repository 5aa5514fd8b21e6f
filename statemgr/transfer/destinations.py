"""Where a verified GET goes: into a part of a file, into memory, or nowhere. Touches the file that it is given."""

from __future__ import annotations

from typing import Protocol

from statemgr.local.transfer_files import NewFile
from statemgr.ports import BlobReader
from statemgr.transfer.pool import Batch, Counter


class Sink(Protocol):
    """Takes a blob's bytes, positions counted from 0; all of them once more after :meth:`restart`."""

    def write(self, position: int, piece: memoryview) -> None:
        """Take what was read."""

    def move(self, reader: BlobReader, position: int, wanted: int) -> memoryview | None:
        """Take up to ``wanted`` bytes from the reader itself. Returns: what has arrived; None where that cannot be."""

    def restart(self, written: int) -> None:
        """What was taken, ``written`` bytes, was wrong."""


class IntoFile:
    """A part of a file, from ``offset`` on. Raises Cancelled once the batch has failed."""

    def __init__(self, target: NewFile, fd: int, offset: int, buffer: memoryview, batch: Batch, done: Counter) -> None:
        self._target = target
        self._fd = fd
        self._offset = offset
        self._buffer = buffer
        self._batch = batch
        self._done = done

    def write(self, position: int, piece: memoryview) -> None:
        self._batch.check()
        self._target.write(self._fd, self._offset + position, piece)
        self._done.add(len(piece))

    def move(self, reader: BlobReader, position: int, wanted: int) -> memoryview | None:
        """From file to file, and then a look at what has arrived."""
        self._batch.check()
        offset = self._offset + position
        size = reader.copy_to(self._fd, offset, min(wanted, len(self._buffer)))
        if size is None:
            return None
        piece = self._buffer[:size]
        self._target.read(self._fd, offset, piece)
        self._done.add(size)
        return piece

    def restart(self, written: int) -> None:
        self._done.add(-written)


class IntoMemory:
    """``data``: what has been read."""

    def __init__(self) -> None:
        self.data = bytearray()

    def write(self, position: int, piece: memoryview) -> None:
        self.data.extend(piece)

    def move(self, reader: BlobReader, position: int, wanted: int) -> memoryview | None:
        """What is read goes through this process."""
        return None

    def restart(self, written: int) -> None:
        self.data.clear()


class Nowhere:
    """What is read is only verified."""

    def write(self, position: int, piece: memoryview) -> None:
        pass

    def move(self, reader: BlobReader, position: int, wanted: int) -> memoryview | None:
        return None

    def restart(self, written: int) -> None:
        pass
