"""Shows who uses a store's local directories: one lock for short changes, and one locked file per living owner.

Both are advisory file locks. The kernel releases them when a process dies in any way, and no reused process ID can pass
for a living owner. Touches ``<root>/lock`` and ``<root>/owners/``.
"""

from __future__ import annotations

import errno
import fcntl
import os
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from statemgr.errors import UnavailableError
from statemgr.local.durable import open_regular
from statemgr.ports import Clock

_FLAGS = os.O_RDWR | os.O_CREAT
#: No file of that name, or something else: nobody gives a sign of life there.
_NO_SIGN = {errno.ENOENT, errno.ELOOP, errno.EISDIR, errno.ENXIO}
_DEADLINE_SECONDS = 60.0
_STEP_SECONDS = 0.005


class Owner:
    """A sign of life that lasts as long as this object (or its process).

    Args:
        directory: where the signs of all owners are.
        token: this owner's name, unique.
    """

    def __init__(self, directory: Path, token: str) -> None:
        self.token = token
        self._path = directory / token
        self._give_sign()

    def _give_sign(self) -> None:
        self._descriptor = open_regular(self._path, _FLAGS | os.O_EXCL)
        fcntl.flock(self._descriptor, fcntl.LOCK_EX)
        self._end = weakref.finalize(self, _end, self._path, self._descriptor, os.getpid())

    def renew(self) -> None:
        """Give the sign of life again where somebody deleted its file. The lock of the directories is held.

        Raises: OSError when the directory of the signs is gone too.
        """
        try:
            there, own = os.lstat(self._path), os.fstat(self._descriptor)
            if (there.st_dev, there.st_ino) == (own.st_dev, own.st_ino):
                return
            os.unlink(self._path)
        except FileNotFoundError:
            pass
        ended, before = self._end, self._descriptor
        ended.detach()
        self._give_sign()
        os.close(before)

    def close(self) -> None:
        """Give the sign of life up: what still bears this owner's name may be removed by others."""
        self._end()


def _end(path: Path, descriptor: int, process: int) -> None:
    # a forked child runs this too when it ends, and must not declare its parent dead
    if process == os.getpid():
        with suppress(OSError):
            os.unlink(path)
    os.close(descriptor)


def is_alive(directory: Path, token: str) -> bool:
    """Whether the owner of that name still exists; the file of a dead one is removed."""
    path = directory / token
    try:
        descriptor = open_regular(path, os.O_RDWR)
    except OSError as error:
        if error.errno in _NO_SIGN:
            return False
        raise
    try:
        if not _locked(descriptor):
            return True
        with suppress(FileNotFoundError):
            os.unlink(path)
        return False
    finally:
        os.close(descriptor)


@contextmanager
def exclusive_if_free(lock: Path) -> Iterator[bool]:
    """Hold a lock file against all other threads and processes, unless one has it. Gives whether it is held."""
    descriptor = open_regular(lock, _FLAGS)
    try:
        yield _locked(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def exclusive(lock: Path, clock: Clock) -> Iterator[None]:
    """Hold a lock file against all other threads and processes.

    Raises: UnavailableError when another one holds it for a minute.
    """
    deadline = clock.monotonic() + _DEADLINE_SECONDS
    descriptor = open_regular(lock, _FLAGS)
    try:
        while not _locked(descriptor):
            if clock.monotonic() >= deadline:
                raise UnavailableError(
                    "another process holds the lock of a local directory",
                    hint="if that process is stopped or hangs, end it; otherwise try again later",
                    path=lock,
                )
            clock.sleep(_STEP_SECONDS)
        yield
    finally:
        os.close(descriptor)


def _locked(descriptor: int) -> bool:
    """Lock a file until its descriptor is closed, unless another descriptor has it locked."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
