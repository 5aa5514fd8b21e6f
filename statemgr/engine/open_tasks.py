"""Which tasks this process has open: a task is opened once at a time, and a close in progress is waited for.

An opening belongs to somebody who may lose the task meanwhile: ``still_owned`` says whether it still has it. Whoever
lost it gives way to the next opening of the same task.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from statemgr.engine.task import Task
from statemgr.errors import InvalidError, OpeningCancelled
from statemgr.flows.published import always
from statemgr.kafka.publisher import TransactionalPublisher
from statemgr.ports import Clock, Progress

_LOOK_S = 0.05


@dataclass(frozen=True)
class Assignment:
    """Who a task is opened for: its name, and whether the caller still has it."""

    task: str
    still_owned: Callable[[], bool] = always

    def check(self) -> None:
        """Raises: OpeningCancelled when the task was taken away meanwhile."""
        if not self.still_owned():
            raise OpeningCancelled("the task was taken away while it was being opened", task=self.task)

    def checked(self, progress: Progress) -> Progress:
        """Report progress, and end the restore when the task was taken away."""

        def report(what: str, done: int, total: int) -> None:
            self.check()
            progress(what, done, total)

        return report


@dataclass
class _Entry:
    assignment: Assignment
    task: Task | None = None  # None: it is being opened

    @property
    def gives_way(self) -> bool:
        return not self.assignment.still_owned() or (self.task is not None and self.task.closed)


class OpenTasks:
    """The tasks of this process, and the transactional IDs that it took over for tasks that it is about to open."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._changed = threading.Condition()
        self._entries: dict[str, _Entry] = {}
        self._fenced: dict[str, TransactionalPublisher] = {}

    def claim(self, assignment: Assignment) -> None:
        """Begin to open a task. One that is being closed, or was lost by its owner, is waited for: each of its steps
        has a deadline of its own, and a process that was suspended has missed any other.

        Raises: InvalidError when it is open; OpeningCancelled.
        """
        with self._changed:
            while (entry := self._entries.get(assignment.task)) is not None:
                if not entry.gives_way:
                    raise InvalidError(
                        "the task is already open in this process", hint="close it first", task=assignment.task
                    )
                assignment.check()
                self._clock.wait(self._changed, _LOOK_S)
            self._entries[assignment.task] = _Entry(assignment)

    def opened(self, name: str, task: Task) -> None:
        """The opening has ended well."""
        with self._changed:
            self._entries[name].task = task

    def forget(self, name: str) -> None:
        """The task is closed, or its opening has failed."""
        with self._changed:
            self._entries.pop(name, None)
            self._changed.notify_all()

    def put_fenced(self, name: str, publisher: TransactionalPublisher | None) -> None:
        """Keep the publisher whose ID was taken over for the opening that follows; None: there is none."""
        with self._changed:
            before = self._fenced.pop(name, None)
            if publisher is not None:
                self._fenced[name] = publisher
        if before is not None:
            before.close()

    def take_fenced(self, name: str) -> TransactionalPublisher | None:
        """The publisher that was kept for this opening, if any."""
        with self._changed:
            return self._fenced.pop(name, None)

    def close(self) -> None:
        """Close every task that is open, without committing, and let go of the IDs that were not used."""
        for name in list(self._fenced):
            self.put_fenced(name, None)
        for entry in list(self._entries.values()):
            if entry.task is not None:
                entry.task.close()
