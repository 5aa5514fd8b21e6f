"""Gives a job another number of tasks. Spark's executors build the new stores.

Steps of :func:`rescale`:

1. The driver plans. It sends each group of tasks of one store that exchange keys to an executor, as a separate Spark
   job. Several of these jobs run at the same time.
2. The executor restores the old stores, splits them, reads the new ones again and uploads them.
3. The driver notes each answer, brings in what the job has committed in the meantime, fences the job and publishes.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from spark_integration.executors import on_executors
from statemgr import JobConfig
from statemgr.operations.rescale.spread import RescaledJob, rescale_job, rescale_unit

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def rescale(
    spark: SparkSession,
    config: JobConfig,
    tasks: int,
    *,
    checkpoint_id: str | None = None,
    partitioner: str | None = None,
    parallel: int = 32,
) -> RescaledJob:
    """Give a job more or fewer tasks, on the executors. Afterwards, start the job with the configuration in the result.

    The job may run in another application. It is fenced when its last changes are brought in. Executors need
    to reach the blob store, and Kafka if the job has changelogs. If the driver dies, run it again on the same machine,
    or ``statemgr rescale --write``: both continue.

    Args:
        config: the configuration of the job before the rescale.
        checkpoint_id: a checkpoint that all tasks retain; None for the current one.
        partitioner: how the producers of the input choose a partition, if the state does not show it: ``murmur2`` or
            ``crc32``, with ``quix-`` before it for the keys of Quix Streams.
        parallel: Spark jobs at a time, each with one Spark task.

    Raises: as ``statemgr rescale``: ConfigError, InvalidError, MissingState, PermissionNeeded, UnavailableError,
        AccessDenied, DiskFull; FencedError, RetryableError: surely not published; OutcomeUnknownError: run it again.
    """
    work = partial(_sent, spark)
    return rescale_job(config, tasks, work, parallel=parallel, checkpoint_id=checkpoint_id, partitioner=partitioner)


def _sent(spark: SparkSession, order: str) -> str:
    (answer,) = on_executors(spark, rescale_unit, [order])
    return answer
