"""Runs functions on Spark's executors, each call in its own Spark task."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import pyarrow as pa

from spark_integration.failures import find, marked
from statemgr.errors import FencedError, OutcomeUnknownError, RetryableError, StatemgrError, from_json

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_RESULT = pa.schema([("error", pa.string()), ("answer", pa.string())])


def on_executors(spark: SparkSession, work: Callable[[str], str], orders: Sequence[str]) -> list[str]:
    """Call ``work`` with each order, and return the answers in the same order. Both are JSON.

    If a call raises RetryableError or OutcomeUnknownError, Spark repeats it, on another executor if it can. So it does
    after a FencedError because a newer call for the same order has begun. ``work`` must be safe to repeat.

    Raises: the error of the first call that failed, after all calls have ended; Spark's own error if executors were
        lost too often.
    """
    from pyspark.sql.pandas.types import from_arrow_schema

    numbers = spark.range(0, len(orders), 1, len(orders))
    try:
        rows = numbers.mapInArrow(_worker(work, orders), from_arrow_schema(_RESULT)).collect()
    except Exception as error:  # of any of Spark's kinds
        raise find(str(error)) or error from error
    for row in rows:
        if row.error is not None:
            raise from_json(row.error)
    return [row.answer for row in rows]


def _worker(
    work: Callable[[str], str], orders: Sequence[str]
) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """The function for ``mapInArrow``. Each row has the position of an order."""

    def run(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for number in batch.column("id").to_pylist():
                row: dict[str, str | None] = {"error": None, "answer": None}
                try:
                    row["answer"] = work(orders[number])
                except (RetryableError, FencedError, OutcomeUnknownError) as error:
                    raise RetryableError(marked(error)) from error
                except StatemgrError as error:
                    # running the call again cannot help, so Spark gets the error as a result
                    row["error"] = error.to_json()
                yield pa.RecordBatch.from_pylist([row], schema=_RESULT)

    return run
