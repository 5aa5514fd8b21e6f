"""A directory for files that no process needs after its own end. Touches what is below its path only.

::

    <path>/<token>/            one process's files
    <path>/owners/<token>      locked as long as that process lives
    <path>/lock                held while a process begins, or removes what dead ones left
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
#: The names of processes' directories. Whatever is called otherwise is not ours, and stays.
_OURS = re.compile(r"[0-9a-f]{16}\Z")


class Scratch:
    """Called, it makes this process's directory and returns it; first it removes those of dead processes.

    Args:
        base: the path is below it, at any depth; no level in between is entered through a link. Default: its parent.
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
        """Raises: DiskFull, UnavailableError (another process holds the lock), InvalidError (a link on the way)."""
        with self._lock, disk_errors(self._path):
            # what is local is a cache: it may be removed while a process runs
            if self._owner is None or not levels.check(self._path, self._owner.token).is_dir():
                self._begin()
            else:
                self._owner.renew()
            assert self._owner is not None
            return self._path / self._owner.token

    def tidy(self) -> None:
        """Remove what dead processes left, if there is anything. Raises: UnavailableError."""
        with disk_errors(self._path):
            if levels.check(self._base, *self._levels, _OWNERS).is_dir():
                with exclusive(self._path / _LOCK, self._clock):
                    self._remove_dead()

    def close(self) -> None:
        """Remove this process's directory. Repeating it is no error; another call makes another one."""
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
