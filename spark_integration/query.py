"""``StatefulQuery``: declares a Structured Streaming query whose state statemgr keeps, step by step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Unpack

from spark_integration import story
from spark_integration.brokers import has_own_input
from spark_integration.context import Bound, ProcessFunction, Program
from spark_integration.driver import Driver, Plan, RunStage
from spark_integration.heartbeat import with_heartbeat
from spark_integration.location import Location, own_locations
from spark_integration.output_schema import as_declared, can_be_local, to_arrow
from spark_integration.outputs import FileOutput, FormatOutput, KafkaOutput, Output
from spark_integration.partitioning import Partitioning
from spark_integration.reports import OnBatch
from spark_integration.running import RunningQuery
from spark_integration.sources import OffsetLog, StartingOffsets, others_of
from spark_integration.stateful_input import check_stateless, check_streaming
from spark_integration.writer import LOCATION, StatefulWriter
from statemgr import JobConfig, StateManager, configure_logging
from statemgr.engine import PERMISSIONS, PermissionFlags, Scratch
from statemgr.errors import (
    BatchMismatch,
    ConfigError,
    CorruptError,
    InvalidError,
    LayoutMismatch,
    MissingError,
    PrerequisiteMissing,
)

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.readwriter import DataStreamWriter
    from pyspark.sql.types import StructType

    from statemgr import Checkpoint

InputFunction = Callable[[StartingOffsets], Any]
#: Changes output rows: a function from a DataFrame to another.
Step = Callable[[Any], Any]


@dataclass(frozen=True)
class StatefulQuery:
    """A stateful query over Kafka. Every method returns a new query; nothing runs before :meth:`start`.

    Args:
        config: the job. ``job.tasks`` is the number of state partitions.
        manager: makes the job's state manager from the configuration and the partitioner.
    """

    config: JobConfig
    manager: Callable[[JobConfig, str], StateManager] = StateManager
    _input: Any = None
    _partitioning: Partitioning | None = None
    _process: ProcessFunction | None = None
    _program: Program | None = None
    _schema: Any = None
    _steps: tuple[Step, ...] = ()
    _output: Output | None = None
    _on_batch: OnBatch | None = None
    _name: str | None = None
    _trigger: Mapping[str, Any] = field(default_factory=dict)
    _options: Mapping[str, Any] = field(default_factory=dict)

    def input(self, source: InputFunction | DataFrame) -> StatefulQuery:
        """Set the input: a function from ``startingOffsets`` to a streaming DataFrame over Kafka, or such a DataFrame.

        The function receives the offsets of the published state, so the query continues after the checkpoint location
        is lost. :meth:`start` calls it twice, first with ``earliest`` to learn the key's types, and reads only the
        second result.
        """
        return replace(self, _input=source)

    def key_by(self, *columns: str) -> StatefulQuery:
        """Give all rows of a key to one task, by the hash of these columns. Null is a key like any other."""
        if not columns:
            raise InvalidError("key_by needs a column")
        return replace(self, _partitioning=Partitioning(columns, by_key=True))

    def partition_by_kafka_partition(self, column: str = "partition") -> StatefulQuery:
        """Give task i the rows of Kafka partition i.

        A consumer loop does the same, so a job can move between the two.
        """
        return replace(self, _partitioning=Partitioning((column,), by_key=False))

    def process(self, function: ProcessFunction, output_schema: StructType | str) -> StatefulQuery:
        """Set the function ``function(batches, stores, context)``, which yields rows of ``output_schema``.

        ``output_schema`` is a StructType or DDL. The function runs on an executor, once per task and micro-batch, even
        if there are no rows.
        """
        return replace(self, _process=function, _program=None, _schema=output_schema)

    def run_program(self, program: Program, output_schema: StructType | str) -> StatefulQuery:
        """Like :meth:`process`, for a program that is bound to the input and the published checkpoint at the start."""
        return replace(self, _process=None, _program=program, _schema=output_schema)

    def then(self, step: Step) -> StatefulQuery:
        """Change the output rows before the output gets them, with a stateless function from a DataFrame to another."""
        return replace(self, _steps=(*self._steps, step))

    def output(self, write: Output) -> StatefulQuery:
        """Set the output. ``write(df, sequence)`` may be called again for a sequence, and then has the same rows."""
        return replace(self, _output=write)

    def session(self) -> SparkSession:
        """The session of the input. Raises: as :meth:`start`, for an input that it cannot use."""
        return self._rows(StartingOffsets.of({})).sparkSession

    @property
    def writeStream(self) -> StatefulWriter:
        """A writer of the output, instead of :meth:`output`: Kafka, files, a table, ``foreach``, ``foreachBatch``."""
        return StatefulWriter(self)

    def on_batch(self, report: OnBatch) -> StatefulQuery:
        """Call ``report`` on the driver after every batch. An exception in it is logged and does not end the query."""
        return replace(self, _on_batch=report)

    def queryName(self, name: str) -> StatefulQuery:
        """Set the query's name in Spark."""
        return replace(self, _name=name)

    def trigger(self, **trigger: Any) -> StatefulQuery:
        """Set the trigger as ``DataStreamWriter.trigger`` does.

        Continuous processing is refused, because it has no micro-batches.
        """
        if "continuous" in trigger or "realTime" in trigger:
            hint = "trigger processingTime or availableNow"
            raise InvalidError("a stateful query needs micro-batches", hint=hint)
        return replace(self, _trigger=trigger)

    def option(self, name: str, value: Any) -> StatefulQuery:
        """Set an option of Spark's writer. Only inputs that cannot start at offsets need a ``checkpointLocation``."""
        return replace(self, _options={**self._options, name: value})

    def options(self, **options: Any) -> StatefulQuery:
        """Set several options."""
        return replace(self, _options={**self._options, **options})

    def start(self, **permissions: Unpack[PermissionFlags]) -> RunningQuery:
        """Take the job over and start.

        Args:
            permissions: one-shot permissions, as for :meth:`statemgr.StateManager.acquire`.

        Raises:
            InvalidError: a part of the query is missing or wrong.
            LayoutMismatch: the checkpoint has another number of tasks, another partitioner, or a key of other types.
            BatchMismatch: the checkpoint location is new and the input a plain DataFrame, but the job has a checkpoint.
            StatemgrError: as ``StateManager.acquire``.
        """
        unknown = sorted(set(permissions) - set(PERMISSIONS))
        if unknown:
            raise InvalidError(
                f"start has no option {unknown[0]!r}",
                hint=f"set it with .option(), or choose one of {', '.join(PERMISSIONS)}",
            )
        configure_logging(self.config)
        self.check_complete()
        self._check_input()
        rows = self._rows(StartingOffsets.of({}))
        self._check_writer(rows)
        driver, manager = self.take_over(rows, **permissions)
        own = None if self._location() else manager.scratch(*own_locations())
        try:
            return self._start(driver, manager, own)
        except BaseException:
            manager.close()
            if own is not None:
                own.close()
            raise

    def take_over(
        self, rows: DataFrame, run_stage: RunStage | None = None, **permissions: Unpack[PermissionFlags]
    ) -> tuple[Driver, StateManager]:
        """Check the query and take the job over. A query that is refused ends no other one: what is published is
        looked at before the owner that runs is fenced, and again afterwards.

        Args:
            rows: the input, or any DataFrame with its columns.

        Returns: the driver that runs its batches, and the manager, which the caller must close.

        Raises: as :meth:`start`.
        """
        assert self._partitioning is not None
        columns = self.output_schema(rows.sparkSession)
        if isinstance(self._output, KafkaOutput):
            self._output.check(columns)
            if not can_be_local(parsed_schema(self._schema)):
                raise InvalidError(
                    "rows with a variant, or with a struct that has fields declared NOT NULL, cannot be sent to Kafka",
                    hint="declare another type in the output schema, or use foreachBatch",
                )
        if isinstance(self._output, FileOutput):
            self._output.check(rows.sparkSession)
        partitioner = self._partitioning.name(rows)
        prepared = None if self._program is None else self._program.prepare(self.config, rows)
        manager = self.manager(self.config, partitioner)
        try:
            looked = manager.look(**permissions)
            self._check_location(rows.sparkSession, looked)
            if prepared is not None:
                with suppress(MissingError, CorruptError):  # the owner that runs may have deleted it meanwhile
                    prepared.bind(looked)
            epoch = manager.acquire(**permissions)
            story.took_over(self.config, epoch)
            if self._trigger.get("availableNow") or self._trigger.get("once"):
                manager.metrics.gauge("ends_by_itself").labels(self.config.job_name).set(1)
            in_transaction = isinstance(self._output, KafkaOutput)
            if in_transaction or (isinstance(self._output, FormatOutput) and self._output.format == "kafka"):
                story.sends_to_kafka(self.config.job_name, in_transaction=in_transaction)
            try:
                bound = None if prepared is None else prepared.bind(epoch.checkpoints)
            except (MissingError, CorruptError):
                manager.confirm()
                raise
            plan = replace(self._plan(bound, run_stage), is_from_own_brokers=has_own_input(rows, self.config))
            driver = Driver(plan, manager, epoch)
            manager.when_damaged(driver.repair)
        except BaseException:
            manager.close()
            raise
        return driver, manager

    def _start(self, driver: Driver, manager: StateManager, own: Scratch | None) -> RunningQuery:
        rows = self._rows(driver.starting_offsets())
        assert self._partitioning is not None
        if self._partitioning.name(rows) != manager.layout.partitioner:
            raise LayoutMismatch(
                "the input's key has other types at other starting offsets",
                hint="the function that is given to input must always return the same columns",
                first=manager.layout.partitioner,
                now=self._partitioning.name(rows),
            )
        self._check_location(rows.sparkSession, driver.published())
        # Spark takes the path literally, so it is not quoted
        uri = self._location() if own is None else f"file://{own()}/location"
        location = Location(rows.sparkSession, uri, kept=own is None)
        driver.offsets = OffsetLog(location, heartbeat=driver.has_heartbeat)
        published = driver.published_batch()
        if published is not None and published.query_id != location.query_id():
            # a new location: Spark does not replay a batch whose output a crash cut off, so deliver it here
            driver.give_output_again(rows.sparkSession)
        if isinstance(self._output, FileOutput):
            self._output.prepare(rows.sparkSession)
        source = with_heartbeat(rows) if driver.has_heartbeat else rows
        writer = self._writer(source).foreachBatch(driver.run).options(**{LOCATION: uri})
        with location.quick():
            running = writer.start()  # copies the session
        return RunningQuery(running, driver, manager, own)

    def _check_location(self, session: SparkSession, checkpoints: Mapping[str, Checkpoint]) -> None:
        """Raises: BatchMismatch if only the location of the job's last batch can continue its published
        ``checkpoints`` (task → checkpoint), and this is another one."""
        batches = {checkpoint.batch for checkpoint in checkpoints.values()}
        last = batches.pop() if len(batches) == 1 else None
        others = {} if last is None else others_of(last.end_offsets)
        if not checkpoints or (callable(self._input) and not others):
            return
        uri = self._location()
        query_id = Location(session, uri).query_id() if uri else None
        if query_id is None and not callable(self._input):
            raise BatchMismatch(
                "the checkpoint location is new, but the job has a published checkpoint",
                hint="give input a function, `.input(lambda starting_offsets: spark.readStream…)`, "
                "and it starts where the checkpoint ended",
                location=uri,
                job=self.config.job_name,
            )
        if others and last is not None and last.query_id != query_id:
            raise BatchMismatch(
                f"the checkpoint location is another than that of the job's last batch, and only that one can "
                f"position {' and '.join(others)} of the input, which is not Kafka",
                hint="use that location; if it is lost, read those sources from their beginning, in a job with "
                "another job.id",
                location=uri or None,
                job=self.config.job_name,
            )

    def _rows(self, offsets: StartingOffsets) -> DataFrame:
        rows: DataFrame = self._input(offsets) if callable(self._input) else self._input
        check_streaming(rows)
        check_stateless(rows)
        return rows

    def _writer(self, rows: DataFrame) -> DataStreamWriter:
        """Spark's writer, without what the driver adds: the function for a batch and the location."""
        options = {name: value for name, value in self._options.items() if name.lower() != LOCATION.lower()}
        writer = rows.writeStream.options(**options)
        if self._name is not None:
            writer = writer.queryName(self._name)
        return writer.trigger(**self._trigger) if self._trigger else writer

    def _check_writer(self, rows: DataFrame) -> None:
        """Raises: InvalidError for what Spark would refuse only after the job was taken over, which ends the query that
        runs: a trigger, an option, the name of another query, a location."""
        from py4j.protocol import Py4JError
        from pyspark.errors import PySparkException

        session = rows.sparkSession
        try:
            self._writer(rows)
            if self._location():
                Location(session, self._location()).query_id()
        except (PySparkException, Py4JError, TypeError, ValueError) as error:
            raise InvalidError(
                f"Spark refuses a setting of the query: {error}",
                hint=f"check the trigger, the name, the options and {LOCATION}",
            ) from error
        if self._name is not None and any(query.name == self._name for query in session.streams.active):
            raise InvalidError(
                f"a query of the name {self._name!r} is already running in this session",
                hint="stop it first, or give this query another name",
            )

    def _location(self) -> str:
        """Return the user's checkpoint location, or an empty text if there is none."""
        return next((str(value or "") for name, value in self._options.items() if name.lower() == LOCATION.lower()), "")

    def _check_input(self) -> None:
        """Raises: InvalidError for an input that a start without a location could not position."""
        if not self._location() and not callable(self._input):
            raise InvalidError(
                "the input is a DataFrame, and only a checkpoint location can continue it at the next start",
                hint="give input a function, `.input(lambda starting_offsets: spark.readStream…)`, or the query the "
                f"option {LOCATION}",
            )

    def check_complete(self) -> None:
        """Check that no part is missing. Raises: InvalidError, ConfigError, if one is missing or cannot be used."""
        missing = {
            "input": self._input,
            "key_by or partition_by_kafka_partition": self._partitioning,
            "process": self._process or self._program,
            "output": self._output,
        }
        for method, value in missing.items():
            if value is None:
                raise InvalidError("the query is not complete", hint=f"call {method} before start")
        to_arrow(parsed_schema(self._schema))  # refuses types that cannot be stored
        if self.config.blob_uri is None:
            raise ConfigError(
                "a Spark job needs a blob store, even if all state is backed up to changelogs",
                hint="executors leave output rows and changes there for the driver: set blob.store.uri",
                key="blob.store.uri",
            )
        for name, store in self.config.stores.items():
            if not store.durable:
                raise ConfigError(
                    f"store {name!r} has no backup, so on Spark it would be empty at the beginning of every batch",
                    hint=f"name a backend in stores.{name}.backup.factories or task.backup.factories",
                    key=f"stores.{name}.backup.factories",
                    store=name,
                )
            if store.ttl_ms is not None:
                raise ConfigError(
                    f"store {name!r} has a TTL, which only tasks of consumer loops apply",
                    hint=f"remove stores.{name}.ttl.ms; state variables of a processor may have a TTL (docs/spark.md)",
                    key=f"stores.{name}.ttl.ms",
                    store=name,
                )

    def output_schema(self, spark: SparkSession) -> StructType:
        """The columns of the output. Raises: AnalysisException, if a step does not fit."""
        return self._shaped(spark.createDataFrame([], parsed_schema(self._schema))).schema

    def _shaped(self, rows: DataFrame) -> DataFrame:
        for step in self._steps:
            rows = step(rows)
        return rows

    def _completed(self, rows: DataFrame) -> DataFrame:
        """Give rows that an older version of the query stored the declared columns and types, for the steps."""
        return as_declared(rows, parsed_schema(self._schema), self.config.job_name) if self._steps else rows

    def _plan(self, bound: Bound | None, run_stage: RunStage | None) -> Plan:
        assert self._partitioning is not None
        assert self._output is not None
        if bound is None:
            assert self._process is not None
            bound = Bound(self._process, function=getattr(self._process, "__qualname__", type(self._process).__name__))
        return Plan(
            config=self.config,
            partitioning=self._partitioning,
            bound=bound,
            schema=parsed_schema(self._schema),
            shaped=self._shaped,
            completed=self._completed,
            output=self._output,
            on_batch=self._on_batch,
            run_stage=run_stage,
        )


def parsed_schema(schema: StructType | str) -> StructType:
    """Parse an output schema, which may be DDL. Raises: InvalidError, PrerequisiteMissing."""
    try:
        from pyspark.errors import PySparkException
        from pyspark.sql.types import StructType
    except ImportError as error:
        raise PrerequisiteMissing("PySpark is not installed", hint="pip install 'statemgr[spark]'") from error
    if isinstance(schema, StructType):
        return schema
    try:
        parsed = StructType.fromDDL(schema)
    except PySparkException as error:
        raise InvalidError(f"the output schema cannot be parsed: {error}") from error
    if not isinstance(parsed, StructType):
        raise InvalidError("the output schema is not a list of columns", hint="such as 'key string, total bigint'")
    return parsed
