"""Removes the local states of tasks that this machine does not run any more.

Tasks move between machines, and may never come back. Steps of :class:`Sweep`, in every process that has tasks:

1. touch the directories of these tasks
2. if no process here has looked for a sixth of ``state.cleanup.delay.ms``, look whose directories nobody has touched
   since the last look
3. if that is so for the sixth time in a row, remove what is below: local copies, segments, and unfinished directories
   of dead processes

A look compares the times of directories with those that the last one saw, and with no clock. So neither a machine that
was off, nor a query that runs once a day, loses the states that it is about to open. What a living process has open, or
made a few minutes ago, stays. So does the note that this machine has published state of the task.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from statemgr.errors import InvalidError, StatemgrError
from statemgr.flows.worker import Worker
from statemgr.ids import task_at, task_name
from statemgr.local import durable
from statemgr.local.shared_directories import exclusive_if_free
from statemgr.services import Services

log = logging.getLogger(__name__)
_LOOKS = 6
_NOTE, _MOST_NOTE = "swept", 16 * 1024 * 1024


def touch(services: Services, task: str) -> None:
    """Step 1. A failure is no error."""
    now_ns = services.clock.time_ns()
    with suppress(OSError, InvalidError):
        os.utime(services.task_directory(task), ns=(now_ns, now_ns))


class Sweep:
    """The sweeps of one process. Safe to use from many threads."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._every_s = services.config.state_cleanup_delay_ms / 1000 / _LOOKS
        self._next_s = -math.inf
        self.worker: Worker[None] = Worker(services, "sweep", f"job {services.config.job_name}", background=True)

    def start(self, tasks: Iterable[str]) -> None:
        """Step 1 for the tasks that this process has. If it is time to look, look on another thread."""
        for task in tasks:
            touch(self._services, task)
        now_s = self._services.clock.monotonic()
        if now_s >= self._next_s and self.worker.attempt("looking for local states that nobody uses", self.look):
            self._next_s = now_s + self._every_s

    def look(self) -> None:
        """Steps 2 and 3, unless another process looks or has just done so. Raises: OSError, InvalidError."""
        job = self._services.task_directory(task_name(0)).parent
        if not job.is_dir():
            return
        with exclusive_if_free(job / _NOTE) as is_free:
            now_ms = self._services.clock.time_ns() // 1_000_000
            looked_ms, before = _read(job / _NOTE)
            if not is_free or abs(now_ms - looked_ms) < self._every_s * 1000:
                return
            found = {}
            for directory in sorted(job.iterdir()):
                task = task_at(directory.name)
                if task is None or not directory.is_dir() or directory.is_symlink():
                    continue
                touched = os.lstat(directory).st_mtime_ns
                last, looks = before.get(task, (None, 0))
                looks = looks + 1 if touched == last else 0
                if looks == _LOOKS and not self._remove(task, directory):
                    looks -= 1  # the next look tries again
                found[task] = touched, looks
            durable.write_note(job / _NOTE, [now_ms, found])

    def _remove(self, task: str, directory: Path) -> bool:
        """Step 3. Returns: whether nothing is left to try again."""
        services = self._services
        try:
            for store in sorted(durable.directories_with(directory, "committed")):
                services.directories(task, store).keep_only(())
                if (config := services.config.stores.get(store)) is not None:
                    for _, manager in services.segment_backends(config):
                        manager.forget_local(services.identity(task, store))
        except (StatemgrError, OSError) as error:
            log.warning("%s: the local state, which nobody uses, was not removed: %s", task, error)
            return False
        log.info("%s: the local state was removed, because no process of this machine has the task", task)
        return True


def _read(note: Path) -> tuple[int, dict[str, tuple[int, int]]]:
    """When the last look was, in epoch milliseconds, and task → when its directory had been touched, in nanoseconds,
    and in how many looks it had not been touched."""
    with suppress(OSError, ValueError, TypeError, AttributeError):
        looked_ms, found = durable.read_note(note, _MOST_NOTE)
        return int(looked_ms), {task: (int(touched), int(looks)) for task, (touched, looks) in found.items()}
    return 0, {}
