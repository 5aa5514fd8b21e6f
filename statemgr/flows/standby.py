"""Standby: keep the newest checkpoint of some tasks as local directories, while another process owns the tasks.

Steps of a turn:

1. read what is new on the checkpoint topic; nobody is fenced, and nothing is written to Kafka or to blobs
2. per task with a new checkpoint, several tasks at once: plan each store
3. the local directory made for exactly this state, or the first factory that can, reusing local files: only what is
   missing is fetched
4. a restore that fails because the owner's clean-up was faster is no error: go on with the newer checkpoint
5. read the topic once more, and remove the local directories of states that are neither here nor there

An owner that opens the task on this machine afterwards finds the directory, and fetches nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from statemgr.errors import ConfigError, MissingState, StatemgrError
from statemgr.flows.empty_start import remember_published
from statemgr.flows.parts import Parts
from statemgr.flows.restore import StoreRestore, restore_store
from statemgr.ids import CheckpointId, task_index
from statemgr.local.clock import moment
from statemgr.model.checkpoint import Checkpoint, CheckpointRecord
from statemgr.model.permissions import Permissions
from statemgr.model.plan import StorePlan, plan_stores
from statemgr.ports import CheckpointLog, Moment, Progress

log = logging.getLogger(__name__)
_TASKS_AT_ONCE = 4
#: Newer checkpoints that one turn goes after when the one before is cleaned up meanwhile.
_CHASES = 5
#: Seconds after which local directories are looked at again: they are a cache, and may have been deleted.
_LOOK_AGAIN_S = 60.0


@dataclass(frozen=True, slots=True)
class Followed:
    """What a turn did for one task: the checkpoint that it went for, how each store came, or what went wrong.

    ``task``: None for an error that is not about one. ``checkpoint``: None when the topic has none of the task.
    ``seconds`` of wall time.
    """

    task: str | None
    checkpoint: Checkpoint | None
    stores: tuple[StoreRestore, ...] = ()
    seconds: float = 0.0
    error: StatemgrError | None = None


class Follower:
    """Follows the checkpoints of some tasks (of all that have one, if none is named). One thread at a time."""

    def __init__(self, parts: Parts, checkpoint_log: CheckpointLog, tasks: Collection[str], progress: Progress) -> None:
        self._parts = parts
        self._log = checkpoint_log
        self._tasks = tuple(tasks)
        self._progress = progress
        #: task → the checkpoint whose state is on this machine, and when that was last looked at
        self._here: dict[str, tuple[CheckpointId, float]] = {}

    def turn(self) -> list[Followed]:
        """Bring every task whose checkpoint is new to it, in order. What fails is in the answer, and due again.

        Raises: ConfigError; what reading the checkpoint topic raises.
        """
        as_of = moment(self._parts.clock)
        records = self._read()  # 1
        due = sorted((task for task, record in records.items() if self._due(task, record)), key=task_index)
        missing = [Followed(task, None, error=self._unknown(task)) for task in self._tasks if task not in records]
        with ThreadPoolExecutor(_TASKS_AT_ONCE, thread_name_prefix="statemgr-standby") as pool:
            followed = pool.map(lambda task: self._follow(task, records[task], as_of), due)
            return [*missing, *(found for found in followed if found is not None)]

    def _due(self, task: str, record: CheckpointRecord) -> bool:
        checkpoint_id, looked = self._here.get(task, (None, 0.0))
        return record.current.checkpoint_id != checkpoint_id or self._parts.clock.monotonic() > looked + _LOOK_AGAIN_S

    def _follow(self, task: str, record: CheckpointRecord, as_of: Moment) -> Followed | None:
        """None when all was still here. ``as_of``: before the topic was read."""
        started = self._parts.clock.monotonic()
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
                log.info("task %s: checkpoint %s was cleaned up meanwhile", task, current.checkpoint_id)
                continue
            before, _ = self._here.get(task, (None, 0.0))
            self._here[task] = current.checkpoint_id, self._parts.clock.monotonic()
            if before == current.checkpoint_id and all(store.factory == "local" for store in stores):
                return None
            self._tidy(task, current)  # 5
            return Followed(task, current, tuple(stores), self._parts.clock.monotonic() - started)
        return Followed(task, current, (), self._parts.clock.monotonic() - started, failure)

    def _bring(self, task: str, record: CheckpointRecord, as_of: Moment) -> list[StoreRestore]:
        """Steps 2 and 3. A store that the configuration has and the checkpoint has not is none of a standby's."""
        checkpoint = record.current
        plans = plan_stores(
            checkpoint,
            {name: store.restore_factories for name, store in self._parts.config.stores.items()},
            durable=self._parts.durable,
            permissions=Permissions(allow_new_stores=True, allow_removed_stores=True),
            older=record.checkpoints[1:],
            job=self._parts.config.job_name,
            task=task,
        )
        return [self._bring_store(task, checkpoint, plan, as_of) for plan in plans if not plan.empty]

    def _bring_store(self, task: str, checkpoint: Checkpoint, plan: StorePlan, as_of: Moment) -> StoreRestore:
        """The preferred factory first; before another is asked, which may take hours, look for a newer checkpoint."""

        def progress(_: str, done: int, total: int) -> None:
            self._progress(f"{task} / {plan.store}", done, total)

        try:
            first = replace(plan, candidates=plan.candidates[:1])
            return restore_store(self._parts, task, first, progress, as_of)[1]
        except StatemgrError:
            newest = self._newest(task)
            superseded = newest is not None and newest.current.checkpoint_id != checkpoint.checkpoint_id
            if superseded or len(plan.candidates) == 1:
                raise
        return restore_store(self._parts, task, plan, progress, as_of)[1]

    def _tidy(self, task: str, here: Checkpoint) -> None:
        """An owner on this machine needs the newest, and what it made lately is spared anyway. It fails no turn."""
        try:
            remember_published(self._parts, task)
            newest = self._newest(task)
            states = [c.stores for c in (here, newest.current if newest else here)]
            for store in here.stores.keys() & self._parts.config.stores.keys():
                kept = {of_checkpoint[store] for of_checkpoint in states if store in of_checkpoint}
                self._parts.directories(task, store).keep_only(kept)
        except (StatemgrError, OSError) as error:
            log.warning("task %s: local directories are not tidied: %s", task, error)

    def _newest(self, task: str) -> CheckpointRecord | None:
        """The task's record as the topic has it now; None where it cannot be read."""
        try:
            return self._log.read([task]).get(task)
        except StatemgrError as error:
            log.warning("task %s: the checkpoint topic cannot be read: %s", task, error)
            return None

    def _read(self) -> Mapping[str, CheckpointRecord]:
        return self._log.read(self._tasks or None)

    def _unknown(self, task: str) -> MissingState:
        return MissingState(
            "the topic has no checkpoint of the task",
            hint="nobody has committed it yet; `statemgr checkpoints list` shows the others",
            job=self._parts.config.job_name,
            task=task,
            topic=self._parts.config.checkpoint_topic,
        )
