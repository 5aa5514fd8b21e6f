"""The driver's side of a stateful query: ``foreachBatch`` runs it for each micro-batch.

Steps of :meth:`Driver.run`:

1. find out whether a repair was published that was not answered, and compare the batch with the published one; a batch
   that is already published continues with step 5, and one that has nothing to do ends here
2. run the stage: one attempt per task, on the executors
3. collect exactly one prepared commit per task
4. publish all of them in one Kafka transaction, with the output rows if they go to Kafka; meanwhile, fetch the stored
   output rows if they are few
5. fetch the stored output rows if they are many, confirm that no other owner has published since, and call the output

Only step 4 changes which state is current. The steps before it leave only blobs that expire. The step after it runs
again when the batch is replayed.
"""

from __future__ import annotations

import contextlib
import json
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from spark_integration import story
from spark_integration.attempt import OUTPUT, UNSENT, Work, is_unsent, named
from spark_integration.context import Bound
from spark_integration.failures import find
from spark_integration.heartbeat import IdleWatch
from spark_integration.location import Location
from spark_integration.observing import Observers
from spark_integration.outbox import fetched_rows, local_rows, stored_rows
from spark_integration.output_schema import to_arrow
from spark_integration.outputs import KafkaOutput, Output
from spark_integration.partitioning import Partitioning
from spark_integration.reports import BatchReport, OnBatch, TaskReport
from spark_integration.sessions import changed
from spark_integration.sources import BatchInput, OffsetLog, StartingOffsets, check_continues, others_of, to_json
from spark_integration.stage import Stage
from spark_integration.stateful_input import check_no_state
from statemgr import JobConfig, StateManager
from statemgr.engine import (
    Condition,
    Epoch,
    MicroBatch,
    PreparedCommit,
    SharedCheckpoints,
    prepared_from_bytes,
    share_checkpoints,
)
from statemgr.errors import (
    BatchMismatch,
    CorruptBlob,
    CorruptError,
    FencedError,
    InvalidError,
    MissingBlob,
    MissingError,
    OutcomeUnknownError,
    PermissionNeeded,
    RetryableError,
    StatemgrError,
    from_json,
)
from statemgr.ids import source_topic
from statemgr.phases import Phase, announce
from statemgr.ports import BackupLost

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

    from statemgr import Checkpoint

#: Number of tries to publish, and to settle a publish whose outcome is unknown. Each has its own deadline.
SETTLE_ATTEMPTS = 3
#: Minimum seconds of a batch that has nothing to do, so that Spark does not run such batches without a pause.
_IDLE_SECONDS = 0.2
_ADAPTIVE = "spark.sql.adaptive.enabled"


#: Runs a batch's attempts at the tasks, as :meth:`Stage.run` does. Partition i of Spark has the rows of task i.
RunStage = Callable[["DataFrame", Work], list[Any]]


@dataclass(frozen=True)
class Plan:
    """The parts of a query as the user declared them. ``shaped`` takes the steps after the state; before it,
    ``completed`` gives stored rows the columns and the types that an older version of the query did not have."""

    config: JobConfig
    partitioning: Partitioning
    bound: Bound
    schema: StructType
    shaped: Callable[[DataFrame], DataFrame]
    completed: Callable[[DataFrame], DataFrame]
    output: Output
    on_batch: OnBatch | None = None
    run_stage: RunStage | None = None
    #: Whether the job's brokers have the input, as far as their addresses tell.
    is_from_own_brokers: bool = False


class Driver:
    """Runs the micro-batches of one query, one at a time.

    ``failure``: the typed error that ended the last batch, because Spark keeps only its text.
    """

    def __init__(self, plan: Plan, manager: StateManager, epoch: Epoch) -> None:
        self.failure: StatemgrError | None = None
        #: The class of the error that the last batch failed with, typed or not.
        self.failed: str | None = None
        #: Set when the query is asked to stop: Spark then interrupts the batch in progress.
        self.stopping = False
        self.observers = Observers(manager, plan.on_batch)
        #: Set when the query starts.
        self.offsets: OffsetLog | None = None
        self.plan = plan
        self._manager = manager
        self._epoch = epoch
        self._checkpoints: dict[str, Checkpoint | None] = dict(epoch.checkpoints)
        self._first = plan.bound.first
        #: The watermark that the batch that was published before this driver began has noted for the next one.
        self._noted_ms = plan.bound.watermark_ms
        #: How the stage is described to Spark; None before the first batch, and after the one that adds ``_first``.
        self._stage: Stage | None = None
        self._query_id: str | None = None
        self.idle = IdleWatch()
        #: The time at which the published state has something to do without input, in epoch milliseconds; 0 if unknown.
        self._due_ms: float = 0
        manager.metrics.health.watch(self.condition)
        #: Held while a batch or a repair runs.
        self._turn = threading.Lock()
        self._inputs = manager.job_inputs(epoch)
        #: Topics that were recreated, with permission. The published offsets mean nothing in them.
        self._recreated = self._inputs.recreated
        #: Where partitions begin whose next records are gone, if they may be skipped.
        self._skipped: Mapping[str, int] = {}
        if plan.is_from_own_brokers and epoch.permissions.allow_skipped_input:
            self._skipped = self._inputs.gone(self.input_offsets() or {})

    @property
    def has_heartbeat(self) -> bool:
        """Whether the program needs batches while the input is idle."""
        return self.plan.bound.next_due is not None

    def condition(self) -> Condition:
        """The condition for the probes of the process. A failed batch ends the query."""
        dead = () if self.failed is None else (f"a batch has failed: {self.failed}",)
        return Condition(dead=dead, open=self.plan.config.tasks)

    # --- what is published --------------------------------------------------------------------------------

    def published(self) -> dict[str, Checkpoint]:
        """Task → its current checkpoint, for the tasks that have one."""
        return {task: checkpoint for task, checkpoint in self._checkpoints.items() if checkpoint is not None}

    def published_batch(self) -> MicroBatch | None:
        """The current micro-batch, or None if something else published last."""
        batches = {checkpoint.batch if checkpoint else None for checkpoint in self._checkpoints.values()}
        return batches.pop() if len(batches) == 1 else None

    def input_offsets(self) -> dict[str, int] | None:
        """The input offsets of the published state over all tasks; None if no state is published.

        Topics that are read from their beginning again with permission are left out, and so are records that are gone.
        Raises: BatchMismatch if tasks disagree about a partition, as after a consumer loop.
        """
        return {**self._published_offsets(), **self._skipped} if self.published() else None

    def _published_offsets(self) -> dict[str, int]:
        """As :meth:`input_offsets`, without looking at what is gone."""
        published = self.published()
        offsets: dict[str, int] = {}
        last: Mapping[str, int] = {}
        for task, checkpoint in published.items():
            if checkpoint.input_offsets == last:
                continue  # with key_by, every task has all partitions
            last = checkpoint.input_offsets
            for partition, offset in last.items():
                if offsets.setdefault(partition, offset) != offset:
                    raise BatchMismatch(
                        "the tasks' checkpoints are at different offsets of one partition",
                        hint="a job whose tasks were committed one by one continues with "
                        "partition_by_kafka_partition only",
                        partition=partition,
                        task=task,
                    )
        return {name: offset for name, offset in offsets.items() if source_topic(name) not in self._recreated}

    def starting_offsets(self) -> StartingOffsets:
        """Where a query at a new location begins: at the published offsets. New partitions, and those of topics that
        were recreated with permission, begin at their first record.

        Raises: as :meth:`input_offsets`; UnavailableError.
        """
        offsets = self.input_offsets() or {}
        return StartingOffsets.of(offsets).including(*self._inputs.added(offsets))

    # --- a batch ------------------------------------------------------------------------------------------

    def run(self, rows: DataFrame, batch_id: int) -> None:
        """Process one batch. Raises: statemgr's typed errors, and whatever user functions raise."""
        assert self.offsets is not None
        self.idle.begin()
        with self._typed():
            source = self._never_back(self.offsets.read(batch_id))
            report = self._run(rows, source)
        if source.is_empty:
            self.idle.end_without_input()
        if report is not None:
            self.observers.observe(report)
        else:
            self._manager.clock.sleep(_IDLE_SECONDS)

    def give_output_again(self, spark: SparkSession) -> None:
        """Deliver the published rows before the first batch. Raises: as :meth:`run`."""
        with self._typed():
            self._give_output(spark)

    def repair(self) -> bool:
        """Make damaged backups again between two batches, on another thread.

        Returns: whether nothing is left to do here; a batch that is running may do it instead.
        Raises: as :meth:`statemgr.StateManager.repair`.
        """
        if not self._turn.acquire(blocking=False):
            return False
        try:
            damaged = self._manager.damaged()
            self._checkpoints.update(self._manager.repair())
            left = {task: pairs - damaged.get(task, frozenset()) for task, pairs in self._epoch.refill.items()}
            self._epoch = replace(self._epoch, refill=left)
        finally:
            self._turn.release()
        return not any(self._manager.damaged().values())

    def _settle(self) -> None:
        """Find out whether a repair was published whose acknowledgement was lost: the batch continues it then.

        Raises: as :meth:`statemgr.StateManager.settle`.
        """
        for left in reversed(range(SETTLE_ATTEMPTS)):
            try:
                self._checkpoints.update(self._manager.settle())
                return
            except OutcomeUnknownError:
                if not left:
                    raise

    def _note_damage(self) -> None:
        """Let the next commits make again what is damaged as far as is known. Damage that is found later has to wait
        for the commits after them."""
        refill = dict(self._epoch.refill)
        for task, pairs in self._manager.damaged().items():
            refill[task] = refill.get(task, frozenset()) | pairs
        self._epoch = replace(self._epoch, refill=refill)

    @contextlib.contextmanager
    def _typed(self) -> Iterator[None]:
        try:
            with self._turn:
                self._settle()
                yield
        except Exception as error:
            self.failure = _error_of(error)
            if self.stopping and self.failure is None:
                story.given_up(self.plan.config.job_name, error)
                raise
            self._fail(self.failure or error)
            if self.failure is None or self.failure is error:
                raise
            raise self.failure from error

    def _fail(self, error: Exception) -> None:
        self.failed = type(error).__name__
        self._manager.metrics.failed(error)
        story.failed(self.plan.config.job_name, error)

    def _run(self, rows: DataFrame, source: BatchInput) -> BatchReport | None:
        """Run a batch. Returns: its report, or None if it had nothing to do."""
        assert self.offsets is not None
        spark, batch_id = rows.sparkSession, source.batch_id
        # 1. recognise
        if source.others_end and not self.offsets.location.kept:
            raise InvalidError(
                "the input has a source other than Kafka, and only a checkpoint location can continue it",
                hint=".option('checkpointLocation', 'file:///…'), one for each query",
            )
        start, end = to_json(source.start, source.others_start), to_json(source.end, source.others_end)
        batch = MicroBatch(self._id(self.offsets.location, spark), batch_id, start, end, source.watermark_ms)
        replayed = self._recognise(batch, source)
        if not replayed and self._has_nothing_to_do(source):
            return None
        now = self._manager.clock.monotonic
        began = staged = now()
        publish_seconds = 0.0
        tasks: tuple[TaskReport, ...] = ()
        fetched = None
        if not replayed:
            # 2. run the stage, 3. collect
            if self.plan.is_from_own_brokers and not self._epoch.permissions.allow_skipped_input:
                self._inputs.expect_from(source.start)  # Spark skips what is gone with failOnDataLoss=false
            prepared, tasks = self._run_stage(rows, source)
            topic_ids = self._inputs.asked(source.end)  # after the rows were read, which came from these topics
            staged = now()
            # 4. publish
            prepared = self._with_watermark(self._with_records(spark, prepared), tasks, source)
            fetched, publish_seconds = self._publish_and_fetch(spark, prepared, batch, topic_ids)
            self._due_ms = min((task.due_ms for task in tasks if task.due_ms is not None), default=math.inf)
        # 5. output
        sequence = self._give_output(spark, fetched)
        return BatchReport(
            job=self.plan.config.job_name,
            batch_id=batch_id,
            sequence=sequence,
            replayed=replayed,
            time_ms=source.time_ms,
            watermark_ms=source.watermark_ms,
            stage_seconds=staged - began,
            publish_seconds=publish_seconds,
            output_seconds=now() - staged - publish_seconds,
            input_offsets=dict(source.end),
            tasks=tasks,
        )

    def lost_location(self) -> BatchMismatch | None:
        """An error that says so if the location is gone, or has become another query's, while this one runs."""
        location = self.offsets.location if self.offsets is not None else None
        if location is None or not location.kept or self._query_id is None:
            return None
        try:
            found = location.query_id()
        except StatemgrError:
            found = None
        if found == self._query_id:
            return None
        return BatchMismatch(
            "the checkpoint location was removed while the query runs" if found is None
            else "another query has taken the checkpoint location while this one runs",
            hint="start at a new location, one for each query: the query continues from its published checkpoint",
            location=location.uri, job=self.plan.config.job_name,
        )  # fmt: skip

    def _id(self, location: Location, spark: SparkSession) -> str:
        """The query's ID. The first call also checks that Spark keeps no state in the location, whose logs are open.

        Raises: BatchMismatch if a location that is cheap to read is not this query's any more.
        """
        if self._query_id is None:
            location.forget_quick(spark)
            check_no_state(location)
            self._query_id = location.query_id()
        elif location.is_local and (lost := self.lost_location()) is not None:
            raise lost
        if self._query_id is None:
            raise InvalidError("the checkpoint location has no metadata", location=location.uri)
        return self._query_id

    def _never_back(self, source: BatchInput) -> BatchInput:
        """Return the batch with the published watermark if that is higher. A new location starts without one."""
        published = self.published_batch()
        if published is None:
            return source
        known = (source.watermark_ms, published.watermark_ms, self._noted_ms)
        return replace(source, watermark_ms=max((ms for ms in known if ms is not None), default=None))

    def _recognise(self, batch: MicroBatch, source: BatchInput) -> bool:
        """Whether the batch is the published one. Raises: BatchMismatch if it is neither that one nor the next."""
        published = self.published_batch()
        if published is not None and replace(published, watermark_ms=batch.watermark_ms) == batch:
            return True
        here = (batch.query_id, batch.batch_id)
        if published is not None and (published.query_id, published.batch_id) == here:
            raise BatchMismatch(
                f"batch {batch.batch_id} was published with other offsets than it has now",
                hint="the checkpoint location was changed; take a new one and the callable form of input",
                published=f"{published.start_offsets} to {published.end_offsets}",
                now=f"{batch.start_offsets} to {batch.end_offsets}",
            )
        self.plan.partitioning.offsets_of_tasks(self.plan.config.tasks, source.end)  # refuses foreign partitions
        others = others_of(published.end_offsets) if published else {}
        permitted = self._epoch.permissions.allow_skipped_input
        offsets = self.input_offsets()
        if self._skipped and offsets is not None and others:
            # only the kept location has these: it begins where its last batch ended, and Spark skips what is gone
            published_at = self._published_offsets()
            offsets |= {name: at for name, at in published_at.items() if source.start.get(name) == at}
        check_continues(source, offsets, others, allow_skipped=permitted)
        return False

    def _has_nothing_to_do(self, source: BatchInput) -> bool:
        """Whether a batch would leave the state unchanged: no input, the same watermark, and nothing due by its time.

        A job's first batch always runs, because the batches of a location continue from a published one.
        """
        published = self.published_batch()
        return (
            self.has_heartbeat
            and published is not None
            and source.is_empty
            and source.watermark_ms == published.watermark_ms
            and source.time_ms < self._due_ms
        )

    def _run_stage(self, rows: DataFrame, source: BatchInput) -> tuple[list[PreparedCommit], tuple[TaskReport, ...]]:
        plan, order = self.plan, self.plan.bound.order
        if self._first is not None:
            rows, order = self._first.added_to(rows), (*order, *self._first.order)
        if self._stage is None:
            self._stage = Stage(plan.config.job_key, rows, plan.partitioning, plan.config.tasks, order)
        run = plan.run_stage or self._stage.run
        with share_checkpoints(plan.config, self.published()) as checkpoints, _not_adaptive(rows.sparkSession):
            work = self._work(source, checkpoints)
            with self._explaining():
                results = run(self._stage.spread(rows), work)
                failures = [from_json(row.error) for row in results if row.error is not None]
                if failures:
                    # if another owner caused one of the errors, that explains the others
                    raise next((error for error in failures if isinstance(error, FencedError)), failures[0])
        if sorted(row.task for row in results) != list(range(plan.config.tasks)):
            raise InvalidError(
                f"the stage returned {len(results)} commits, not one for each of {plan.config.tasks} tasks",
                hint="something between the input and the state changed the number of Spark's partitions",
            )
        # workers neither receive nor return the input's offsets
        offsets = plan.partitioning.offsets_of_tasks(plan.config.tasks, source.end)
        prepared = [
            replace(prepared_from_bytes(bytes(row.prepared)), input_offsets=offsets[row.task]) for row in results
        ]
        tasks = [TaskReport.from_json(row.report) for row in sorted(results, key=lambda row: row.task)]
        for report in (restored for task in tasks for restored in task.restored):
            if report.factory not in ("local", "empty"):
                story.restored(plan.config.job_name, report)
        return prepared, tuple(tasks)

    @contextlib.contextmanager
    def _explaining(self) -> Iterator[None]:
        """A block that reads published state. Raises: FencedError if another owner has removed some of it since."""
        try:
            yield
        except Exception as error:
            if isinstance(_error_of(error), MissingError | CorruptError):
                self._manager.confirm()
            raise

    def _work(self, source: BatchInput, checkpoints: SharedCheckpoints) -> Work:
        plan, published, before = self.plan, self.published(), self.published_batch()
        self._note_damage()
        return Work(
            config=json.dumps(plan.config.to_mapping()),
            epoch=self._epoch.to_bytes(),
            checkpoints=checkpoints,
            tasks=plan.config.tasks,
            partitioning=plan.partitioning,
            process=plan.bound.process,
            next_due=plan.bound.next_due,
            attachments=plan.bound.attachments,
            schema=to_arrow(plan.schema).serialize().to_pybytes(),
            sequence=1 + max((self._epoch.sequence, *(checkpoint.sequence for checkpoint in published.values()))),
            time_ms=source.time_ms,
            watermark_ms=source.watermark_ms,
            previous_watermark_ms=None if before is None else before.watermark_ms,
        )

    def _with_records(self, spark: SparkSession, prepared: list[PreparedCommit]) -> list[PreparedCommit]:
        """Return the commits, with the records that the transaction sends to Kafka added to the first one. Without any,
        the names of the stored rows say so."""
        plan = self.plan
        if not isinstance(plan.output, KafkaOutput):
            return [replace(one, attachments=tuple(named(a, UNSENT) for a in one.attachments)) for one in prepared]
        attachments = [attachment for commit in prepared for attachment in commit.attachments]
        rows = fetched_rows(spark, plan.config, attachments, plan.schema)
        return [replace(prepared[0], produced=tuple(plan.output.records(plan.shaped(rows)))), *prepared[1:]]

    def _with_watermark(
        self, prepared: list[PreparedCommit], tasks: Sequence[TaskReport], source: BatchInput
    ) -> list[PreparedCommit]:
        """Return the commits, of which the first one notes the watermark of the next batch, if the rows have moved it.

        Spark has it in its location as well, and a new location needs it.
        """
        found = [task.next_watermark_ms for task in tasks if task.next_watermark_ms is not None]
        following = max(found, default=0)
        if following <= (source.watermark_ms or 0):
            return prepared
        noting, first = self.plan.bound.noting(following), prepared[0]
        attachments = tuple(
            replace(one, inline=noting[one.name]) if one.name in noting and one.inline is not None else one
            for one in first.attachments
        )
        return [replace(first, attachments=attachments), *prepared[1:]]

    def _publish_and_fetch(
        self,
        spark: SparkSession,
        prepared: list[PreparedCommit],
        batch: MicroBatch,
        topic_ids: Callable[[], Mapping[str, str]],
    ) -> tuple[DataFrame | None, float]:
        """Publish on another thread, because only this thread may call Spark.

        Returns: the output rows if they are few, and the seconds that the publish took.
        """
        stored = [one for commit in sorted(prepared, key=lambda one: one.task) for one in commit.attachments]
        to_kafka = isinstance(self.plan.output, KafkaOutput)
        with self._manager.executors.pool("publish", 1) as pool:
            publishing = pool.submit(self._publish, prepared, batch, topic_ids)
            try:
                rows = None if to_kafka else local_rows(spark, self.plan.config, stored)
            except Exception:
                publishing.result()  # its error explains this one
                self._manager.confirm()  # or another owner has removed the rows
                raise
            return rows, publishing.result()

    def _publish(
        self, prepared: list[PreparedCommit], batch: MicroBatch, topic_ids: Callable[[], Mapping[str, str]]
    ) -> float:
        """Publish the commits. If that fails, publish the same ones again: each try first finds out whether the one
        before it was published, and whether this driver is still the owner. Returns: the seconds that it took."""
        began = self._manager.clock.monotonic()
        ids = topic_ids()
        prepared = [replace(commit, input_topic_ids=ids) for commit in prepared]
        for left in reversed(range(SETTLE_ATTEMPTS)):
            try:
                checkpoints = self._manager.publish(prepared, batch, refill=self._epoch.refill, wait=False)
            except (RetryableError, OutcomeUnknownError) as error:
                # a lost backup needs a commit of the whole state
                if not left or self.stopping or isinstance(error, BackupLost):
                    raise
                story.publishing_again(self.plan.config.job_name, error)
            else:
                break
        self._checkpoints.update(checkpoints)
        self._noted_ms = None
        if self._first is not None:
            self._first = self._stage = None
        self._recreated, self._skipped = frozenset(), {}
        # permissions and fills were for this one publish
        self._epoch = self._epoch.after_publish()
        return self._manager.clock.monotonic() - began

    def _give_output(self, spark: SparkSession, rows: DataFrame | None = None) -> int:
        """Call the output with the stored rows of the published batch. ``rows`` are these if they were fetched already.

        Returns: their sequence number.
        Raises: FencedError if another owner has published since, and PermissionNeeded if the rows are lost; the output
        is then not called.
        """
        published = self.published()
        sequence = max(checkpoint.output_sequence for checkpoint in published.values())
        announce(Phase.OUTPUT, f"sequence {sequence}", self.plan.config.job_key)
        if isinstance(self.plan.output, KafkaOutput):
            self._send_stored(spark, self.plan.output, sequence)
            return sequence
        with contextlib.nullcontext(rows) if rows is not None else self._stored(spark, sequence) as given:
            if given is not None:
                self._manager.confirm()
                self.plan.output(self.plan.shaped(given), sequence)
        return sequence

    @contextlib.contextmanager
    def _stored(self, spark: SparkSession, sequence: int) -> Iterator[DataFrame | None]:
        """Return the stored rows of the published batch; None if they are lost, and may be left out.

        Raises: FencedError if another owner has removed them; PermissionNeeded if they are lost; as
        :func:`stored_rows`.
        """
        config, rows = self.plan.config, None
        with contextlib.ExitStack() as kept:
            try:
                found = kept.enter_context(stored_rows(spark, config, self.published(), self.plan.schema))
                rows = self.plan.completed(found)
            except Exception as error:
                self._manager.confirm()
                lost = _error_of(error)
                if not isinstance(lost, MissingBlob | CorruptBlob):
                    raise
                if not self._epoch.permissions.allow_skipped_output:
                    raise PermissionNeeded(
                        f"the output rows of sequence {sequence} are lost, and may not have been delivered: "
                        f"{lost.message}",
                        hint="bring the blob back; or, if the output has this sequence or can do without it, start "
                        "once with allow_skipped_output=True. The state is not concerned",
                        **{"job": config.job_name, **lost.where},
                    ) from error
                story.left_out(config.job_name, sequence, lost)
            yield rows

    def _send_stored(self, spark: SparkSession, output: KafkaOutput, sequence: int) -> None:
        """Send the published rows to Kafka in a transaction that publishes their state again, unless the transaction of
        their batch has sent them: another output may have had that batch, and may not have got it."""
        published = self.published()
        if not any(is_unsent(one) for checkpoint in published.values() for one in checkpoint.attachments):
            return
        with self._stored(spark, sequence) as stored:
            if stored is None:
                return
            records = output.records(self.plan.shaped(stored))
        self._checkpoints.update(self._manager.publish_again(records, lambda one: named(one, OUTPUT)))


def _error_of(error: Exception) -> StatemgrError | None:
    """The typed error that an exception is, or whose text it has: Spark passes on a worker's error only as text."""
    return error if isinstance(error, StatemgrError) else find(str(error))


def _not_adaptive(session: SparkSession) -> AbstractContextManager[None]:
    """Plan without adaptive execution, as Spark plans its own stateful queries.

    Adaptive execution would take time to look for better partitions, but there is one for each task. In a batch without
    rows, it would remove them. This changes only the query's own copy of the session.
    """
    return changed(session, _ADAPTIVE, "false")
