"""Opening a task of a consumer loop.

Steps of :meth:`TaskOpener.open`:

1. claim the task in this process, and wait for an earlier assignment of it that gives way
2. verify the job's topics
3. fence older owners: the task's transactional ID first, then that of an owner of the whole job
4. read what is published, and refuse what would lose state (:func:`statemgr.flows.open_job.read_published`)
5. compare the input topics with those of the checkpoint
6. restore and open every store
7. adopt the first snapshots that ``statemgr materialize`` has offered
8. publish the checkpoint again if the next commit would have to change something even without input: a backend to fill,
   an input topic that was created again, or one-shot permissions to use up
9. from now on, repair damaged backups in the background
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from statemgr.backends.services import Services
from statemgr.engine.health import Condition
from statemgr.engine.metrics import Metrics
from statemgr.engine.open_tasks import Assignment, OpenTasks
from statemgr.engine.task import Task
from statemgr.engine.task_coordinator import TaskCoordinator
from statemgr.errors import InvalidError, OpeningCancelled
from statemgr.flows.open_job import JobTopics, fence_ids, in_parallel, read_published, take_over
from statemgr.flows.opening_checks import serdes_in_force
from statemgr.flows.ownership import explained
from statemgr.flows.restore import restore_task
from statemgr.ids import task_index
from statemgr.kafka.input_topics import InputTopics, TaskInputs
from statemgr.kafka.publisher import TransactionalPublisher, job_transactional_id, task_transactional_id
from statemgr.model.checkpoint import Layout
from statemgr.model.permissions import Permissions
from statemgr.phases import flow
from statemgr.ports import CheckpointLog, Progress


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
        #: task → its publisher, whose ID :meth:`fence` has taken over for the opening that follows
        self._fenced: dict[str, TransactionalPublisher] = {}

    def fence(self, tasks: Sequence[str], still_owned: Callable[[str], bool], *, allow_empty_start: bool) -> None:
        """Steps 2 and 3 for several tasks at once. See :meth:`statemgr.StateManager.fence_tasks`."""
        for task in tasks:
            self._check_name(task)
        self.topics.ensure(allow_empty_start=allow_empty_start)

        def fence_one(task: str) -> None:
            self._release(task)
            if still_owned(task):
                publisher = self._take_over(task)
                self._release(task)
                self._fenced[task] = publisher

        in_parallel(self.services, fence_one, tasks)

    def open(self, assignment: Assignment, permissions: Permissions, progress: Progress) -> Task:
        """See :meth:`statemgr.StateManager.open_task`."""
        self._check_name(assignment.name)
        self._tasks.claim(assignment)  # 1
        try:
            self.topics.ensure(allow_empty_start=permissions.allow_empty_start)  # 2
            with flow("restore", assignment.name, self.services.config.job_key) as restoring:
                assignment.task = opened = self._open(assignment, permissions, progress)
                restoring.attributes |= _restored(opened)
        except BaseException as error:
            self._tasks.forget(assignment.name)
            self.metrics.forget(assignment.name)
            if not isinstance(error, OpeningCancelled):
                self.metrics.failed(error)
            raise
        opened.watch_backups()  # 9
        return opened

    def condition(self) -> Condition:
        """Which tasks are open, for the probes of the process."""
        return self._tasks.condition()

    def close(self) -> None:
        """Close every task without a commit, and release the IDs that no opening has used."""
        for task in list(self._fenced):
            self._release(task)
        self._tasks.close()

    def _open(self, assignment: Assignment, permissions: Permissions, progress: Progress) -> Task:
        services, task = self.services, assignment.name
        others = [job_transactional_id(services.config)]
        with ExitStack() as undo:
            metrics = self.metrics.of(task)
            undo.callback(metrics.close)
            publisher = self._publisher(assignment)  # 3
            undo.callback(publisher.close)
            fence_ids(services, others)
            assignment.check()
            found = read_published(  # 4
                services, self.log, self.layout, [task], permissions,
                others=others, still_owned=assignment.still_owned, serdes_follow=True,
            )  # fmt: skip
            published, permissions = found.published, found.permissions[task]
            checkpoint = published.checkpoint(task)
            published.serdes = serdes_in_force(services, checkpoint)
            known = checkpoint.input_topic_ids if checkpoint else {}
            inputs = TaskInputs(self.inputs, task, known, skip=permissions.allow_skipped_input)
            inputs.expect()  # 5
            with explained(services, self.log, published):
                stores, restored = restore_task(  # 6
                    services, task, checkpoint,
                    permissions=permissions, older=published.older(task), as_of=found.as_of,
                    progress=assignment.checked(progress), watch=metrics.restoring,
                )  # fmt: skip
            for store in stores.values():
                undo.callback(store.close)
            coordinator = TaskCoordinator(
                services, task, publisher, self.log, published, stores, found.refill[task], metrics
            )
            opened = Task(
                services, task, coordinator, stores, restored, metrics, inputs, permissions,
                on_close=lambda: self._tasks.forget(task),
            )  # fmt: skip
            undo.callback(opened.close)
            coordinator.watched_by(self.metrics)
            assignment.check()
            for restore in restored:
                self.metrics.restored(restore)
            metrics.opened()
            metrics.measure(stores)
            coordinator.adopt_offers()  # 7
            if found.refill[task] or inputs.recreated or permissions.names or published.permits:  # 8
                opened.commit(opened.start_offsets)
            undo.pop_all()
        return opened

    def _publisher(self, assignment: Assignment) -> TransactionalPublisher:
        """The task's publisher, whose ID :meth:`fence` took over or this does. Raises: OpeningCancelled."""
        publisher = self._fenced.pop(assignment.name, None)
        try:
            assignment.check()
        except BaseException:
            if publisher is not None:
                publisher.close()
            raise
        return publisher or self._take_over(assignment.name)

    def _release(self, task: str) -> None:
        publisher = self._fenced.pop(task, None)
        if publisher is not None:
            publisher.close()

    def _take_over(self, task: str) -> TransactionalPublisher:
        return take_over(self.services, task_transactional_id(self.services.config, task), task)

    def _check_name(self, task: str) -> None:
        config = self.services.config
        if task_index(task) >= config.tasks:
            raise InvalidError(
                f"the job has {config.tasks} tasks, so there is no {task!r}",
                hint="job.tasks is the number of partitions of the input",
                job=config.job_name,
            )


def _restored(task: Task) -> dict[str, str | int]:
    """The attributes of a restore."""
    checkpoint = task.last_checkpoint
    return {
        "bytes": sum(one.bytes_fetched for one in task.restored),
        "records": sum(one.records for one in task.restored),
        "backends": ", ".join(sorted({one.factory for one in task.restored})),
        **({} if checkpoint is None else {"checkpoint": str(checkpoint.checkpoint_id)}),
    }
