"""``open-job``: reading a checkpoint topic that still holds a million records of a thousand tasks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from statemgr.config import JobConfig
from statemgr.flows.published import send_records, sequences
from statemgr.ids import CheckpointId, task_name
from statemgr.kafka.topics import TopicAdmin, checkpoint_topic_spec
from statemgr.local.machine import SystemClock
from statemgr.model.chain import ChainSnapshot, SegmentChain
from statemgr.model.checkpoint import (
    BlobMarker,
    BlobRef,
    ChangelogMarker,
    Checkpoint,
    CheckpointRecord,
    Layout,
    Retention,
)
from statemgr.model.codecs import encode_chain
from statemgr_tools.bench.fresh import in_fresh_process
from statemgr_tools.bench.kafka_operations import fill
from statemgr_tools.bench.measure import interleaved
from statemgr_tools.bench.registry import case
from statemgr_tools.bench.result import Line, Target, alone, compared
from statemgr_tools.bench.session import Session

_RECORDS = 1_000_000
_TASKS = 1000
#: Key, and value or None for a delete.
Sent = tuple[bytes, bytes | None]


@case("open-job")
def open_job(session: Session) -> Iterator[Line]:
    """The newest checkpoint of each of 1,000 tasks in a million records, compared with plain consumption."""
    count, tasks = session.count(_RECORDS, least=5000), session.count(_TASKS, least=50)
    config = session.job("open", job__tasks=tasks, task__backup__factories="kafka-changelog,blob-store")
    session.report(f"filling a checkpoint topic with {count:,} records")
    with TopicAdmin(config, SystemClock()) as admin:
        admin.create_missing([checkpoint_topic_spec(config)])
    fill(config, config.checkpoint_topic, _records(config, tasks, count))
    arguments = {"config": config.to_mapping()}

    def read(number: int) -> dict[str, float]:
        found = in_fresh_process("statemgr_tools.bench.kafka_operations:read_records", **arguments)
        assert found["tasks"] == tasks, found
        return {"seconds": found["seconds"], "peak": found["peak_bytes"]}

    def consume(number: int) -> float:
        topic = config.checkpoint_topic
        return float(
            in_fresh_process("statemgr_tools.bench.kafka_operations:consume", topic=topic, **arguments)["seconds"]
        )

    found = interleaved({"read": read, "consumption": consume}, session.rounds, session.report)
    ours, plain = (count / found[name].median() for name in ("read", "consumption"))
    unit = f"records/s, {tasks:,} tasks"
    yield compared("open-job", ours, unit, "plain consumption, keys and values", plain, Target("at least", 0.4))
    peak = found["read"].largest("peak") / 1e6
    yield alone("open-job", peak, "MB at most resident", "the same reads", Target("at most", 256, of="value"))


def _records(config: JobConfig, tasks: int, count: int) -> Iterator[Sequence[Sent]]:
    """Yield the records of a job that commits all tasks at once to both backends and retains two checkpoints."""
    layout = Layout(1, tasks, "kafka-partition")
    before: dict[str, CheckpointRecord | None] = dict.fromkeys(map(task_name, range(tasks)))
    job_records: set[int] = set()
    for sequence in range(1, max(count // (2 * tasks), 1) + 1):  # a record and a delete for each task
        after = {task: _record(config, task, layout, sequence, record) for task, record in before.items()}
        sent: list[Sent] = []
        send_records(config, lambda *record, to=sent: to.append(record), layout, before, after, job_records)
        job_records = (job_records | {sequence}) & sequences(after)
        before = dict(after)
        yield sent


def _record(
    config: JobConfig, task: str, layout: Layout, sequence: int, before: CheckpointRecord | None
) -> CheckpointRecord:
    attempt = "1700000000000-0123456789abcdef"
    index = BlobRef(f"{config.job_name}/1/{task}/s/{attempt}/index", 12_345, bytes(range(16)))
    snapshot = ChainSnapshot(index, f"{attempt}-s", 123_456_789)
    chain = SegmentChain(
        config.job_name, "1", task, "s", f"{attempt}-s", attempt, attempt, 1_700_000_000_000, snapshot, (),
        (index.blob_id,),
    )  # fmt: skip
    topic = config.stores["s"].changelog_topic
    checkpoint = Checkpoint(
        checkpoint_id=CheckpointId(1_700_000_000_000 + sequence, 1),
        sequence=sequence,
        epoch=1,
        input_offsets={"orders-0": 123_456_789},
        stores={"s": f"{attempt}-s"},
        state_checkpoint_markers={
            "kafka-changelog": {"s": ChangelogMarker(topic, "AAAAAAAAAAAAAAAAAAAAAA", 0, 123_456_789)},
            "blob-store": {"s": BlobMarker(inline=encode_chain(chain))},
        },
        backup_factories={"s": ("kafka-changelog", "blob-store")},
        restore_factories={"s": ("blob-store",)},
    )
    if before is not None:
        return before.followed_by(checkpoint, Retention(newest=2))
    return CheckpointRecord(config.job_name, config.job_id, task, layout, (checkpoint,))
