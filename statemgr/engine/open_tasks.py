"""The tasks that this process has open. It opens a task only once at a time.

An opening belongs to a caller who may lose the task meanwhile: ``still_owned`` says whether the caller still has it. A
task that is being closed, or whose caller has lost it, gives way: the next opening of the same task waits for it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from statemgr.engine.task import Task
from statemgr.errors import InvalidError, OpeningCancelled
from statemgr.flows.owner import always
from statemgr.ports import Clock, Progress
from statemgr.telemetry.liveness import NOT_YET, Condition

_LOOK_S = 0.05


@dataclass(eq=False)
class Assignment:
    """A task's name, whether the caller still has it, and the task once it is open."""

    name: str
    still_owned: Callable[[], bool] = always
    task: Task | None = None

    def check(self) -> None:
        """Raises: OpeningCancelled if the task was taken away from the caller."""
        if not self.still_owned():
            raise OpeningCancelled("the task was taken away while it was being opened", task=self.name)

    def checked(self, progress: Progress) -> Progress:
        """A function that reports progress, and ends the restore if the task was taken away."""

        def report(what: str, done: int, total: int) -> None:
            self.check()
            progress(what, done, total)

        return report

    @property
    def gives_way(self) -> bool:
        """Whether this assignment is ending, so that another opening of the task can wait for it."""
        return not self.still_owned() or (self.task is not None and self.task.closed)


class OpenTasks:
    """Tasks that are open or being opened. Safe to use from many threads."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._changed = threading.Condition()
        self._assignments: dict[str, Assignment] = {}

    def claim(self, assignment: Assignment) -> None:
        """Begin to open a task. Waits for an earlier assignment that gives way. The wait has no deadline: each step of
        a close or an opening has its own, and a process that was suspended would exceed any other.

        Raises: InvalidError if the task is open; OpeningCancelled.
        """
        with self._changed:
            while (earlier := self._assignments.get(assignment.name)) is not None:
                if not earlier.gives_way:
                    raise InvalidError(
                        "the task is already open in this process", hint="close it first", task=assignment.name
                    )
                assignment.check()
                self._clock.wait(self._changed, _LOOK_S)
            self._assignments[assignment.name] = assignment

    def condition(self) -> Condition:
        """Which tasks are open, and which are being opened. Not ready if there are none."""
        with self._changed:
            found = list(self._assignments.values())
        opening = tuple(one.name for one in found if one.task is None)
        return Condition(unready=() if found else (NOT_YET,), restoring=opening, open=len(found) - len(opening))

    def open(self) -> list[Task]:
        """The tasks that are open now."""
        with self._changed:
            found = [one.task for one in self._assignments.values()]
        return [task for task in found if task is not None and not task.closed]

    def forget(self, name: str) -> None:
        """The task is closed, or its opening has failed."""
        with self._changed:
            self._assignments.pop(name, None)
            self._changed.notify_all()

    def close(self) -> None:
        """Close every open task without a commit."""
        for assignment in list(self._assignments.values()):
            if assignment.task is not None:
                assignment.task.close()
