"""Layouts that a rescale has replaced, while their records are on the topic: which checkpoints they retain and keep."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from statemgr.errors import MissingState, RetryableError
from statemgr.flows.owner import fence_ids
from statemgr.kafka.transactions.publisher import job_transactional_id, publish_alone
from statemgr.model import codecs
from statemgr.model.checkpoint import CheckpointRecord
from statemgr.model.checkpoint_records import task_alone
from statemgr.model.jobs.layouts import RetiredLayout
from statemgr.ports import CheckpointLog
from statemgr.services import Services

#: Name of the transactional ID of all who change the records of these layouts.
CHANGES = "gc"


def kept_by(log: CheckpointLog, generation: int) -> tuple[str, ...]:
    """IDs of the checkpoints that any task of a layout keeps beyond the retention, in order."""
    return tuple(sorted({one for record in log.read(generation=generation).values() for one in record.kept}))


def find_layout(
    log: CheckpointLog, checkpoint_id: str | None
) -> tuple[RetiredLayout, Mapping[str, CheckpointRecord]] | None:
    """The newest replaced layout that retains a checkpoint (None: any), and the records of its tasks; None if there is
    no such layout."""
    log.read(())
    while True:
        layouts = log.retired()
        for retired in reversed(layouts):
            records = log.read(generation=retired.layout.generation)
            if records and (checkpoint_id is None or any(record.find(checkpoint_id) for record in records.values())):
                return retired, records
        if log.retired() == layouts:  # otherwise somebody has rescaled the job, or gone back, meanwhile
            return None


def collect_layouts(services: Services, log: CheckpointLog, before_ms: int) -> None:
    """Delete the records of the layouts that were replaced before a time (epoch milliseconds) and keep no checkpoint.

    A job that goes back to such a layout meanwhile deletes the same records itself. Raises: FencedError if somebody
    changes these records at the same time; RetryableError.
    """

    def deletes() -> Iterator[tuple[bytes, None]]:
        log.read(())  # nobody else changes these layouts from here on
        keys: list[bytes] = []
        for retired in log.retired():
            if retired.retired_ms < before_ms and not kept_by(log, retired.layout.generation):
                keys += (*log.record_keys(retired.layout.generation), retired.key)
        yield from ((key, None) for key in keys)

    publish_alone(services.config, services.clock, CHANGES, services.config.checkpoint_topic, deletes())


def keep_in_layout(
    services: Services, log: CheckpointLog, checkpoint_id: str, *, is_kept: bool
) -> Mapping[str, tuple[str, ...]]:
    """Keep a checkpoint of a replaced layout, or keep it no longer, in every task that retains it.

    Returns: task → the checkpoints that it keeps now.
    Raises: MissingState if no such layout retains it; FencedError if somebody changes these layouts at the same time;
        RetryableError, also if the layout was brought back meanwhile; InvalidError, OutcomeUnknownError.
    """
    kept: dict[str, tuple[str, ...]] = {}

    def retaining() -> list[CheckpointRecord]:
        found = find_layout(log, checkpoint_id)
        if found is None:
            raise MissingState(
                f"checkpoint {checkpoint_id} is not retained for any task",
                hint="run `statemgr checkpoints list` to see the checkpoints that are retained",
                job=services.config.job_name,
            )
        return [record for record in found[1].values() if record.find(checkpoint_id) is not None]

    generations: set[int] = set()

    def changed() -> Iterator[tuple[bytes, bytes]]:
        for record in retaining():  # nobody else changes these layouts from here on
            generations.add(record.layout.generation)
            kept[record.task] = record.with_kept(checkpoint_id, is_kept=is_kept)
            current = replace(record.current, kept=kept[record.task])
            yield codecs.encode_task(record.key(current), task_alone(current, record.layout))

    retaining()  # before anybody is fenced
    fence_ids(services, [job_transactional_id(services.config)])  # a rescale, or the way back
    publish_alone(services.config, services.clock, CHANGES, services.config.checkpoint_topic, changed())
    log.read(())  # a way back that was not fenced ends before this, or sees the change and publishes nothing
    if generations - {retired.layout.generation for retired in log.retired()}:
        raise RetryableError(
            "the layout of the checkpoint was brought back or collected meanwhile, and may not know the change",
            hint="run it again",
            job=services.config.job_name,
        )
    return kept
