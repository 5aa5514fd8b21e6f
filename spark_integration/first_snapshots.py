"""First snapshots of a job, built by Spark's executors from its changelogs, next to the running job.

Steps of :func:`materialize`:

1. the driver reads the checkpoint topic: which tasks and stores need a first snapshot
2. each of them becomes one Spark task: an executor replays the changelog, uploads the files and offers the snapshot
3. the driver collects one result for each

Each offer counts by itself, so those of other tasks stay if one fails.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

import pyarrow as pa

from spark_integration.failures import find, marked
from statemgr import JobConfig
from statemgr.engine import Materialized, materialize_task, wanted_stores
from statemgr.errors import RetryableError, StatemgrError, from_json

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_RESULT_DDL = "error string, done string"
_RESULT = pa.schema([("error", pa.string()), ("done", pa.string())])


def materialize(
    spark: SparkSession,
    config: JobConfig,
    *,
    tasks: Collection[str] = (),
    stores: Collection[str] = (),
    again: bool = False,
) -> list[Materialized]:
    """Build and offer the first snapshot of every task and store that has none, on the executors.

    The job may be running in another application: it is neither fenced nor restarted. Executors need to reach Kafka and
    the blob store, and need room below ``state.dir`` for the stores that they build at a time.

    Args:
        tasks: the tasks to work on; all if it is empty. So are ``stores``.
        again: also where an offer waits for the owner already.

    Raises: as ``statemgr materialize``: ConfigError, InvalidError, MissingState, UnavailableError, AccessDenied,
        DiskFull. If several fail, the first one's error, after all have ended.
    """
    found = wanted_stores(config, tasks, stores)  # 1
    wanted = [(task, store) for task, store, reason in found if reason is None or again]
    if not wanted:
        return []
    numbers = spark.range(0, len(wanted), 1, len(wanted))
    work = _worker(json.dumps(config.to_mapping()), wanted, again)
    try:
        rows = numbers.mapInArrow(work, _RESULT_DDL).collect()  # 2, 3
    except Exception as error:  # of any of Spark's kinds
        raise find(str(error)) or error from error
    for row in rows:
        if row.error is not None:
            raise from_json(row.error)
    return [Materialized(**json.loads(row.done)) for row in rows]


def _worker(
    config: str, wanted: Sequence[tuple[str, str]], again: bool
) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """The function for ``mapInArrow``. Each row has the position of a task and store in ``wanted``."""

    def run(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for number in batch.column("id").to_pylist():
                task, store = wanted[number]
                row: dict[str, str | None] = {"error": None, "done": None}
                try:
                    (done,) = materialize_task(JobConfig.from_mapping(json.loads(config)), task, [store], again=again)
                    row["done"] = json.dumps(asdict(done))
                except RetryableError as error:
                    # Spark runs the task again, on another executor if it can
                    raise RetryableError(marked(error.with_where(task=task, store=store))) from error
                except StatemgrError as error:
                    # running the task again cannot help, so Spark gets the error as a result
                    row["error"] = error.with_where(task=task, store=store).to_json()
                yield pa.RecordBatch.from_pylist([row], schema=_RESULT)

    return run
