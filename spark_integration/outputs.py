"""Outputs: where the rows of a published batch go. The driver calls one with the rows and their sequence number.

An output may get a sequence again, with the same rows, for example after a driver has died. Each class says what it
does then. ``KafkaOutput`` is different: the transaction that publishes the state sends its records.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from spark_integration.context import OutputFunction
from spark_integration.location import Location
from spark_integration.output_schema import types_in
from spark_integration.partitioning import quoted
from spark_integration.sessions import JvmRefused, jvm_of
from statemgr.engine import ProducedRecord
from statemgr.errors import InvalidError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, Row
    from pyspark.sql.types import StructField, StructType

log = logging.getLogger(__name__)
#: The formats that Spark's file sink writes.
FILE_FORMATS = ("avro", "csv", "json", "orc", "parquet", "text")
_FIRST = "_statemgr_first"
#: Batches without rows that files get for sequences of another output, instead of one for each.
_MOST_EMPTY = 20
#: Partitions of a sequence for ``foreach``. A rescale must not change it: the sequence may be given again afterwards.
_FOREACH_PARTITIONS = 32
_NUMBER = "_statemgr_partition"
#: Spark's types of the columns of a Kafka record, by name.
#: :class:`KafkaOutput` sends the first one.
_KAFKA_TYPES = {
    "key": ("binary", "string"),
    "value": ("binary", "string"),
    "topic": ("string",),
    "partition": ("int",),
    "headers": ("array<struct<key:string,value:binary>>",),
}


@dataclass(frozen=True)
class KafkaOutput:
    """Records for Kafka, exactly once: the transaction that publishes the state sends them to the job's brokers.

    The rows have the columns of Spark's Kafka sink: ``value``, and optionally ``key``, ``topic``, ``partition`` and
    ``headers``. All rows of a batch pass through the driver's memory.

    Args:
        topic: the topic of all records; None to take it from the column ``topic``.
    """

    topic: str | None = None

    def check(self, schema: StructType) -> None:
        """Check the columns. Raises: InvalidError if rows of this schema are no Kafka records."""
        columns = {column.name: column.dataType.simpleString() for column in schema}
        needed = {"value"} if self.topic else {"value", "topic"}
        for name in sorted(needed - columns.keys()):
            hint = "select(F.to_json(F.struct('*')).alias('value')), for example"
            if name == "topic":
                hint = ".option('topic', …) gives all rows one topic"
            raise InvalidError(f"output to Kafka needs a column {name!r}", hint=hint, column=name)
        for name, kind in columns.items():
            if kind not in _KAFKA_TYPES.get(name, ()):
                raise InvalidError(
                    f"the column {name!r} of type {kind} cannot be sent to Kafka",
                    hint=f"the columns are {', '.join(f'{one} ({kinds[-1]})' for one, kinds in _KAFKA_TYPES.items())}",
                    column=name,
                )

    def records(self, rows: DataFrame) -> list[ProducedRecord]:
        """Return the rows as records. Raises: InvalidError for a row without a topic."""
        kinds = [(name, kinds[0]) for name, kinds in _KAFKA_TYPES.items() if name in rows.columns]
        table = rows.selectExpr(*(f"cast({name} as {kind}) as {name}" for name, kind in kinds)).toArrow()
        return [self._record(**row) for batch in table.to_batches() for row in batch.to_pylist()]

    def _record(
        self,
        value: bytes | None,
        key: bytes | None = None,
        topic: str | None = None,
        partition: int | None = None,
        headers: Sequence[Mapping[str, Any]] | None = None,
    ) -> ProducedRecord:
        topic = self.topic or topic
        if topic is None:
            raise InvalidError(
                "a row for Kafka has no topic", hint="fill the column topic, or set .option('topic', …) for all rows"
            )
        pairs = tuple((header["key"], header["value"]) for header in headers or ())
        return ProducedRecord(topic, key, value, partition, pairs)


#: The possible outputs of a query.
Output = OutputFunction | KafkaOutput


@dataclass(frozen=True)
class FileOutput:
    """Files in a directory, exactly once: it uses Spark's own file sink, which skips a batch that it already has.

    Its log in ``_spark_metadata`` names the complete files, and Spark reads the directory by it. The log has a record
    of each batch from 0 on. ``_statemgr_first`` names the sequence that is its batch 0, and in a second line the job,
    if the directory is not older than that line. Batches that another query has written come before the job's first
    sequence, so the number may be negative.

    If another output got many sequences, or an empty start left many out, this number changes: the next sequence
    follows the log's last batch after a few without rows, and older sequences still have numbers of batches that the
    log has. A driver that hangs, and wakes up meanwhile, still writes one of the few, and not the number of the next
    sequence.
    """

    path: str
    format: str
    job: str
    partition_by: tuple[str, ...] = ()
    options: Mapping[str, str] = field(default_factory=dict)

    def __call__(self, rows: DataFrame, sequence: int) -> None:
        session: Any = rows.sparkSession
        with self._jvm(session) as jvm:
            known, first = self._known(session, jvm), self._first(session)
            if first is None:
                first = self._begin(session, sequence - known)
            elif (missing := sequence - first - known) >= _MOST_EMPTY:
                log.info("%s: the files have no batches for %d sequences, which they did not get", self.path, missing)
                first = self._begin(session, sequence - known - _MOST_EMPTY)
            batch, sink = sequence - first, self._sink(session, jvm)
            for missing in range(known, batch):  # sequences that another output got
                sink.addBatch(missing, rows.limit(0)._jdf)
            if batch >= 0:
                sink.addBatch(batch, rows._jdf)

    def check(self, session: Any) -> None:
        """Check the session and the directory.

        Raises: InvalidError if Python may not call Spark's file sink, or if the directory is another job's.
        """
        with self._jvm(session) as jvm:
            jvm.org.apache.spark.api.python.PythonUtils.toSeq([])
            self._first(session)

    def prepare(self, session: Any) -> None:
        """Make the directory, so that it can be read before the first batch, as Spark does."""
        with self._jvm(session) as jvm:
            self._known(session, jvm)

    @contextmanager
    def _jvm(self, session: Any) -> Iterator[Any]:
        try:
            with jvm_of(session) as jvm:
                yield jvm
        except JvmRefused as error:
            raise InvalidError(
                "the session does not let Python call the classes of Spark's file sink",
                hint="write inside foreachBatch, with the sequence in the directory's name",
                path=self.path,
            ) from error

    def _begin(self, session: Any, first: int) -> int:
        Location(session, self.path).write(_FIRST, f"{first}\n{self.job}")
        return first

    def _first(self, session: Any) -> int | None:
        """Return the sequence of batch 0; None in a directory that no job has written to.

        Raises: InvalidError if another job has.
        """
        lines = Location(session, self.path).read(_FIRST)
        if not lines:
            return None
        first, job = lines[0], lines[1] if len(lines) > 1 else self.job
        if job != self.job:
            raise InvalidError(
                "another job writes to this directory, and its sequences have the same numbers",
                hint="give each job its own directory",
                path=self.path,
                job=self.job,
                other=job,
            )
        return int(first)

    def _known(self, session: Any, jvm: Any) -> int:
        """Return the number of batches in the sink's log."""
        logs, none = jvm.org.apache.spark.sql.execution.streaming.sinks.FileStreamSinkLog, jvm.scala.Option.empty()
        newest = logs(1, session._jsparkSession, f"{self.path}/_spark_metadata", none).getLatestBatchId()
        return int(newest.get()) + 1 if newest.isDefined() else 0

    def _sink(self, session: Any, jvm: Any) -> Any:
        utils, none = jvm.org.apache.spark.api.python.PythonUtils, jvm.scala.Option.empty()
        source = jvm.org.apache.spark.sql.execution.datasources.DataSource.apply(
            session._jsparkSession,
            self.format,
            utils.toSeq([]),
            none,
            utils.toSeq(list(self.partition_by)),
            none,
            utils.toScalaMap({**self.options, "path": self.path}),
            none,
            none,
        )
        return source.createSink(jvm.org.apache.spark.sql.streaming.OutputMode.Append())


@dataclass(frozen=True)
class TableOutput:
    """A table. The output creates it if it does not exist.

    Exactly once for tables of files in Spark's own catalog, as :class:`FileOutput`, and for Delta Lake, which knows
    the options ``txnAppId`` and ``txnVersion``. Other tables get the rows of a repeated sequence again.
    """

    name: str
    job: str
    format: str | None = None
    partition_by: tuple[str, ...] = ()
    options: Mapping[str, str] = field(default_factory=dict)

    def __call__(self, rows: DataFrame, sequence: int) -> None:
        from pyspark.sql import functions

        session = rows.sparkSession
        if not session.catalog.tableExists(self.name):
            maker = rows.limit(0).writeTo(self.name).options(**self.options)
            maker = maker.using(self.format) if self.format else maker
            columns = [functions.col(name) for name in self.partition_by]
            (maker.partitionedBy(*columns) if columns else maker).create()
        described = session.sql(f"DESCRIBE TABLE EXTENDED {self.name}").collect()
        facts = {row.col_name: row.data_type for row in described}
        provider = facts.get("Provider", "").lower()
        if facts.get("Catalog") == "spark_catalog" and provider in FILE_FORMATS:
            FileOutput(facts["Location"], provider, self.job, self.partition_by, self.options)(rows, sequence)
            session.catalog.refreshTable(self.name)
            return
        once = _once(provider, self.job, sequence)
        rows.writeTo(self.name).options(**self.options, **once).append()


@dataclass(frozen=True)
class FormatOutput:
    """Any other format of Spark's batch writer, in append mode.

    Exactly once for Delta Lake, as :class:`TableOutput`. Others get the rows of a repeated sequence again.
    """

    format: str
    job: str
    path: str | None = None
    partition_by: tuple[str, ...] = ()
    options: Mapping[str, str] = field(default_factory=dict)

    def __call__(self, rows: DataFrame, sequence: int) -> None:
        once = _once(self.format, self.job, sequence)
        writer = rows.write.format(self.format).mode("append").options(**self.options, **once)
        (writer.partitionBy(*self.partition_by) if self.partition_by else writer).save(self.path)


def _once(kind: str, job: str, sequence: int) -> dict[str, str]:
    """Options by which Delta Lake, and any format that knows them, skips a sequence that it has.

    JDBC would pass them on to the database's driver, which may refuse them.
    """
    return {} if kind.lower() == "jdbc" else {"txnAppId": job, "txnVersion": str(sequence)}


@dataclass(frozen=True)
class ForeachOutput:
    """Spark's ``foreach`` on the executors: a function of a row, or an object with three methods.

    The methods are ``open(partition_id, sequence)``, ``process(row)`` and ``close(error)``. A partition of a sequence
    has the same rows when the sequence is repeated, also with another number of tasks, so ``open`` may refuse a
    partition that it has seen. Each partition has its own copy of the object. A task of Spark processes several.

    Args:
        tasks: tasks of Spark for a sequence.
    """

    function: Any
    tasks: int

    def __post_init__(self) -> None:
        methods = [name for name in ("open", "process", "close") if callable(getattr(self.function, name, None))]
        if not callable(self.function) and "process" not in methods:
            raise InvalidError(
                "foreach needs a function of a row, or an object with a method process",
                hint="foreach(lambda row: …)",
            )

    def __call__(self, rows: DataFrame, sequence: int) -> None:
        from pyspark import cloudpickle

        # by their content, so that a partition has the same rows whatever Spark's parallelism is
        by = [quoted(column.name) for column in rows.schema if _has_hash(column)]
        number = f"pmod(hash({', '.join(by)}), {_FOREACH_PARTITIONS})" if by else "0"
        spread = rows.selectExpr(f"{number} as {_NUMBER}", "*").repartition(self.tasks, _NUMBER)
        function: bytes = cloudpickle.dumps(self.function)  # type: ignore[no-untyped-call]
        spread.sortWithinPartitions(_NUMBER).foreachPartition(partial(_each, function, sequence))


def _has_hash(column: StructField) -> bool:
    """Whether Spark spreads rows by the column, and equal values have equal hashes."""
    from pyspark.sql.types import StructType

    return all(type(kind).__name__ not in ("MapType", "VariantType") for _, kind in types_in(StructType([column])))


def _each(pickled: bytes, sequence: int, rows: Iterable[Row]) -> None:
    """The function for one task of Spark. ``rows``: those of each partition together, with its number first."""
    from pyspark import cloudpickle
    from pyspark.sql.types import _create_row

    for number, found in groupby(rows, key=itemgetter(0)):
        own = (_create_row(row.__fields__[1:], row[1:]) for row in found)
        _partition(cloudpickle.loads(pickled), number, sequence, own)


def _partition(function: Any, number: int, sequence: int, rows: Iterable[Row]) -> None:
    """The function for one partition of :class:`ForeachOutput`."""
    process: Callable[[Row], Any] | None = getattr(function, "process", None)
    if process is None:
        for row in rows:
            function(row)
        return
    wanted = not hasattr(function, "open") or function.open(number, sequence)
    error: BaseException | None = None
    try:
        if wanted:
            for row in rows:
                process(row)
    except BaseException as raised:
        error = raised
        raise
    finally:
        if hasattr(function, "close"):
            function.close(error)


@dataclass(frozen=True)
class MemoryOutput:
    """A temporary view of all rows since the start, in the driver's memory: for tests. It contains a sequence once.

    A query runs in a copy of the session, so ``session`` is the session that gets the view.
    """

    view: str
    session: Any
    _tables: dict[int, pa.Table] = field(default_factory=dict)

    def __call__(self, rows: DataFrame, sequence: int) -> None:
        self._tables[sequence] = rows.toArrow()
        tables = pa.concat_tables(self._tables.values())
        self.session.createDataFrame(tables, rows.schema).createOrReplaceTempView(self.view)


@dataclass(frozen=True)
class ConsoleOutput:
    """The first rows of each batch on standard output."""

    rows: int
    truncate: bool

    def __call__(self, rows: DataFrame, sequence: int) -> None:
        line = "-" * 43
        print(f"{line}\nSequence: {sequence}\n{line}")  # noqa: T201 - this output is for a terminal
        rows.show(self.rows, self.truncate)
