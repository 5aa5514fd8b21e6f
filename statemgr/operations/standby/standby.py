"""Standby: keep the newest checkpoint of some tasks as local directories, while another process owns the tasks.

Steps of a turn:

1. read new records of the checkpoint topic; this fences nobody and writes nothing to Kafka or to blobs
2. plan each store of each task with a new checkpoint, several tasks at a time
3. take the local directory of exactly this state, or restore from the first factory that can, fetching only missing
   files
4. if a restore fails because the owner's clean-up was faster, continue with the newer checkpoint
5. read the topic once more, and remove the local directories of all states except the ones just restored and the newest
   ones

An owner that later opens the task on this machine finds the directory, and fetches nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import dataclass, replace

from statemgr.errors import ConfigError, MissingError, MissingState, StatemgrError, UnavailableError
from statemgr.flows.opening.opening_checks import remember_published
from statemgr.flows.opening.restore import StoreRestore, restore_store
from statemgr.flows.sweep import Sweep
from statemgr.ids import CheckpointId, task_index
from statemgr.local.machine import moment
from statemgr.model.checkpoint import Checkpoint, CheckpointRecord
from statemgr.model.jobs.permissions import Permissions
from statemgr.model.plan import StorePlan, plan_stores
from statemgr.ports import CheckpointLog, Moment, Progress
from statemgr.services import Services

log = logging.getLogger(__name__)
_TASKS_AT_ONCE = 4
#: Newer checkpoints that one turn tries when the one before was cleaned up meanwhile.
_CHASES = 5
#: Seconds until local directories are checked again: they are a cache, and may have been deleted.
_LOOK_AGAIN_S = 60.0


@dataclass(frozen=True, slots=True)
class Followed:
    """The result of a turn for one task: its checkpoint, how each store was restored, or the error.

    ``task``: None for an error that is not about one. ``checkpoint``: None if the topic has none of the task.
    ``seconds``: wall time. ``generation``: of the layout that the checkpoint is in, which may be newer than that of the
    turn.
    """

    task: str | None
    checkpoint: Checkpoint | None
    stores: tuple[StoreRestore, ...] = ()
    seconds: float = 0.0
    error: StatemgrError | None = None
    generation: int = 0

    @property
    def waits(self) -> bool:
        """Whether the task has not committed yet, so that there is nothing to fetch."""
        return self.task is not None and self.checkpoint is None and self.error is None


class Follower:
    """Follows the checkpoints of ``tasks``, or of all tasks with a checkpoint if it is empty. One thread at a time.

    Args:
        stores: the stores to bring; all if none is named.
        only_settled: read the topic only up to the first open transaction, and do not wait for its end.

    Attributes:
        there: the tasks with a checkpoint, as of the last turn.
        generation: of the layout that they are in.
    """

    def __init__(
        self,
        services: Services,
        checkpoint_log: CheckpointLog,
        tasks: Collection[str],
        progress: Progress,
        *,
        stores: Collection[str] = (),
        only_settled: bool = False,
    ) -> None:
        self.there: Collection[str] = ()
        self.generation = 0
        self._stores = stores or services.config.stores.keys()
        self._only_settled = only_settled
        self._services = services
        self._log = checkpoint_log
        self._tasks = tuple(tasks)
        self._progress = progress
        self._sweep = Sweep(services)
        #: task → the checkpoint whose state is on this machine, and the time of the last check
        self._here: dict[str, tuple[CheckpointId, float]] = {}

    def turn(self) -> list[Followed]:
        """Bring every task with a new checkpoint up to date. Failures are in the result, and tried again in the next
        turn.

        Raises: ConfigError; the errors of reading the checkpoint topic.
        """
        as_of = moment(self._services.clock)
        records = self._log.read(self._tasks or None, only_settled=self._only_settled)  # 1
        self.there = tuple(records)
        self.generation = max((record.layout.generation for record in records.values()), default=0)
        due = sorted((task for task, record in records.items() if self._due(task, record)), key=task_index)
        missing = [
            Followed(task, None, error=self.unknown(task) if task in self._here else None)
            for task in self._tasks
            if task not in records
        ]

        def follow(task: str) -> Followed | None:
            return self._follow(task, records[task], as_of)

        followed = self._services.in_parallel("standby", follow, due, _TASKS_AT_ONCE)
        self._sweep.start(self._here.keys() & set(self.there))  # a rescale may have retired the others
        return [*missing, *(found for found in followed if found is not None)]

    def forget(self, task: str) -> None:
        """Bring the task again in the next turn."""
        self._here.pop(task, None)

    def unknown(self, task: str) -> MissingState:
        """An error for a task that has no checkpoint."""
        return MissingState(
            "the topic has no checkpoint of the task",
            hint="it has not committed yet, or a rescale has removed it: `statemgr checkpoints list` shows the tasks "
            "that have one",
            job=self._services.config.job_name,
            task=task,
            topic=self._services.config.checkpoint_topic,
        )

    def _due(self, task: str, record: CheckpointRecord) -> bool:
        checkpoint_id, looked = self._here.get(task, (None, 0.0))
        return (
            record.current.checkpoint_id != checkpoint_id or self._services.clock.monotonic() > looked + _LOOK_AGAIN_S
        )

    def _follow(self, task: str, record: CheckpointRecord, as_of: Moment) -> Followed | None:
        """Bring one task up to date; None if it already is. ``as_of``: a moment before the topic was read."""
        started = self._services.clock.monotonic()
        failure: StatemgrError | None = None
        current = record.current
        for _chase in range(_CHASES):
            current = record.current
            try:
                stores = self._bring(task, record, as_of)
            except ConfigError:
                raise
            except StatemgrError as error:
                failure = error
                record = self._newest(task) or record  # 4
                if record.current.checkpoint_id == current.checkpoint_id:
                    break
                log.info("%s: checkpoint %s was deleted in the meantime", task, current.checkpoint_id)
                continue
            before, _ = self._here.get(task, (None, 0.0))
            self._here[task] = current.checkpoint_id, self._services.clock.monotonic()
            if before == current.checkpoint_id and all(store.factory == "local" for store in stores):
                return None
            self._tidy(task, current)  # 5
            seconds = self._services.clock.monotonic() - started
            return Followed(task, current, tuple(stores), seconds, generation=record.layout.generation)
        else:
            if isinstance(failure, MissingError) and record.find(str(current.checkpoint_id)) is None:
                failure = UnavailableError(
                    f"the job has deleted {_CHASES} checkpoints, each before all of it was fetched: {failure.message}",
                    hint="the next try goes on with what was fetched. If it never ends, let the job retain more: raise "
                    "task.checkpoint.retained",
                    **{**failure.where, "task": task},
                )
        return Followed(task, current, (), self._services.clock.monotonic() - started, failure)

    def _bring(self, task: str, record: CheckpointRecord, as_of: Moment) -> list[StoreRestore]:
        """Steps 2 and 3. Skips stores that the checkpoint does not have."""
        checkpoint = record.current
        plans = plan_stores(
            checkpoint,
            {name: self._services.config.stores[name].restore_factories for name in self._stores},
            durable=self._services.durable,
            permissions=Permissions(allow_new_stores=True, allow_removed_stores=True),
            older=record.checkpoints[1:],
            job=self._services.config.job_name,
            task=task,
        )
        return [self._bring_store(task, checkpoint, plan, as_of) for plan in plans if not plan.empty]

    def _bring_store(self, task: str, checkpoint: Checkpoint, plan: StorePlan, as_of: Moment) -> StoreRestore:
        """Try the preferred factory. Before trying another one, which may take hours, look for a newer checkpoint."""

        def progress(_: str, done: int, total: int) -> None:
            self._progress(f"{task} / {plan.store}", done, total)

        try:
            first = replace(plan, candidates=plan.candidates[:1])
            return restore_store(self._services, task, first, progress, as_of)[1]
        except StatemgrError:
            newest = self._newest(task)
            superseded = newest is not None and newest.current.checkpoint_id != checkpoint.checkpoint_id
            if superseded or len(plan.candidates) == 1:
                raise
        return restore_store(self._services, task, plan, progress, as_of)[1]

    def _tidy(self, task: str, here: Checkpoint) -> None:
        """Remove old directories, but not the newest, which an owner on this machine may need. Never fails the turn."""
        try:
            remember_published(self._services, task)
            newest = self._newest(task)
            states = [c.stores for c in (here, newest.current if newest else here)]
            for store in here.stores.keys() & self._services.config.stores.keys():
                kept = {of_checkpoint[store] for of_checkpoint in states if store in of_checkpoint}
                self._services.directories(task, store).keep_only(kept)
        except (StatemgrError, OSError) as error:
            log.warning("%s: old local directories were not removed: %s", task, error)

    def _newest(self, task: str) -> CheckpointRecord | None:
        """The task's record as the topic has it now; None if it cannot be read."""
        try:
            return self._log.read([task], only_settled=self._only_settled).get(task)
        except StatemgrError as error:
            log.warning("%s: the checkpoint topic cannot be read: %s", task, error)
            return None
