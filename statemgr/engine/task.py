"""A task of a consumer loop: its stores, and its commits (prepare and publish in one process)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, overload

from statemgr import serdes
from statemgr.config.store import expires
from statemgr.engine.pending_commit import PendingCommit, Turn
from statemgr.engine.task_coordinator import InputIds, TaskCoordinator
from statemgr.engine.timers import Timer, Timers
from statemgr.errors import ClosedError, ConfigError, CorruptFile, InvalidError, MissingFile, StatemgrError
from statemgr.flows.committing.commit import CommitBase, FrozenCommit, discard, freeze, prepare
from statemgr.flows.committing.persist_ahead import PersistAhead
from statemgr.flows.opening.restore import StoreRestore
from statemgr.flows.worker import Worker
from statemgr.ids import check_offsets, source_topic, task_index
from statemgr.kafka.input_topics import TaskInputs
from statemgr.model.checkpoint import Checkpoint
from statemgr.model.commit import PreparedCommit, ProducedRecord
from statemgr.model.jobs.permissions import Permissions
from statemgr.model.plan import check_serdes
from statemgr.phases import Flow
from statemgr.serdes import SerdeLike, SerdeName, TypedSerde
from statemgr.serdes.serde import K, V
from statemgr.services import Closing, Services
from statemgr.stores.expiry import STEP_S, ExpiringEntries
from statemgr.stores.open_store import OpenStore
from statemgr.stores.store import Store
from statemgr.telemetry.task_metrics import TaskMetrics

log = logging.getLogger(__name__)
#: What Kafka's producer takes as a key, a value or a header.
_SENT = (bytes, str, type(None))
#: The highest number of a partition that the producer takes.
_MOST_PARTITION = (1 << 31) - 1
#: The end of the year 9999 in epoch milliseconds. A later time is most often one in microseconds or nanoseconds.
_MOST_MS = 253_402_300_799_999


class Task:
    """One task, opened by :meth:`statemgr.StateManager.open_task`. Use it from one thread.

    Attributes:
        name: ``Partition <i>``.
        restored: how each store was restored.
        metrics: the cost of its commits, and how long they blocked it.
        damage: known damage of the current checkpoint's backups.
        owner: publishes its commits.
    """

    def __init__(
        self,
        services: Services,
        name: str,
        coordinator: TaskCoordinator,
        stores: dict[str, OpenStore],
        restored: Sequence[StoreRestore],
        metrics: TaskMetrics,
        inputs: TaskInputs,
        permissions: Permissions,
        on_close: Callable[[], None],
    ) -> None:
        self.name = name
        self.restored = tuple(restored)
        self.metrics = metrics
        self.damage = coordinator.damage
        self._services = services
        self.owner = self._coordinator = coordinator
        self._stores = stores
        self._inputs = inputs
        #: Source partitions that this task reads, if its loop has said which topics it reads.
        self._sources: frozenset[str] = frozenset()
        #: Raises InvalidError for output that its topic does not take, if the loop knows the topics.
        self._check_output: Callable[[ProducedRecord], None] | None = None
        self._permissions = permissions
        self._on_close = on_close
        self._timers = Timers(services.clock, name)
        self._newest_input_ms: int | None = None
        #: Timestamp of the message or batch that the application processes, which its output gets by default.
        self._input_ms: int | None = None
        self._pending = PendingCommit(services, name, metrics)
        self._ahead = PersistAhead(services, name, portable=False)
        self._repairs: Worker[None] = Worker(services, f"repair-{name}", f"task {name}", background=True)
        self._turn = Turn()
        self._closed = False
        for store in stores.values():
            self._ahead.watch(store, self._base_ahead)
            if isinstance(store.entries, ExpiringEntries):
                self._timers.add(STEP_S, store.delete_expired)
        self.damage.note(restored)

    # --- state ---------------------------------------------------------------------------------------------------

    @overload
    def store(self, name: str, key_serde: SerdeName | None = None, value_serde: SerdeName | None = None) -> Store: ...

    @overload
    def store(
        self, name: str, key_serde: SerdeName | None = None, value_serde: TypedSerde[V] = ...
    ) -> Store[Any, V]: ...

    @overload
    def store(self, name: str, key_serde: TypedSerde[K], value_serde: SerdeName | None = None) -> Store[K, Any]: ...

    @overload
    def store(self, name: str, key_serde: TypedSerde[K], value_serde: TypedSerde[V]) -> Store[K, V]: ...

    def store(self, name: str, key_serde: SerdeLike | None = None, value_serde: SerdeLike | None = None) -> Store:
        """A store of this task, with the configured serdes unless others are given.

        ``bytes``, given here, reads and writes the stored bytes as they are.

        Raises: ConfigError for an unknown store, and for a serde of values with a name that ends with `` with TTL``;
        PermissionNeeded if the store's keys or values were written with other serdes.
        """
        opened = self._stores.get(name)
        if opened is None:
            raise ConfigError(
                f"the job has no store {name!r}",
                hint=f"it has {', '.join(self._stores) or 'none'}; declare it with a key stores.{name}.*",
                task=self.name,
                store=name,
            )
        key = serdes.serde(key_serde) if key_serde else opened.key_serde
        value = serdes.serde(value_serde) if value_serde else opened.value_serde
        if opened.config.ttl_ms is None and expires(value.label):
            raise ConfigError(
                f"the name of a serde of values may not end like {value.name!r}",
                hint="choose another name: in a checkpoint, this ending means that the store has a ttl.ms",
                task=self.name,
                store=name,
            )
        self._check_serdes(
            name,
            None if key_serde == "bytes" else key.label,
            None if value_serde == "bytes" else opened.config.value_label(value.label),
        )
        return Store(opened, key, value)

    def _check_serdes(self, store: str, key: str | None, value: str | None) -> None:
        """Check the labels of the serdes that the application uses; None if it reads and writes plain bytes."""
        check_serdes(
            self.last_checkpoint,
            {store: (key, value)},
            allowed=self._permissions.allow_serde_change,
            job=self._services.config.job_name,
            task=self.name,
        )
        config = self._services.config.stores[store]
        in_force = self._coordinator.published.serdes
        known = in_force.get(store) or config.serdes
        self._coordinator.published.serdes = {**in_force, store: (key or known[0], value or known[1])}

    def produce(
        self,
        topic: str,
        key: bytes | None,
        value: bytes | None,
        *,
        partition: int | None = None,
        headers: Sequence[tuple[str, bytes | None]] = (),
        timestamp_ms: int | None = None,
    ) -> None:
        """Send output in the transaction of the next commit. Texts are sent as UTF-8.

        Args:
            timestamp_ms: of the record, in epoch milliseconds. Without one, output of ``process`` has the timestamp of
                the message, and output of ``process_batch`` the newest of the batch. All other output, for example of
                a timer, has the time at which the commit sends it.

        Raises: InvalidError for a record that is larger than the producer takes, for a timestamp before 1970 or after
        the year 9999, for half a surrogate pair, and in a consumer loop for what a topic of ``task.outputs`` does not
        take (its size, its timestamp, no key if the topic is compacted, an unknown partition); RetryableError if too
        much output waits for a commit; TypeError for what the producer does not take, which would fail each commit.
        """
        if not isinstance(topic, str) or not topic or "\0" in topic:
            raise TypeError(f"a topic must be its name, not {topic!r}")
        pairs = tuple(headers)
        if not all(isinstance(pair, tuple | list) and len(pair) == 2 and isinstance(pair[0], str) for pair in pairs):
            raise TypeError(f"headers for the topic {topic} must be a list of pairs of a name and its bytes")
        if not (isinstance(key, _SENT) and isinstance(value, _SENT) and all(isinstance(of, _SENT) for _, of in pairs)):
            raise TypeError(f"keys, values and headers for the topic {topic} must be bytes, text or None")
        if partition is not None and (not isinstance(partition, int) or isinstance(partition, bool)):
            raise TypeError(f"a partition of the topic {topic} must be a whole number, not {partition!r}")
        if partition is not None and not -1 <= partition <= _MOST_PARTITION:  # -1 is any partition
            raise TypeError(f"a partition of the topic {topic} must be a number of 31 bits, not {partition}")
        at_ms = self._input_ms if timestamp_ms is None else timestamp_ms
        if at_ms is not None and (not isinstance(at_ms, int) or isinstance(at_ms, bool)):
            raise TypeError(f"a timestamp for the topic {topic} must be a whole number, not {at_ms!r}")
        if at_ms is not None and not 0 < at_ms <= _MOST_MS:
            raise InvalidError(
                f"the timestamp {at_ms} of a record is not in the years from 1970 to 9999",
                hint="give epoch milliseconds as timestamp_ms, not microseconds or nanoseconds",
                task=self.name,
                topic=topic,
            )
        try:
            topic.encode()
            pairs = tuple((name, _encoded(part)) for name, part in pairs)  # the producer takes no lists as pairs
            record = ProducedRecord(topic, _encoded(key), _encoded(value), partition, pairs, at_ms)
            if self._check_output is not None:
                self._check_output(record)
            self._coordinator.output.add(record)
        except UnicodeEncodeError:
            raise InvalidError(
                "a text with half a surrogate pair cannot be sent as UTF-8", task=self.name, topic=ascii(topic)
            ) from None

    def drop_output(self) -> int:
        """Drop the output that waits for a commit, because Kafka refuses a record of it for good. Otherwise each later
        commit would send that record again. Changes of the stores stay.

        Returns: the number of dropped records. Raises: as :meth:`commit` if one is in progress.
        """
        with self._turn.commit():
            self._pending.make_way()
            self._coordinator.settle()
            return self._coordinator.output.drop()

    @property
    def has_much_output(self) -> bool:
        """Whether so much output waits that the next commit should begin now."""
        return self._coordinator.output.is_much

    @property
    def may_skip_input(self) -> bool:
        """Whether this opening has the permission to continue where the input begins if its offset is gone."""
        return self._permissions.allow_skipped_input

    @property
    def has_changes(self) -> bool:
        """Whether a commit has changes of backed-up stores, or output, to publish."""
        changed = any(store.uncommitted for store in self._stores.values() if store.config.durable)
        return changed or bool(self._coordinator.output.waiting())

    # --- time ----------------------------------------------------------------------------------------------------

    def now_ms(self) -> int:
        """The time, in epoch milliseconds. In a test, :class:`statemgr.testing.JobTester` moves it."""
        return self._services.clock.time_ns() // 1_000_000

    def newest_input_ms(self) -> int | None:
        """The newest timestamp of a message that this task was given, in epoch milliseconds; None before the first.

        It is in the memory of this process, as timers are: a task that is opened elsewhere begins with None.
        """
        return self._newest_input_ms

    def note_input(self, timestamp_ms: int) -> None:
        """Tell the task the timestamp of a message, in epoch milliseconds; -1 if it has none. A consumer loop does this
        before it passes the message.

        It is the timestamp of output until the next call, or the next of :meth:`run_timers`, if output can have it.
        """
        # librdkafka sends 0 as the time of now, and foreign input may have microseconds
        self._input_ms = timestamp_ms if 0 < timestamp_ms <= _MOST_MS else None
        if timestamp_ms >= 0:
            self._newest_input_ms = max(timestamp_ms, self._newest_input_ms or 0)

    # --- timers --------------------------------------------------------------------------------------------------

    def every(self, seconds: float, callback: Callable[[Task], object]) -> Timer:
        """Call ``callback(task)`` every ``seconds``, for the first time after ``seconds``, until the timer is cancelled
        or the task closes.

        A consumer loop calls it on its own thread between two messages (or batches), never in parallel with them. What
        it writes and produces belongs to the next commit. The times do not drift: they are multiples of ``seconds``
        after this call. If some have passed meanwhile, it is called once, and the next call is at the next multiple.

        Timers are in the memory of this process, and no commit contains them. A task that is restored elsewhere has
        none: add them in ``on_open`` of :meth:`statemgr.StateManager.run`. In a loop of your own, call
        :meth:`run_timers`.

        Raises: InvalidError if ``seconds`` is not a positive number.
        """
        return self._timers.add(seconds, lambda: callback(self))

    def run_timers(self) -> bool:
        """Call the timers that are due, and delete entries that have expired. A consumer loop does this by itself.

        Returns: whether one was due. Raises: what a callback raises.
        """
        self._input_ms = None
        return self._timers.run()

    # --- checkpoints ---------------------------------------------------------------------------------------------

    @property
    def last_checkpoint(self) -> Checkpoint | None:
        """The newest published checkpoint; None before the first commit."""
        return self._coordinator.checkpoint

    @property
    def has_new_factories(self) -> bool:
        """Whether the newest checkpoint was made with other factories than the configuration has."""
        last, stores = self.last_checkpoint, self._services.config.stores.values()
        return last is not None and any(
            last.backup_factories.get(store.name, store.backup_factories) != store.backup_factories
            or last.restore_factories.get(store.name, store.restore_factories) != store.restore_factories
            for store in stores
        )

    @property
    def start_offsets(self) -> Mapping[str, int]:
        """Source partition → next offset to read, from the checkpoint. Topics that were deleted and created again, and
        that ``allow_skipped_input`` permits to read from their beginning, are left out."""
        checkpoint = self.last_checkpoint
        offsets = checkpoint.input_offsets if checkpoint else {}
        return {source: at for source, at in offsets.items() if source_topic(source) not in self._inputs.recreated}

    def expect_inputs(self, topics: Sequence[str]) -> None:
        """Call this before the first message. Later, a commit is refused if one of these topics was created again, or
        if it leaves out the task's partition of one that the checkpoint has.

        Raises: MissingState if a topic was created again since the checkpoint; UnavailableError.
        """
        self._inputs.expect(topics)
        self._sources = frozenset(f"{topic}-{task_index(self.name)}" for topic in topics)

    def expect_outputs(self, check: Callable[[ProducedRecord], None]) -> None:
        """Let :meth:`produce` call ``check`` with each record. It raises InvalidError for one that its topic does not
        take. A consumer loop calls this method."""
        self._check_output = check

    # --- commits -------------------------------------------------------------------------------------------------

    def commit(self, input_offsets: Mapping[str, int], *, materialize: bool = False) -> Checkpoint:
        """Commit all stores, the output and ``input_offsets``, and wait for the result.

        Args:
            input_offsets: source partition (``orders-0``) → offset of the next message, a whole number.
            materialize: store snapshots even if segments of changes would be enough, so that a restore applies none.

        Raises: InvalidError for invalid offsets; MissingState if an input topic was deleted and created again;
        FencedError, RetryableError, OutcomeUnknownError, DiskFull, ClosedError; the error of an earlier asynchronous
        commit if nobody has seen it. After an error the next commit has the same changes. After LocalStateLost no
        commit of this task succeeds: open it again and continue from its last checkpoint.
        """
        self.commit_async(input_offsets, materialize=materialize)
        checkpoint = self._pending.end()  # its error is raised here, not by the next commit
        assert checkpoint is not None
        return checkpoint

    def commit_async(self, input_offsets: Mapping[str, int], *, materialize: bool = False) -> Future[Checkpoint]:
        """Start a commit: flush and checkpoint directories now; upload, publish and clean-up while the task continues.

        At most one commit is in progress. A second one waits for it, and raises its error or, after
        ``task.commit.timeout.ms``, RetryableError. The wait counts as blocked when the first is older than
        ``task.commit.max.delay.ms``. To skip a commit instead, check :attr:`pending_commit_seconds` first. Errors that
        no later commit has raised are logged by :meth:`close`.
        """
        check_offsets(input_offsets, task=self.name)
        with self._turn.commit():
            self._pending.make_way()
            if self._closed:
                raise ClosedError("the task is closed", task=self.name)
            with Flow("commit", self.name, self._services.config.job_key).here() as flow, self.metrics.begins_commit():
                return self._begin(input_offsets, materialize, flow)

    def may_commit(self) -> bool:
        """Whether a commit can begin without waiting for a repair of the backups. If not, the repair is asked to give
        way, but it may already wait for the brokers. Any repair also gives way to :meth:`commit_async`, which waits."""
        return self._turn.ask()

    def _begin(self, input_offsets: Mapping[str, int], materialize: bool, flow: Flow) -> Future[Checkpoint]:
        """The part of a commit that the task waits for."""
        self._coordinator.settle()
        self._check_sources(input_offsets)
        self._coordinator.snapshots.raise_failures()
        base = self._coordinator.next_base()
        overdue = self._coordinator.snapshots.overdue(base.checkpoint)
        whole: Collection[str] = self._stores if materialize else overdue
        input_ids = self._inputs.asked(input_offsets)
        with self._ahead.held(), self.metrics.phase("flush"):
            waiting = self._coordinator.output.waiting()
            frozen = freeze(self._services, self._stores, base, input_offsets, waiting, local_copies=whole)
        self.metrics.measure(self._stores)
        self.metrics.carried(sum(self._stores[name].changes_in(part) for name, part in frozen.stores.items()))
        try:
            return self._pending.start(lambda: self._finish(frozen, input_ids, whole, flow))
        except BaseException:
            discard(self._stores, frozen.stores)
            raise

    def _check_sources(self, input_offsets: Mapping[str, int]) -> None:
        """Refuse a commit that would forget a position: after a crash, its input would be processed a second time."""
        given, known = self._sources & input_offsets.keys(), self._sources & self.start_offsets.keys()
        if not known <= given or (self._sources and not given and self._newest_input_ms is not None):
            raise InvalidError(
                f"the input offsets leave out {', '.join(sorted((known or self._sources) - given))}",
                hint="give the next offset of each input partition of the task; `StateManager.run` commits by itself",
                task=self.name,
            )

    @property
    def pending_commit_seconds(self) -> float | None:
        """Age of the commit in progress; None if there is none."""
        return self._pending.seconds

    def forgive(self) -> None:
        """The caller has seen the error of an asynchronous commit, so the next commit does not raise it again."""
        self._pending.forgive()

    def _base_ahead(self) -> CommitBase | None:
        """The base of the next commit; None while it is not known, or a commit is in progress."""
        is_known = self._pending.seconds is None and self._coordinator.settled
        return self._coordinator.next_base() if is_known else None

    def _finish(self, frozen: FrozenCommit, input_ids: InputIds, whole: Collection[str], flow: Flow) -> Checkpoint:
        """The asynchronous part of a commit, on the commit thread."""
        with flow.here(), self.metrics.commit():
            try:
                prepared = self._prepare(frozen, whole)
                self._coordinator.publish(frozen, prepared, input_ids)
                self._coordinator.make_whole()
                self.damage.remind()
                checkpoint = self._coordinator.checkpoint
                assert checkpoint is not None
                self.metrics.log.committed(checkpoint)
                flow.attributes |= {"checkpoint": str(checkpoint.checkpoint_id), "bytes": prepared.added_bytes}
                flow.end()
                return checkpoint
            except (CorruptFile, MissingFile) as error:
                lost = [store.give_up(error) for store in self._stores.values()]
                raise lost[0] from error

    def _prepare(self, frozen: FrozenCommit, whole: Collection[str]) -> PreparedCommit:
        try:
            self._coordinator.check()
            self._ahead.wait()
        except BaseException:
            discard(self._stores, frozen.stores)
            raise
        with self.metrics.phase("upload"):
            return prepare(self._services, self._stores, frozen, portable=False, materialize=whole)

    # --- repair --------------------------------------------------------------------------------------------------

    def watch_backups(self) -> None:
        """Check the backups and repair damage in the background from now on."""
        repairs = self._repairs
        self.damage.watch(
            lambda: repairs.wake("checking and repairing the backups", self.check_up), lambda: repairs.busy
        )

    def check_up(self) -> bool:
        """Check the backups of the current checkpoint and repair damage. Not for the task's own thread.

        Returns: whether nothing is left to do. Raises: StatemgrError; then call it again.
        """
        if self._closed or not (needs_repair := self._coordinator.needs_repair()):
            return self._closed or needs_repair is False
        with self._turn.repair() as is_free:
            if not is_free or self._closed or self._pending.seconds is not None:
                return False  # commits have precedence
            return self._coordinator.repair(self._turn.give_way)

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` was called, even if it has not ended."""
        return self._closed

    # --- end -----------------------------------------------------------------------------------------------------

    def close(self, *, leave_copies: bool = True) -> None:
        """Close without committing: the next owner processes uncommitted input again. Idempotent.

        Args:
            leave_copies: keep local copies, with which the next opening on this machine is faster.
        """
        if self._closed:
            return
        self._closed = True
        self._repairs.close(wait=False)  # a repair gives way, and nobody waits for a check of backups
        with Closing() as closing, self._turn.commit():
            closing.callback(self._on_close)
            closing.callback(self._coordinator.close)
            for store in self._stores.values():
                closing.callback(store.close)
            if leave_copies:
                closing.callback(self._leave_copies)
            closing.callback(self._log_dropped_changes)
            closing.callback(self.metrics.close)
            closing.callback(self._coordinator.snapshots.close)
            closing.callback(self._ahead.close)
            closing.callback(self._pending.close)

    def _log_dropped_changes(self) -> None:
        counts = {name: store.uncommitted for name, store in self._stores.items() if store.config.backup_factories}
        dropped = ", ".join(f"{count} of {name}" for name, count in counts.items() if count)
        if dropped:
            log.warning("%s: closed with changes that are not committed: %s", self.name, dropped)

    def _leave_copies(self) -> None:
        """Leave copies, so that the next start on this machine replays nothing. They are a cache: errors are logged."""
        for name, store in self._stores.items():
            try:
                if store.leave_copy():
                    store.tidy()
            except (StatemgrError, OSError) as error:
                log.warning("%s: no local copy of %s was kept: %s", self.name, name, error)

    def __enter__(self) -> Task:
        return self

    def __exit__(self, *exc: Any) -> None:
        with Closing(exc[1]) as closing:
            closing.callback(self.close)


def _encoded(part: str | bytes | None) -> bytes | None:
    return part.encode() if isinstance(part, str) else part
