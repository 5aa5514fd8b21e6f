"""The local files of uploads and downloads. Touches only the paths that it is given, and follows no links."""

from __future__ import annotations

import errno
import os
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Self

from statemgr.errors import CorruptFile, InvalidError
from statemgr.os_errors import disk_errors

_NEW = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_WRITE = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
# an open must not wait for a planted FIFO
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class SourceFile:
    """A regular file, open for reading."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with disk_errors(path):
            self._file = FileIO(os.open(path, _READ))
            status = os.fstat(self._file.fileno())
            self.size = status.st_size
        if not stat.S_ISREG(status.st_mode):
            self._file.close()
            raise InvalidError("not a regular file", path=path)

    def pieces(self, offset: int, length: int, buffer: memoryview) -> Iterator[memoryview]:
        """Read ``length`` bytes from ``offset``, piece by piece into ``buffer``. Raises: CorruptFile (too few
        bytes)."""
        with disk_errors(self._path):
            self._file.seek(offset)
            while length:
                size = self._file.readinto(buffer[:length])
                if not size:
                    raise CorruptFile("a local file became shorter after it was committed", path=self._path)
                yield buffer[:size]
                length -= size

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()


class NewFile:
    """A new file that is created at its full size and written part by part from many threads.

    Args:
        path: must not exist yet; its directory must exist.
        size: bytes. They are reserved if the file system can, so that a full disk is noticed at once.
        parts: how many parts will be written.
        exists: the file is already there at its full size, and belongs to this transfer.
    """

    def __init__(self, path: Path, size: int, parts: int, *, exists: bool = False) -> None:
        self.path = path
        self._size = size
        self._left = parts
        self._made = exists
        self._lock = threading.Lock()

    @contextmanager
    def part(self) -> Iterator[int]:
        """A descriptor to write one part with. The first call creates the file."""
        with disk_errors(self.path):
            with self._lock:
                fd = os.open(self.path, _WRITE if self._made else _NEW, 0o600)
                first, self._made = not self._made, True
            try:
                if first and self._size:
                    _reserve(fd, self._size)
            except BaseException:
                os.close(fd)
                raise
        try:
            with disk_errors(self.path):
                yield fd
        finally:
            os.close(fd)

    def write(self, fd: int, offset: int, data: memoryview) -> None:
        """Write all of ``data`` at ``offset``. Call it within :meth:`part`, which translates errors."""
        while data:
            size = os.pwrite(fd, data, offset)
            data = data[size:]
            offset += size

    def read(self, fd: int, offset: int, buffer: memoryview) -> None:
        """Read back from ``offset`` into a buffer. Call it within :meth:`part`, which translates errors."""
        while buffer:
            size = os.preadv(fd, [buffer], offset)
            if not size:
                raise CorruptFile("a file became shorter while it was written", path=self.path)
            buffer = buffer[size:]
            offset += size

    def part_done(self) -> bool:
        """Count a finished part. Returns: whether it was the last one."""
        with self._lock:
            self._left -= 1
            return self._left == 0


def write_new(path: Path, data: bytes | memoryview) -> None:
    """Write a small new file. Raises: DiskFull, InvalidError if the path exists."""
    target = NewFile(path, len(data), 1)
    with target.part() as fd:
        target.write(fd, 0, memoryview(data))


def _reserve(fd: int, size: int) -> None:
    if hasattr(os, "posix_fallocate"):
        try:
            os.posix_fallocate(fd, 0, size)
            return
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL, errno.ENOSYS):
                raise
    os.ftruncate(fd, size)
