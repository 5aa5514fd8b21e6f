"""The data sources ``statemgr.state``, ``statemgr.checkpoints`` and ``statemgr.changes``.

They read published data with one Spark partition per task, and disturb no running job: they fence nobody, and write
nothing to Kafka or to blobs. The driver reads the checkpoint topic once for each query, and every task reads its
store as of the checkpoint that the driver found. A task that restores from a changelog looks whether it still can.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, MutableMapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, Filter, InputPartition
from pyspark.sql.types import StringType, StructField, StructType

from spark_integration.processors.variables import RECORD, Record
from spark_integration.reading.columns import arrow_type, key_column, value_column
from spark_integration.reading.filters import Range, among, key_range
from spark_integration.reading.options import Options, unknown
from spark_integration.reading.variables import Pairs, TimerColumns, VariableColumns
from statemgr import JobConfig, JobReader
from statemgr.engine import read_attachment
from statemgr.errors import InvalidError
from statemgr.ids import task_name

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

#: Rows of an Arrow batch, and the bytes of keys and values that fill one.
_ROWS, _BYTES = 10_000, 16 * 1024 * 1024
#: Without this setting, Spark refuses data sources that take filters.
_PUSHDOWN = "spark.sql.python.filterPushdown.enabled"
_CHECKPOINTS = (
    "task string, checkpoint_id string, current boolean, sequence bigint, published timestamp, "
    "input_offsets map<string,bigint>, stores map<string,string>, backends map<string,array<string>>"
)


def register(spark: SparkSession) -> None:
    """Add the formats ``statemgr.state``, ``statemgr.checkpoints`` and ``statemgr.changes`` to a session.

    Turns on ``spark.sql.python.filterPushdown.enabled`` in the session, so that filters on keys reach the stores.
    """
    for source in (StateSource, CheckpointsSource, ChangesSource):
        spark.dataSource.register(source)
    spark.conf.set(_PUSHDOWN, "true")


class ItemColumns:
    """The keys and the values of a store, decoded by the store's serdes."""

    def __init__(self, config: JobConfig, store: str) -> None:
        self._key, self._value = key_column(config.stores[store]), value_column(config.stores[store])
        self.fields = [StructField("key", self._key.kind), StructField("value", self._value.kind)]

    def range(self, filters: Sequence[Filter]) -> Range:
        """Return the range of keys that the query needs. Only some serdes preserve the order of the values."""
        return key_range(filters, ("key",), self._key.serialize) if self._key.ordered else (None, None)

    def arrays(self, pairs: Pairs) -> list[pa.Array]:
        """Decode the columns of some items. Raises: CorruptError."""
        return [self._key.decode([key for key, _ in pairs]), self._value.decode([value for _, value in pairs])]


@dataclass
class TaskPartition(InputPartition):
    """The input of one Spark task. ``found``: a task's record and checkpoint, or its two checkpoints."""

    task: str
    found: Any


class StateSource(DataSource):
    """``statemgr.state``: the items of a store, or a state variable of a processor, as of one checkpoint."""

    def __init__(self, options: MutableMapping[str, str]) -> None:
        names = ("config", "checkpointId", "task", "store", "backend", "stateVarName", "readRegisteredTimers")
        self._options = Options.of(self.name(), names, options)
        self.checkpoint_id = self._options.checkpoint("checkpointId")
        self._variable = self._options.given.get("stateVarName")
        self._timers = self._options.flag("readRegisteredTimers")
        if self._variable and self._timers:
            raise InvalidError(
                "a query reads a state variable or the timers, not both",
                hint="remove one of the options",
                option="readRegisteredTimers",
            )
        config = self._options.config()
        record = self._record(config) if self._variable or self._timers else None
        self.store = self._options.store(config, record.store if record is not None else None)
        if record is not None and record.store != self.store:
            raise unknown("store", self.store, [record.store], "the processor's state is not in the store")
        self.config = self._options.config(self.store)
        self.tasks = self._options.tasks(config)
        self.columns = self._columns(record)

    @classmethod
    def name(cls) -> str:
        return "statemgr.state"

    def schema(self) -> StructType:
        return StructType([StructField("task", StringType()), *self.columns.fields])

    def reader(self, schema: StructType) -> StateReader:
        return StateReader(self)

    def _columns(self, record: Record | None) -> ItemColumns | VariableColumns | TimerColumns:
        if record is None:
            return ItemColumns(self.config, self.store)
        if self._variable is None:
            return TimerColumns(record)
        if self._variable not in record.variables:
            raise unknown("stateVarName", self._variable, record.variables, "the processor has no state variable")
        return VariableColumns(record, record.variables[self._variable])

    def _record(self, config: JobConfig) -> Record:
        """Return the checkpoint's record of the processor's state. Raises: InvalidError if no processor wrote it."""
        with JobReader(config, only_settled=True) as reader:
            checkpoint = reader.checkpoint(task_name(0), self.checkpoint_id)
        attachment = next((one for one in checkpoint.attachments if one.name == RECORD), None)
        if attachment is None:
            raise InvalidError(
                "no processor wrote the state of this job",
                hint="remove stateVarName and readRegisteredTimers",
                option="stateVarName" if self._variable else "readRegisteredTimers",
            )
        return Record.from_bytes(read_attachment(config, attachment))


class StateReader(DataSourceReader):
    """Reads each task's store in its own Spark partition."""

    def __init__(self, source: StateSource) -> None:
        self._source = source
        self._tasks: Any = None
        self._range = source.columns.range([])

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:  # noqa: N802  Spark's name
        """Narrow the keys and the tasks. Spark applies all filters again."""
        self._tasks = among(filters, ("task",))
        self._range = self._source.columns.range(filters)
        return filters

    def partitions(self) -> Sequence[InputPartition]:
        source = self._source
        with JobReader(source.config, only_settled=True) as reader:
            records = reader.retaining(source.checkpoint_id, source.tasks)
        wanted = [record for record in records if self._tasks is None or record.task in self._tasks]
        return [TaskPartition(record.task, (record, record.find(source.checkpoint_id))) for record in wanted]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        if not isinstance(partition, TaskPartition):  # Spark's own, where there is no partition to read
            return
        source = self._source
        schema = _arrow(source.schema())
        start, end = self._range
        with JobReader(source.config) as reader:
            record, checkpoint = partition.found
            with closing(reader.scan(record, checkpoint, source.store, start, end, _ROWS)) as batches:
                for pairs in batches:
                    yield _batch(partition.task, source.columns.arrays(pairs), schema)


class ChangesSource(DataSource):
    """``statemgr.changes``: the keys of a store that differ between two checkpoints, with both values."""

    def __init__(self, options: MutableMapping[str, str]) -> None:
        names = ("config", "before", "after", "task", "store", "backend")
        found = Options.of(self.name(), names, options)
        config = found.config()
        self.store = found.store(config)
        self.config = found.config(self.store)
        self.tasks = found.tasks(config)
        before = found.checkpoint("before")
        if before is None:
            raise InvalidError(
                "the source statemgr.changes needs the checkpoint to compare with",
                hint="set .option('before', ID): the source statemgr.checkpoints lists the IDs",
                option="before",
            )
        self.before, self.after = before, found.checkpoint("after")

    @classmethod
    def name(cls) -> str:
        return "statemgr.changes"

    def schema(self) -> StructType:
        store = self.config.stores[self.store]
        value = value_column(store).kind
        return StructType(
            [
                StructField("task", StringType()),
                StructField("change", StringType()),
                StructField("key", key_column(store).kind),
                StructField("before", value),
                StructField("after", value),
            ]
        )

    def reader(self, schema: StructType) -> ChangesReader:
        return ChangesReader(self)


class ChangesReader(DataSourceReader):
    """Compares each task's store in its own Spark partition."""

    def __init__(self, source: ChangesSource) -> None:
        self._source = source

    def partitions(self) -> Sequence[InputPartition]:
        source = self._source
        with JobReader(source.config, only_settled=True) as reader:
            pairs = reader.pairs(source.before, source.after, source.tasks)
        return [TaskPartition(pair.record.task, pair) for pair in pairs]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        if not isinstance(partition, TaskPartition):
            return
        source = self._source
        schema, store = _arrow(source.schema()), source.config.stores[source.store]
        key, value = key_column(store), value_column(store)
        with JobReader(source.config) as reader, closing(reader.changes(partition.found, source.store)) as changes:
            for part in _parts(changes):
                columns = [
                    pa.array([str(change.kind) for change in part], pa.string()),
                    key.decode([change.key for change in part]),
                    value.decode([change.before for change in part]),
                    value.decode([change.after for change in part]),
                ]
                yield _batch(partition.task, columns, schema)


class CheckpointsSource(DataSource):
    """``statemgr.checkpoints``: the retained checkpoints of each task, newest first."""

    def __init__(self, options: MutableMapping[str, str]) -> None:
        found = Options.of(self.name(), ("config", "task"), options)
        self.config = found.config()
        self.tasks = found.tasks(self.config)

    @classmethod
    def name(cls) -> str:
        return "statemgr.checkpoints"

    def schema(self) -> str:
        return _CHECKPOINTS

    def reader(self, schema: StructType) -> CheckpointsReader:
        return CheckpointsReader(self.config, self.tasks, schema)


class CheckpointsReader(DataSourceReader):
    """Reads the checkpoint topic on the driver; each task's rows are a Spark partition."""

    def __init__(self, config: JobConfig, tasks: Sequence[str], schema: StructType) -> None:
        self._config, self._tasks, self._schema = config, tasks, schema

    def partitions(self) -> Sequence[InputPartition]:
        with JobReader(self._config, only_settled=True) as reader:
            return [TaskPartition(record.task, record) for record in reader.retaining(None, self._tasks)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        if not isinstance(partition, TaskPartition):
            return
        rows = [
            {
                "task": partition.task,
                "checkpoint_id": str(one.checkpoint_id),
                "current": one is partition.found.current,
                "sequence": one.sequence,
                "published": None if one.published_ms is None else one.published_ms * 1000,
                "input_offsets": dict(one.input_offsets),
                "stores": dict(one.stores),
                "backends": {
                    store: sorted(name for name, of in one.state_checkpoint_markers.items() if store in of)
                    for store in one.stores
                },
            }
            for one in partition.found.checkpoints
        ]
        yield pa.RecordBatch.from_pylist(rows, _arrow(self._schema))


def _parts(changes: Iterable[Any]) -> Iterator[list[Any]]:
    """Lists of changes, each for one Arrow batch."""
    part, size = list[Any](), 0
    for change in changes:
        part.append(change)
        size += len(change.key) + len(change.before or b"") + len(change.after or b"")
        if len(part) == _ROWS or size >= _BYTES:
            yield part
            part, size = [], 0
    if part:
        yield part


def _arrow(schema: StructType) -> pa.Schema:
    return pa.schema([pa.field(field.name, arrow_type(field.dataType)) for field in schema.fields])


def _batch(task: str, columns: Sequence[pa.Array], schema: pa.Schema) -> pa.RecordBatch:
    names = pa.repeat(pa.scalar(task, pa.string()), len(columns[0]))
    return pa.RecordBatch.from_arrays([names, *columns], schema=schema)
