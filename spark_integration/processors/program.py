"""A processor as a query's program: its declarations, checked against the checkpoint, and the workers' function."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from pyspark import cloudpickle
from pyspark.sql.streaming.stateful_processor import StatefulProcessor
from pyspark.sql.types import StructField, StructType

from spark_integration.context import Bound
from spark_integration.partitioning import column_named
from spark_integration.processors.group_state import GroupFunction
from spark_integration.processors.groups import EventTime, Form
from spark_integration.processors.handle import Discovery
from spark_integration.processors.initial import InitialState, initial_state
from spark_integration.processors.keys import check_key_types
from spark_integration.processors.run import ProcessorRun
from spark_integration.processors.variables import RECORD, Declared, Record
from spark_integration.processors.watermarks import WATERMARK, Watermark, watermark_of
from spark_integration.sessions import MAX_RECORDS, is_on, limit
from statemgr import JobConfig
from statemgr.engine import read_attachment
from statemgr.errors import ConfigError, CorruptBlob, InvalidError, MissingBlob
from statemgr.ids import task_name

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from statemgr import Checkpoint


@dataclass(frozen=True)
class ProcessorProgram:
    """A processor with its grouping columns.

    ``store``: the store's name, None if the job has only one. ``initial_state``: the user's argument, or None.
    ``output_time``: the output column with the event time; None if none is declared.
    """

    processor: StatefulProcessor
    keys: tuple[str, ...]
    output: StructType
    time_mode: str
    pandas: bool
    store: str | None = None
    initial_state: Any = None
    output_time: EventTime | None = None

    @property
    def operator(self) -> str:
        """The name of the operator in Spark's progress and plans."""
        if isinstance(self.processor, GroupFunction):
            return "applyInPandasWithState"
        return "transformWithStateInPandasExec" if self.pandas else "transformWithStateInPySparkExec"

    @property
    def function(self) -> str:
        """The name of the user's class or function."""
        user: Any = self.processor.function if isinstance(self.processor, GroupFunction) else type(self.processor)
        return str(getattr(user, "__qualname__", user))

    def prepare(self, config: JobConfig, rows: DataFrame) -> PreparedProcessor:
        """Find out what the processor declares, before anything changes.

        Raises: InvalidError, and whatever ``init`` raises.
        """
        columns = []
        for name in self.keys:
            column = column_named(name, rows.columns)
            if column is None:
                raise InvalidError(
                    "the input has no such column to group by",
                    hint=f"its columns are {', '.join(rows.columns)}; compute others in the input (rows.withColumn)",
                    column=name,
                )
            # without metadata, because a watermark adds some
            columns.append(StructField(column, rows.schema[column].dataType, True))
        key = StructType(columns)
        check_key_types(key, "the grouping key")
        settings = rows.sparkSession.conf
        watermarks = [field for field in rows.schema.fields if WATERMARK in field.metadata]
        processor = self.processor
        if isinstance(processor, GroupFunction):
            processor = processor.of(rows, has_watermark=bool(watermarks))
        form = Form(
            sliced=isinstance(processor, GroupFunction),
            pandas=self.pandas,
            timezone=str(settings.get("spark.sql.session.timeZone")),
            safe=is_on(settings, "spark.sql.execution.pandas.convertToArrowArraySafely"),
            rows_per_frame=limit(settings, MAX_RECORDS),
            bytes_per_frame=limit(settings, "spark.sql.execution.arrow.maxBytesPerBatch"),
            decimals_of_ints=is_on(settings, "spark.sql.execution.pythonUDF.pandas.intToDecimalCoercionEnabled"),
            extension_ints=is_on(settings, "spark.sql.execution.pythonUDF.pandas.preferIntExtensionDtype"),
            by_name=is_on(settings, "spark.sql.legacy.execution.pandas.groupedMap.assignColumnsByName"),
        )
        event_time = None
        if self.output_time is not None:
            _event_time(rows)  # without a watermark, no time of the output would be checked
        if self.time_mode == "eventtime":
            event_time = _event_time(rows)
        store = _store(config, self.store)
        initial = None if self.initial_state is None else initial_state(self.initial_state, key)
        program = replace(self, processor=processor)
        declared = self._declared(nullable=settings.get("spark.sql.streaming.stateStore.encodingFormat") == "avro")
        idle_batches = self.time_mode != "none" and is_on(settings, "spark.sql.streaming.noDataMicroBatches.enabled")
        watermark = watermark_of(rows) if watermarks else None
        return PreparedProcessor(
            program, config, store, key, form, event_time, declared, initial, idle_batches, watermark
        )

    def _declared(self, *, nullable: bool) -> Declared:
        """Run ``init`` on a copy, as Spark does. The processor itself is shipped unchanged."""
        discovery = Discovery(self.time_mode)
        copy: Any = cloudpickle.loads(cloudpickle.dumps(self.processor))  # type: ignore[no-untyped-call]
        copy.init(discovery)
        copy.close()
        return discovery.found(nullable=nullable)


@dataclass(frozen=True)
class PreparedProcessor:
    """A processor whose state variables are known.

    ``idle_batches``: it needs batches while the input is idle. ``watermark``: as :func:`watermark_of` returns it.
    """

    program: ProcessorProgram
    config: JobConfig
    store: str
    key: StructType
    form: Form
    event_time: EventTime | None
    declared: Declared
    initial: InitialState | None
    idle_batches: bool
    watermark: Watermark | None

    def bind(self, checkpoints: Mapping[str, Checkpoint | None]) -> Bound:
        """Check the variables against the published checkpoints (task → checkpoint).

        Raises: InvalidError for a change that cannot be resolved; as :func:`statemgr.engine.read_attachment`.
        """
        published = self._published(checkpoints)
        record = (published or Record(self.key, self.store, self.program.time_mode, {})).with_declared(self.declared)
        record = replace(record, watermark_ms=None)
        program = self.program
        run = ProcessorRun(
            processor=program.processor,
            store=self.store,
            key=self.key,
            output=program.output,
            time_mode=program.time_mode,
            form=self.form,
            event_time=self.event_time,
            variables=self.declared.visible(record),
            parsed=self.declared.parsed,
            output_time=program.output_time,
            watermark=self.watermark,
        )
        first = self.initial if published is None else None
        next_due = run.next_due if self.idle_batches else None
        return Bound(
            run,
            {RECORD: record.to_bytes()},
            tuple(self.key.names),
            first,
            next_due,
            operator=program.operator,
            function=program.function,
            counts=self.declared.counts(),
            watermark_ms=None if published is None else published.watermark_ms,
            noting=lambda watermark_ms: {RECORD: replace(record, watermark_ms=watermark_ms).to_bytes()},
        )

    def _published(self, checkpoints: Mapping[str, Checkpoint | None]) -> Record | None:
        """The published record, or None before the first batch."""
        checkpoint = checkpoints.get(task_name(0))
        attachment = next((a for a in checkpoint.attachments if a.name == RECORD), None) if checkpoint else None
        if attachment is not None:
            try:
                data = read_attachment(self.config, attachment)
            except (MissingBlob, CorruptBlob) as error:
                raise type(error)(
                    f"the record of the processor's state variables is lost: {error.message}",
                    hint="bring the blob back: without the record, nobody can read the state. Records of up to 16 KiB "
                    "are in the checkpoint itself",
                    **error.where,
                ) from error
            record = Record.from_bytes(data)
            record.check_same(self.key, self.program.time_mode)
            return record
        if checkpoint is not None and self.store in checkpoint.stores:
            raise InvalidError(
                "the store has state that no processor wrote",
                hint="give the processor a store of its own: stateful(…, store='name')",
                store=self.store,
            )
        return None


def output_time(output: StructType, column: str) -> EventTime:
    """Return the output column with the event time.

    Raises: InvalidError if there is no such column, or if it is neither a timestamp nor a window.
    """
    name = column_named(column, output.names)
    if name is None:
        raise InvalidError(
            f"the output has no column {column!r}",
            hint=f"eventTimeColumnName is one of {', '.join(output.names)}",
            column=column,
        )
    kind = output[name].dataType.simpleString()
    windows = ("struct<start:timestamp,end:timestamp>", "struct<start:timestamp_ntz,end:timestamp_ntz>")
    if kind not in ("timestamp", "timestamp_ntz", *windows):
        raise InvalidError(
            f"the column {column!r} is of type {kind}, which is no event time",
            hint="eventTimeColumnName is a column of type timestamp, or a window",
            column=column,
        )
    return EventTime(name, kind in windows)


def _event_time(rows: DataFrame) -> EventTime:
    """Return the column with the watermark: the first one, as in Spark. Raises: InvalidError if there is none."""
    for field in rows.schema.fields:
        if WATERMARK in field.metadata:
            return EventTime(field.name, isinstance(field.dataType, StructType))
    raise InvalidError(
        "the time mode EventTime and eventTimeColumnName need a watermark, and the input has none",
        hint="df.withWatermark('time', '10 minutes')",
    )


def _store(config: JobConfig, name: str | None) -> str:
    if name is None and len(config.stores) == 1:
        name = next(iter(config.stores))
    if name is None or name not in config.stores:
        raise ConfigError(
            "the job has several stores" if name is None else f"the job has no store {name!r}",
            hint=f"choose one with stateful(…, store=…): it has {', '.join(config.stores) or 'none'}",
        )
    store = config.stores[name]
    if (store.key_serde, store.value_serde) != ("bytes", "bytes"):
        raise ConfigError(
            "a processor writes bytes, and its store has another serde",
            hint="remove the store's key.serde and value.serde",
            key=f"stores.{name}.value.serde",
        )
    return name
