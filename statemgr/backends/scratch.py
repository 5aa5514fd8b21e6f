"""A directory for files that no process needs after its own end. Touches that directory only."""

from __future__ import annotations

import shutil
from contextlib import suppress
from pathlib import Path

from statemgr.backends.files import disk_errors
from statemgr.ports import Clock

_LIFE_NS = 24 * 3600 * 10**9


class Scratch:
    """Called, it makes the directory and returns it. What a dead process left there goes after a day."""

    def __init__(self, path: Path, clock: Clock) -> None:
        self._path = path
        self._clock = clock
        self._tidied = False

    def __call__(self) -> Path:
        """Raises: DiskFull."""
        with disk_errors(self._path):
            self._path.mkdir(parents=True, exist_ok=True)
        if not self._tidied:
            self._tidied = True
            self._tidy()
        return self._path

    def _tidy(self) -> None:
        for entry in self._path.iterdir():
            with suppress(OSError):
                if self._clock.time_ns() - entry.lstat().st_mtime_ns < _LIFE_NS:
                    continue
                if entry.is_dir() and not entry.is_symlink():
                    shutil.rmtree(entry)
                else:
                    entry.unlink()
