"""Removes the local states that a machine does not need any more.

Tasks move between machines, and may never come back; stores are removed from the configuration; a command that builds
whole states is killed. Steps of :class:`Sweep`, in every process that has tasks:

1. touch the directories of these tasks
2. if no process here has looked for a sixth of ``state.cleanup.delay.ms``, look for directories that nobody has touched
   since the last look: of tasks, of stores that the job does not have, and of ``rescale`` and ``materialize``
3. if that is so for the sixth time in a row, remove what is below: local copies, segments, and unfinished directories
   of dead processes. What a command has built, and would continue with, stays for 24 times as long

A look compares the times of directories with those that the last one saw, and with no clock. So neither a machine that
was off, nor a query that runs once a day, loses the states that it is about to open. What a living process has open, or
made a few minutes ago, stays. So does the note that this machine has published state of the task.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from statemgr.errors import InvalidError, StatemgrError
from statemgr.flows.opening.opening_checks import touch
from statemgr.flows.worker import Worker
from statemgr.ids import task_at, task_name
from statemgr.local import durable
from statemgr.local.shared_directories import exclusive_if_free
from statemgr.services import Services

log = logging.getLogger(__name__)
_LOOKS, _LOOKS_AT_WORK = 6, 6 * 24
#: Where commands build states: directories with a lock, which a command that runs has.
_WORK = ("rescale", "materialize/*/*")
_LOCK = "lock"
_NOTE, _MOST_NOTE = "swept", 16 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class _Place:
    """A directory that may be in use.

    Attributes:
        touched_ns: when something there changed.
        looks: after how many looks in a row without a change it is not.
        remove: removes what is below. Returns: False if somebody uses it after all.
    """

    key: str
    touched_ns: int
    looks: int
    remove: Callable[[], bool]


class Sweep:
    """The sweeps of one process. Safe to use from many threads."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._every_s = services.config.state_cleanup_delay_ms / 1000 / _LOOKS
        self._next_s = -math.inf
        self._starting = threading.Lock()
        self.worker: Worker[None] = Worker(services, "sweep", f"job {services.config.job_name}", background=True)

    def start(self, tasks: Iterable[str]) -> None:
        """Step 1 for the tasks that this process has. If it is time to look, look on another thread."""
        for task in tasks:
            touch(self._services, task)
        now_s = self._services.clock.monotonic()
        with self._starting:
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
            for place in self._places(job):
                last, looks = before.get(place.key, (None, 0))
                looks = looks + 1 if place.touched_ns == last else 0
                if looks == place.looks and not self._remove(place):
                    looks -= 1  # the next look tries again
                found[place.key] = place.touched_ns, looks
            durable.write_note(job / _NOTE, [now_ms, found])

    def _places(self, job: Path) -> Iterator[_Place]:
        for directory in sorted(job.iterdir()):
            task = task_at(directory.name)
            if task is None or not _is_ours(job, directory):
                continue
            stores = sorted(durable.directories_with(directory, "committed"))
            yield _Place(task, durable.changed_ns(directory), _LOOKS, partial(self._forget, task, stores))
            for store in stores:
                if store not in self._services.config.stores:
                    changed_ns = durable.changed_ns(directory / store / "committed")
                    yield _Place(f"{task}/{store}", changed_ns, _LOOKS, partial(self._forget, task, [store]))
        for directory in sorted(found for pattern in _WORK for found in job.glob(pattern)):
            if _is_ours(job, directory):
                changed_ns = max(map(durable.changed_ns, (directory, *directory.iterdir())))
                yield _Place(str(directory.relative_to(job)), changed_ns, _LOOKS_AT_WORK, partial(_clear, directory))

    def _remove(self, place: _Place) -> bool:
        """Step 3. Returns: False if the next look has to try again."""
        try:
            removed = place.remove()
        except (StatemgrError, OSError) as error:
            log.warning("%s: the local state, which nobody uses, was not removed: %s", place.key, error)
            return False
        if removed:
            log.info("%s: the local state was removed, because no process of this machine uses it", place.key)
        return removed

    def _forget(self, task: str, stores: Iterable[str]) -> bool:
        services = self._services
        for store in stores:
            services.directories(task, store).keep_only(())
            for factory in sorted(services.fed):
                services.backup_manager(factory).forget_local(services.identity(task, store))
        return True


def _clear(directory: Path) -> bool:
    with exclusive_if_free(directory / _LOCK) as is_free:
        if is_free:
            durable.remove_all_but(directory, _LOCK)
    return is_free


def _is_ours(job: Path, directory: Path) -> bool:
    """Whether it is a directory of this user, and not behind a link."""
    try:
        return durable.check_private(job, *directory.relative_to(job).parts).is_dir()
    except InvalidError:
        return False


def _read(note: Path) -> tuple[int, dict[str, tuple[int, int]]]:
    """When the last look was, in epoch milliseconds, and place → when it had been touched, in nanoseconds, and in how
    many looks it had not been touched."""
    with suppress(OSError, ValueError, TypeError, AttributeError):
        looked_ms, found = durable.read_note(note, _MOST_NOTE)
        return int(looked_ms), {key: (int(touched), int(looks)) for key, (touched, looks) in found.items()}
    return 0, {}
