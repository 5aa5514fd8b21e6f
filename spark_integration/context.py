"""The batch as the process function sees it. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame

    from statemgr import Checkpoint, JobConfig, Store


_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class StateContext:
    """The batch as one task sees it.

    Attributes:
        task: ``Partition 0`` … ``Partition N-1``.
        sequence: the number under which this batch's state and output will be published; never used twice.
        batch_time_ms: when Spark began the batch (epoch milliseconds); the same when the batch runs again.
        watermark_ms: the query's event-time watermark (epoch milliseconds), or None if it has none yet.
        attempt: names this attempt; another attempt at the same task and batch has another name.
        previous_watermark_ms: that of the published batch before. Spark calls a row late that is not newer than it.
    """

    task: str
    sequence: int
    batch_time_ms: int
    watermark_ms: int | None
    attempt: str
    previous_watermark_ms: int | None = None
    _late: list[int] = field(default_factory=lambda: [0], compare=False, repr=False)
    _watermarks_ms: list[int] = field(default_factory=list, compare=False, repr=False)

    @property
    def batch_time(self) -> datetime:
        """``batch_time_ms`` as a time in UTC. Python has none after the year 9999: then it is the last of that year."""
        return _time(self.batch_time_ms)

    @property
    def watermark(self) -> datetime | None:
        """``watermark_ms`` as a time, like :attr:`batch_time`."""
        return None if self.watermark_ms is None else _time(self.watermark_ms)

    @property
    def previous_watermark(self) -> datetime | None:
        """``previous_watermark_ms`` as a time, like :attr:`batch_time`."""
        return None if self.previous_watermark_ms is None else _time(self.previous_watermark_ms)

    @property
    def late_rows(self) -> int:
        """The number of late rows so far."""
        return self._late[0]

    def count_late(self, rows: int) -> None:
        """Add to the number of late rows in the report of the batch."""
        self._late[0] += rows

    @property
    def next_watermark_ms(self) -> int | None:
        """The watermark that follows from the rows of the task so far, in epoch milliseconds; None if it is unknown."""
        return max(self._watermarks_ms, default=None)

    def see_time(self, time_ms: int, *, delay_ms: int) -> None:
        """Note that a row has this time, and that the watermark is so far behind."""
        self._watermarks_ms[:] = [max([time_ms - delay_ms, *self._watermarks_ms])]


def _time(millis: int) -> datetime:
    try:
        return _EPOCH + timedelta(milliseconds=millis)
    except OverflowError:
        return datetime.max.replace(tzinfo=UTC)


#: ``process(batches, stores, context)`` yields the batch's output rows.
ProcessFunction = Callable[
    ["Iterator[pa.RecordBatch]", "Mapping[str, Store]", StateContext], "Iterator[pa.RecordBatch]"
]
#: The earliest time at which a program has something to do without input, in epoch milliseconds, given its stores after
#: a batch. None if there is no such time.
NextDue = Callable[["Mapping[str, Store]"], int | None]
#: ``write(df, sequence)``; ``df`` is a Spark DataFrame.
OutputFunction = Callable[[Any, int], None]


class FirstRows(Protocol):
    """Rows that only the first batch has, in addition to its input."""

    @property
    def order(self) -> tuple[str, ...]:
        """Additional columns that sort the rows of a batch."""
        ...

    def added_to(self, rows: DataFrame) -> DataFrame:
        """Return the input of a batch together with these rows."""
        ...


@dataclass(frozen=True)
class Bound:
    """What the workers of a query run.

    Attributes:
        attachments: the attachments of the first task to every checkpoint, by name.
        order: the columns that sort the rows of a task; empty for no order.
        first: rows for the next batch that is published, and for no other.
        next_due: keeps Spark's batches coming while the input is idle. A task's answer covers the clock; a watermark
            that has moved is always something to do. None if the program needs no batches without input.
        operator: the name of the operator in Spark's progress.
        function: the user's class or function, for ``explain``.
        counts: the numbers of state variables, as Spark's progress has them (``numValueStateVars``).
        watermark_ms: the watermark that the published batch has noted for the next one; None if it has not.
        noting: returns ``attachments`` that note a watermark, in epoch milliseconds, for the next batch.
    """

    process: ProcessFunction
    attachments: Mapping[str, bytes] = field(default_factory=dict)
    order: tuple[str, ...] = ()
    first: FirstRows | None = None
    next_due: NextDue | None = None
    operator: str = "statefulQuery"
    function: str = ""
    counts: Mapping[str, int] = field(default_factory=dict)
    watermark_ms: int | None = None
    noting: Callable[[int], Mapping[str, bytes]] = lambda watermark_ms: {}


class Prepared(Protocol):
    """A program that was checked as far as possible without the published checkpoints."""

    def bind(self, checkpoints: Mapping[str, Checkpoint | None]) -> Bound:
        """Check the program against the published checkpoints (task → checkpoint). Raises: InvalidError."""
        ...


class Program(Protocol):
    """A part of a query that, unlike a process function, depends on its input and on the published checkpoints."""

    def prepare(self, config: JobConfig, rows: DataFrame) -> Prepared:
        """Check the program with the input's columns. Raises: InvalidError."""
        ...
