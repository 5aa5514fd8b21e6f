"""Opening a task of a consumer loop.

Steps of :meth:`TaskOpener.open`:

1. claim the task in this process: one that is being closed, or was taken away from who opened it, is waited for
2. verify the job's topics
3. fence older owners: the task's transactional ID first, then that of an owner of the whole job
4. read what is published, and refuse what would lose state (:func:`statemgr.flows.open_job.read_published`)
5. compare the input topics with those of the checkpoint
6. restore and open every store
7. publish the checkpoint once more where the opening has left something out, or was given permissions for itself alone
8. from now on, repair damaged backups in the background
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack

from statemgr.backends.services import Services
from statemgr.engine.metrics import Metrics
from statemgr.engine.open_tasks import Assignment, OpenTasks
from statemgr.engine.task import Task
from statemgr.engine.task_coordinator import TaskCoordinator
from statemgr.errors import InvalidError
from statemgr.flows.changes import serdes_in_force
from statemgr.flows.open_job import JobTopics, fence_ids, in_parallel, read_published, take_over
from statemgr.flows.published import explained
from statemgr.flows.restore import restore_task
from statemgr.ids import task_index
from statemgr.kafka.input_topics import InputTopics, TaskInputs
from statemgr.kafka.publisher import TransactionalPublisher, job_transactional_id, task_transactional_id
from statemgr.model.checkpoint import Layout
from statemgr.model.permissions import Permissions
from statemgr.ports import CheckpointLog, Progress


class TaskOpener:
    """Opens the tasks of one process. Safe to use from many threads."""

    def __init__(
        self,
        services: Services,
        checkpoint_log: CheckpointLog,
        layout: Layout,
        topics: JobTopics,
        inputs: InputTopics,
        metrics: Metrics,
    ) -> None:
        self._services = services
        self._log = checkpoint_log
        self._layout = layout
        self._topics = topics
        self._inputs = inputs
        self._metrics = metrics
        self._tasks = OpenTasks(services.clock)

    def fence(self, tasks: Sequence[str], still_owned: Callable[[str], bool], *, allow_empty_start: bool) -> None:
        """Steps 2 and 3 for several tasks at once. See :meth:`statemgr.StateManager.fence_tasks`."""
        for task in tasks:
            self._check_task(task)
        self._topics.prepare(allow_empty_start=allow_empty_start)

        def fence_one(task: str) -> None:
            self._tasks.put_fenced(task, None)
            if still_owned(task):
                self._tasks.put_fenced(task, self._take_over(task))

        in_parallel(self._services, fence_one, tasks)

    def open(self, assignment: Assignment, permissions: Permissions, progress: Progress) -> Task:
        """See :meth:`statemgr.StateManager.open_task`."""
        self._check_task(assignment.task)
        self._tasks.claim(assignment)  # 1
        try:
            self._topics.prepare(allow_empty_start=permissions.allow_empty_start)  # 2
            opened = self._open(assignment, permissions, progress)
        except BaseException:
            self._tasks.forget(assignment.task)
            raise
        self._tasks.opened(assignment.task, opened)
        opened.watch_backups()  # 8
        return opened

    def _open(self, assignment: Assignment, permissions: Permissions, progress: Progress) -> Task:
        services, task = self._services, assignment.task
        others = [job_transactional_id(services.config)]
        with ExitStack() as undo:
            publisher = self._fenced(assignment)  # 3
            undo.callback(publisher.close)
            fence_ids(services, others)
            assignment.check()
            found = read_published(  # 4
                services, self._log, self._layout, [task], permissions,
                others=others, still_owned=assignment.still_owned, serdes_follow=True,
            )  # fmt: skip
            published, permissions = found.published, found.permissions[task]
            checkpoint = published.checkpoint(task)
            published.serdes = serdes_in_force(services, checkpoint)
            known = checkpoint.input_topic_ids if checkpoint else {}
            inputs = TaskInputs(self._inputs, task, known, skip=permissions.allow_skipped_input)
            inputs.expect()  # 5
            with explained(services, self._log, published):
                stores, restored = restore_task(  # 6
                    services, task, checkpoint,
                    permissions=permissions, older=published.older(task), as_of=found.as_of,
                    progress=assignment.checked(progress),
                )  # fmt: skip
            for store in stores.values():
                undo.callback(store.close)
            metrics = self._metrics.of(task)
            coordinator = TaskCoordinator(
                services, task, publisher, self._log, published, stores, found.refill[task], metrics
            )
            opened = Task(
                services, task, coordinator, stores, restored, metrics, inputs, permissions,
                on_close=lambda: self._tasks.forget(task),
            )  # fmt: skip
            undo.callback(opened.close)
            assignment.check()
            for restore in restored:
                self._metrics.restored(restore)
            if found.refill[task] or inputs.recreated or permissions.names or published.permits:  # 7
                opened.commit(opened.start_offsets)
            undo.pop_all()
        return opened

    def close(self) -> None:
        """Close every task, without committing."""
        self._tasks.close()

    def _fenced(self, assignment: Assignment) -> TransactionalPublisher:
        """The task's publisher, its ID taken over by :meth:`fence` or now. Raises: OpeningCancelled."""
        publisher = self._tasks.take_fenced(assignment.task)
        try:
            assignment.check()
        except BaseException:
            if publisher is not None:
                publisher.close()
            raise
        return publisher or self._take_over(assignment.task)

    def _take_over(self, task: str) -> TransactionalPublisher:
        return take_over(self._services, task_transactional_id(self._services.config, task), task)

    def _check_task(self, task: str) -> None:
        config = self._services.config
        if task_index(task) >= config.tasks:
            raise InvalidError(
                f"the job has {config.tasks} tasks, so there is no {task!r}",
                hint="job.tasks is the number of partitions of the input",
                job=config.job_name,
            )
