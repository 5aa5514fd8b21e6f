"""Rescale: a job whose new stores other machines build, and what each of these machines does."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass

from statemgr.config import JobConfig
from statemgr.errors import ConfigError
from statemgr.kafka.checkpoint_topic import CheckpointTopic
from statemgr.local import remove
from statemgr.local.machine import SystemClock, moment
from statemgr.model.keys.partitioners import PRODUCERS
from statemgr.operations.rescale.build import Build
from statemgr.operations.rescale.built import Built, Workshop
from statemgr.operations.rescale.orders import Order, answer
from statemgr.operations.rescale.plan import changes_in_force, plan_rescale
from statemgr.operations.rescale.rescale import Workers, rescale
from statemgr.os_errors import disk_errors
from statemgr.ports import Progress, no_progress
from statemgr.services import submit_here
from statemgr.wiring import open_services


@dataclass(frozen=True, slots=True)
class RescaledJob:
    """A job whose current layout has the wanted number of tasks.

    Attributes:
        config: the configuration to start the job with.
        changes: configuration key → its new value.
        checkpoints: task → the ID of its first checkpoint, or of its newest one if the job had that many tasks already.
        partitioner: the partitioner that spreads the keys, and ``keys`` and ``size``: the number of keys, and the bytes
            of the new stores. None if the job had that many tasks already.
    """

    config: JobConfig
    changes: Mapping[str, int | str]
    checkpoints: Mapping[str, str]
    partitioner: str | None = None
    keys: int | None = None
    size: int | None = None


def rescale_job(
    config: JobConfig,
    tasks: int,
    elsewhere: Callable[[str], str],
    *,
    parallel: int,
    checkpoint_id: str | None = None,
    partitioner: str | None = None,
    progress: Progress = no_progress,
) -> RescaledJob:
    """Rescale a job. Other machines build the new stores; this process plans, fences the job and publishes.

    It can be run again after a crash, and continues, as ``statemgr rescale`` does on the same machine. This process
    needs Kafka and the blob store. It restores the new stores below ``state.dir`` if the job has committed since they
    were built.

    Args:
        elsewhere: calls :func:`rescale_unit` on another machine. It is called from ``parallel`` + 1 threads.
        checkpoint_id: the retained checkpoint to begin with; None for the current one.
        partitioner: as the option ``--partitioner`` of ``statemgr rescale``.

    Raises: as ``rescale``, and what ``elsewhere`` raises; ConfigError for an unknown partitioner.
    """
    if partitioner is not None and partitioner not in PRODUCERS:
        raise ConfigError(f"no partitioner is called {partitioner!r}", hint=f"choose one of {', '.join(PRODUCERS)}")
    with closing(CheckpointTopic(config, SystemClock(), owned=True)) as log:
        records = log.read()
        if records and {record.layout.tasks for record in records.values()} == {tasks}:
            changes = changes_in_force(config, records)
            ids = {task: str(record.current.checkpoint_id) for task, record in records.items()}
            return RescaledJob(JobConfig.from_mapping(config.to_mapping(), changes), changes, ids)
        plan = plan_rescale(config, records, tasks, checkpoint_id)
        with closing(open_services(plan.config)) as services:
            workers = Workers(submit_here(services), parallel, open_services, elsewhere)
            done = rescale(services, log, tasks, workers, progress, checkpoint_id=checkpoint_id, chosen=partitioner)
    ids = {task: str(made.checkpoint_id) for task, made in done.checkpoints.items()}
    built = done.built
    return RescaledJob(plan.new_config, plan.changes, ids, built.partitioner, built.keys, built.size)


def rescale_unit(order: str) -> str:
    """Carry out an order of :func:`rescale_job` on this machine, and return the answer.

    The machine needs the blob store, Kafka for changelogs, and room below ``state.dir`` for the old state of the unit
    and twice its new state. The directory belongs to this call alone and is removed, so calls for one order may run at
    the same time; but where there is a changelog, a newer call fences an older one.

    Raises: as :meth:`statemgr.operations.rescale.build.Build.run`; FencedError if a newer call for the same order runs.
    """
    told = Order.from_json(order)
    with closing(open_services(told.plan.config)) as services, closing(open_services(told.new_config)) as new:
        if any(record.current.names_blobs for record in told.plan.records.values()):
            new.expect_blobs()
        root = services.scratch_file("rescale")
        try:
            with disk_errors(root):
                root.mkdir()
                return _carried_out(told, Workshop(services, new, root, submit_here(services), 1, no_progress))
        finally:
            remove(root)


def _carried_out(order: Order, workshop: Workshop) -> str:
    as_of, unit = moment(workshop.services.clock), order.unit
    build = Build(workshop, order.plan, as_of, None)
    if len(order.partitioners) > 1:
        return json.dumps({source: build.fitting(unit, source, order.partitioners) for source in unit.sources})
    spread = Built(order.plan, as_of, order.partitioners[0], ()).spread(unit.store)
    return answer(build.unit(unit, spread, order.changelog))
