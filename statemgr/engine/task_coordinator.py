"""The coordinator of one task of a consumer loop: publishes its prepared commits, and does what follows a publish."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace

from statemgr.backends.services import Services
from statemgr.engine.commit_metrics import TaskCommits
from statemgr.engine.output import Output
from statemgr.errors import FencedError, StatemgrError
from statemgr.flows.background_snapshots import BackgroundSnapshots
from statemgr.flows.clean_up import CleanUp
from statemgr.flows.commit import CommitBase, FrozenCommit, Refill
from statemgr.flows.damage import find_damage
from statemgr.flows.empty_start import remember_published
from statemgr.flows.open_store import OpenStore
from statemgr.flows.publish import publish
from statemgr.flows.published import Published, settle
from statemgr.flows.repair import GivesWay, can_repair, prepare_repair
from statemgr.model.checkpoint import Checkpoint, CheckpointRecord
from statemgr.model.commit import PreparedCommit
from statemgr.ports import CheckpointLog, Publisher

log = logging.getLogger(__name__)
#: Waits for the IDs of the input topics: topic → ID.
InputIds = Callable[[], Mapping[str, str]]


class TaskCoordinator:
    """The task's publisher, and what is published of the task. Used by one thread at a time.

    Attributes:
        published: what is published, and by which epoch.
        damage: what is wrong with the backups of the current checkpoint.
        output: output records that wait for a commit.
    """

    def __init__(
        self,
        services: Services,
        task: str,
        publisher: Publisher,
        checkpoint_log: CheckpointLog,
        published: Published,
        stores: Mapping[str, OpenStore],
        refill: Refill,
        metrics: TaskCommits,
    ) -> None:
        self.published = published
        self.output = Output(task)
        self._services = services
        self._task = task
        self._publisher = publisher
        self._log = checkpoint_log
        self._stores = stores
        self._refill = refill
        self._metrics = metrics
        self._clean_up = CleanUp(services, task, checkpoint_log)
        self.damage = self._clean_up.damage
        self.snapshots = BackgroundSnapshots(services, task, stores, metrics, self.damage.suspect)
        self._unsettled: tuple[FrozenCommit, PreparedCommit, CheckpointRecord | None] | None = None
        self._fenced: FencedError | None = None
        self._clean_up.at_open(published.records[task])

    @property
    def checkpoint(self) -> Checkpoint | None:
        """The newest published checkpoint; None before the first commit."""
        return self.published.checkpoint(self._task)

    def base(self) -> CommitBase:
        """What the next commit continues."""
        refill = self._refill | self.damage.pairs
        return CommitBase(self._task, self.published.layout, self.published.epoch, self.checkpoint, refill)

    @property
    def settled(self) -> bool:
        """Whether every publish was answered."""
        return self._unsettled is None

    def settle(self) -> None:
        """Before a new commit: find out what became of one whose acknowledgement was lost.

        Raises: FencedError, also when that was found out before; UnavailableError.
        """
        if self._fenced is not None:
            raise self._fenced
        if self._unsettled is None:
            return
        try:
            was_published = settle(self._services, self._publisher, self._log, self.published)
        except FencedError as error:
            self._fenced = error
            raise
        unsettled, self._unsettled = self._unsettled, None
        if was_published:
            self._acknowledged(*unsettled)

    def check(self) -> None:
        """Before a commit is prepared. Raises: what the clean-up after the last one failed with."""
        self._clean_up.check()

    def publish(self, frozen: FrozenCommit, prepared: PreparedCommit, input_ids: InputIds) -> Checkpoint:
        """Publish a commit in one transaction, then clean up. Raises: FencedError, RetryableError,
        OutcomeUnknownError."""
        before = self.published.records[self._task]
        self._metrics.uploaded(prepared.added_bytes)
        outstanding = {self._task: self._clean_up.outstanding}
        try:
            with self._metrics.phase("publish"):
                prepared = replace(prepared, input_topic_ids=input_ids())
                publish(self._services, self._publisher, self._log, self.published, [prepared], outstanding=outstanding)
        except BaseException as error:
            if self.published.pending:
                self._unsettled = (frozen, prepared, before)
            elif isinstance(error, FencedError):
                self._fenced = error
            else:
                self._keep_local()  # of the state that was not published nothing is kept here
            raise
        return self._acknowledged(frozen, prepared, before)

    def _acknowledged(
        self, frozen: FrozenCommit, prepared: PreparedCommit, before: CheckpointRecord | None
    ) -> Checkpoint:
        record = self.published.records[self._task]
        assert record is not None
        for name, part in frozen.stores.items():
            self._stores[name].acknowledged(part, prepared.stores[name].state_id)
        self.output.published(len(frozen.produced))
        self._refill -= frozen.base.refill
        self.damage.repaired(frozen.base.refill)
        with self._metrics.phase("clean-up"):
            self._clean_up.after_publish(before, record, prepared)
            self._keep_local()
        self.snapshots.after_commit(record.current)
        return record.current

    def _keep_local(self) -> None:
        """Tidy the local directories. It fails no commit: they are a cache."""
        try:
            if self.checkpoint is not None:
                remember_published(self._services, self._task)
            for store in self._stores.values():
                store.tidy()
        except (StatemgrError, OSError) as error:
            log.warning("task %s: local directories are not tidied: %s", self._task, error)

    # --- repair --------------------------------------------------------------------------------------------------

    def has_damage(self) -> bool | None:
        """Look at the backups of the current checkpoint where they are suspected. From any thread.

        Returns: whether any is damaged; None when a newer checkpoint was published meanwhile. Raises: StatemgrError.
        """
        checkpoint, suspicion = self.checkpoint, self.damage.suspicion
        if checkpoint is None or self._fenced is not None:
            return False
        if suspicion is not None:
            found = find_damage(self._services, self._task, checkpoint)
            if self.checkpoint is not checkpoint:
                return None  # it was evicted meanwhile, perhaps, and its blobs deleted
            self.damage.checked(suspicion, found)
        return bool(self.damage.pairs)

    def repair(self, give_way: Callable[[], None]) -> bool:
        """Publish the current checkpoint once more with backups that are whole.

        Returns: whether nothing is left to do; not when ``give_way`` raised GivesWay. Raises: as :meth:`publish`.
        """
        self.settle()
        record, base = self.published.records[self._task], self.base()
        if record is None or not base.refill or not can_repair(self._services, record):
            return not base.refill
        try:
            for store in {store for _, store in base.refill}:
                self._stores[store].copy_published()
            base, prepared = prepare_repair(self._services, record, base, check=give_way)
        except GivesWay:
            return False
        repeated = FrozenCommit(prepared.attempt, base, prepared.input_offsets, {})
        with self._metrics.commit():
            self.publish(repeated, prepared, lambda: prepared.input_topic_ids)
        return True

    def close(self) -> None:
        """Let the transactional ID go."""
        self._publisher.close()
