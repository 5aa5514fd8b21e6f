"""The bodies of PUTs and GETs as streams. Reads local files."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import IO, cast

from statemgr.errors import CorruptError, CorruptFile
from statemgr.model.hashing import hasher
from statemgr.os_errors import Fault, translated
from statemgr.ports import BlobReader, Body, FileSlice

#: Bytes that are read at once.
CHUNK = 1024 * 1024


def body_size(body: Body) -> int:
    """Bytes of a PUT's body."""
    return body.length if isinstance(body, FileSlice) else len(body)


@contextmanager
def open_body(body: Body) -> Iterator[IO[bytes]]:
    """A seekable stream of exactly the body's bytes. Raises: CorruptError if the file is shorter, or does not have the
    given digest."""
    if isinstance(body, bytes):
        yield io.BytesIO(body)
        return
    with SliceStream(body) as stream:
        yield cast(IO[bytes], stream)


class SliceStream(io.RawIOBase):
    """A read-only stream of a slice of a file; position 0 is the slice's start. Links are refused.

    The first pass through the slice is compared with its digest. A store that reads it again compares the passes.
    """

    def __init__(self, piece: FileSlice) -> None:
        super().__init__()
        self._piece = piece
        self._position = 0
        self._unchecked, self._hashed, self._hash = piece.digest, 0, hasher()
        self._fd = -1  # also closed if opening it fails
        with self._errors():
            self._fd = os.open(piece.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        if os.fstat(self._fd).st_size < piece.offset + piece.length:
            self.close()
            raise self._too_short()

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._piece.length}[whence]
        self._position = max(start + offset, 0)
        return self._position

    def read(self, size: int | None = -1) -> bytes:
        """Up to ``size`` bytes, none at the slice's end. Raises: CorruptError if the file ends before."""
        left = max(self._piece.length - self._position, 0)
        wanted = left if size is None or size < 0 else min(size, left)
        if wanted == 0:
            return b""
        with self._errors():
            data = os.pread(self._fd, wanted, self._piece.offset + self._position)
        if not data:
            raise self._too_short()
        if self._unchecked is not None:
            self._check(data)
        self._position += len(data)
        return data

    def _check(self, data: bytes) -> None:
        if self._position == 0:
            self._hashed, self._hash = 0, hasher()
        if self._position != self._hashed:
            return
        self._hash.update(data)
        self._hashed += len(data)
        if self._hashed == self._piece.length:
            if self._hash.digest() != self._unchecked:
                raise CorruptFile("a file changed while it was uploaded", path=self._piece.path)
            self._unchecked = None

    def close(self) -> None:
        """Close the file. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        super().close()

    def _errors(self) -> AbstractContextManager[None]:
        return translated("a file to upload cannot be read", self._piece.path, kinds={Fault.GONE: CorruptFile})

    def _too_short(self) -> CorruptError:
        return CorruptFile("a file became shorter while it was uploaded", path=self._piece.path)


class BytesReader:
    """A :class:`statemgr.ports.BlobReader` over bytes."""

    def __init__(self, data: bytes | memoryview) -> None:
        self._data = memoryview(data)

    def copy_to(self, fd: int, offset: int, size: int) -> int | None:
        return None

    def readinto(self, buffer: memoryview) -> int:
        size = min(len(buffer), len(self._data))
        buffer[:size] = self._data[:size]
        self._data = self._data[size:]
        return size


def chunks(reader: BlobReader, buffer: memoryview) -> Iterator[memoryview]:
    """The rest of an open GET, piece by piece in ``buffer``. Each piece is valid until the next."""
    while size := reader.readinto(buffer):
        yield buffer[:size]
