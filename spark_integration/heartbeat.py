"""Batches while the input is idle: a second source gives Spark a reason for them. None of its rows reaches a program.

Spark makes a batch when a source has something new. Spark's source ``rate-micro-batch`` always has, and it ends with
the trigger ``availableNow``. Its position means nothing, so a lost checkpoint location loses nothing with it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


def with_heartbeat(rows: DataFrame) -> DataFrame:
    """Return the input with a heartbeat as its last source, so that every trigger makes a batch."""
    from pyspark.sql import functions

    beats = rows.sparkSession.readStream.format("rate-micro-batch").option("rowsPerBatch", 1).load()
    columns = [functions.lit(None).cast(field.dataType).alias(field.name) for field in rows.schema.fields]
    # Spark evaluates the filter when it plans a batch, and leaves the source out
    return rows.union(beats.where(functions.lit(False)).select(*columns))


class IdleWatch:
    """Counts batches, so that another thread can wait until the input is idle."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._begun = 0
        #: The number of the last batch that ended without input.
        self._without_input = 0

    def begin(self) -> None:
        """Note that a batch begins."""
        with self._changed:
            self._begun += 1

    def end_without_input(self) -> None:
        """Note that the current batch has ended and had no input."""
        with self._changed:
            self._without_input = self._begun
            self._changed.notify_all()

    def wait(self, is_active: Callable[[], bool]) -> None:
        """Wait until the query ends, or until a batch that was planned after this call ends without input."""
        with self._changed:
            planned = self._begun + 1  # the next batch may have been planned before
            while self._without_input <= planned and is_active():
                self._changed.wait(0.1)
