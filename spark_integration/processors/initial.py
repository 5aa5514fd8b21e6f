"""The initial state of a processor: rows that the first batch passes to ``handleInitialState``, before its input.

They join the input of the first batch that is published, so they are in the state exactly once, in the checkpoint with
that batch. A row then has two more columns: whether it is input, and the initial state's row, which is null for input.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

from spark_integration.partitioning import column_named, quoted
from spark_integration.sessions import JvmRefused, jvm_of
from statemgr.errors import InvalidError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.types import StructType

IS_INPUT, ROW = "__statemgr_is_input", "__statemgr_initial"


@dataclass(frozen=True)
class InitialState:
    """Rows of the initial state. ``keys`` are the grouping columns, as the input has them."""

    rows: DataFrame
    keys: tuple[str, ...]

    @property
    def order(self) -> tuple[str, ...]:
        """The columns that sort a key's initial state before its input."""
        return (IS_INPUT,)

    def added_to(self, rows: DataFrame) -> DataFrame:
        """Return the input of a batch together with these rows."""
        from pyspark.sql import functions

        whole = functions.struct(*[quoted(name) for name in self.rows.columns])
        own = self.rows.select(
            *[functions.col(quoted(column_named(name, self.rows.columns) or name)).alias(name) for name in self.keys],
            functions.lit(False).alias(IS_INPUT),
            whole.alias(ROW),
        )
        absent = functions.lit(None).cast(self.rows.schema)
        marked = rows.withColumn(IS_INPUT, functions.lit(True)).withColumn(ROW, absent)
        return marked.unionByName(own, allowMissingColumns=True)


def initial_state(grouped: Any, key: StructType) -> InitialState:
    """Return the rows of ``initialState``, which must be ``df.groupBy(keys…)``.

    Raises: InvalidError if it is something else, is streaming, or is grouped by other columns than the input, or by
    anything but columns.
    """
    from pyspark.sql import GroupedData

    hint = "pass df.groupBy(…) with the columns of stateful(…), in the same order"
    if not isinstance(grouped, GroupedData):
        raise InvalidError(f"initialState is of type {type(grouped).__name__}, and no grouped DataFrame", hint=hint)
    rows: DataFrame = grouped._df
    if rows.isStreaming:
        raise InvalidError("initialState is a streaming DataFrame", hint="read it with spark.read")
    counted = grouped.count()
    columns = [(one.name.lower(), one.dataType.simpleString()) for one in counted.schema.fields[:-1]]
    wanted = [(one.name.lower(), one.dataType.simpleString()) for one in key.fields]
    if columns != wanted:
        named = [", ".join(f"{name} {kind}" for name, kind in some) for some in (columns, wanted)]
        raise InvalidError(f"initialState is grouped by {named[0]}, and the input by {named[1]}", hint=hint)
    own = [column_named(name, rows.columns) for name in key.names]
    grouping = _grouping(counted)
    if grouping is not None and own != [name and column_named(name, rows.columns) for name in grouping]:
        raise InvalidError(
            "initialState is grouped by expressions, renamed columns or fields of structs",
            hint="group by plain columns: rows.withColumn('user', …).groupBy('user')",
        )
    return InitialState(rows, tuple(key.names))


def _grouping(counted: DataFrame) -> list[str | None] | None:
    """The names of the columns that an aggregation groups by, None in place of an expression; None if the session does
    not let Python look at the plan."""
    try:
        with jvm_of(counted.sparkSession):
            found = counted._jdf.queryExecution().analyzed().groupingExpressions()
            parts = [found.apply(i) for i in range(found.size())]
            return [part.name() if part.nodeName() == "AttributeReference" else None for part in parts]
    except JvmRefused:
        return None


def parted(batch: pa.RecordBatch) -> tuple[list[bool], pa.RecordBatch, pa.RecordBatch] | None:
    """Return which rows are input, the input, and the rows of the initial state. None for a batch with input only."""
    if IS_INPUT not in batch.schema.names:
        return None
    marks = batch.column(IS_INPUT)
    initial = batch.filter(pc.invert(marks)).column(ROW)
    rows = pa.RecordBatch.from_arrays(initial.flatten(), names=[field.name for field in initial.type])
    return marks.to_pylist(), batch.filter(marks).drop_columns([IS_INPUT, ROW]), rows
