"""The job on its brokers: every record of the checkpoint topic, the layout, the input topics, the group's rights.

Reads only, and fences nobody.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from statemgr.cli.checks.finding import Finding, Status, guarded
from statemgr.config import JobConfig
from statemgr.model.checkpoint import CheckpointRecord

_BY_PARTITION = "kafka-partition"


def check_job(config: JobConfig, groups: Sequence[str]) -> list[Finding]:
    """What the topics of a job hold, and whether a consumer loop could read its input."""
    findings: list[Finding] = []
    records: Mapping[str, CheckpointRecord] = {}
    with guarded("checkpoints", findings):
        records = _records(config)
        told = f"{len(records)} of {config.tasks} tasks have one" if records else "the job has none yet"
        findings.append(Finding(check="checkpoints", status=Status.OK, detail=f"all records are readable; {told}"))
    findings += layout_findings(config, records)
    findings += _inputs(config, records)
    for group in groups:
        with guarded("group", findings):
            findings.append(_group(config, group))
    return findings


def _records(config: JobConfig) -> Mapping[str, CheckpointRecord]:
    """Reads the checkpoint topic to its end. Raises: CorruptRecord with the offset of what is none of statemgr's."""
    from statemgr.kafka.checkpoint_topic import CheckpointTopic
    from statemgr.local.clock import SystemClock

    log = CheckpointTopic(config, SystemClock())
    try:
        return log.read()
    finally:
        log.close()


def layout_findings(config: JobConfig, records: Mapping[str, CheckpointRecord]) -> list[Finding]:
    """Whether the checkpoints were made with as many tasks as the configuration has. (Version 1 does not say.)"""
    layouts = {(r.layout.tasks, r.layout.partitioner) for r in records.values() if r.layout.tasks}
    findings = []
    for tasks, partitioner in sorted(layouts):
        if tasks == config.tasks:
            detail = f"{tasks} tasks, keys spread by {partitioner}"
            findings.append(Finding(check="layout", status=Status.OK, detail=detail))
            continue
        findings.append(
            Finding(
                check="layout",
                status=Status.PROBLEM,
                detail=f"the checkpoints were made with {tasks} tasks, the configuration has {config.tasks}",
                fix=f"set job.tasks = {tasks}",
            )
        )
    if len(layouts) > 1:
        names = ", ".join(f"{tasks} tasks by {partitioner}" for tasks, partitioner in sorted(layouts))
        detail = f"the tasks' checkpoints disagree: {names}"
        findings.append(Finding(check="layout", status=Status.PROBLEM, detail=detail))
    return findings


def _inputs(config: JobConfig, records: Mapping[str, CheckpointRecord]) -> list[Finding]:
    """Each input topic exists and has one partition per task. A job that spreads keys itself may have any number."""
    from statemgr.kafka.input_topics import InputTopics
    from statemgr.local.clock import SystemClock

    findings: list[Finding] = []
    partitioners = {record.layout.partitioner for record in records.values() if record.layout.tasks}
    if partitioners - {_BY_PARTITION}:
        return findings
    if not config.inputs:
        note = "task.inputs is not set: the input topics of a consumer loop are not checked"
        return [Finding(check="inputs", status=Status.NOTE, detail=note)]
    inputs = InputTopics(config, SystemClock())
    with guarded("inputs", findings):
        consumer = config.consumer(f"statemgr-doctor-{config.job_name}")
        try:
            inputs.check(consumer, config.inputs, lambda: _published_tasks(records))
        finally:
            consumer.close()
            inputs.close()
        findings.append(Finding(check="inputs", status=Status.OK, detail=", ".join(config.inputs)))
    return findings


def _published_tasks(records: Mapping[str, CheckpointRecord]) -> int | None:
    return max((record.layout.tasks for record in records.values()), default=None)


def _group(config: JobConfig, group: str) -> Finding:
    """Whether these credentials may be a member of a consumer group. Raises: AccessDenied, UnavailableError."""
    from statemgr.kafka.metadata import TopicMetadata
    from statemgr.local.clock import SystemClock

    with TopicMetadata(config, SystemClock()) as metadata:
        missing = metadata.missing_group_rights(group)
    if not missing:
        return Finding(check="group", status=Status.OK, detail=f"{group}: this user may read")
    return Finding(
        check="group",
        status=Status.PROBLEM,
        detail=f"{group}: this user may not {', '.join(missing)}",
        fix=f"allow {', '.join(missing)} on the consumer group {group}",
    )
