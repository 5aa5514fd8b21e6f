"""Opening a task of a consumer loop, once at a time in a process.

Steps of :meth:`TaskOpener.open`:

1. claim the task in this process, and wait for an earlier assignment of it that gives way
2. verify the job's topics
3. fence older owners: the task's transactional ID first, then that of an owner of the whole job
4. read what is published, and refuse what would lose state (:func:`statemgr.flows.opening.open_job.read_published`), or
   process input together with a job that this one was adopted from
5. compare the input topics with those of the checkpoint
6. restore and open every store
7. adopt the first snapshots that ``statemgr materialize`` has offered
8. publish the checkpoint again if the next commit would have to change something even without input: a backend to fill,
   an input topic that was created again, or one-shot permissions to use up. A task that begins at the end of its input
   does not know its offsets yet, so its first commit uses them up
9. from now on, repair damaged backups in the background

An opening belongs to a caller who may lose the task meanwhile: ``still_owned`` says whether the caller still has it. A
task that is being closed, or whose caller has lost it, gives way.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from statemgr.engine.task import Task
from statemgr.engine.task_coordinator import TaskCoordinator
from statemgr.errors import InvalidError, OpeningCancelled
from statemgr.flows.opening.adopted_job import OldJobWatch
from statemgr.flows.opening.open_job import JobTopics, read_published
from statemgr.flows.opening.opening_checks import serdes_in_force
from statemgr.flows.opening.restore import restore_task
from statemgr.flows.owner import WAITING_AT_ONCE, Owner, always
from statemgr.kafka.input_topics import InputTopics, TaskInputs
from statemgr.model.checkpoint import Layout
from statemgr.model.jobs.permissions import Permissions
from statemgr.phases import flow
from statemgr.ports import CheckpointLog, Clock, Progress
from statemgr.services import Closing, Services
from statemgr.telemetry.liveness import NOT_YET, Condition
from statemgr.telemetry.metrics import Metrics

_LOOK_S = 0.05


@dataclass
class TaskOpener:
    """Opens the tasks of one process. Safe to use from many threads."""

    services: Services
    log: CheckpointLog
    layout: Layout
    topics: JobTopics
    inputs: InputTopics
    metrics: Metrics

    def __post_init__(self) -> None:
        self._tasks = OpenTasks(self.services.clock)
        self._old_job = OldJobWatch(self.services)
        #: task → its owner; :meth:`fence` has fenced all other owners for the opening that follows
        self._fenced: dict[str, Owner] = {}

    def fence(self, tasks: Sequence[str], still_owned: Callable[[str], bool], *, allow_empty_start: bool) -> None:
        """Steps 2 and 3 for several tasks at once. See :meth:`statemgr.StateManager.fence_tasks`."""
        for task in tasks:
            self.services.config.check_task(task)
        self.topics.ensure(allow_empty_start=allow_empty_start)

        fenced: dict[str, Owner] = {}

        def fence_one(task: str) -> None:
            self._release(task)
            if still_owned(task):
                fenced[task] = Owner.take(self.services, self.log, task, fence_others=False)

        try:
            self.services.in_parallel("fence", fence_one, tasks, WAITING_AT_ONCE)
            if fenced:  # the owners of the whole job are the same ones for all tasks
                next(iter(fenced.values())).fence_others()
        except BaseException:
            for owner in fenced.values():
                owner.close()
            raise
        for task, owner in fenced.items():
            self._release(task)
            self._fenced[task] = owner

    def open(self, assignment: Assignment, permissions: Permissions, progress: Progress) -> Task:
        """See :meth:`statemgr.StateManager.open_task`."""
        self.services.config.check_task(assignment.name)
        self._tasks.claim(assignment)  # 1
        try:
            self.topics.ensure(allow_empty_start=permissions.allow_empty_start)  # 2
            with flow("restore", assignment.name, self.services.config.job_key) as restoring:
                assignment.task = opened = self._open(assignment, permissions, progress)
                restoring.attributes |= _restored(opened)
        except BaseException as error:
            self._tasks.forget(assignment)
            self.metrics.forget(assignment.name)
            if not isinstance(error, OpeningCancelled):
                self.metrics.failed(error)
            raise
        opened.watch_backups()  # 9
        return opened

    def condition(self) -> Condition:
        """Which tasks are open, for the probes of the process."""
        return self._tasks.condition()

    def owners(self) -> list[TaskCoordinator]:
        """Those of the tasks that are open now."""
        return [task.owner for task in self._tasks.open()]

    def close(self) -> None:
        """Close every task without a commit, and release the IDs that no opening has used."""
        with Closing() as closing:
            closing.callback(self._tasks.close)
            for task in list(self._fenced):
                closing.callback(self._release, task)

    def _open(self, assignment: Assignment, permissions: Permissions, progress: Progress) -> Task:
        services, task = self.services, assignment.name
        with Closing() as undo:
            metrics = self.metrics.of(task)
            undo.callback(metrics.close)
            owner = self._owner(assignment)  # 3
            undo.callback(owner.close)
            found = read_published(owner, self.layout, [task], permissions, serdes_follow=True)  # 4
            published, permissions = owner.published, found.permissions[task]
            checkpoint = published.checkpoint(task)
            if (adopted := self.log.adopted()) is not None:
                self._old_job.check(adopted, task, checkpoint, permissions)
            published.serdes = serdes_in_force(services, checkpoint)
            known = checkpoint.input_topic_ids if checkpoint else {}
            inputs = TaskInputs(self.inputs, task, known, skip=permissions.allow_skipped_input)
            inputs.expect()  # 5
            with owner.explaining():
                stores, restored = restore_task(  # 6
                    services, task, checkpoint,
                    permissions=permissions, older=published.older(task), as_of=found.as_of,
                    progress=assignment.checked(progress), watch=metrics.restoring, by_need=True,
                    refill=found.refill[task],
                )  # fmt: skip
            for store in stores.values():
                undo.callback(store.close)
            coordinator = TaskCoordinator(owner, task, stores, found.refill[task], metrics, self.topics)
            opened = Task(
                services, task, coordinator, stores, restored, metrics, inputs, permissions,
                on_close=lambda: self._tasks.forget(assignment),
            )  # fmt: skip
            undo.callback(opened.close)
            coordinator.watched_by(self.metrics)
            assignment.check()
            for restore in restored:
                self.metrics.restored(restore)
            metrics.opened()
            metrics.measure(stores)
            metrics.watch(stores)
            coordinator.adopt_offers()  # 7
            changes = found.refill[task] or inputs.recreated or permissions.names or published.permits
            if changes and not (checkpoint is None and services.config.starts_latest):  # 8
                opened.commit(opened.start_offsets)
            undo.pop_all()
        return opened

    def _owner(self, assignment: Assignment) -> Owner:
        """The task's owner. :meth:`fence` has fenced the others, or this does. Raises: OpeningCancelled."""
        owner = self._fenced.pop(assignment.name, None)
        try:
            assignment.check()
            if owner is None:
                owner = Owner.take(self.services, self.log, assignment.name)
                assignment.check()
        except BaseException:
            if owner is not None:
                owner.close()
            raise
        owner.still_owned = assignment.still_owned
        return owner

    def _release(self, task: str) -> None:
        owner = self._fenced.pop(task, None)
        if owner is not None:
            owner.close()


def _restored(task: Task) -> dict[str, str | int]:
    """The attributes of a restore."""
    checkpoint = task.last_checkpoint
    return {
        "bytes": sum(one.bytes_fetched for one in task.restored),
        "records": sum(one.records for one in task.restored),
        "backends": ", ".join(sorted({one.factory for one in task.restored})),
        **({} if checkpoint is None else {"checkpoint": str(checkpoint.checkpoint_id)}),
    }


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

    def forget(self, assignment: Assignment) -> None:
        """The task is closed, or its opening has failed. Another opening of it may have begun since."""
        with self._changed:
            if self._assignments.get(assignment.name) is assignment:
                del self._assignments[assignment.name]
            self._changed.notify_all()

    def close(self) -> None:
        """Close every open task without a commit, whatever becomes of the others."""
        with Closing() as closing:
            for assignment in list(self._assignments.values()):
                if assignment.task is not None:
                    closing.callback(assignment.task.close)
