"""Turns the rows that a processor yields into record batches, with Spark's own conversions.

Source: ``pyspark/sql/pandas/serializers.py`` of PySpark 4.2.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from itertools import accumulate
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.conversion import PandasToArrowConversion
from pyspark.sql.types import Row, StructType

from spark_integration.output_schema import to_arrow
from spark_integration.processors.groups import EventTime, Form, micros
from statemgr.errors import InvalidError

#: The number of rows that are converted together.
_ROWS = 10_000


def converted(produced: Iterable[Any], schema: StructType, form: Form) -> Iterator[pa.RecordBatch]:
    """Convert what a processor yields to record batches of the output schema."""
    if form.pandas:
        for frame, sizes in _gathered(produced, min(form.rows_per_frame, _ROWS)):
            yield from _of_frames(frame, sizes, schema, form)
        return
    arrow = to_arrow(schema)
    rows: list[dict[str, Any]] = []
    for row in produced:
        if not isinstance(row, Row):
            raise _other(row, "a Row")
        rows.append(row.asDict(True))
        if len(rows) == _ROWS:
            yield pa.RecordBatch.from_pylist(rows, schema=arrow)
            rows = []
    if rows:
        yield pa.RecordBatch.from_pylist(rows, schema=arrow)


def _gathered(produced: Iterable[Any], most: int) -> Iterator[tuple[Any, list[int]]]:
    """Yield the processor's results. Frames with the same columns and types become one frame, with the rows of each.

    This copies the values, because a processor may change a frame that it has yielded. It keeps no frame, because
    Python's garbage collection of thousands of them takes longer than their conversion. Raises: InvalidError for
    anything but a frame.
    """
    import pandas as pd

    columns: list[tuple[Any, Any]] = []
    values: list[list[Any]] = []
    sizes: list[int] = []
    rows = 0

    def joined() -> tuple[Any, list[int]]:
        kinds = zip(columns, values, strict=True)
        frame = pd.DataFrame({i: pd.Series(each, dtype=kind) for i, ((_, kind), each) in enumerate(kinds)})
        frame.columns = pd.Index([name for name, _ in columns])
        return frame, sizes

    for one in produced:
        if not isinstance(one, pd.DataFrame):
            raise _other(one, "a pandas.DataFrame")
        if not len(one):
            continue  # as on Spark, whatever types its columns have
        # items() would make a Series of each column, which takes six times as long
        read: list[Any] = list(one._iter_column_arrays())  # type: ignore[operator]
        found = list(zip(one.columns, (column.dtype for column in read), strict=True))
        if sizes and (found != columns or rows >= most):
            yield joined()
            values, sizes, rows = [], [], 0
        if not found:
            yield one, []  # no columns
            continue
        columns, values = found, values or [[] for _ in found]
        for each, column in zip(values, read, strict=True):
            each.extend(column.tolist())
        sizes.append(len(one))
        rows += len(one)
    if sizes:
        yield joined()


def _other(yielded: object, wanted: str) -> InvalidError:
    return InvalidError(
        f"the processor yielded {type(yielded).__name__}, not {wanted}",
        hint="transformWithState takes rows, and the forms in pandas take data frames, also from timers",
    )


def _of_frames(frame: Any, sizes: list[int], schema: StructType, form: Form) -> Iterator[pa.RecordBatch]:
    """Convert frames that were joined into one to record batches."""
    convert = partial(
        PandasToArrowConversion.convert,
        schema=schema,
        timezone=form.timezone,
        safecheck=form.safe,
        assign_cols_by_name=form.by_name,
        int_to_decimal_coercion_enabled=form.decimals_of_ints,
    )
    parts = [frame]
    if len(sizes) > 1:
        try:
            joined = convert(frame, arrow_cast=False)
        except Exception:  # a frame needs a cast, which depends on all values that are cast together
            parts = [frame.iloc[end - size : end] for end, size in zip(accumulate(sizes), sizes, strict=True)]
        else:
            yield joined
            return
    for part in parts:
        yield convert(part, arrow_cast=True)


def newer(batches: Iterable[pa.RecordBatch], event_time: EventTime, limit_ms: int) -> Iterator[pa.RecordBatch]:
    """Yield an output's batches. Raises: InvalidError if a time is at or before ``limit_ms`` (epoch milliseconds)."""
    for batch in batches:
        earliest = pc.min(micros(batch, event_time)).as_py()
        if earliest is not None and earliest <= limit_ms * 1000:
            raise InvalidError(
                f"the processor yielded a row of the time {earliest // 1000}, which is not newer than the watermark "
                f"{limit_ms} (epoch milliseconds)",
                hint="yield rows that are newer than the watermark, or give no eventTimeColumnName",
                column=event_time.column,
            )
        yield batch
