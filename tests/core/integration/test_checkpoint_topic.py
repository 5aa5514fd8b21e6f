"""The checkpoint topic on a real broker: a read returns the newest record of every task or a typed error, never an
older state."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace

import pytest
from confluent_kafka import Message, TopicPartition

from statemgr.config import JobConfig
from statemgr.errors import CorruptRecord, MissingState, TopicMisconfigured, UnavailableError
from statemgr.kafka.checkpoint_topic import CheckpointTopic
from statemgr.local.machine import SystemClock
from statemgr.model import codecs
from statemgr.model.checkpoint import ChangelogMarker, CheckpointRecord, Layout
from statemgr.model.checkpoint_records import JobCheckpoint, publish_of, task_part
from statemgr.model.jobs.adopted_job import AdoptedJob
from statemgr.model.jobs.layouts import RetiredLayout
from statemgr.model.jobs.offers import OfferKey
from statemgr.model.jobs.permissions import Permissions, Permit
from tests.blob_faults import ManualClock
from tests.kafka_jobs import (
    EAGER,
    a_record,
    client,
    committed,
    compacted,
    job,
    make_topic,
    make_topics,
    plain_producer,
    recreate,
    send,
    wait_until,
)
from tests.servers import KafkaServer


def _new(kafka: KafkaServer, **more: object) -> tuple[JobConfig, CheckpointTopic]:
    config = job(kafka, **more)
    make_topics(config)
    return config, CheckpointTopic(config, SystemClock(), stall_s=20)


def _bytes(record: CheckpointRecord, version: int = 2) -> tuple[bytes, bytes]:
    if version == 1:
        return codecs.encode_key(record.key_v1()), codecs.encode_record_v1(record)
    (pair,) = codecs.encode_record(record)
    return pair


def _retained(*records: CheckpointRecord) -> CheckpointRecord:
    """The record that a read returns for a task with these records, given newest first."""
    return replace(records[0], checkpoints=tuple(record.current for record in records))


def _delete(config: JobConfig, *records: CheckpointRecord) -> None:
    send(config, config.checkpoint_topic, [(_bytes(record)[0], None) for record in records])


def _publish(config: JobConfig, *records: CheckpointRecord, version: int = 2) -> None:
    send(config, config.checkpoint_topic, [_bytes(record, version) for record in records])


def test_the_newest_record_of_every_task_is_read(kafka: KafkaServer) -> None:
    """A read returns all checkpoints of a task with their offsets, and only the tasks asked for."""
    config, topic = _new(kafka, job__tasks=2)
    assert topic.read() == {}
    first, second, other = a_record(config, 1), a_record(config, 2), a_record(config, 3, "Partition 1")
    _publish(config, first, other, second)
    found = topic.read()
    assert found == {"Partition 0": _retained(second, first), "Partition 1": other}
    assert (found["Partition 0"].offset, found["Partition 1"].offset) == (2, 1)
    assert [checkpoint.offset for checkpoint in found["Partition 0"].checkpoints] == [2, 0]
    assert topic.read(["Partition 1", "Partition 7"]) == {"Partition 1": other}
    assert list(topic.history()) == [first, other, second]


def test_what_comes_last_is_newest_whatever_the_clock_said(kafka: KafkaServer) -> None:
    """A checkpoint whose ID comes from a clock that went back (fault 25) is newer if its offset is."""
    config, topic = _new(kafka)
    _publish(config, a_record(config, 50), a_record(config, 7))
    assert topic.read()["Partition 0"].current.sequence == 7


def test_records_of_other_jobs_are_ignored(kafka: KafkaServer) -> None:
    """On a shared topic, a read does not even decode the records of another job or run."""
    config, topic = _new(kafka)
    other = job(kafka, config.job_name, job__id="2")
    key, _ = _bytes(a_record(other, 5))
    send(config, config.checkpoint_topic, [_bytes(a_record(config, 1)), (key, b"not a record")])
    assert [r.current.sequence for r in topic.read().values()] == [1]


def test_what_newer_software_writes_for_other_jobs_is_ignored(kafka: KafkaServer) -> None:
    """Of a permission, an offer, a retired layout or an adopted job of another job, a read decodes the key alone."""
    config, topic = _new(kafka)
    other = config.job_name, "2"
    permit = Permit(*other, "Partition 0", "token", Permissions(), 0)
    offer = OfferKey(*other, 0, "Partition 0", "totals", "1700-ab")
    retired = RetiredLayout(*other, Layout(1, 1, "kafka-partition"), 0)
    adopted = AdoptedJob("raw", "old", None, None, False, {}, (), {}, {}, {}).encoded(*other)[0]
    keys = permit.key, offer.encoded(), retired.key, adopted
    send(config, config.checkpoint_topic, [_bytes(a_record(config, 1)), *((key, b"newer") for key in keys)])
    assert [r.current.sequence for r in topic.read().values()] == [1]
    mine = Permit(config.job_name, config.job_id, "Partition 0", "token", Permissions(), 0).key
    send(config, config.checkpoint_topic, [(mine, b"newer")])
    with pytest.raises(CorruptRecord):
        topic.read()


def test_a_key_of_version_1_with_more_bytes_is_refused(kafka: KafkaServer) -> None:
    """It is nobody's key, although it begins with that of a record."""
    config, topic = _new(kafka)
    key, value = _bytes(a_record(config, 1), version=1)
    send(config, config.checkpoint_topic, [(key, value)])
    assert len(topic.read()) == 1
    send(config, config.checkpoint_topic, [(key + bytes(16), value)])
    with pytest.raises(CorruptRecord):
        topic.read()


def test_the_newest_layout_generation_counts(kafka: KafkaServer) -> None:
    """After a rescale the records of the older generation are still on the topic, but are not current."""
    config, topic = _new(kafka)
    old = a_record(config, 9, "Partition 1")
    new = a_record(config, 10)
    new = CheckpointRecord(new.job_name, new.job_id, new.task, Layout(1, 1, "kafka-partition"), new.checkpoints)
    _publish(config, new, old)
    assert topic.read() == {"Partition 0": new}


def test_another_owners_open_transaction_hides_nothing(kafka: KafkaServer) -> None:
    """A read waits for a record published behind another task's open transaction (fault 19), and never misses it."""
    config, topic = _new(kafka)
    _publish(config, a_record(config, 1))
    other = plain_producer(config, config.job_name)
    other.begin_transaction()
    other.produce(config.checkpoint_topic, *reversed(_bytes(a_record(config, 5, "Partition 1"))), 0)
    other.flush(30)
    _publish(config, a_record(config, 2))
    impatient = CheckpointTopic(config, SystemClock(), stall_s=1)
    with pytest.raises(UnavailableError, match="an open transaction of another owner stops it at 1") as late:
        impatient.read()
    assert late.value.where["topic"] == config.checkpoint_topic
    ends = threading.Timer(1.0, other.commit_transaction, (30,))
    ends.start()
    found = topic.read()
    ends.join()
    assert {task: r.current.sequence for task, r in found.items()} == {"Partition 0": 2, "Partition 1": 5}


def test_an_aborted_checkpoint_is_none(kafka: KafkaServer) -> None:
    """If the topic ends in an aborted record and control records, the committed record remains current."""
    config, topic = _new(kafka)
    _publish(config, a_record(config, 1))
    other = plain_producer(config, config.job_name)
    other.begin_transaction()
    other.produce(config.checkpoint_topic, *reversed(_bytes(a_record(config, 2))), 0)
    other.flush(30)
    other.abort_transaction(30)
    assert topic.read()["Partition 0"].current.sequence == 1


def test_what_was_deleted_is_retained_no_longer(kafka: KafkaServer) -> None:
    """A delete removes one checkpoint of one task, even a checkpoint that was read before."""
    config, topic = _new(kafka, job__tasks=2)
    first, second, third = (a_record(config, number) for number in (1, 2, 3))
    _publish(config, first, second, third, a_record(config, 1, "Partition 1"))
    assert len(topic.read()["Partition 0"].checkpoints) == 3
    _delete(config, second)
    for reader in (topic, CheckpointTopic(config, SystemClock())):
        assert reader.read() == {
            "Partition 0": _retained(third, first),
            "Partition 1": a_record(config, 1, "Partition 1"),
        }


def _publish_together(config: JobConfig, number: int) -> list[tuple[bytes, bytes]]:
    """Send a job record and the task records that refer to it."""
    records = [a_record(config, number, f"Partition {n}", stores={"totals": f"{number}-{n}"}) for n in range(2)]
    publish, key = publish_of(records[0].current), records[0].key(records[0].current)
    sent = [codecs.encode_job(replace(key, task=""), JobCheckpoint(records[0].layout, publish))]
    sent += [codecs.encode_task(r.key(r.current), task_part(r.current, publish)) for r in records]
    send(config, config.checkpoint_topic, sent)
    return sent


def test_tasks_refer_to_their_job_record(kafka: KafkaServer) -> None:
    """Protocol 4: the part that tasks published together have in common is written once, and appears in each
    checkpoint."""
    config, topic = _new(kafka, job__tasks=2)
    _publish_together(config, 1)
    _publish_together(config, 2)
    found = topic.read()
    for n in range(2):
        expected = [a_record(config, number, f"Partition {n}", stores={"totals": f"{number}-{n}"}) for number in (2, 1)]
        assert found[f"Partition {n}"] == _retained(*expected)
    assert sorted(topic.job_records()) == [1, 2]
    assert [record.current.sequence for record in topic.history()] == [1, 1, 2, 2]


@pytest.mark.parametrize("reads_before", [False, True])
def test_a_job_record_that_is_gone_is_an_error(kafka: KafkaServer, reads_before: bool) -> None:
    """If somebody deleted a checkpoint's job record, a read fails instead of returning an older checkpoint."""
    config, topic = _new(kafka, job__tasks=2)
    _publish_together(config, 1)
    (key, _), *_ = _publish_together(config, 2)
    if reads_before:
        assert len(topic.read()) == 2
    send(config, config.checkpoint_topic, [(key, None)])
    with pytest.raises(MissingState, match="lost the job record of sequence 2") as lost:
        topic.read()
    assert lost.value.where["offset"] == 4
    assert [record.current.sequence for record in topic.history()] == [1, 1, 2, 2]


def test_compaction_keeps_the_newest(kafka: KafkaServer) -> None:
    """After compaction the newest record is still there, and the topic does not count as truncated."""
    config = job(kafka)
    make_topic(config, config.checkpoint_topic, **EAGER)
    topic = CheckpointTopic(config, SystemClock(), stall_s=20)
    number = 0

    def publish(_: int) -> None:
        nonlocal number
        for _ in range(50):
            number += 1
            _publish(config, a_record(config, number))
            _delete(config, a_record(config, number - 1))

    other, _ = _bytes(a_record(job(kafka), 1))
    compacted(config, config.checkpoint_topic, publish, closing_key=other)
    assert topic.read()["Partition 0"] == a_record(config, number)
    assert len(list(topic.history())) < number
    assert not topic.was_truncated()


def test_what_was_read_long_ago_is_read_again(kafka: KafkaServer) -> None:
    """Compaction removes a checkpoint and then its delete, so a reader that remembers the checkpoint starts over."""
    config = job(kafka)
    make_topic(config, config.checkpoint_topic, **EAGER)
    clock = ManualClock()
    clock.now = time.time()
    topic = CheckpointTopic(config, clock, stall_s=20)
    first, last = a_record(config, 1), a_record(config, 9)
    _publish(config, first)
    assert topic.read()["Partition 0"] == first
    other, _ = _bytes(a_record(job(kafka), 1))

    def publish(_: int) -> None:
        _publish(config, last)
        _delete(config, first)

    compacted(config, config.checkpoint_topic, publish, closing_key=other)
    deleted = _bytes(first)[0]

    def forgotten() -> bool:
        time.sleep(0.6)
        send(config, config.checkpoint_topic, [(other, b"")])
        return all(key != deleted for key, _ in committed(config, config.checkpoint_topic))

    wait_until(forgotten)
    clock.now += 6 * 3600
    assert topic.read()["Partition 0"] == last


def test_a_newer_version_one_record_is_the_current_checkpoint(kafka: KafkaServer) -> None:
    """After older software has run, its changelog offsets are current, and the older checkpoints stay retained."""
    config, topic = _new(kafka)
    marker = {"kafka-changelog": {"totals": ChangelogMarker("t", "id", 0, 70)}}
    both = a_record(config, 1, state_checkpoint_markers=marker)
    send(config, config.checkpoint_topic, [_bytes(both, 1), _bytes(both, 2)])
    assert topic.read()["Partition 0"] == both
    _publish(config, a_record(config, 9, state_checkpoint_markers=marker), version=1)
    found = topic.read()["Partition 0"]
    assert [c.record_version for c in found.checkpoints] == [1, 2]
    assert found.current.marker("kafka-changelog", "totals") == ChangelogMarker("t", None, 0, 70)
    assert found.current.sequence == 2
    only_two = job(kafka, config.job_name, task__checkpoint__read__versions=[2])
    assert CheckpointTopic(only_two, SystemClock()).read()["Partition 0"].current.sequence == 1


_POISON = {
    "a key with a flipped bit": ("flipped", "whole"),
    "a delete whose key has a flipped bit": ("flipped", None),
    "no key": (None, b"x"),
    "a key of something else": (b"poison", b"x"),
    "an unknown schema": ("key", b"\xc3\x01" + b"\x07" * 8 + b"body"),
    "no Avro at all": ("key", b"poison"),
    "a value cut short": ("key", "cut"),
    "a delete of the newest checkpoint": ("key", None),
}


@pytest.mark.parametrize("kind", sorted(_POISON))
def test_a_poison_record_is_an_error_with_its_place(kafka: KafkaServer, kind: str) -> None:
    """Fault 22: the error names topic, partition and offset, and a read never returns an older record instead."""
    config = job(kafka)
    # a compacted topic refuses null keys, but a user's topic may not be compacted
    make_topic(config, config.checkpoint_topic, cleanup__policy="delete")
    key, value = _bytes(a_record(config, 2))
    bad_key, bad_value = _POISON[kind]
    keys = {"key": key, "flipped": key[:-20] + bytes([key[-20] ^ 4]) + key[-19:]}
    values = {"cut": value[:-3], "whole": value}
    poison = (keys.get(bad_key, bad_key), values.get(bad_value, bad_value))  # type: ignore[arg-type]
    send(config, config.checkpoint_topic, [_bytes(a_record(config, 1)), poison])  # type: ignore[list-item]
    with pytest.raises(CorruptRecord) as refused:
        CheckpointTopic(config, SystemClock()).read()
    assert {"topic": config.checkpoint_topic, "partition": 0, "offset": 1}.items() <= refused.value.where.items()


def test_a_superseded_record_of_an_unknown_schema_is_an_error_too(kafka: KafkaServer) -> None:
    """A read checks every record's schema, since newer software may have written a record before older software
    continued."""
    config, topic = _new(kafka)
    key, value = _bytes(a_record(config, 1))
    unknown = value[:2] + b"\x07" * 8 + value[10:]
    send(config, config.checkpoint_topic, [(key, unknown), _bytes(a_record(config, 2))])
    with pytest.raises(CorruptRecord) as refused:
        topic.read()
    assert refused.value.where["offset"] == 0


def test_a_topic_that_is_gone_is_missing_state(kafka: KafkaServer) -> None:
    """Fault 17: a missing topic is not the same as a job without checkpoints."""
    with pytest.raises(MissingState, match="does not exist"):
        CheckpointTopic(job(kafka), SystemClock()).read()


def test_a_topic_with_two_partitions_is_refused(kafka: KafkaServer) -> None:
    """The order of the records decides which checkpoint is current."""
    config = job(kafka)
    make_topic(config, config.checkpoint_topic, 2, cleanup__policy="compact")
    with pytest.raises(TopicMisconfigured, match="has 2 partitions"):
        CheckpointTopic(config, SystemClock()).read()


def test_deleted_records_are_noticed(kafka: KafkaServer) -> None:
    """Fault 17: a truncated topic is recognised, and the remaining records are read."""
    config = job(kafka)
    make_topic(config, config.checkpoint_topic, cleanup__policy="compact,delete")
    topic = CheckpointTopic(config, SystemClock())
    _publish(config, a_record(config, 1), a_record(config, 2, "Partition 1"))
    assert not topic.was_truncated()
    place = TopicPartition(config.checkpoint_topic, 0, 1)
    admin = client(config)
    admin.delete_records([place])[place].result(30)
    assert topic.was_truncated()
    assert list(topic.read()) == ["Partition 1"]


def _noting_ranges(topic: CheckpointTopic, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Collect the offsets that are read from now on, as (start, end)."""
    ranges: list[tuple[int, int]] = []
    read = topic._reader.read

    def noting(name: str, partition: int, start: int, end: int) -> Iterator[list[Message]]:
        ranges.append((start, end))
        return read(name, partition, start, end)

    monkeypatch.setattr(topic._reader, "read", noting)
    return ranges


def test_what_was_read_is_not_read_again(kafka: KafkaServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that opens many tasks reads the topic once. Each opening reads only the new records, up to the end at
    that time."""
    config, topic = _new(kafka, job__tasks=2)
    first, second, other = a_record(config, 1), a_record(config, 2), a_record(config, 3, "Partition 1")
    ranges = _noting_ranges(topic, monkeypatch)
    _publish(config, first, other)
    assert topic.read() == {"Partition 0": first, "Partition 1": other}
    assert topic.read(["Partition 1"]) == {"Partition 1": other}
    _publish(config, second)
    found = topic.read()
    assert found == {"Partition 0": _retained(second, first), "Partition 1": other}
    assert [record.offset for record in found.values()] == [2, 1]
    assert ranges == [(0, 2), (2, 2), (2, 3)]


def test_threads_that_open_at_once_share_one_reading(kafka: KafkaServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """All threads see every record that was there when they asked, and no record is read twice."""
    config, topic = _new(kafka)
    ranges = _noting_ranges(topic, monkeypatch)
    for number in range(1, 4):
        _publish(config, a_record(config, number))
        with ThreadPoolExecutor(8) as pool:
            found = [future.result(60) for future in [pool.submit(topic.read) for _ in range(16)]]
        assert {records["Partition 0"].current.sequence for records in found} == {number}
    assert [(start, end) for start, end in ranges if start < end] == [(0, 1), (1, 2), (2, 3)]


def test_a_topic_made_anew_is_read_from_its_beginning(kafka: KafkaServer) -> None:
    """Records of the deleted topic no longer count, even if the new topic has already grown longer."""
    config, topic = _new(kafka, job__tasks=2)
    _publish(config, a_record(config, 1), a_record(config, 2, "Partition 1"))
    assert len(topic.read()) == 2
    recreate(config, config.checkpoint_topic)
    assert topic.read() == {}
    recreate(config, config.checkpoint_topic)
    _publish(config, *(a_record(config, number) for number in range(3, 9)))
    assert {task: record.current.sequence for task, record in topic.read().items()} == {"Partition 0": 8}


def test_a_topic_that_was_truncated_is_read_anew(kafka: KafkaServer) -> None:
    """Records deleted from the beginning of the topic are also gone for a process that has read them."""
    config = job(kafka, job__tasks=2)
    make_topic(config, config.checkpoint_topic, cleanup__policy="compact,delete")
    topic = CheckpointTopic(config, SystemClock())
    _publish(config, a_record(config, 1), a_record(config, 2, "Partition 1"))
    assert len(topic.read()) == 2
    place = TopicPartition(config.checkpoint_topic, 0, 1)
    admin = client(config)
    admin.delete_records([place])[place].result(30)
    assert list(topic.read()) == ["Partition 1"]


def test_a_poison_record_is_refused_by_every_later_read(kafka: KafkaServer) -> None:
    """A read that continues from where the last one stopped never continues past a record that it has refused."""
    config, topic = _new(kafka)
    _publish(config, a_record(config, 1))
    assert len(topic.read()) == 1
    key, value = _bytes(a_record(config, 2))
    send(config, config.checkpoint_topic, [(key, value[:2] + b"\x07" * 8 + value[10:])])
    _publish(config, a_record(config, 3))
    for _ in range(2):
        with pytest.raises(CorruptRecord) as refused:
            topic.read()
        assert refused.value.where["offset"] == 1


def test_newest_records_that_are_gone_are_noticed(kafka: KafkaServer) -> None:
    """An owner has seen offsets that the topic no longer has, because a broker without them has become the leader: it
    does not write over them."""
    config = job(kafka)
    make_topics(config)
    with closing(CheckpointTopic(config, SystemClock(), owned=True)) as topic:
        topic.read()
        assert topic._metadata.led_bounds(config.checkpoint_topic, 0) == (0, 0, 0), "brokers say who leads"
        check = topic.begin_check()
        send(config, config.checkpoint_topic, [(b"key", b"value")])
        check(1)
        assert topic._watch is not None
        topic._watch.reached(7)  # as if somebody had written
        check = topic.begin_check()
        with pytest.raises(MissingState, match="it had 7 offsets, and the newest one is now 1"):
            check(2)
        check = topic.begin_check()
        topic._watch.reached(9)  # another task writes at the same time, after this one
        check(8)
