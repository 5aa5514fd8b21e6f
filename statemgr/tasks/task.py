"""A task of a consumer loop: its stores, and its commits (prepare and publish in one process)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

from statemgr import serdes
from statemgr.errors import ClosedError, ConfigError, CorruptFile, FencedError, MissingFile, StatemgrError
from statemgr.flows.background_snapshots import Materializer
from statemgr.flows.clean_up import CleanUp
from statemgr.flows.commit import CommitBase, FrozenCommit, Refill, discard, freeze, prepare
from statemgr.flows.damage import find_damage
from statemgr.flows.empty_start import remember_published
from statemgr.flows.open_store import OpenStore
from statemgr.flows.parts import Parts
from statemgr.flows.persist_ahead import AHEAD_BYTES, PersistAhead, is_useful
from statemgr.flows.publish import publish
from statemgr.flows.published import Published, settle
from statemgr.flows.repair import GivesWay, can_repair, prepare_repair
from statemgr.flows.restore import StoreRestore
from statemgr.ids import check_offsets, source_topic
from statemgr.kafka.input_topics import TaskInputs
from statemgr.model.checkpoint import Checkpoint, CheckpointRecord
from statemgr.model.commit import PreparedCommit, ProducedRecord
from statemgr.model.permissions import Permissions
from statemgr.model.serde_check import check_serdes
from statemgr.ports import CheckpointLog, Publisher
from statemgr.serdes import SerdeLike
from statemgr.tasks.commit_metrics import TaskCommits
from statemgr.tasks.output import Output
from statemgr.tasks.pending_commit import InFlight, Turn
from statemgr.tasks.store import Store

log = logging.getLogger(__name__)
#: Waits for the IDs of the input topics: topic → ID.
_InputIds = Callable[[], Mapping[str, str]]


class Task:
    """One task, opened by :meth:`statemgr.StateManager.open_task`. Use it from one thread.

    Attributes:
        name: ``Partition <i>``.
        restored: how each store came back.
        metrics: what its commits cost and held up.
        damage: what is wrong with the backups of the current checkpoint.
    """

    def __init__(
        self,
        parts: Parts,
        name: str,
        publisher: Publisher,
        checkpoint_log: CheckpointLog,
        published: Published,
        stores: dict[str, OpenStore],
        restored: Sequence[StoreRestore],
        refill: Refill,
        metrics: TaskCommits,
        inputs: TaskInputs,
        permissions: Permissions,
        on_close: Callable[[], None],
    ) -> None:
        self.name = name
        self.restored = tuple(restored)
        self.metrics = metrics
        self._parts = parts
        self._publisher = publisher
        self._log = checkpoint_log
        self._published = published
        self._stores = stores
        self._refill = refill
        self._inputs = inputs
        self._permissions = permissions
        self._on_close = on_close
        self._clean_up = CleanUp(parts, name, checkpoint_log)
        self.damage = self._clean_up.damage
        self._output = Output(name)
        self._in_flight = InFlight(name, parts.config, parts.clock, metrics)
        self._materializer = Materializer(parts, name, stores, metrics, self.damage.suspect)
        self._ahead = PersistAhead(parts, name, portable=False)
        for store in stores.values():
            if is_useful(parts, store):
                store.content.watch(AHEAD_BYTES, partial(self._persist_ahead, store))
        self._turn = Turn()
        self._unsettled: tuple[FrozenCommit, PreparedCommit, CheckpointRecord | None] | None = None
        self._fenced: FencedError | None = None
        self._closed = False
        self._clean_up.at_open(published.records[name])
        self.damage.note(restored)

    # --- state ---------------------------------------------------------------------------------------------------

    def store(self, name: str, key_serde: SerdeLike | None = None, value_serde: SerdeLike | None = None) -> Store:
        """A store of this task; serdes as configured unless given.

        Raises: ConfigError for an unknown name; PermissionNeeded when the store's keys or values were written with
        other serdes. (``bytes``, given here, is a view of what is stored, whatever that was written with.)
        """
        opened = self._stores.get(name)
        if opened is None:
            raise ConfigError(
                f"the job has no store {name!r}",
                hint=f"it has {', '.join(self._stores) or 'none'}; declare it by a stores.{name}.* key",
                task=self.name,
                store=name,
            )
        key = serdes.serde(key_serde) if key_serde else serdes.key_serde(opened.config)
        value = serdes.serde(value_serde) if value_serde else serdes.value_serde(opened.config)
        self._check_serdes(
            name, None if key_serde == "bytes" else key.label, None if value_serde == "bytes" else value.label
        )
        return Store(opened, key, value)

    def _check_serdes(self, store: str, key: str | None, value: str | None) -> None:
        """Those of a store as the application uses it. None: it reads and writes bytes as they are."""
        check_serdes(
            self.last_checkpoint,
            {store: (key, value)},
            allowed=self._permissions.allow_serde_change,
            job=self._parts.config.job_name,
            task=self.name,
        )
        config = self._parts.config.stores[store]
        known = self._published.serdes.get(store, (config.key_serde, config.value_serde))
        self._published.serdes[store] = (key or known[0], value or known[1])

    def produce(
        self,
        topic: str,
        key: bytes | None,
        value: bytes | None,
        *,
        partition: int | None = None,
        headers: Sequence[tuple[str, bytes | None]] = (),
    ) -> None:
        """Output in the same transaction as the next commit. Raises: RetryableError when too much waits for it."""
        self._output.add(ProducedRecord(topic, key, value, partition, tuple(headers)))

    @property
    def last_checkpoint(self) -> Checkpoint | None:
        """The newest published checkpoint; None before the first commit."""
        return self._published.checkpoint(self.name)

    @property
    def start_offsets(self) -> Mapping[str, int]:
        """Source partition → where its input goes on: the checkpoint's offsets, but those of topics that were deleted
        and created again and that ``allow_skipped_input`` was given for."""
        checkpoint = self.last_checkpoint
        offsets = checkpoint.input_offsets if checkpoint else {}
        return {source: at for source, at in offsets.items() if source_topic(source) not in self._inputs.recreated}

    def expect_inputs(self, topics: Sequence[str]) -> None:
        """Before the first message: from now on a commit is refused if one of these topics is not what it is now.

        Raises: MissingState when it is not what the checkpoint's offsets belong to; UnavailableError.
        """
        self._inputs.expect(topics)

    # --- commits -------------------------------------------------------------------------------------------------

    def commit(self, input_offsets: Mapping[str, int], *, materialize: bool = False) -> Checkpoint:
        """Commit all stores, the output and ``input_offsets``, and wait for it.

        Args:
            input_offsets: source partition (``orders-0``) → offset of the next message, a whole number.
            materialize: store whole states where segments of changes would do: a restore then has none to apply.

        Raises: InvalidError for offsets that are none; MissingState when an input topic was deleted and created again
        since its offsets began; FencedError, RetryableError, OutcomeUnknownError, DiskFull, ClosedError; the error of
        an earlier asynchronous commit if nobody has seen it. After an error the next commit carries the same changes.
        LocalStateLost: no commit of this task succeeds any more; open it again and go on from its last checkpoint.
        """
        self.commit_async(input_offsets, materialize=materialize)
        return self._in_flight.end()  # its error is raised here, not by the next commit

    def commit_async(self, input_offsets: Mapping[str, int], *, materialize: bool = False) -> Future[Checkpoint]:
        """Start a commit: flush and checkpoint directories now; upload, publish and clean-up while the task goes on.

        At most one is in flight. A second waits for the first (counted as blocked once that is older than
        ``task.commit.max.delay.ms``) and raises its error, whether or not its future was asked; RetryableError when
        the first has not ended within ``task.commit.timeout.ms``. Use :attr:`in_flight_seconds` to leave a commit out
        instead. An error that no later commit has raised is logged by :meth:`close`.
        """
        check_offsets(input_offsets, task=self.name)
        with self._turn.commit():
            self._in_flight.make_way()
            self._check_usable()
            self._settle()
            self._materializer.check()
            base = self._base()
            input_ids = self._inputs.asked(input_offsets)
            with self._ahead.held(), self.metrics.phase("flush"):
                waiting = self._output.waiting()
                frozen = freeze(self._parts, self._stores, base, input_offsets, waiting, local_copy=materialize)
            self.metrics.carried(sum(self._stores[name].changes_in(part) for name, part in frozen.stores.items()))
            return self._in_flight.start(lambda: self._finish(frozen, input_ids, materialize))

    @property
    def in_flight_seconds(self) -> float | None:
        """How long ago the commit that is on its way was begun; None when there is none."""
        return self._in_flight.seconds

    def forgive(self) -> None:
        """The error of an asynchronous commit that has ended was seen: the next commit does not raise it again."""
        self._in_flight.forgive()

    def _base(self) -> CommitBase:
        refill = self._refill | self.damage.pairs
        return CommitBase(self.name, self._published.layout, self._published.epoch, self.last_checkpoint, refill)

    def _persist_ahead(self, store: OpenStore) -> None:
        """Much was written to a store since the last commit: some of it is stored now, unless a commit is under way."""
        if self._in_flight.seconds is None and self._unsettled is None:
            self._ahead.start(store, self._base())

    def _finish(self, frozen: FrozenCommit, input_ids: _InputIds, materialize: bool) -> Checkpoint:
        """The asynchronous part of a commit, on the commit thread."""
        with self.metrics.commit():
            try:
                return self._upload_and_publish(frozen, input_ids, materialize)
            except (CorruptFile, MissingFile) as error:
                lost = [store.give_up(error) for store in self._stores.values()]
                raise lost[0] from error

    def _upload_and_publish(self, frozen: FrozenCommit, input_ids: _InputIds, materialize: bool) -> Checkpoint:
        before = self._published.records[self.name]
        try:
            self._clean_up.check()
            self._ahead.wait()
        except BaseException:
            discard(self._stores, frozen.stores)
            raise
        with self.metrics.phase("upload"):
            whole = frozen.stores if materialize else ()
            prepared = prepare(self._parts, self._stores, frozen, portable=False, materialize=whole)
        return self._publish(frozen, prepared, before, input_ids)

    def _publish(
        self, frozen: FrozenCommit, prepared: PreparedCommit, before: CheckpointRecord | None, input_ids: _InputIds
    ) -> Checkpoint:
        self.metrics.uploaded(prepared.added_bytes)
        outstanding = {self.name: self._clean_up.outstanding}
        try:
            with self.metrics.phase("publish"):
                prepared = replace(prepared, input_topic_ids=input_ids())
                publish(self._parts, self._publisher, self._log, self._published, [prepared], outstanding=outstanding)
        except BaseException as error:
            if self._published.pending:
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
        record = self._published.records[self.name]
        assert record is not None
        for name, part in frozen.stores.items():
            self._stores[name].acknowledged(part, prepared.stores[name].state_id)
        self._output.published(len(frozen.produced))
        self._refill -= frozen.base.refill
        self.damage.repaired(frozen.base.refill)
        with self.metrics.phase("clean-up"):
            self._clean_up.after_publish(before, record, prepared)
            self._keep_local()
        self._materializer.after_commit(record.current)
        return record.current

    def _keep_local(self) -> None:
        """Tidy the local directories. It fails no commit: they are a cache."""
        try:
            if self.last_checkpoint is not None:
                remember_published(self._parts, self.name)
            for store in self._stores.values():
                store.tidy()
        except (StatemgrError, OSError) as error:
            log.warning("task %s: local directories are not tidied: %s", self.name, error)

    # --- repair --------------------------------------------------------------------------------------------------

    def check_up(self) -> bool:
        """Look for damage in the backups of the current checkpoint and repair it, on another thread than the task's.

        Returns: whether nothing is left to do. Raises: StatemgrError; then it is worth another try.
        """
        checkpoint, suspicion = self.last_checkpoint, self.damage.suspicion
        if checkpoint is None or self._closed or self._fenced is not None:
            return True
        if suspicion is not None:
            found = find_damage(self._parts, self.name, checkpoint)
            if self.last_checkpoint is not checkpoint:
                return False  # it was evicted meanwhile, perhaps, and its blobs deleted
            self.damage.checked(suspicion, found)
        return not self.damage.pairs or self._repair()

    def _repair(self) -> bool:
        """Publish the current checkpoint once more with backups that are whole, unless a commit does it first."""
        with self._turn.repair() as is_free:
            if not is_free or self._closed or self._in_flight.seconds is not None:
                return False
            self._settle()
            before, base = self._published.records[self.name], self._base()
            if before is None or not base.refill or not can_repair(self._parts, before):
                return not base.refill
            try:
                for store in {store for _, store in base.refill}:
                    self._stores[store].copy_published()
                base, prepared = prepare_repair(self._parts, before, base, check=self._turn.give_way)
            except GivesWay:
                return False
            repeated = FrozenCommit(prepared.attempt, base, prepared.input_offsets, {})
            with self.metrics.commit():
                self._publish(repeated, prepared, before, lambda: prepared.input_topic_ids)
        return True

    def _settle(self) -> None:
        """Before a new commit: find out what became of one whose acknowledgement was lost."""
        if self._unsettled is None:
            return
        try:
            published = settle(self._parts, self._publisher, self._log, self._published)
        except FencedError as error:
            self._fenced = error
            raise
        unsettled, self._unsettled = self._unsettled, None
        if published:
            self._acknowledged(*unsettled)

    def _check_usable(self) -> None:
        if self._closed:
            raise ClosedError("the task is closed", task=self.name)
        if self._fenced is not None:
            raise self._fenced

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` was called; it may not have ended yet."""
        return self._closed

    # --- end -----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Close without committing: what was not committed is processed again by the next owner. Idempotent."""
        if self._closed:
            return
        self._closed = True
        with ExitStack() as closing, self._turn.commit():
            closing.callback(self._on_close)
            closing.callback(self._publisher.close)
            for store in self._stores.values():
                closing.callback(store.close)
            closing.callback(self._leave_copies)
            closing.callback(self._say_what_is_dropped)
            closing.callback(self.metrics.close)
            closing.callback(self._materializer.close)
            closing.callback(self._ahead.close)
            closing.callback(self._in_flight.close)

    def _say_what_is_dropped(self) -> None:
        counts = {name: store.uncommitted for name, store in self._stores.items() if store.config.backup_factories}
        dropped = ", ".join(f"{count} of {name}" for name, count in counts.items() if count)
        if dropped:
            log.warning("task %s: closed without these changes being committed: %s", self.name, dropped)

    def _leave_copies(self) -> None:
        """The next start on this machine replays nothing. It fails nothing: what is local is a cache."""
        for name, store in self._stores.items():
            try:
                store.leave_copy()
            except (StatemgrError, OSError) as error:
                log.warning("task %s: no local copy of %s is left: %s", self.name, name, error)

    def __enter__(self) -> Task:
        return self

    def __exit__(self, *exc: Any) -> None:
        self.close()
