"""Directories that several processes share: locks, and signs that show which process still uses its part.

::

    <root>/lock              locked for short changes
    <root>/owners/<token>    a file that its owner keeps locked as long as it lives
    <root>/aside/            a root for processes that did not get the lock in time

Both are advisory file locks. The kernel releases them when a process dies in any way, and no reused process ID can pass
for a living owner. But a process that is suspended, or whose disk hangs, keeps its locks. These directories hold a
cache, so other processes then go on in ``aside``, without it. The signs of one process are links to one file, so it
needs one descriptor for any number of roots. :class:`Scratch` is the simplest such directory: temporary files of each
process.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
import shutil
import threading
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from statemgr.errors import UnavailableError
from statemgr.ids import IdSource
from statemgr.local import durable
from statemgr.os_errors import disk_errors
from statemgr.ports import Clock

log = logging.getLogger(__name__)
_FLAGS = os.O_RDWR | os.O_CREAT
#: Errors of opening a path that has no regular file: no owner of that name is alive.
_NO_SIGN = {errno.ENOENT, errno.ELOOP, errno.EISDIR, errno.ENXIO}
_DEADLINE_SECONDS = 60.0
_STEP_SECONDS = 0.005
_ASIDE = "aside"
#: Names of owners. Anything with another name is not ours, and stays.
_TOKEN = re.compile(r"[0-9a-f]{16}\Z")


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
        self._file = _locked_file(self._path)
        self._end = weakref.finalize(self, _end, self._path, os.getpid())

    def gives_sign(self) -> bool:
        """Whether other processes see that this owner lives: its file still exists."""
        return _is_at(self._path, self._file.descriptor)

    def renew(self) -> None:
        """Create the file of the sign of life again if somebody deleted it. The caller holds the lock of the root.

        Raises: OSError if the directory of the signs is gone too.
        """
        if self.gives_sign():
            return
        with suppress(FileNotFoundError):
            os.unlink(self._path)
        self._end.detach()
        self._give_sign()

    def close(self) -> None:
        """Give up the sign of life, so that others may remove what has this owner's name."""
        self._end()


def _end(path: Path, process: int) -> None:
    # a forked child runs this too when it ends, and must not declare its parent dead
    if process == os.getpid():
        with suppress(OSError):
            os.unlink(path)


class _LockedFile:
    """A new file that is locked as long as this object, or its process, exists."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.descriptor = durable.open_regular(path, _FLAGS | os.O_EXCL)
        weakref.finalize(self, os.close, self.descriptor)
        fcntl.flock(self.descriptor, fcntl.LOCK_EX)


#: (process, file system) → the file that the next sign of life there is a link to.
_files: weakref.WeakValueDictionary[tuple[int, int], _LockedFile] = weakref.WeakValueDictionary()


def _locked_file(path: Path) -> _LockedFile:
    """The locked file of this process, with a link at ``path``. If there can be none, ``path`` is a new locked file."""
    key = os.getpid(), os.stat(path.parent).st_dev
    file = _files.get(key)
    if file is not None and _is_at(file.path, file.descriptor):
        with suppress(OSError):  # too many links, or a file system without links
            os.link(file.path, path, follow_symlinks=False)
            return file
    file = _files[key] = _LockedFile(path)
    return file


def _is_at(path: Path, descriptor: int) -> bool:
    """Whether a path still names an open file."""
    try:
        there, own = os.lstat(path), os.fstat(descriptor)
    except FileNotFoundError:
        return False
    return (there.st_dev, there.st_ino) == (own.st_dev, own.st_ino)


def is_alive(directory: Path, token: str) -> bool:
    """Whether the owner of that name still exists. The sign of a dead one is removed."""
    path = directory / token
    try:
        descriptor = durable.open_regular(path, os.O_RDWR)
    except OSError as error:
        if error.errno in _NO_SIGN:
            return False
        raise
    try:
        # shared: somebody else may look at another sign of the same dead process, which is the same file
        if not _locked(descriptor, fcntl.LOCK_SH):
            return True
        with suppress(FileNotFoundError):
            os.unlink(path)
        return False
    finally:
        os.close(descriptor)


@contextmanager
def exclusive_if_free(lock: Path) -> Iterator[bool]:
    """Hold a lock file against all other threads and processes, unless one of them has it. Yields whether it is
    held."""
    descriptor = durable.open_regular(lock, _FLAGS)
    try:
        yield _locked(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def exclusive(lock: Path, clock: Clock) -> Iterator[bool]:
    """Hold a lock file against all other threads and processes. Yields: whether it is in its place; if somebody has
    removed it in the meantime, others lock another file.

    Raises: UnavailableError if another one holds it for a minute.
    """
    deadline = clock.monotonic() + _DEADLINE_SECONDS
    descriptor = durable.open_regular(lock, _FLAGS)
    try:
        while not _locked(descriptor):
            if clock.monotonic() >= deadline:
                raise UnavailableError(
                    "another process holds the lock of a local directory",
                    hint="if that process is stopped or hangs, end it; otherwise try again later",
                    path=lock,
                )
            clock.sleep(_STEP_SECONDS)
        yield _is_at(lock, descriptor)
    finally:
        os.close(descriptor)


def _locked(descriptor: int, kind: int = fcntl.LOCK_EX) -> bool:
    """Lock a file until its descriptor is closed, unless another descriptor has it locked."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


class SharedRoot:
    """A directory with a lock and owners. It is created when it is needed.

    Args:
        base: a directory above the root, at any depth. No level in between may be a link. Default: the root's parent.
    """

    #: Directories below the root.
    parts: tuple[str, ...] = ("owners",)

    def __init__(self, root: Path, clock: Clock, ids: IdSource, base: Path | None = None) -> None:
        self._root = root
        self._base = base or root.parent
        self._levels = root.relative_to(self._base).parts
        self._clock = clock
        self._ids = ids
        self._owner: Owner | None = None
        #: Roots that this object has left because their lock was held, and its owners there.
        self._left: list[tuple[Path, Owner | None]] = []
        #: Held by the thread that has the lock file, or waits for it: a thread may not leave a root in which another
        #: one works.
        self._turn = threading.Lock()

    def _exists(self) -> bool:
        """Raises: InvalidError if a level of the path is a link; OSError."""
        return durable.check_private(self._base, *self._levels).is_dir()

    @contextmanager
    def _holding_lock(self) -> Iterator[None]:
        """Create what is missing, and hold the lock. If another process holds it for a minute, this object goes on in
        another root, which is empty at first. Raises: InvalidError, OSError."""
        with self._turn, ExitStack() as held:
            while True:
                root = durable.make_private(self._base, *self._levels, inside=self.parts)
                try:
                    is_in_place = held.enter_context(exclusive(root / "lock", self._clock))
                except UnavailableError as error:
                    self._leave(root, error)
                    continue
                if is_in_place:
                    break
                held.close()  # another process has removed this root meanwhile
            yield

    def _leave(self, root: Path, why: UnavailableError) -> None:
        log.warning("%s; this process goes on without the local copies there, in %s", why, root / _ASIDE)
        self._left.append((root, self._owner))
        self._owner = None
        self._levels += (_ASIDE,)
        self._root = root / _ASIDE

    def _remove_aside(self) -> None:
        """Remove the root aside when nobody uses it any more. The caller holds the lock."""
        aside = self._root / _ASIDE
        if not durable.check_private(self._root, _ASIDE, "owners").is_dir():
            return
        with exclusive_if_free(aside / "lock") as is_free:
            if is_free and not any(is_alive(aside / "owners", token) for token in os.listdir(aside / "owners")):
                durable.remove(aside)

    def _own(self) -> Owner:
        """This owner, with its sign of life in place. The caller holds the lock."""
        owner = self._owner  # another thread may leave this root meanwhile
        if owner is None:
            owner = self._owner = Owner(self._root / "owners", self._ids.token()[:16])
        else:
            owner.renew()
        return owner

    def _alive(self) -> set[str]:
        """Living owners, including this one even if its sign was deleted. The caller holds the lock."""
        signs = self._root / "owners"
        alive = {token for token in os.listdir(signs) if is_alive(signs, token)}
        owner = self._owner  # another thread may leave this root meanwhile
        return alive | {owner.token} if owner is not None else alive

    def close(self) -> None:
        """Give up what this object owns. Idempotent."""
        if self._owner is not None:
            self._owner.close()
            self._owner = None
        while self._left:
            _, owner = self._left.pop()
            if owner is not None:
                owner.close()


class Scratch(SharedRoot):
    """Temporary files: ``<root>/<token>/`` has those of one process, which nobody needs after its end.

    A call creates this process's directory and returns it, after removing those of dead processes.
    """

    def __init__(self, root: Path, clock: Clock, ids: IdSource, base: Path | None = None) -> None:
        super().__init__(root, clock, ids, base)
        self._mutex = threading.Lock()

    def __call__(self) -> Path:
        """Raises: DiskFull, InvalidError (a link in the path)."""
        with self._mutex, disk_errors(self._root):
            # local files are a cache: somebody may remove any of them while a process runs
            if self._owner is not None and not durable.check_private(self._root, self._owner.token).is_dir():
                self._owner = None
            if self._owner is None or not self._owner.gives_sign():
                with self._holding_lock():
                    own = self._root / self._own().token
                    own.mkdir(0o700, exist_ok=True)
                    self._remove_dead()
            assert self._owner is not None
            return self._root / self._owner.token

    def tidy(self) -> None:
        """Remove the files of dead processes. Raises: AccessDenied."""
        with disk_errors(self._root):
            if self._exists():
                with self._holding_lock():
                    self._remove_dead()

    def close(self) -> None:
        """Remove this process's directory. Idempotent. The next call creates a new one."""
        with self._mutex:
            if self._owner is not None:
                shutil.rmtree(self._root / self._owner.token, ignore_errors=True)
            super().close()

    def _remove_dead(self) -> None:
        alive = self._alive()
        for entry in self._root.iterdir():
            if _TOKEN.match(entry.name) and entry.name not in alive:
                with suppress(OSError):
                    durable.remove(entry)
        self._remove_aside()
