"""The owner of one task of a consumer loop: what follows each of its publishes, the adoption of offers, and the
repair of its backups."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

from statemgr.engine.coordinator import Coordinator
from statemgr.engine.pending_commit import Output
from statemgr.errors import FencedError, LocalStateLost, OutcomeUnknownError, StatemgrError
from statemgr.flows.committing.background_snapshots import BackgroundSnapshots
from statemgr.flows.committing.commit import CommitBase, FrozenCommit, Refill
from statemgr.flows.offers import prepare_adoption
from statemgr.flows.opening.open_job import JobTopics
from statemgr.flows.opening.opening_checks import remember_published, touch
from statemgr.flows.opening.repair import GivesWay, can_repair, prepare_repair, repeated_attachments
from statemgr.flows.owner import Owner
from statemgr.model.checkpoint import Checkpoint, CheckpointRecord
from statemgr.model.commit import PreparedCommit
from statemgr.stores.open_store import OpenStore
from statemgr.telemetry.task_metrics import TaskMetrics

log = logging.getLogger(__name__)
#: Waits for the IDs of the input topics: topic → ID.
InputIds = Callable[[], Mapping[str, str]]


class TaskCoordinator(Coordinator):
    """Publishes for one task.

    Attributes:
        output: the output records that wait for a commit.
        damage: the known damage of the current checkpoint's backups.
        snapshots: the snapshots that are made in the background.
    """

    def __init__(
        self,
        owner: Owner,
        task: str,
        stores: Mapping[str, OpenStore],
        refill: Refill,
        metrics: TaskMetrics,
        topics: JobTopics,
    ) -> None:
        super().__init__(owner, topics)
        services = owner.services
        self.output = Output(task, services.config.most_record_bytes)
        self._task = task
        self._stores = stores
        self._refill = refill
        self._metrics = metrics
        self._is_remembered = False
        self._clean_up = self.clean_ups[task]
        self.damage = self._clean_up.damage
        self.snapshots = BackgroundSnapshots(services, task, stores, metrics, self.damage.suspect)
        self._clean_up.at_open(self.published.records[task])
        touch(services, task)

    @property
    def checkpoint(self) -> Checkpoint | None:
        """The newest published checkpoint; None before the first commit."""
        return self.published.checkpoint(self._task)

    def next_base(self) -> CommitBase:
        """What the next commit continues."""
        return self.base(self._task, self._refill)

    def check(self) -> None:
        """Called before a commit is prepared. Raises: the error of the clean-up after the last commit."""
        self._clean_up.retry_ttls()

    def publish(self, frozen: FrozenCommit, prepared: PreparedCommit, input_ids: InputIds) -> Checkpoint:
        """Publish a commit, then clean up. Raises: FencedError, RetryableError, OutcomeUnknownError."""
        follow_up = partial(self._acknowledged, frozen, prepared, self.published.records[self._task])
        self._metrics.uploaded(prepared.added_bytes)
        try:
            with self._metrics.phase("publish"):
                self._publish([replace(prepared, input_topic_ids=input_ids())], follow_up)
        except BaseException:
            if self.settled and not self.owner.is_fenced:
                self._tidy()  # the local directories of a state that was not published are removed
            raise
        return follow_up()

    def _acknowledged(
        self, frozen: FrozenCommit, prepared: PreparedCommit, before: CheckpointRecord | None
    ) -> Checkpoint:
        record = self.published.records[self._task]
        assert record is not None
        # first: whatever fails after it, no output is sent twice, and no blob expires
        self.output.published(len(frozen.produced))
        self._clean_up.published(prepared)
        for name, part in frozen.stores.items():
            self._stores[name].acknowledged(part, prepared.stores[name].state_id)
        self._refill -= frozen.base.refill
        self.damage.repaired(frozen.base.refill)
        with self._metrics.phase("clean-up"):
            self._clean_up.after_publish(before, record, prepared)
            self._tidy()
        self.snapshots.after_commit(record.current)
        return record.current

    def _tidy(self) -> None:
        """Tidy the local directories. They are a cache, so an error here does not fail a commit."""
        try:
            if self.checkpoint is not None and not self._is_remembered:
                remember_published(self._services, self._task)
                self._is_remembered = True
            for store in self._stores.values():
                store.tidy()
        except (StatemgrError, OSError) as error:
            log.warning("%s: the local directories could not be tidied: %s", self._task, error)

    def adopt_offers(self) -> None:
        """Publish the current checkpoint again, with the first snapshots that ``statemgr materialize`` has offered.

        If that fails, the next commit uploads the whole state. Raises: FencedError.
        """
        record, base, offers = self.published.records[self._task], self.next_base(), self._log.offers()
        if record is None or not offers:
            return
        try:
            attachments = repeated_attachments(record.current)
            adoption = prepare_adoption(self._services, offers, record, base, attachments=attachments, together=False)
            if adoption is None:
                return
            commit = adoption.commit
            repeated = FrozenCommit(commit.attempt, base, commit.input_offsets, {})
            with self._adopting([adoption]), self._metrics.commit():
                self.publish(repeated, commit, lambda: commit.input_topic_ids)
        except FencedError:
            raise
        except StatemgrError as error:
            log.warning("%s: the offer of a first snapshot was not adopted: %s", self._task, error)

    def needs_repair(self) -> bool | None:
        """Whether a backup of the current checkpoint is damaged; None if that has to be checked again.

        Any thread may call this. Raises: RetryableError, AccessDenied.
        """
        if self.checkpoint is None or self.owner.is_fenced:
            return False
        return bool(self.damage.pairs) if self.look_for_damage(self._task) else None

    def make_whole(self) -> None:
        """After a publish: if blobs of the commit had been deleted meanwhile, make the backup again before the commit
        counts as a success.

        Raises: OutcomeUnknownError if that fails: the commit is published, and the next one makes the backup again.
        """
        if not self._clean_up.lost_blobs:
            return
        try:
            if self.needs_repair():
                self.repair(lambda: None)
        except FencedError:
            return  # the new owner has the commit and looks for its blobs; the next call says that this owner is fenced
        except StatemgrError as error:
            raise OutcomeUnknownError(
                f"the commit was published, but has lost blobs, and its backup was not made again: {error.message}",
                hint="commit again: the next commit makes the backup again",
                **{"task": self._task, **error.where},
            ) from error

    def repair(self, give_way: Callable[[], None]) -> bool:
        """Publish the current checkpoint again, with complete backups.

        Returns: whether nothing is left to do; False if ``give_way`` raised GivesWay. Raises: as :meth:`publish`.
        """
        self.settle()
        record, base = self.published.records[self._task], self.next_base()
        if record is None or not base.refill or not can_repair(self._services, record):
            return not base.refill
        try:
            for store in {store for _, store in base.refill}:
                self._stores[store].copy_published()
            attachments = repeated_attachments(record.current)
            base, prepared = prepare_repair(self._services, record, base, attachments=attachments, check=give_way)
            repeated = FrozenCommit(prepared.attempt, base, prepared.input_offsets, {})
            with self._metrics.commit():  # it gives way here, too, while it fills a changelog
                self.publish(repeated, prepared, lambda: prepared.input_topic_ids)
        except GivesWay:
            return False
        except LocalStateLost as error:  # the open stores share files with the copy, and would make another of them
            for store in {store for _, store in base.refill}:
                self._stores[store].give_up(error)
            raise
        return True
