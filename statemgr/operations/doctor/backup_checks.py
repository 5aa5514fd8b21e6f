"""What ``statemgr doctor`` checks of the backups of a job: all changelogs, and a sample of the blobs. Reads only."""

from __future__ import annotations

import random
from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING

from statemgr.config.factories import KAFKA_CHANGELOG
from statemgr.logs import counted

if TYPE_CHECKING:
    from statemgr.config import JobConfig
    from statemgr.health.checks import Report
    from statemgr.health.verify_blobs import Verified
    from statemgr.model.checkpoint import CheckpointRecord

#: Tasks whose indexes are read, and blobs that are asked for.
_TASKS, _BLOBS = 20, 200
#: Problems that are listed one by one.
_MOST = 5
_NOT_CHECKED = (
    "other blobs, all bytes, and older checkpoints (`statemgr snapshots verify --read-data`); blobs that nobody needs "
    "(`statemgr gc`); whether the job runs and keeps up (`statemgr top`)"
)


def check_backups(report: Report, config: JobConfig) -> None:
    """All changelogs have what the current checkpoints need, and a sample of the blobs is there. Says what is left."""
    from statemgr.health.verify_blobs import lost_backups, verify_blobs
    from statemgr.kafka.checkpoint_topic import CheckpointTopic
    from statemgr.ports import no_progress
    from statemgr.wiring import open_services

    with (
        report.guarded("backups"),
        closing(open_services(config)) as services,
        closing(CheckpointTopic(config, services.clock)) as log,
    ):

        def read() -> Mapping[str, CheckpointRecord]:
            return {task: replace(one, checkpoints=one.checkpoints[:1]) for task, one in log.read().items()}

        records = read()
        lost = list(islice(lost_backups(services, records.values()), _MOST))
        for one in lost:
            detail = f"{one.task}, store {one.store}: {one.problem}"
            report.problem(
                "changelogs", detail, "start the job, or wait a minute: its owner writes the whole state again"
            )
        if not lost and any(KAFKA_CHANGELOG in store.backup_factories for store in config.stores.values()):
            report.ok("changelogs", "they have what the current checkpoints need")
        if config.blob_uri is not None and records:
            tasks = random.sample(sorted(records), min(_TASKS, len(records)))
            _report_blobs(report, verify_blobs(services, read, tasks, 0.0, no_progress, most=_BLOBS), len(records))
    report.note("not checked", _NOT_CHECKED)


def _report_blobs(report: Report, found: Verified, tasks: int) -> None:
    ttl = "start the job, which removes it, or use `statemgr gc --fix --write`"
    kinds = (
        ("are damaged", found.damaged, "`statemgr snapshots verify --read-data --repair`"),
        ("still have a TTL", found.expiring, ttl),
    )
    for what, findings, fix in kinds:
        for one in findings[:_MOST]:
            detail = f"{one.blob_id}: {one.problem}; {one.task} needs it for checkpoint {one.checkpoint_id}"
            report.problem("backups", detail, fix)
        if len(findings) > _MOST:
            report.problem("backups", f"{len(findings) - _MOST} more blobs {what}", "as above")
    asked = f"asked for {found.checked:,} of {counted(found.blobs, 'blob')} of {counted(found.tasks, 'task')}"
    if not (found.damaged or found.expiring):
        report.ok("backups", f"{asked} (the job has {tasks:,}): all exist, with their sizes and without a TTL")
