"""A directory for temporary files, which no process needs after its end. Touches only what is below its path.

::

    <path>/<token>/            the files of one process
    <path>/owners/<token>      a file that is locked while that process lives
    <path>/lock                locked while a process starts, or removes files of dead processes
"""

from __future__ import annotations

import re
import shutil
import threading
from contextlib import suppress
from pathlib import Path

from statemgr.ids import IdSource
from statemgr.local import durable, levels
from statemgr.local.owners import Owner, exclusive, is_alive
from statemgr.local.transfer_files import disk_errors
from statemgr.ports import Clock

_OWNERS, _LOCK = "owners", "lock"
#: Names of the directories of processes. Anything with another name is not ours, and stays.
_OURS = re.compile(r"[0-9a-f]{16}\Z")


class Scratch:
    """A call creates this process's directory and returns it, after removing those of dead processes.

    Args:
        base: a directory above the path, at any depth. No level in between may be a link. Default: the path's parent.
    """

    def __init__(self, path: Path, clock: Clock, ids: IdSource, base: Path | None = None) -> None:
        self._path = path
        self._base = base or path.parent
        self._levels = path.relative_to(self._base).parts
        self._clock = clock
        self._ids = ids
        self._lock = threading.Lock()
        self._owner: Owner | None = None

    def __call__(self) -> Path:
        """Raises: DiskFull, UnavailableError (another process holds the lock), InvalidError (a link in the path)."""
        with self._lock, disk_errors(self._path):
            # local files are a cache: somebody may remove them while a process runs
            if self._owner is None or not levels.check(self._path, self._owner.token).is_dir():
                self._begin()
            else:
                self._owner.renew()
            assert self._owner is not None
            return self._path / self._owner.token

    def tidy(self) -> None:
        """Remove the files of dead processes. Raises: UnavailableError."""
        with disk_errors(self._path):
            if levels.check(self._base, *self._levels, _OWNERS).is_dir():
                with exclusive(self._path / _LOCK, self._clock):
                    self._remove_dead()

    def close(self) -> None:
        """Remove this process's directory. Idempotent; the next call creates a new one."""
        with self._lock:
            owner, self._owner = self._owner, None
            if owner is not None:
                shutil.rmtree(self._path / owner.token, ignore_errors=True)
                owner.close()

    def _begin(self) -> None:
        owners = levels.make(self._base, *self._levels, _OWNERS)
        with exclusive(self._path / _LOCK, self._clock):
            self._remove_dead()
            self._owner = Owner(owners, self._ids.token()[:16])
            (self._path / self._owner.token).mkdir(0o700)

    def _remove_dead(self) -> None:
        for entry in self._path.iterdir():
            if not _OURS.match(entry.name) or is_alive(self._path / _OWNERS, entry.name):
                continue
            with suppress(OSError):
                durable.remove(entry)
