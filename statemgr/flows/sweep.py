"""Sweep: limits the disk space of local copies on a machine. Tasks move between executors, and may never come back.

Steps, in the background of an attempt, at most every ten minutes on a machine:

1. find the tasks for which no attempt has left a local copy here for an hour
2. remove their local copies, and unfinished directories of dead processes

Everything that it removes is a cache. Directories that a living process has open, or made a few minutes ago, stay.
"""

from __future__ import annotations

import os
from pathlib import Path

from statemgr.backends.services import Services
from statemgr.flows.worker import Worker
from statemgr.ids import task_name
from statemgr.local import durable
from statemgr.local.owners import exclusive_if_free

_EVERY_S = 600
_UNUSED_S = 3600


class Sweep:
    """The sweeps of one process. ``stamp``: a file that all processes of the machine share."""

    def __init__(self, services: Services, stamp: Path) -> None:
        self._services = services
        self._stamp = stamp
        self._next_s = 0.0
        self._worker: Worker[None] = Worker(services, "sweep", services.config.job_name, background=True)

    def start(self) -> None:
        """If a sweep is due, start it on another thread. Nothing waits for it."""
        now = self._services.clock.monotonic()
        if now < self._next_s:
            return
        self._next_s = now + _EVERY_S
        self._worker.attempt("removing local copies that nobody uses", self.run)

    def run(self) -> None:
        """Sweep now, unless another process does or has done so recently. Raises: OSError, StatemgrError."""
        with exclusive_if_free(self._stamp) as is_free:
            now_s = self._services.clock.time_ns() / 1e9
            found = os.stat(self._stamp)
            if not is_free or (found.st_size and abs(now_s - found.st_mtime) < _EVERY_S):
                return
            for index in range(self._services.config.tasks):
                for store in self._services.config.stores:
                    self._sweep(task_name(index), store, now_s)
            durable.write_file(self._stamp, b"swept\n", synced=False)

    def _sweep(self, task: str, store: str, now_s: float) -> None:
        try:
            # every attempt adds a directory here and removes another one
            used_s = os.lstat(self._services.task_directory(task) / store / "committed").st_mtime
        except FileNotFoundError:
            return
        if now_s - used_s > _UNUSED_S:
            self._services.directories(task, store).keep_only(())
