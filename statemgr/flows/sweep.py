"""One sweep per machine bounds what attempts leave on its disk: tasks move between executors, and may never come back.

Steps, in the background of an attempt, at most every ten minutes on a machine:

1. of which tasks has no attempt left a local copy here for an hour
2. remove their local copies, and what dead processes left half made

Everything that is removed is a cache. What a living process has open, or made a few minutes ago, stays.
"""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path

from statemgr.errors import StatemgrError
from statemgr.flows.parts import Parts
from statemgr.ids import task_name
from statemgr.local import durable
from statemgr.local.owners import exclusive_if_free

log = logging.getLogger(__name__)
_EVERY_S = 600
_UNUSED_S = 3600


class Sweep:
    """The sweeps of one process. ``stamp`` is a file that all processes of the machine share."""

    def __init__(self, parts: Parts, stamp: Path) -> None:
        self._parts = parts
        self._stamp = stamp
        self._next_s = 0.0

    def start(self) -> None:
        """Begin a sweep on a thread of its own if one is due; nothing waits for it."""
        now = self._parts.clock.monotonic()
        if now < self._next_s:
            return
        self._next_s = now + _EVERY_S
        threading.Thread(target=self._tried, name="statemgr-sweep", daemon=True).start()

    def run(self) -> None:
        """Sweep now, unless another process here does, or has done so lately. Raises: OSError, StatemgrError."""
        with exclusive_if_free(self._stamp) as is_free:
            now_s = self._parts.clock.time_ns() / 1e9
            found = os.stat(self._stamp)
            if not is_free or (found.st_size and abs(now_s - found.st_mtime) < _EVERY_S):
                return
            for index in range(self._parts.config.tasks):
                for store in self._parts.config.stores:
                    self._sweep(task_name(index), store, now_s)
            durable.write_file(self._stamp, b"swept\n", synced=False)

    def _sweep(self, task: str, store: str, now_s: float) -> None:
        try:
            # every attempt adds a directory to it and removes another
            used_s = os.lstat(self._parts.task_directory(task) / store / "committed").st_mtime
        except FileNotFoundError:
            return
        if now_s - used_s > _UNUSED_S:
            self._parts.directories(task, store).keep_only(())

    def _tried(self) -> None:
        try:
            self.run()
        except (StatemgrError, OSError) as error:
            log.warning("local copies that nobody uses are not removed, it is tried again: %s", error)
