"""The records that one publish writes to the checkpoint topic: new records, and deletes of those that retention drops.

A reader may see only the first records of a publish. So they have this order:

1. a version 1 checkpoint that older software made current, under its own key, so that it stays retained
2. the older checkpoints that come along from another layout, oldest first, in the form of 3 and 4
3. the job record, if several tasks are published together; task records refer to it
4. one task record per task
5. version 1 records, if older software reads them too
6. deletes: task records first, then job records that nothing refers to any more
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace

from statemgr.config import JobConfig
from statemgr.ids import CheckpointId
from statemgr.model import codecs
from statemgr.model.checkpoint import Checkpoint, CheckpointKey, CheckpointRecord, Layout
from statemgr.model.checkpoint_records import JobCheckpoint, common_inputs, publish_of, task_alone, task_part

Send = Callable[[bytes, bytes | None], None]
Records = Mapping[str, CheckpointRecord]


def send_records(
    config: JobConfig,
    send: Send,
    layout: Layout,
    before: Mapping[str, CheckpointRecord | None],
    after: Records,
    job_records: Collection[int],
) -> None:
    """Send all records of a publish of the tasks in ``after``.

    Args:
        send: takes the key and the value of a record, or None to delete it.
        before: the tasks' records on the topic.
        job_records: the sequence numbers of the job records on the topic that this publisher may delete.
    """
    for task, record in after.items():  # 1
        adopted = _adopted(before[task])
        if adopted is not None and adopted.checkpoint_id in {c.checkpoint_id for c in record.checkpoints}:
            send(*codecs.encode_task(record.key(adopted), task_alone(adopted, layout)))
    for older in _taken_along(before, after):  # 2
        _send_new(config, send, layout, older)
    _send_new(config, send, layout, after)  # 3, 4
    if 1 in config.write_versions:  # 5
        for record in after.values():
            send(codecs.encode_key(record.key_v1()), codecs.encode_record_v1(record))
    for task, record in after.items():  # 6
        for checkpoint in _dropped(before[task], record):
            send(codecs.encode_key(record.key(checkpoint)), None)
    for sequence in sorted(set(job_records) - sequences(after)):
        send(codecs.encode_key(_job_key(config, layout, sequence)), None)


def sequences(records: Mapping[str, CheckpointRecord | None]) -> set[int]:
    """The sequence numbers of all retained checkpoints."""
    return {checkpoint.sequence for record in records.values() if record for checkpoint in record.checkpoints}


def _send_new(config: JobConfig, send: Send, layout: Layout, after: Records) -> None:
    if len(after) == 1:
        ((_, record),) = after.items()
        send(*codecs.encode_task(record.key(record.current), task_alone(record.current, layout)))
        return
    current = {task: record.current for task, record in after.items()}
    publish = publish_of(next(iter(current.values())), common_inputs(current))
    send(*codecs.encode_job(_job_key(config, layout, publish.sequence), JobCheckpoint(layout, publish)))
    for record in after.values():
        send(*codecs.encode_task(record.key(record.current), task_part(record.current, publish)))


def _job_key(config: JobConfig, layout: Layout, sequence: int) -> CheckpointKey:
    return CheckpointKey(config.job_name, config.job_id, layout.generation, "", 2, sequence)


def _taken_along(before: Mapping[str, CheckpointRecord | None], after: Records) -> list[Records]:
    """The older checkpoints that have no record in this layout yet: one mapping for each earlier publish, oldest
    first."""
    publishes: dict[tuple[int, CheckpointId], dict[str, CheckpointRecord]] = {}
    for task, record in after.items():
        earlier = before[task]
        if earlier is not None and earlier.layout.generation != record.layout.generation:
            for one in record.checkpoints[1:]:
                of_publish = publishes.setdefault((one.sequence, one.checkpoint_id), {})
                of_publish[task] = replace(record, checkpoints=(one,))
    return [publishes[at] for at in sorted(publishes, key=lambda at: (at[0], str(at[1])))]


def _adopted(before: CheckpointRecord | None) -> Checkpoint | None:
    """The current checkpoint if it has no version 2 record yet, else None."""
    return before.current if before is not None and before.from_version_one else None


def _dropped(before: CheckpointRecord | None, after: CheckpointRecord) -> list[Checkpoint]:
    """The checkpoints of the same layout that have a record and are no longer retained."""
    if before is None or before.layout.generation != after.layout.generation:
        return []
    kept = {checkpoint.checkpoint_id for checkpoint in after.checkpoints}
    adopted = _adopted(before)
    return [c for c in before.checkpoints if c.checkpoint_id not in kept and c is not adopted]
