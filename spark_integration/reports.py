"""Reports of micro-batches: what each task did, in numbers. Pure.

A worker's numbers travel in the row that its attempt returns, so the driver runs no job of its own for them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from statemgr.logs import counted

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(frozen=True, slots=True)
class RestoreReport:
    """How one store of one task was restored before a batch: from a factory, ``local`` or ``empty``.

    A factory supplies what the executor lacks: ``bytes_reused`` says how much of the state it had.
    ``reasons``: factory → why the restore could not use it. ``reason``: why the store came from there, in one word:
    ``new``, ``local-copy``, ``first-choice``, ``damaged``, ``unreachable`` or ``absent``. ``bytes_to_come``: what the
    executor fetches while the batch and later ones run.
    """

    task: str
    store: str
    factory: str
    bytes_fetched: int
    bytes_reused: int
    records: int
    seconds: float
    reasons: Mapping[str, str]
    reason: str = ""
    bytes_to_come: int = 0


@dataclass(frozen=True, slots=True)
class TaskReport:
    """One task's part of a batch, as counted by the attempt whose commit was published.

    Attributes:
        retries: attempts of the task that failed before this one.
        input_rows: rows that the task received, late ones included.
        late_rows: rows that a processor dropped, or that your function counted with ``context.count_late``.
        output_rows: rows that the task yielded.
        keys_read: keys that the task looked up. Items of scans are not counted.
        keys_written: keys that the task put or deleted. A key that changes again counts again after its first change
            has left the store's write buffer.
        keys_estimated: keys in its stores now, as RocksDB estimates them without reading: changes to a key that are
            not compacted yet count as more keys.
        state_bytes: bytes of its stores on disk, without the changes that the batch still has in memory.
        commit_bytes: bytes of the blobs that the attempt stored, output rows included.
        commit_requests: the number of these blobs. Each takes one PUT, or more if PUTs fail and are repeated.
        inline_bytes: bytes that the attempt returned to the driver: the commit with whatever is too small for a blob.
        input_seconds: until the first rows had arrived.
        open_seconds: to restore and open the stores.
        process_seconds: to read the other rows, run your function and store the output rows.
        prepare_seconds: to make the commit durable.
        segments: store → number and bytes of the segments that a restore of the state before this batch would apply.
        blob_counts: requests to the blob store that the worker process has counted since its last report. Each is a
            name, labels and a number, such as ``["requests", "put", "ok", 3]``.
        snapshots: background snapshots that have ended in the worker process since its last report: task, store,
            seconds (None if it failed) and the class of the error (None if it was made).
        due_ms: when a timer or a TTL of the task next expires by the clock (epoch milliseconds); None if none does.
        next_watermark_ms: the watermark that follows from the task's rows (epoch milliseconds); None if it is unknown.
    """

    task: str
    retries: int
    input_rows: int
    late_rows: int
    output_rows: int
    keys_read: int
    keys_written: int
    keys_estimated: int
    state_bytes: int
    commit_bytes: int
    commit_requests: int
    inline_bytes: int
    input_seconds: float
    open_seconds: float
    process_seconds: float
    prepare_seconds: float
    restored: tuple[RestoreReport, ...]
    due_ms: int | None = None
    next_watermark_ms: int | None = None
    segments: Mapping[str, Sequence[int]] = field(default_factory=dict)
    blob_counts: Sequence[Sequence[Any]] = ()
    snapshots: Sequence[Sequence[Any]] = ()

    @property
    def seconds(self) -> float:
        """The seconds of the complete attempt."""
        return self.input_seconds + self.open_seconds + self.process_seconds + self.prepare_seconds

    def to_json(self) -> str:
        """Encode the report for the row that a worker returns."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> TaskReport:
        """The inverse of :meth:`to_json`."""
        found = json.loads(text)
        restored = tuple(RestoreReport(**one) for one in found.pop("restored"))
        return cls(restored=restored, **found)


#: Names of the numbers that a batch sums over its tasks.
TOTALS = (
    "retries", "input_rows", "late_rows", "output_rows", "keys_read", "keys_written", "keys_estimated", "state_bytes",
    "commit_bytes", "commit_requests", "inline_bytes",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class BatchReport:
    """Report of one micro-batch. The seconds of a skipped step are 0, and a replayed batch has no tasks.

    Each number of :class:`TaskReport` is also here, as the sum over the tasks.

    Attributes:
        job: the job's name.
        replayed: the batch was published before, and only its stored output was delivered again.
        time_ms: when Spark began the batch (epoch milliseconds).
        watermark_ms: the watermark (epoch milliseconds); None if there is none yet.
        stage_seconds: from the start of the stage until every task's commit was durable.
        publish_seconds: the Kafka transaction.
        output_seconds: to fetch the output rows and to write them.
        input_offsets: source partition → next offset to read, as of the published state.
    """

    job: str
    batch_id: int
    sequence: int
    replayed: bool
    time_ms: int
    watermark_ms: int | None
    stage_seconds: float
    publish_seconds: float
    output_seconds: float
    input_offsets: Mapping[str, int]
    tasks: tuple[TaskReport, ...]

    @property
    def retries(self) -> int:
        return self._sum("retries")

    @property
    def input_rows(self) -> int:
        return self._sum("input_rows")

    @property
    def late_rows(self) -> int:
        return self._sum("late_rows")

    @property
    def output_rows(self) -> int:
        return self._sum("output_rows")

    @property
    def keys_read(self) -> int:
        return self._sum("keys_read")

    @property
    def keys_written(self) -> int:
        return self._sum("keys_written")

    @property
    def keys_estimated(self) -> int:
        return self._sum("keys_estimated")

    @property
    def state_bytes(self) -> int:
        return self._sum("state_bytes")

    @property
    def commit_bytes(self) -> int:
        return self._sum("commit_bytes")

    @property
    def commit_requests(self) -> int:
        return self._sum("commit_requests")

    @property
    def inline_bytes(self) -> int:
        return self._sum("inline_bytes")

    @property
    def restored(self) -> tuple[RestoreReport, ...]:
        """The restores of all stores of all tasks."""
        return tuple(restored for task in self.tasks for restored in task.restored)

    @property
    def slowest(self) -> TaskReport | None:
        """The task that took the longest; None for a replayed batch."""
        return max(self.tasks, key=lambda task: task.seconds, default=None)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON: every attribute, the totals, and the name of the slowest task."""
        slowest = self.slowest
        totals = {name: getattr(self, name) for name in TOTALS}
        return asdict(self) | totals | {"slowest": None if slowest is None else slowest.task}

    def __str__(self) -> str:
        """One line for a log."""
        if self.replayed:
            return (
                f"{self.job}: batch {self.batch_id} was published before as sequence {self.sequence}; "
                f"its output was delivered again in {self.output_seconds:.3f} s"
            )
        slowest = self.slowest
        parts = [
            f"{counted(self.input_rows, 'row')} in ({self.late_rows} late), {self.output_rows} out",
            f"{counted(self.keys_read, 'key')} read, {self.keys_written} written, about {self.keys_estimated} in all "
            f"({self.state_bytes} bytes)",
            f"commit of {self.inline_bytes} bytes and {self.commit_bytes} in {counted(self.commit_requests, 'blob')}",
            f"stage {self.stage_seconds:.3f} s, publish {self.publish_seconds:.3f} s",
            f"output {self.output_seconds:.3f} s",
        ]
        if slowest is not None:
            parts.append(f"slowest {slowest.task} with {slowest.seconds:.3f} s")
        if self.retries:
            parts.append(counted(self.retries, "retry", "retries"))
        fetched = [one for one in self.restored if one.factory not in ("local", "empty")]
        if fetched:
            parts.append(
                f"restored {counted(len(fetched), 'store')} ({sum(one.bytes_fetched for one in fetched)} bytes)"
            )
        if self.watermark_ms is not None:
            parts.append(f"watermark {self.watermark_ms}")
        return f"{self.job}: batch {self.batch_id} is published as sequence {self.sequence}: {'; '.join(parts)}"

    def _sum(self, name: str) -> int:
        return sum(getattr(task, name) for task in self.tasks)


class StatefulQueryListener:
    """Base class of listeners for ``query.addListener``, as Spark's ``StreamingQueryListener`` is for Spark's progress.

    Methods run on the driver, on the thread of the batch. An exception in one is logged and does not end the query.
    """

    def onBatch(self, report: BatchReport) -> None:  # noqa: N802 - as Spark's names
        """Called after every batch, once its output is written."""


#: A function that takes the report of each batch.
OnBatch = Callable[[BatchReport], None]


class RowCount:
    """Counts the rows of record batches that pass through :meth:`of`."""

    def __init__(self) -> None:
        self.rows = 0

    def of(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            self.rows += batch.num_rows
            yield batch
