"""Turns a task's rows into groups for a processor.

Spark sorts the rows of a task by the key before they reach Python, so a group is a run of equal keys, and a
complete group is never in memory. Conversions are Spark's own, so a processor sees what it sees under
``transformWithState``. Source: ``pyspark/sql/pandas/serializers.py`` of PySpark 4.2.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, groupby
from operator import itemgetter
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.conversion import ArrowBatchTransformer
from pyspark.sql.types import Row, StructType

from spark_integration.output_schema import types_in
from spark_integration.partitioning import column_named
from spark_integration.processors.initial import IS_INPUT, parted
from spark_integration.processors.keys import encode_key

#: The bytes of a key, the key as the processor sees it, its rows or data frames, and whether they are input or initial
#: state.
Group = tuple[bytes, tuple[Any, ...], Iterator[Any], bool]
#: The bytes of a row's key, the key as the processor sees it, and the row, or a frame of consecutive rows.
_Keyed = tuple[bytes, tuple[Any, ...], Any]
#: Spark's largest limit in bytes, and its default: frames are not measured then.
_MOST_BYTES = 2**31 - 1


@dataclass(frozen=True)
class Form:
    """How rows are passed to a processor: as ``Row`` objects or as pandas data frames.

    ``sliced``: frames are parts of record batches, with their types, as in ``applyInPandasWithState``. Otherwise, they
    are made of rows, as in ``transformWithStateInPandas``. The other fields are the session's settings when the query
    started: its time zone, the most rows and bytes of a frame (``sys.maxsize`` for no limit), and how pandas' types
    become Spark's, and the other way round.
    """

    pandas: bool
    timezone: str
    safe: bool
    rows_per_frame: int
    bytes_per_frame: int = sys.maxsize
    decimals_of_ints: bool = False
    extension_ints: bool = False
    by_name: bool = True
    sliced: bool = False


@dataclass(frozen=True)
class EventTime:
    """The column with the watermark. ``window``: the column is a window, whose end is its time."""

    column: str
    window: bool


def in_time(
    batches: Iterable[pa.RecordBatch], event_time: EventTime, late_ms: int, count_late: Callable[[int], None]
) -> Iterator[pa.RecordBatch]:
    """Yield the batches without late rows. A row is late if its time is at or before ``late_ms`` (epoch milliseconds).

    A row without a time is never late. A batch without other rows than late ones is left out. ``count_late`` gets the
    number of late rows in each batch.
    """
    for batch in batches:
        in_time = pc.fill_null(pc.greater(micros(batch, event_time), late_ms * 1000), True)
        if IS_INPUT in batch.schema.names:
            in_time = pc.or_(in_time, pc.invert(batch.column(IS_INPUT)))  # initial state has no time
        kept = batch.filter(in_time)
        count_late(batch.num_rows - kept.num_rows)
        if kept.num_rows:  # pandas makes a frame without columns of no rows
            yield kept


def grouped(
    batches: Iterable[pa.RecordBatch], key: StructType, form: Form, coming: Callable[[list[bytes]], None]
) -> Iterator[Group]:
    """Yield the groups one after the other, a key's initial state before its input. Unread rows of a group are skipped.

    Before the first group of a record batch, ``coming`` gets the bytes of its keys, row by row.
    """
    limit = _Limit(form)
    rows = (row for batch in batches for row in _marked(limit.seen(batch), key, form, coming))
    for (encoded, is_input), run in groupby(rows, key=itemgetter(0, 1)):
        first = next(run)
        values = (row for _, _, _, row in chain((first,), run))
        framed = form.pandas and not form.sliced
        yield encoded, first[2], _frames(values, limit) if framed else values, is_input


class _Limit:
    """How many rows a frame may have. A limit in bytes counts as rows of the mean size so far, as on Spark."""

    def __init__(self, form: Form) -> None:
        self._form = form
        self._seen = self._bytes = 0
        self.rows = form.rows_per_frame

    def seen(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        if self._form.bytes_per_frame < _MOST_BYTES and batch.num_rows:
            self._seen += batch.num_rows
            self._bytes += batch.nbytes
            by_size = math.ceil(self._form.bytes_per_frame * self._seen / max(self._bytes, 1))
            self.rows = max(1, min(self._form.rows_per_frame, by_size))
        return batch


def micros(batch: pa.RecordBatch, event_time: EventTime) -> pa.Array:
    """Return the time of each row, in epoch microseconds."""
    times = batch.column(event_time.column)
    if event_time.window:
        times = pc.struct_field(times, "end")
    return times.cast(pa.timestamp("us", tz=times.type.tz)).cast(pa.int64())


def _marked(
    batch: pa.RecordBatch, key: StructType, form: Form, coming: Callable[[list[bytes]], None]
) -> Iterator[tuple[bytes, bool, tuple[Any, ...], Any]]:
    """Yield each row with its key, and whether it is input."""
    read = _slices if form.sliced else _runs if form.pandas else _rows
    parts = parted(batch)
    if parts is None:
        keys = _Keys.of(batch, key)
        coming(keys.encoded)
        yield from ((encoded, True, own, row) for encoded, own, row in read(batch, keys, form))
        return
    marks, rows, initial = parts
    keys = _Keys.of(rows, key)
    coming(keys.encoded)
    inputs, states = read(rows, keys, form), read(initial, _Keys.of(initial, key), form)
    at = 0
    while at < len(marks):
        encoded, own, row = next(inputs if marks[at] else states)
        yield encoded, marks[at], own, row
        at += len(row) if form.pandas else 1


@dataclass(frozen=True)
class _Keys:
    """The keys of a batch's rows. ``at`` lists their columns.

    ``values`` are Arrow's, because pandas turns whole numbers into floats where a batch has a null.
    """

    at: list[int]
    values: list[tuple[Any, ...]]
    encoded: list[bytes]

    @classmethod
    def of(cls, batch: pa.RecordBatch, schema: StructType) -> _Keys:
        names = batch.schema.names
        at = [names.index(column_named(name, names) or name) for name in schema.names]
        values = list(zip(*(batch.column(i).to_pylist() for i in at), strict=True))
        return cls(at, values, list(_encoded(values, schema)))

    def runs(self) -> Iterator[tuple[bytes, int, int]]:
        """Yield the bytes of each key, and the start and the end of its rows."""
        end = 0
        for encoded, run in groupby(self.encoded):
            start, end = end, end + sum(1 for _ in run)
            yield encoded, start, end


def _rows(batch: pa.RecordBatch, keys: _Keys, form: Form) -> Iterator[_Keyed]:
    row_of = Row(*batch.schema.names)
    rows = zip(*(column.to_pylist() for column in batch.columns), strict=True)
    for encoded, own, values in zip(keys.encoded, keys.values, rows, strict=True):
        yield encoded, own, row_of(*values)


def _runs(batch: pa.RecordBatch, keys: _Keys, form: Form) -> Iterator[_Keyed]:
    """Yield the rows of each key as one frame, with the names and types that pandas gives to a list of rows."""
    import pandas as pd

    series = _series(batch, form)
    frame = pd.DataFrame(list(pd.concat(series, axis=1).itertuples(index=False)))
    # for other types, the rows of one key have the type that all rows have
    inferred = any(column.null_count and pa.types.is_boolean(column.type) for column in batch.columns)
    shown = list(zip(*(frame.iloc[:, i] for i in keys.at), strict=True))
    # this does what groupby does for each group, without its overhead: it takes half the time of frame.iloc[start:end]
    manager, names = frame._mgr, frame.columns
    for encoded, start, end in keys.runs():
        own = manager.get_slice(slice(start, end), axis=1)
        own.axes[0] = names.view()  # its name is the processor's own
        own.axes[1] = pd.RangeIndex.from_range(range(end - start))
        part = pd.DataFrame._from_mgr(own, axes=own.axes)  # type: ignore[attr-defined]
        yield encoded, shown[start], part.infer_objects() if inferred else part


def _slices(batch: pa.RecordBatch, keys: _Keys, form: Form) -> Iterator[_Keyed]:
    """Yield the rows of each key as one frame."""
    import pandas as pd

    for encoded, start, end in keys.runs():
        series = _series(batch.slice(start, end - start), form)
        yield encoded, tuple(series[i].iloc[0] for i in keys.at), pd.concat(series, axis=1)


def _series(batch: pa.RecordBatch, form: Form) -> list[Any]:
    series: list[Any] = ArrowBatchTransformer.to_pandas(
        batch, timezone=form.timezone, prefer_int_ext_dtype=form.extension_ints
    )
    return series


def _frames(parts: Iterator[Any], limit: _Limit) -> Iterator[Any]:
    """Yield frames from a group's rows in one or more record batches. Indexes begin at 0."""
    gathered: list[Any] = []
    for part in parts:
        gathered.append(part)
        while (rows := sum(map(len, gathered))) >= limit.rows:
            end = max(1, len(part) - (rows - limit.rows))  # the limit may have become lower
            yield _joined([*gathered[:-1], part.iloc[:end].reset_index(drop=True)])
            part = part.iloc[end:].reset_index(drop=True)
            gathered = [part] if len(part) else []
    if gathered:
        yield _joined(gathered)


def _joined(parts: list[Any]) -> Any:
    import pandas as pd

    return parts[0] if len(parts) == 1 else pd.concat(parts, ignore_index=True)


def _encoded(keys: list[tuple[Any, ...]], schema: StructType) -> Iterator[bytes]:
    # in an hour that a clock repeats, two times that differ are equal in Python
    has_times = any(type(kind).__name__ == "TimestampType" for _, kind in types_in(schema))
    for key, run in groupby(keys, key=schema.toInternal if has_times else None):
        encoded = encode_key(schema, key if has_times else schema.toInternal(key))
        yield from (encoded for _ in run)
