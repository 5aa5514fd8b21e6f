"""Checks that a job can read its input topics again: their partitions, and the records from some offsets on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from statemgr.config import JobConfig
from statemgr.ids import source_topic
from statemgr.kafka.metadata import TopicMetadata
from statemgr.logs import counted
from statemgr.model.checkpoint import Checkpoint
from statemgr.ports import Clock


def input_of(checkpoints: Iterable[Checkpoint]) -> tuple[dict[str, int], dict[str, str]]:
    """The offsets from which a job with these checkpoints continues, and the IDs of their topics."""
    offsets: dict[str, int] = {}
    topic_ids: dict[str, str] = {}
    for checkpoint in checkpoints:
        offsets |= checkpoint.input_offsets
        topic_ids |= checkpoint.input_topic_ids
    return offsets, topic_ids


def refused_inputs(config: JobConfig, clock: Clock) -> list[str]:
    """Why a consumer loop with this configuration refuses topics of ``task.inputs``: one sentence for each. Topics that
    do not exist, or that these credentials may not describe, are left out. Raises: UnavailableError, AccessDenied."""
    with TopicMetadata(config, clock) as metadata:
        counts = {topic: len(found.partitions) for topic, found in metadata.describe(config.inputs).items()}
    return [
        f"{topic} has {counted(count, 'partition')}, but the job will have {counted(config.tasks, 'task')}"
        for topic, count in counts.items()
        if count != config.tasks
    ]


def missing_input(
    config: JobConfig, clock: Clock, offsets: Mapping[str, int], topic_ids: Mapping[str, str]
) -> list[str]:
    """Why a job cannot read its input from ``offsets`` on: one sentence for each problem, none if it can.

    Offsets of topics that do not exist here, or that these credentials may not describe, are not checked.

    Args:
        offsets: source partition → next offset to read.
        topic_ids: input topic → the ID that it had in Kafka.

    Raises: UnavailableError, AccessDenied.
    """
    by_topic: dict[str, list[str]] = {}
    for source in sorted(offsets):
        by_topic.setdefault(source_topic(source) or "", []).append(source)
    metadata = TopicMetadata(config, clock)
    try:
        problems = []
        for topic, found in metadata.describe(sorted(filter(None, by_topic))).items():
            if topic_ids.get(topic, str(found.topic_id)) != str(found.topic_id):
                problems.append(f"{topic} was deleted and created again, so the offsets mean nothing in it")
                continue
            for source in by_topic[topic]:
                start, end = metadata.bounds(topic, int(source.rpartition("-")[2]))
                if offsets[source] < start:
                    problems.append(f"{source} begins at offset {start} now, after {offsets[source]}")
                elif offsets[source] > end:
                    problems.append(f"{source} ends at offset {end} now, before {offsets[source]}")
        return problems
    finally:
        metadata.close()
