"""The worker: one attempt at one task of one micro-batch, on an executor, as a function for ``mapInArrow``.

Steps of :func:`attempt`:

1. wait for the first rows of the input
2. open the attempt, which restores the task's stores
3. run the process function
4. write its output rows to local files
5. prepare the commit, and return it as one row

The stores are closed while the driver publishes; the next attempt of this process waits for that. No store of an
attempt stays open afterwards, and the worker writes nothing to Kafka.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import chain, pairwise

import pyarrow as pa

from spark_integration.context import NextDue, ProcessFunction, StateContext
from spark_integration.failures import marked
from spark_integration.heap import spare_collections
from spark_integration.partitioning import Partitioning
from spark_integration.produced import checked, write
from spark_integration.reports import RestoreReport, RowCount, TaskReport
from statemgr import JobConfig
from statemgr.engine import (
    Attachment,
    Attempt,
    Epoch,
    PreparedCommit,
    SharedCheckpoints,
    open_attempt,
    prepared_to_bytes,
)
from statemgr.errors import RetryableError, StatemgrError
from statemgr.ids import task_name

#: Name of the attachments with a task's output rows, each an Arrow IPC stream: ``output-0``, ``output-1``, …
OUTPUT = "output-"
#: The same in a checkpoint whose transaction has not sent the rows: ``output-unsent-0``, …
UNSENT = f"{OUTPUT}unsent-"
#: The row that a worker returns: its task, and either a typed error or the prepared commit with a report.
RESULT = pa.schema([("task", pa.int32()), ("error", pa.string()), ("prepared", pa.binary()), ("report", pa.string())])


@dataclass(frozen=True)
class Work:
    """Everything that the workers of one micro-batch need. Spark ships it with the function, so it must not grow with
    the number of tasks.

    ``config`` is JSON with secrets unresolved, ``epoch`` is bytes of statemgr's own format, ``schema`` is Arrow's.
    The first task attaches ``attachments`` to its checkpoint.
    """

    config: str = field(repr=False)  # it contains secrets that were given literally
    epoch: bytes
    checkpoints: SharedCheckpoints
    tasks: int
    partitioning: Partitioning
    process: ProcessFunction
    next_due: NextDue | None
    attachments: Mapping[str, bytes]
    schema: bytes
    sequence: int
    time_ms: int
    watermark_ms: int | None
    previous_watermark_ms: int | None


def worker(work: Work) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """The function for ``mapInArrow``. The number of Spark's partition is the number of the task."""

    def run(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from pyspark import TaskContext

        context = TaskContext.get()
        assert context is not None, "runs on an executor only"
        task = context.partitionId()
        try:
            retries = context.attemptNumber()
            prepared, report = attempt(work, task, batches, retries, wait_for_close=ends_with_its_task(os.environ))
        except RetryableError as error:
            # Spark runs the task again, on another executor if it can
            raise RetryableError(marked(error)) from error
        except StatemgrError as error:
            # running the task again cannot help, so Spark gets the error as a result
            yield _row(task, error=error.with_where(task=task_name(task)).to_json())
        else:
            yield _row(task, prepared=prepared, report=report.to_json())
        spare_collections()

    return run


def ends_with_its_task(environ: Mapping[str, str]) -> bool:
    """Whether Spark does not reuse this worker, so that its other threads end with its task.

    Without its daemon (``spark.python.use.daemon=false``), Spark starts a process for each task. The environment then
    has the port or the socket of the executor, and all the same the variable that says that workers are reused.
    """
    alone = {"PYTHON_WORKER_FACTORY_PORT", "PYTHON_WORKER_FACTORY_SOCK_PATH"}
    return "SPARK_REUSE_WORKER" not in environ or not alone.isdisjoint(environ)


def attempt(
    work: Work, task: int, batches: Iterator[pa.RecordBatch], retries: int = 0, *, wait_for_close: bool = True
) -> tuple[bytes, TaskReport]:
    """Run one attempt at one task. Returns: the bytes of its prepared commit, and its report.

    ``wait_for_close``: as ``wait`` of :meth:`statemgr.engine.Attempt.close`.
    """
    times = [time.perf_counter()]
    # 1. the input first: no store has to be open during the shuffle
    first = next(batches, None)
    rows = () if first is None else chain((first,), batches)
    times.append(time.perf_counter())
    # 2. open
    config = _config_of(work.config)
    checkpoint = work.checkpoints.of_task(config, task)
    epoch = Epoch.from_bytes(work.epoch)
    with open_attempt(config, task_name(task), checkpoint, epoch, by_need=not wait_for_close) as opened:
        if task == 0:
            for name, data in work.attachments.items():
                opened.attach(name, data, alone=True)
        times.append(time.perf_counter())
        # 3. process, 4. keep the output
        read, yielded = RowCount(), RowCount()
        own = (work.partitioning.check(batch, task, work.tasks) for batch in read.of(rows))
        context = StateContext(
            task=task_name(task),
            sequence=work.sequence,
            batch_time_ms=work.time_ms,
            watermark_ms=work.watermark_ms,
            attempt=opened.attempt_id,
            previous_watermark_ms=work.previous_watermark_ms,
        )
        schema = pa.ipc.read_schema(pa.py_buffer(work.schema))
        produced = yielded.of(checked(work.process(own, opened.stores, context), schema))
        for number, part in enumerate(write(produced, opened.directory(), schema)):
            opened.attach(f"{OUTPUT}{number}", part)
            part.unlink()
        for _ in own:
            pass  # check also the rows that process did not read
        due_ms = None if work.next_due is None else work.next_due(opened.stores)
        times.append(time.perf_counter())
        # 5. prepare: everything is durable when this returns; the driver adds the input's offsets
        prepared = opened.prepare({})
        data = prepared_to_bytes(prepared)
        times.append(time.perf_counter())
        report = _report(opened, prepared, len(data), context, retries, read.rows, yielded.rows, times)
        opened.close(wait=wait_for_close)
        return data, replace(report, due_ms=due_ms, next_watermark_ms=context.next_watermark_ms)


@lru_cache(maxsize=8)
def _config_of(text: str) -> JobConfig:
    return JobConfig.from_mapping(json.loads(text))


def is_unsent(attachment: Attachment) -> bool:
    """Whether an attachment has output rows that its checkpoint's transaction has not sent to Kafka."""
    return attachment.name.startswith(UNSENT)


def named(attachment: Attachment, prefix: str) -> Attachment:
    """An attachment, whose name begins with ``prefix`` if it has output rows: ``OUTPUT`` or ``UNSENT``."""
    if not attachment.is_output:
        return attachment
    return replace(attachment, name=prefix + attachment.name.rpartition("-")[2])


def _report(
    opened: Attempt,
    prepared: PreparedCommit,
    size: int,
    context: StateContext,
    retries: int,
    read: int,
    yielded: int,
    times: Sequence[float],
) -> TaskReport:
    """Return the report. ``size``: bytes of the commit. ``times``: start of the attempt and end of each part."""
    counted = [store.statistics() for store in opened.stores.values()]

    def total(*names: str) -> int:
        """The sum over the stores. Each kind of store has one of the names."""
        return int(sum(one.get(name, 0) for one in counted for name in names))

    attached = sum(part.blob.size for part in prepared.attachments if part.blob is not None)
    seconds = [after - before for before, after in pairwise(times)]
    return TaskReport(
        task=opened.task,
        retries=retries,
        input_rows=read,
        late_rows=context.late_rows,
        output_rows=yielded,
        keys_read=total("keys.read"),
        keys_written=total("keys.written"),
        keys_estimated=total("rocksdb.estimate-num-keys", "memory.keys"),
        state_bytes=total("rocksdb.live-sst-files-size", "memory.bytes"),
        commit_bytes=prepared.added_bytes + attached,
        commit_requests=len(prepared.added_blobs),
        inline_bytes=size,
        input_seconds=seconds[0],
        open_seconds=seconds[1],
        process_seconds=seconds[2],
        prepare_seconds=seconds[3],
        restored=tuple(
            RestoreReport(
                opened.task,
                r.store,
                r.factory,
                r.bytes_fetched,
                r.bytes_reused,
                r.records,
                r.seconds,
                dict(r.reasons),
                r.reason,
                r.bytes_to_come,
            )
            for r in opened.restored
        ),
        segments=opened.segments,
        blob_counts=[[*name, number] for name, number in opened.take_blob_counts().items()],
        snapshots=opened.take_snapshots(),
    )


def _row(
    task: int, *, error: str | None = None, prepared: bytes | None = None, report: str | None = None
) -> pa.RecordBatch:
    row = {"task": task, "error": error, "prepared": prepared, "report": report}
    return pa.RecordBatch.from_pylist([row], schema=RESULT)
