"""The rows of a task, grouped by key, in the form that a processor takes; and what it yields, as record batches.

Spark sorts the rows of a task by the key before they reach Python, so a group is a run of equal keys, and one group is
never held in memory as a whole. Conversions are Spark's own, so a processor sees what it sees under
``transformWithState``. Source: ``pyspark/sql/pandas/serializers.py`` of PySpark 4.2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.conversion import ArrowBatchTransformer, PandasToArrowConversion
from pyspark.sql.types import Row, StructType

from spark_integration.output_schema import to_arrow
from spark_integration.processors.initial import IS_INPUT, parted
from spark_integration.processors.keys import encode_key
from statemgr.errors import InvalidError

#: The bytes of a key, the key as the processor sees it, its rows or data frames, and whether they are input. If not,
#: they are initial state.
Group = tuple[bytes, tuple[Any, ...], Iterator[Any], bool]
#: The bytes of a row's key, the key as the processor sees it, and the row.
_Keyed = tuple[bytes, tuple[Any, ...], Any]


@dataclass(frozen=True)
class Form:
    """How rows are passed to a processor: as ``Row`` objects or as pandas data frames.

    ``sliced``: frames are parts of record batches, with their types, as ``applyInPandasWithState`` has them. Otherwise
    they are made of rows, as ``transformWithStateInPandas`` has them. ``timezone``, ``safe`` and ``rows_per_frame``
    are the session's settings when the query started.
    """

    pandas: bool
    timezone: str
    safe: bool
    rows_per_frame: int
    sliced: bool = False


@dataclass(frozen=True)
class EventTime:
    """The column with the watermark. ``window``: it is a window, whose end is its time."""

    column: str
    window: bool


def in_time(
    batches: Iterable[pa.RecordBatch], event_time: EventTime, late_ms: int, count_late: Callable[[int], None]
) -> Iterator[pa.RecordBatch]:
    """The batches without late rows: those whose time is at or before ``late_ms`` (epoch milliseconds). A row without
    a time is never late. ``count_late`` is called with the number of late rows of each batch."""
    for batch in batches:
        in_time = pc.fill_null(pc.greater(_micros(batch, event_time), late_ms * 1000), True)
        if IS_INPUT in batch.schema.names:
            in_time = pc.or_(in_time, pc.invert(batch.column(IS_INPUT)))  # initial state has no time
        kept = batch.filter(in_time)
        count_late(batch.num_rows - kept.num_rows)
        yield kept


def newer(batches: Iterable[pa.RecordBatch], event_time: EventTime, limit_ms: int) -> Iterator[pa.RecordBatch]:
    """The batches of an output. Raises: InvalidError if a time is at or before ``limit_ms`` (epoch milliseconds)."""
    for batch in batches:
        earliest = pc.min(_micros(batch, event_time)).as_py()
        if earliest is not None and earliest <= limit_ms * 1000:
            raise InvalidError(
                f"the processor yielded a row of the time {earliest // 1000}, which is not newer than the watermark "
                f"{limit_ms} (epoch milliseconds)",
                hint="yield rows that are newer than the watermark, or give no eventTimeColumnName",
                column=event_time.column,
            )
        yield batch


def grouped(batches: Iterable[pa.RecordBatch], key: StructType, form: Form) -> Iterator[Group]:
    """The groups, one after the other, a key's initial state before its input. Rows of a group that nobody reads are
    skipped."""
    rows = (row for batch in batches for row in _marked(batch, key, form))
    for (encoded, is_input), run in groupby(rows, key=itemgetter(0, 1)):
        first = next(run)
        values = (row for _, _, _, row in _after(first, run))
        framed = form.pandas and not form.sliced
        yield encoded, first[2], _frames(values, form.rows_per_frame) if framed else values, is_input


def converted(produced: Iterable[Any], schema: StructType, form: Form) -> Iterator[pa.RecordBatch]:
    """What a processor yields, as record batches of the output schema. Rows are gathered, frames are not."""
    if form.pandas:
        for frame in produced:
            yield PandasToArrowConversion.convert(
                frame,
                schema,
                timezone=form.timezone,
                safecheck=form.safe,
                arrow_cast=True,
                assign_cols_by_name=True,
            )
        return
    arrow = to_arrow(schema)
    rows: list[dict[str, Any]] = []
    for row in produced:
        rows.append(row.asDict(True))
        if len(rows) == form.rows_per_frame:
            yield pa.RecordBatch.from_pylist(rows, schema=arrow)
            rows = []
    if rows:
        yield pa.RecordBatch.from_pylist(rows, schema=arrow)


def _micros(batch: pa.RecordBatch, event_time: EventTime) -> pa.Array:
    """The time of each row, in epoch microseconds."""
    times = batch.column(event_time.column)
    if event_time.window:
        times = pc.struct_field(times, "end")
    return times.cast(pa.timestamp("us", tz=times.type.tz)).cast(pa.int64())


def _after(first: Any, others: Iterator[Any]) -> Iterator[Any]:
    yield first
    yield from others


def _marked(batch: pa.RecordBatch, key: StructType, form: Form) -> Iterator[tuple[bytes, bool, tuple[Any, ...], Any]]:
    """Each row with its key, and whether it is input."""
    read = _slices if form.sliced else _pandas_rows if form.pandas else _rows
    parts = parted(batch)
    if parts is None:
        yield from ((encoded, True, own, row) for encoded, own, row in read(batch, key, form))
        return
    marks, rows, initial = parts
    inputs, states = read(rows, key, form), read(initial, key, form)
    for is_input in marks:
        encoded, own, row = next(inputs if is_input else states)
        yield encoded, is_input, own, row


def _rows(batch: pa.RecordBatch, key: StructType, form: Form) -> Iterator[_Keyed]:
    row_of = Row(*batch.schema.names)
    at = _offsets(batch, key)
    columns = [column.to_pylist() for column in batch.columns]
    keys = list(zip(*(columns[i] for i in at), strict=True))
    for encoded, own, values in zip(_encoded(keys, key), keys, zip(*columns, strict=True), strict=True):
        yield encoded, own, row_of(*values)


def _pandas_rows(batch: pa.RecordBatch, key: StructType, form: Form) -> Iterator[_Keyed]:
    import pandas as pd

    at = _offsets(batch, key)
    keys = list(zip(*(batch.column(i).to_pylist() for i in at), strict=True))
    series = ArrowBatchTransformer.to_pandas(batch, timezone=form.timezone)
    rows = pd.concat(series, axis=1).itertuples(index=False)
    # the state's key comes from Arrow: pandas turns whole numbers into floating ones where a batch has a null
    for encoded, row in zip(_encoded(keys, key), rows, strict=True):
        yield encoded, tuple(row[i] for i in at), row


def _slices(batch: pa.RecordBatch, key: StructType, form: Form) -> Iterator[_Keyed]:
    """The rows of each key as one frame."""
    import pandas as pd

    at = _offsets(batch, key)
    keys = list(zip(*(batch.column(i).to_pylist() for i in at), strict=True))
    start = 0
    for encoded, run in groupby(_encoded(keys, key)):
        rows = sum(1 for _ in run)
        series = ArrowBatchTransformer.to_pandas(batch.slice(start, rows), timezone=form.timezone)
        yield encoded, tuple(series[i].iloc[0] for i in at), pd.concat(series, axis=1)
        start += rows


def _frames(rows: Iterator[Any], most: int) -> Iterator[Any]:
    import pandas as pd

    part: list[Any] = []
    for row in rows:
        part.append(row)
        if len(part) == most:
            yield pd.DataFrame(part)
            part = []
    if part:
        yield pd.DataFrame(part)


def _offsets(batch: pa.RecordBatch, key: StructType) -> list[int]:
    names = [name.lower() for name in batch.schema.names]
    return [names.index(name.lower()) for name in key.names]


def _encoded(keys: list[tuple[Any, ...]], schema: StructType) -> Iterator[bytes]:
    last: tuple[Any, ...] | None = None
    encoded = b""
    for key in keys:
        if key != last:
            encoded = encode_key(schema, schema.toInternal(key))
            last = key
        yield encoded
