"""What a publish writes to the checkpoint topic of a real broker, in records and bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from confluent_kafka import Consumer, Message, TopicPartition

from statemgr import JobConfig, StateManager
from statemgr.flows.committing.publish import publish
from statemgr.flows.owner import Owner
from statemgr.flows.published import Published
from statemgr.ids import task_name
from statemgr.kafka.checkpoint_topic import CheckpointTopic
from statemgr.kafka.transactions.publisher import TransactionalPublisher
from statemgr.local.machine import SystemClock
from statemgr.model.checkpoint import BlobMarker, BlobRef, CheckpointRecord, Layout, MicroBatch
from statemgr.model.checkpoint_records import Inputs
from statemgr.model.codecs import decode_key
from statemgr.model.commit import PreparedCommit, PreparedStore
from statemgr.wiring import open_services
from tests.commits import TASK, commit, current, publish_by_hand
from tests.jobs import job_mapping, with_changes
from tests.kafka_jobs import make_topics
from tests.servers import KafkaServer

PARTITIONS = {f"orders-{n}": 10**12 + n for n in range(1000)}
IDS = {"orders": "AAAAAAAAAAAAAAAAAAAAAA"}
JSON = '{"orders":{' + ",".join(f'"{n}":{10**12 + n}' for n in range(1000)) + "}}"
BATCH = MicroBatch("6f0c2a3e-9f1f-4a4e-8f0a-8b5a3c1f9d11", 1, JSON, JSON, 1_700_000_000_000)
#: The most bytes that a publish of 1,000 tasks and any single record may take.
MOST_PUBLISHED, MOST_RECORD = 2_000_000, 256 * 1024


def messages(config: JobConfig, start: int = 0) -> list[Message]:
    """Every committed record on the checkpoint topic, starting at an offset."""
    settings = {
        "bootstrap.servers": config.get("kafka.bootstrap.servers"),
        "group.id": "sizes",
        "auto.offset.reset": "error",
        "enable.partition.eof": True,
    }
    reader, found = Consumer(settings), []
    place = TopicPartition(config.checkpoint_topic, 0, start)
    reader.assign([place])
    try:
        while True:
            batch = reader.consume(10_000, 1.0)
            found += [message for message in batch if message.error() is None]
            for event in (message for message in batch if message.error() is not None):
                if (event.offset() or 0) >= reader.get_watermark_offsets(place, timeout=30)[1]:
                    return found
    finally:
        reader.close()


def size(message: Message) -> int:
    """Bytes of key and value."""
    return len(message.key() or b"") + len(message.value() or b"")


class Job:
    """A job that publishes all its tasks at once, without writing to its stores."""

    def __init__(self, kafka: KafkaServer, directory: Path, tasks: int, retained: int) -> None:
        mapping = job_mapping(
            kafka, directory, tasks=tasks, backup=("blob-store",), task__checkpoint__retained=retained
        )
        self.config = JobConfig.from_mapping(mapping)  # type: ignore[arg-type]
        make_topics(self.config)
        self.services = open_services(self.config)
        self.log = CheckpointTopic(self.config, SystemClock())
        self.publisher = TransactionalPublisher(self.config, self.config.job_name, SystemClock())
        self.publisher.fence()
        self.layout = Layout(1, tasks, "kafka-partition")
        names = [task_name(n) for n in range(tasks)]
        self.owner = Owner(self.services, self.log, self.publisher)
        self.owner.published = Published(dict.fromkeys(names), 1, self.layout)

    def publish(self, offsets: Mapping[str, int] | None = None) -> list[Message]:
        """Publish one micro-batch that changes every task. Returns its records."""
        end = self.log._bounds().end
        self.publish_only(offsets)
        return messages(self.config, end)

    def publish_only(self, offsets: Mapping[str, int] | None = None) -> None:
        """Publish one micro-batch that changes every task."""
        commits = [self._commit(task, record, offsets) for task, record in self.owner.published.records.items()]
        inputs = Inputs(PARTITIONS, IDS)
        publish(self.owner, commits, batch=BATCH, inputs=inputs)

    def _commit(self, task: str, record: CheckpointRecord | None, offsets: Mapping[str, int] | None) -> PreparedCommit:
        config, attempt = self.config, self.services.ids.attempt_id()
        blob = BlobRef(f"{config.job_name}/1/{task.replace(' ', '_')}/totals/{attempt}/index", 12_345, bytes(16))
        return PreparedCommit(
            job_name=config.job_name,
            job_id=config.job_id,
            task=task,
            layout=self.layout,
            epoch=1,
            attempt=attempt,
            base_checkpoint_id=str(record.current.checkpoint_id) if record else None,
            input_offsets=offsets,
            stores={"totals": PreparedStore(f"{attempt}-totals", {"blob-store": BlobMarker(blob)})},
        )

    def close(self) -> None:
        """Close the clients."""
        self.publisher.close()
        self.services.close()


def test_a_publish_writes_what_it_adds_once(kafka: KafkaServer, tmp_path: Path) -> None:
    """Protocol 4, FAULT 58: with 1,000 tasks and 1,000 partitions, all changed, a publish takes at most 2 MB, and no
    record is larger than 256 KiB."""
    job = Job(kafka, tmp_path, tasks=1000, retained=2)
    try:
        for _ in range(2):
            job.publish_only()
        sent = job.publish()
        assert sum(map(size, sent)) <= MOST_PUBLISHED
        assert max(map(size, sent)) <= MOST_RECORD
        assert len(sent) == 2 * (1000 + 1), "a record of the job, one of each task, and as many deletes"
        found = CheckpointTopic(job.config, SystemClock()).read()
        assert found == job.owner.published.records
        assert found["Partition 7"].current.input_offsets == PARTITIONS
        assert found["Partition 7"].current.input_topic_ids == IDS
        assert found["Partition 7"].current.batch == BATCH
    finally:
        job.close()


@pytest.mark.long
def test_a_publish_costs_the_same_whatever_is_retained(kafka: KafkaServer, tmp_path: Path) -> None:
    """Protocol 4, FAULT 58: the 105th publish costs the same with 100 retained checkpoints as with one."""
    sizes: dict[int, list[int]] = {}
    for retained in (1, 100):
        job = Job(kafka, tmp_path, tasks=3, retained=retained)
        try:
            for _ in range(105):
                job.publish_only()
            sizes[retained] = _sizes(messages(job.config))
            found = CheckpointTopic(job.config, SystemClock()).read()
            assert {len(record.checkpoints) for record in found.values()} == {retained}
            assert found == job.owner.published.records
        finally:
            job.close()
    assert abs(sizes[100][-1] - sizes[1][-1]) < 50
    assert max(sizes[100]) - min(sizes[100][1:]) < 1000, "what retention drops is a few keys"


def _sizes(sent: Sequence[Message]) -> list[int]:
    """Bytes of each publish; a publish starts with its job record."""
    found: list[int] = []
    for message in sent:
        if message.value() is not None and not decode_key(message.key() or b"").task:
            found.append(0)
        found[-1] += size(message)
    return found


def _keys(sent: Sequence[Message], *, deletes: bool) -> list[tuple[str, int | None]]:
    keys = [decode_key(message.key() or b"") for message in sent if (message.value() is None) == deletes]
    return [(key.task, key.sequence) for key in keys]


def test_exactly_what_retention_drops_is_deleted(kafka: KafkaServer, tmp_path: Path) -> None:
    """Protocol 4: a publish deletes the tasks' records first, then the job records, also when less is retained than
    before."""
    job = Job(kafka, tmp_path, tasks=2, retained=3)
    tasks = [task_name(0), task_name(1)]
    try:
        for number in (1, 2, 3):
            sent = job.publish()
            assert _keys(sent, deletes=True) == []
            assert _keys(sent, deletes=False) == [("", number), *((task, number) for task in tasks)]
        assert _keys(job.publish(), deletes=True) == [(tasks[0], 1), (tasks[1], 1), ("", 1)]
        job.owner.services = replace(job.services, config=with_changes(job.config, task__checkpoint__retained=1))
        sent = job.publish(PARTITIONS | {"orders-0": 5})
        assert _keys(sent, deletes=True) == [(t, n) for t in tasks for n in (4, 3, 2)] + [("", 2), ("", 3), ("", 4)]
        found = CheckpointTopic(job.config, SystemClock()).read()
        assert [len(found[task].checkpoints) for task in tasks] == [1, 1]
        assert found[tasks[0]].current.input_offsets["orders-0"] == 5
        assert len(messages(job.config)) == 15 + 12
    finally:
        job.close()


def test_a_job_record_lives_as_long_as_a_task_needs_it(kafka: KafkaServer, tmp_path: Path) -> None:
    """Protocol 4: a task that is published alone deletes no job record; the next publish of all tasks does."""
    job = Job(kafka, tmp_path, tasks=2, retained=1)
    job.publish()
    job.close()
    config = with_changes(job.config, task__restore__factories=["blob-store"])
    publisher = TransactionalPublisher(config, "alone", SystemClock())
    publisher.fence()
    services = open_services(config)
    alone = Owner(services, job.log, publisher)
    alone.published = Published({TASK: CheckpointTopic(config, SystemClock()).read()[TASK]}, 1, job.layout)
    again = Job.__new__(Job)
    again.__dict__ |= job.__dict__ | {"owner": alone, "publisher": publisher, "services": services}
    sent = again.publish({"orders-0": 7})
    assert _keys(sent, deletes=False) == [(TASK, 2)]
    assert _keys(sent, deletes=True) == [(TASK, 1)]
    log = CheckpointTopic(config, SystemClock())
    found = log.read()
    assert found[TASK].current.input_offsets == {"orders-0": 7}
    assert found["Partition 1"].current.input_offsets == PARTITIONS
    again.owner.published = Published(dict(found), 1, job.layout)
    again.owner.published.job_records = set(log.job_records())
    sent = again.publish()
    assert _keys(sent, deletes=True) == [(TASK, 2), ("Partition 1", 1), ("", 1)]
    assert _keys(sent, deletes=False) == [("", 3), (TASK, 3), ("Partition 1", 3)]
    again.close()


def test_many_commits_with_many_partitions_and_checkpoints(kafka: KafkaServer, tmp_path: Path) -> None:
    """FAULT 58: a task with 1,000 input partitions and 100 retained checkpoints continues to commit."""
    mapping = job_mapping(kafka, tmp_path, backup=("kafka-changelog",), task__checkpoint__retained=100)
    config = JobConfig.from_mapping(mapping)  # type: ignore[arg-type]
    with StateManager(config) as manager, manager.open_task(TASK) as task:
        for number in range(110):
            task.store("totals").put(b"n", b"%d" % number)
            task.commit({name: offset + number for name, offset in PARTITIONS.items()})
    record = current(config)
    assert record is not None
    assert len(record.checkpoints) == 100
    assert record.current.input_offsets["orders-999"] == 10**12 + 999 + 109
    assert max(map(size, messages(config))) <= MOST_RECORD


def test_a_version_one_checkpoint_stays_retained(kafka: KafkaServer, tmp_path: Path) -> None:
    """Protocol 4: if older software published last, the next publish also writes a record for its checkpoint."""
    mapping = job_mapping(kafka, tmp_path, backup=("kafka-changelog",), task__checkpoint__write__versions=[1, 2])
    config = with_changes(JobConfig.from_mapping(mapping), task__checkpoint__retained=3)  # type: ignore[arg-type]
    first = commit(config, {b"a": b"1"}, 1)
    record = current(config)
    assert record is not None
    theirs = type(first.checkpoint_id)(first.checkpoint_id.millis + 1, 0)
    publish_by_hand(config, _with_id(record, theirs), version=1)
    last = commit(config, {b"a": b"2"}, 2)
    found = CheckpointTopic(config, SystemClock()).read()[TASK]
    assert [c.checkpoint_id for c in found.checkpoints] == [last.checkpoint_id, theirs, first.checkpoint_id]
    assert [c.sequence for c in found.checkpoints] == [3, 2, 1]
    assert [c.record_version for c in found.checkpoints] == [2, 1, 2]
    commit(config, {b"a": b"3"}, 3)
    found = CheckpointTopic(config, SystemClock()).read()[TASK]
    assert [c.sequence for c in found.checkpoints] == [4, 3, 2], "it is written once, and dropped like any other"


def _with_id(record: CheckpointRecord, checkpoint_id: object) -> CheckpointRecord:
    from dataclasses import replace

    return replace(record, checkpoints=(replace(record.current, checkpoint_id=checkpoint_id),))  # type: ignore[arg-type]
