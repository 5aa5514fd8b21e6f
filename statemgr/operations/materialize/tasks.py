"""Materialize: all tasks of a job in processes of this machine, or a single task in this process."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import Future, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing
from dataclasses import dataclass

from statemgr.config import JobConfig
from statemgr.errors import MissingState, StatemgrError, UnavailableError
from statemgr.ids import task_index
from statemgr.kafka.checkpoint_topic import CheckpointTopic
from statemgr.local.machine import processors
from statemgr.operations.materialize.materialize import (
    Materialized,
    check_possible,
    materialize_store,
    stores_of,
    why_not,
)
from statemgr.ports import Progress, no_progress
from statemgr.services import Services
from statemgr.wiring import WorkerProcesses, open_services, worker_progress


@dataclass(frozen=True, slots=True)
class Outcome:
    """What happened to one store of one task: exactly one of ``done`` and ``error`` is set."""

    task: str
    store: str
    done: Materialized | None = None
    error: StatemgrError | None = None


def wanted_stores(
    config: JobConfig, tasks: Collection[str] = (), stores: Collection[str] = (), *, again: bool = False
) -> list[tuple[str, str, str | None]]:
    """Task, store, and why it needs no offer (None: it needs one), in order; of all tasks and stores unless some are
    named. ``again``: an offer that waits is no reason. Reads the checkpoint topic, and of each offer on it whether its
    blobs exist.

    Raises: ConfigError, InvalidError for a configuration with which no offer is of use; MissingState without a
        checkpoint, or of a named store; UnavailableError, AccessDenied.
    """
    with closing(open_services(config)) as services, closing(CheckpointTopic(config, services.clock)) as log:
        return _wanted(services, log, tasks, stores, again=again)


def materialize_task(
    config: JobConfig,
    task: str,
    stores: Collection[str] = (),
    *,
    again: bool = False,
    progress: Progress = no_progress,
) -> list[Materialized]:
    """Build and offer the first snapshots of one task, in this process, one store after the other.

    This machine needs Kafka, the blob store and room for the largest store below ``state.dir``.

    Args:
        stores: the stores to work on; all if it is empty.
        again: also where an offer waits for the owner already.

    Raises: as :func:`statemgr.operations.materialize.materialize.materialize_store`.
    """
    with closing(open_services(config)) as services, closing(CheckpointTopic(config, services.clock)) as log:
        chosen = [store for _, store, _ in _wanted(services, log, [task], stores, again=again)]
        return [materialize_store(services, log, task, store, progress, again=again) for store in chosen]


def materialize_job(
    config: JobConfig,
    wanted: Sequence[tuple[str, str]],
    *,
    parallel: int | None = None,
    again: bool = False,
    progress: Progress = no_progress,
) -> Iterator[Outcome]:
    """Build and offer the first snapshots of tasks and stores, several at a time, each in a process of its own.

    Yields each outcome when it is known. A failure does not end the others.

    Args:
        parallel: how many at a time; the number of processors by default.
    """
    count = min(parallel or processors(), max(len(wanted), 1))
    with WorkerProcesses(config, count, progress) as workers:
        running: dict[Future[Materialized], tuple[str, str]] = {
            workers.submit(_materialize, task, store, again): (task, store) for task, store in wanted
        }
        for future in as_completed(running):
            task, store = running[future]
            try:
                yield Outcome(task, store, done=future.result())
            except StatemgrError as error:
                yield Outcome(task, store, error=error.with_where(task=task, store=store))
            except BrokenProcessPool as error:
                hint = "run the command again: it continues; `statemgr materialize --parallel 1` needs the least memory"
                raise UnavailableError("a process that took part was killed", hint=hint) from error


def _materialize(services: Services, task: str, store: str, again: bool) -> Materialized:
    with closing(CheckpointTopic(services.config, services.clock)) as log:
        return materialize_store(services, log, task, store, worker_progress(), again=again)


def _wanted(
    services: Services, log: CheckpointTopic, tasks: Collection[str], stores: Collection[str], *, again: bool
) -> list[tuple[str, str, str | None]]:
    config = services.config
    for store in stores:
        config.store(store)
    check_possible(services)
    records = log.read(tasks or None)
    missing = next((task for task in tasks if task not in records), None)
    if missing is not None or not records:
        raise MissingState(
            "the job has no checkpoint" if missing is None else "the topic has no checkpoint of the task",
            hint="wait for its first commit; `statemgr checkpoints list` shows the tasks that have one",
            job=config.job_name,
            topic=config.checkpoint_topic,
            **({} if missing is None else {"task": missing}),
        )
    found = [pair for pair in stores_of(services, records) if not stores or pair[1] in stores]
    unknown = set(stores) - {store for _, store in found}
    if unknown:
        raise MissingState(
            "the checkpoints have no state of these stores that is backed up",
            hint="let the job commit with them; `statemgr checkpoints list` shows the stores that each checkpoint has",
            stores=", ".join(sorted(unknown)),
        )
    return [
        (task, store, why_not(services, log, records[task], store, again=again))
        for task, store in sorted(found, key=lambda pair: (task_index(pair[0]), pair[1]))
    ]
