"""First snapshots of a job, built by Spark's executors from its changelogs, next to the running job.

Steps of :func:`materialize`:

1. the driver reads the checkpoint topic: which tasks and stores need a first snapshot
2. each pair becomes one Spark task: an executor replays the changelog, uploads the files and offers the snapshot
3. the driver collects one result for each

Each offer counts separately, so the offers of other tasks stay if one fails.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING

from spark_integration.executors import on_executors
from statemgr import JobConfig
from statemgr.errors import StatemgrError
from statemgr.operations.materialize.materialize import Materialized
from statemgr.operations.materialize.tasks import materialize_task, wanted_stores

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


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
    the blob store, and need room in ``state.dir`` for the stores that they build at the same time.

    Args:
        tasks: the tasks to work on; all if it is empty. So are ``stores``.
        again: also build snapshots for which an offer already waits for the owner.

    Raises: as ``statemgr materialize``: ConfigError, InvalidError, MissingState, UnavailableError, AccessDenied,
        DiskFull. If several fail, the first one's error, after all have ended.
    """
    found = wanted_stores(config, tasks, stores)  # 1
    wanted = [(task, store) for task, store, reason in found if reason is None or again]
    if not wanted:
        return []
    work = partial(_built, json.dumps(config.to_mapping()), again)
    answers = on_executors(spark, work, [json.dumps(pair) for pair in wanted])  # 2, 3
    return [Materialized(**json.loads(answer)) for answer in answers]


def _built(config: str, again: bool, wanted: str) -> str:
    """Do the work of one Spark task. ``wanted`` is a task and a store, as JSON."""
    task, store = json.loads(wanted)
    try:
        (done,) = materialize_task(JobConfig.from_mapping(json.loads(config)), task, [store], again=again)
    except StatemgrError as error:
        raise error.with_where(task=task, store=store) from error.__cause__
    return json.dumps(asdict(done))
