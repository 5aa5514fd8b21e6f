"""Runs a stateful query without Kafka, without a blob store and without executors, for the tests of an application.

Spark plans the rows: the steps after the state, and which task has which key. The attempts at the tasks run in the
test's process, so a debugger can stop in them. Commits, publishes, restores and RocksDB are those of production.
Kafka, the blob store and the clock are those of :class:`statemgr.testing.JobTester`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal, Self, Unpack

import pyarrow as pa
import pyarrow.compute as pc
from pyspark import cloudpickle
from pyspark.sql import Row, SparkSession
from pyspark.sql.types import StructField, StructType

from spark_integration.attempt import Work, attempt
from spark_integration.driver import Driver
from spark_integration.location import Location
from spark_integration.partitioning import TASK_COLUMN
from spark_integration.processors.frame import StatefulFrame
from spark_integration.processors.groups import EventTime
from spark_integration.processors.watermarks import WATERMARK, Watermark, timed
from spark_integration.query import StatefulQuery, parsed_schema
from spark_integration.reading.sources import StateSource
from spark_integration.reports import TaskReport
from spark_integration.sources import BatchInput, OffsetLog
from statemgr import Checkpoint, JobConfig, StateManager
from statemgr.engine import PermissionFlags
from statemgr.errors import InvalidError, RetryableError
from statemgr.testing.memory_servers import START_MS, MemoryServers

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

#: The topic of the rows, as the checkpoints name it.
TOPIC = "input"
#: Attempts at a task until a batch fails, as in Spark (``spark.task.maxFailures``).
_ATTEMPTS = 4
_DISK = "executor"
#: The last ``datetime`` of Python, in epoch microseconds.
_LAST_US = (datetime.max.replace(tzinfo=UTC) - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(microseconds=1)
Moment = Literal["publish", "output"]


class SparkJobTester:
    """A stateful query that runs in the test's process until the ``with`` block ends.

    An exception of ``process``, of a processor or of the output ends the query, as in production. The call that caused
    it raises it, and :meth:`restore` starts the query again, which runs the failed batch again.

    Args:
        query: a :class:`StatefulQuery`, or the result of ``transformWithState`` and its relatives. Its input is never
            read: :meth:`batch` takes its place. If it has a function as its output, this is called.
        schema: the columns of the rows that the query's input has, as a StructType or DDL.
        watermark: a column of the rows, and how late rows may be in seconds, as ``withWatermark`` takes them. The
            column has times, or windows, whose ends count.
        spark: the session; without one, the active session or a new local one.
        start_ms: the time at which the clock begins, in epoch milliseconds.
        permissions: one-shot permissions, as for :meth:`StatefulQuery.start`.

    Attributes:
        config: the configuration that applies.
    """

    def __init__(
        self,
        query: StatefulQuery | StatefulFrame,
        schema: StructType | str,
        *,
        watermark: tuple[str, float] | None = None,
        spark: SparkSession | None = None,
        start_ms: int = START_MS,
        **permissions: Unpack[PermissionFlags],
    ) -> None:
        self._servers = MemoryServers(_query_of(query).config, start_ms)
        self.config = self._servers.config
        self._spark = spark or SparkSession.getActiveSession() or _local_session()
        self._schema = parsed_schema(schema)
        self._watermark: Watermark | None = None
        if watermark is not None:
            self._schema, self._watermark = _with_watermark(self._schema, *watermark)
        self._query = self._adapted(query)
        self._permissions = permissions
        self._log = _Log()
        self._driver: Driver | None = None
        self._job: StateManager | None = None
        self._pending: _Pending | None = None
        self._crash: Moment | None = None
        self._lost_attempts = 0
        self._given: list[Row] = []
        self._servers.broker.create(TOPIC, self.config.tasks)

    def __enter__(self) -> Self:
        self._servers.open()
        try:
            self._start(self.config)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self._kill()
        self._servers.close()

    # --- batches -------------------------------------------------------------------------------------------------

    def batch(
        self, rows: Iterable[Any] = (), *, lost_attempts: int = 0, crash_before: Moment | None = None
    ) -> list[Row]:
        """Run one micro-batch. Returns: the rows that the output got; none if the driver crashed.

        Args:
            rows: tuples, dictionaries or ``Row`` objects with the columns of ``schema``; or a pandas data frame.
            lost_attempts: the number of attempts at each task that are thrown away after they have ended, as if their
                executor was lost, before one counts.
            crash_before: the driver dies before it publishes the state, or before it calls the output. Then call
                :meth:`restore`, which runs the batch again.

        Raises: InvalidError if the query does not run; what the query raises.
        """
        self._check_running("run a batch")
        if crash_before not in (None, "publish", "output"):
            raise InvalidError(f"the driver cannot crash before {crash_before!r}", hint="choose publish or output")
        given = rows if hasattr(rows, "columns") else list(rows)
        frame = self._spark.createDataFrame(given, self._schema)
        self._pending = _Pending(frame, self._log.next_batch(self._rows_of(frame), self._servers.now_ms))
        self._lost_attempts, self._crash = lost_attempts, crash_before
        return self._run()

    def advance(self, *, seconds: float) -> list[Row]:
        """Move the clock ahead and run a batch without rows, in which timers expire and TTLs end.

        Returns: the rows that the output got. Raises: InvalidError if ``seconds`` is negative; as :meth:`batch`.
        """
        self._check_running("run a batch")
        if seconds < 0:
            raise InvalidError(f"the clock cannot go back by {-seconds} s", hint="give a positive number of seconds")
        self._servers.clock.advance(seconds)
        return self.batch()

    @property
    def now_ms(self) -> int:
        """The time of the clock, in epoch milliseconds."""
        return self._servers.now_ms

    # --- state ---------------------------------------------------------------------------------------------------

    def state(
        self, store: str | None = None, *, variable: str | None = None, timers: bool = False
    ) -> list[dict[str, Any]]:
        """Return the published state in the order of tasks and keys, with the columns of the source ``statemgr.state``.

        Args:
            store: needed if the job has several.
            variable: a state variable of a processor; ``timers``: its timers. Where ``expires`` is after the year 9999,
                it is the last ``datetime`` of Python.

        Raises: InvalidError for a store or a variable that does not exist.
        """
        self._servers.check_open("SparkJobTester")
        options = {"config": json.dumps(self._servers.on_disk(self.config, _DISK).to_mapping())}
        if store is not None:
            options["store"] = store
        if variable is not None:
            options["stateVarName"] = variable
        if timers:
            options["readRegisteredTimers"] = "true"
        source = StateSource(options)
        reader = source.reader(source.schema())
        return [row for part in reader.partitions() for read in reader.read(part) for row in _rows(read)]

    def checkpoints(self) -> Mapping[str, Checkpoint]:
        """Task → its published checkpoint. Raises: InvalidError if the query does not run."""
        self._check_running("look at checkpoints")
        assert self._driver is not None
        return self._driver.published()

    # --- the life of the query -----------------------------------------------------------------------------------

    def crash(self, *, lose_disk: bool = False) -> None:
        """Kill the driver immediately, between two batches.

        Args:
            lose_disk: the local state is lost too, as on new machines.

        Raises: InvalidError if the query does not run.
        """
        self._check_running("crash")
        self._kill()
        if lose_disk:
            self._servers.lose_disk()

    def restore(self, backend: str | None = None, *, query: StatefulQuery | StatefulFrame | None = None) -> list[Row]:
        """Start the query again after :meth:`crash` or an error, and run the unfinished batch again.

        Args:
            backend: the factory that restores all stores, for example ``kafka-changelog``. The local disk is lost
                first, so that the state comes from the backend. Without one, the query restores as configured.
            query: a new version of the application, with the same configuration.

        Returns: the rows that the output got. Raises: InvalidError if the query runs, or if it has no backup in
            ``backend``; what a restore raises.
        """
        self._servers.check_open("SparkJobTester")
        if self._driver is not None:
            raise InvalidError("the query is running", hint="call crash() before restore()")
        if query is not None:
            self._query = self._adapted(query)
        self._start(self.config if backend is None else self._servers.restoring_from(backend))
        self._lost_attempts, self._crash = 0, None
        return [] if self._pending is None else self._run()

    # --- inside --------------------------------------------------------------------------------------------------

    def _adapted(self, query: StatefulQuery | StatefulFrame) -> StatefulQuery:
        """Return the query on in-memory servers. Raises: InvalidError if it is not complete."""
        given = _query_of(query)
        self._user_output = given._output if callable(given._output) else None
        adapted = replace(given, config=self.config, manager=self._manager)
        adapted = adapted.input(lambda _: None).output(self._output)
        adapted.check_complete()
        return adapted

    def _start(self, config: JobConfig) -> None:
        self._query = replace(self._query, config=self._servers.on_disk(config, _DISK))
        empty = self._spark.createDataFrame([], self._schema)
        self._driver, self._job = self._query.take_over(empty, self._attempts, **self._permissions)
        self._driver.offsets = self._log

    def _run(self) -> list[Row]:
        assert self._driver is not None
        assert self._pending is not None
        self._given = []
        self._log.current = self._pending.source
        try:
            following_ms = self._following_ms(self._pending.rows)
            self._driver.run(self._pending.rows, self._pending.source.batch_id)
        except _Crashed:
            self._kill()
            return []
        except BaseException:
            self._kill()
            raise
        self._log.ended(self._pending.source, following_ms)
        self._pending = None
        return self._given

    def _output(self, rows: DataFrame, sequence: int) -> None:
        if self._crash == "output":
            raise _Crashed
        if self._user_output is not None:
            self._user_output(rows, sequence)
        self._given = rows.collect()

    def _manager(self, config: JobConfig, partitioner: str) -> StateManager:
        return self._servers.manager(config, partitioner)

    def _attempts(self, rows: DataFrame, work: Work) -> list[Any]:
        """Run the attempts here instead of on executors. Raises: whatever they raise."""
        shipped: bytes = cloudpickle.dumps(work)  # type: ignore[no-untyped-call]
        # PySpark makes no table of a null struct with fields declared NOT NULL. Executors get such rows in another way
        table = rows.to(rows.schema.toNullable()).toArrow()
        numbers = table[TASK_COLUMN]
        found = []
        for task in range(work.tasks):
            own = table.filter(pc.equal(numbers, task))
            for _ in range(self._lost_attempts):
                _attempt(shipped, task, own)
            prepared, report = _retried(shipped, task, own)
            found.append(SimpleNamespace(task=task, error=None, prepared=prepared, report=report.to_json()))
        if self._crash == "publish":
            raise _Crashed
        return found

    def _rows_of(self, rows: DataFrame) -> Mapping[str, int]:
        """Return the number of rows in each partition of the input: all in the first one, or as their column says."""
        partitioning = self._query._partitioning
        assert partitioning is not None
        if partitioning.by_key:
            return {f"{TOPIC}-0": rows.count()}
        counted = rows.groupBy(*partitioning.quoted(rows, partitioning.columns)).count().collect()
        return {f"{TOPIC}-{row[0]}": row[1] for row in counted}

    def _following_ms(self, rows: DataFrame) -> int | None:
        """Return the watermark that follows from the rows, in epoch milliseconds; None up to 0, as on Spark."""
        if self._watermark is None:
            return None
        event_time, newest = self._watermark.event_time, list[int]()
        for _ in timed(rows.select(rows[event_time.column]).toArrow().to_batches(), event_time, newest.append):
            pass
        return max(max(newest, default=0) - self._watermark.delay_ms, 0) or None

    def _kill(self) -> None:
        self._driver, job = None, self._job
        self._job = None
        if job is not None:
            job.close()

    def _check_running(self, what: str) -> None:
        self._servers.check_open("SparkJobTester")
        if self._driver is None:
            raise InvalidError(f"cannot {what}: the query does not run", hint="call restore() first")


def _query_of(query: StatefulQuery | StatefulFrame) -> StatefulQuery:
    return query._query if isinstance(query, StatefulFrame) else query


class _Crashed(Exception):
    """The driver dies."""


@dataclass(frozen=True)
class _Pending:
    """An unfinished batch."""

    rows: DataFrame
    source: BatchInput


class _NewLocation(Location):
    """An in-memory checkpoint location."""

    def __init__(self) -> None:
        self.uri = "memory:/location"
        self.kept = True

    def query_id(self) -> str:
        return "query-under-test"

    def read(self, name: str) -> list[str] | None:
        return None


class _Log(OffsetLog):
    """Spark's log of batches, in memory."""

    def __init__(self) -> None:
        super().__init__(_NewLocation())
        self.current: BatchInput | None = None
        self._next = 0
        self._offsets: dict[str, int] = {}
        self._watermark_ms: int | None = None

    def read(self, batch_id: int) -> BatchInput:
        assert self.current is not None
        return self.current

    def next_batch(self, rows: Mapping[str, int], time_ms: int) -> BatchInput:
        """Plan the next batch, with this many rows from each partition."""
        ends = dict(self._offsets)
        for partition, count in rows.items():
            ends[partition] = ends.get(partition, 0) + count
        starts = {partition: self._offsets.get(partition, 0) for partition in ends}
        return BatchInput(self._next, starts, ends, time_ms, self._watermark_ms)

    def ended(self, batch: BatchInput, watermark_ms: int | None) -> None:
        """Note that a batch has ended. Its rows give this watermark."""
        self._next, self._offsets = batch.batch_id + 1, dict(batch.end)
        known = [time for time in (self._watermark_ms, watermark_ms) if time is not None]
        self._watermark_ms = max(known, default=None)


def _attempt(shipped: bytes, task: int, rows: pa.Table, retries: int = 0) -> tuple[bytes, TaskReport]:
    """Run an attempt with its own copy of the query's functions and objects, as an executor has it."""
    work: Work = cloudpickle.loads(shipped)
    return attempt(work, task, iter(rows.to_batches()), retries=retries)


def _retried(shipped: bytes, task: int, rows: pa.Table) -> tuple[bytes, TaskReport]:
    """Run an attempt, and repeat it as Spark does."""
    for number in range(_ATTEMPTS):
        try:
            return _attempt(shipped, task, rows, number)
        except RetryableError:
            if number == _ATTEMPTS - 1:
                raise
    raise AssertionError("unreachable")


def _rows(batch: pa.RecordBatch) -> list[dict[str, Any]]:
    """Return the rows. Python has no time after the year 9999, such as the time of a timer for "never"."""
    at = batch.schema.get_field_index("expires")
    if at >= 0:
        field = batch.schema.field(at)
        micros = pc.min_element_wise(batch.column(at).cast(pa.int64()), _LAST_US)
        batch = batch.set_column(at, field, micros.cast(field.type))
    found: list[dict[str, Any]] = batch.to_pylist()
    return found


def _with_watermark(schema: StructType, column: str, seconds: float) -> tuple[StructType, Watermark]:
    """Return the schema, marked as ``withWatermark`` marks it, and the watermark.

    Raises: InvalidError for a missing column.
    """
    if column not in schema.names:
        raise InvalidError(
            "the rows have no such column for the watermark", hint=f"they have {', '.join(schema.names)}", column=column
        )
    delay_ms = int(seconds * 1000)
    marked = StructType(
        [
            StructField(field.name, field.dataType, field.nullable, {**field.metadata, WATERMARK: delay_ms})
            if field.name == column
            else field
            for field in schema.fields
        ]
    )
    is_window = isinstance(schema[column].dataType, StructType)
    return marked, Watermark(EventTime(column, is_window), delay_ms)


def _local_session() -> SparkSession:
    return SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false").getOrCreate()
