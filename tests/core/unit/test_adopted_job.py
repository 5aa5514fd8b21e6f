"""adopted_job: the record that says which job a job was adopted from, and what a reader refuses."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException

from statemgr.config import JobConfig
from statemgr.errors import AccessDenied, CorruptRecord, MissingState, PermissionNeeded
from statemgr.flows.opening import adopted_job
from statemgr.kafka.metadata import TopicMetadata
from statemgr.model import codecs
from statemgr.model.jobs.adopted_job import AdoptedJob, decode_adopted_job, is_adopted_job
from statemgr.model.jobs.permissions import NO_PERMISSIONS
from statemgr.testing.memory_admin import MemoryAdmin
from statemgr.testing.memory_clients import served
from statemgr.testing.memory_kafka import MemoryBroker
from tests import model_samples as sample
from tests.blob_faults import ManualClock

OLD = AdoptedJob(
    origin="kafka-streams",
    job="old",
    group="old",
    checkpoint_topic=None,
    in_place=False,
    changelogs={"counts": "old-counts"},
    snapshots=("last",),
    given={"rows-1": 7},
    committed={"rows-0": 5, "rows-1": 6},
    ends={"old-counts-0": 9},
)
AT = codecs.Place("__checkpoints", 0, 41)


def test_it_is_read_as_it_was_written() -> None:
    """It survives a round trip, and its delete has the same key."""
    key, value = OLD.encoded("orders", "1")
    assert is_adopted_job(key)
    assert decode_adopted_job(key, value, AT) == (("orders", "1"), OLD)
    assert decode_adopted_job(key, None, AT) == (("orders", "1"), None)
    assert not is_adopted_job(codecs.encode_key(sample.RECORD.key(sample.CHECKPOINT)))


def test_every_flipped_bit_is_noticed() -> None:
    """Every changed bit in a value raises an error, and so does a value under another key."""
    key, value = OLD.encoded("orders", "1")
    for position in range(len(value) * 8):
        damaged = bytearray(value)
        damaged[position // 8] ^= 1 << position % 8
        with pytest.raises(CorruptRecord):
            decode_adopted_job(key, bytes(damaged), AT)
    with pytest.raises(CorruptRecord, match="checksum"):
        decode_adopted_job(OLD.encoded("orders", "2")[0], value, AT)


@pytest.mark.parametrize(
    ("old", "why"),
    [
        (replace(OLD, committed={"rows": 1}), "not a source partition"),
        (replace(OLD, ends={"old-counts-0": -1}), "must be a whole number"),
    ],
)
def test_impossible_values_are_refused(old: AdoptedJob, why: str) -> None:
    """What is used to ask Kafka is checked when it is read."""
    with pytest.raises(CorruptRecord, match=why):
        decode_adopted_job(*old.encoded("orders", "1"), AT)


def watch(
    monkeypatch: pytest.MonkeyPatch,
    committed: Callable[[], Mapping[str, int]],
    ends: Mapping[str, int] | None = None,
    clock: ManualClock | None = None,
    old: AdoptedJob = OLD,
) -> Callable[[int], None]:
    """Return a function that opens a task for the first time.

    Args:
        committed: says where the old job's group is.
        ends: topic → the end of its partition 0; others do not exist.
        clock: that of the process.
    """
    there = ends or {}

    class Metadata:
        def __init__(self, *_: object) -> None:
            pass

        def close(self) -> None:
            pass

        def committed(self, group: str) -> Mapping[str, int]:
            assert group == "old"
            return committed()

        def describe(self, topics: Sequence[str]) -> dict[str, object]:
            return {topic: SimpleNamespace(partitions=[0]) for topic in topics if topic in there}

        def ends(self, partitions: Iterable[tuple[str, int]]) -> dict[tuple[str, int], int]:
            return {(topic, number): there[topic] for topic, number in partitions if topic in there}

    monkeypatch.setattr(adopted_job, "TopicMetadata", Metadata)
    services: Any = SimpleNamespace(config=SimpleNamespace(job_name="new", tasks=2), clock=clock or ManualClock())
    looks = adopted_job.OldJobWatch(services)
    first = replace(sample.CHECKPOINT, sequence=1)
    return lambda task: looks.check(old, f"Partition {task}", first, NO_PERMISSIONS)


def test_a_job_that_may_not_look_begins_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Without the right to read the old group, nothing is known, and the log says so."""

    def denied() -> Mapping[str, int]:
        raise AccessDenied("not allowed")

    watch(monkeypatch, denied)(0)
    assert "job old (kafka-streams) has gone on since its adoption is unknown" in caplog.text


def test_an_old_job_that_is_gone_stops_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its topics were deleted after the adoption, or its offsets are forgotten."""

    def gone() -> Mapping[str, int]:
        raise MissingState("no such group")

    watch(monkeypatch, gone)(0)
    watch(monkeypatch, dict)(0)


def test_only_the_tasks_whose_input_was_processed_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other tasks may begin."""
    opens = watch(monkeypatch, lambda: {"rows-0": 5, "rows-1": 8}, {"old-counts": 9})
    with pytest.raises(PermissionNeeded, match="both would process the same input") as raised:
        opens(1)
    opens(0)
    assert "delete the new job's topics" in str(raised.value.hint)


def test_what_was_adopted_in_place_is_not_to_be_deleted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The new job's topics are the only state that there is."""
    opens = watch(monkeypatch, lambda: {"rows-1": 8}, old=replace(OLD, in_place=True))
    with pytest.raises(PermissionNeeded) as raised:
        opens(1)
    assert "Delete nothing: the state has no other copy" in str(raised.value.hint)


@pytest.mark.parametrize("offset", [6, 7])
def test_where_both_jobs_began_is_no_progress(monkeypatch: pytest.MonkeyPatch, offset: int) -> None:
    """A loop of the new job in the old group commits where it begins: at the offset that the user gave, or at 0."""
    watch(monkeypatch, lambda: {"rows-1": offset, "rows-3": 0})(1)


def test_a_task_has_the_input_partitions_of_its_number_modulo_the_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a rescale, a task has several partitions of an input."""
    opens = watch(monkeypatch, lambda: {"rows-3": 1})
    opens(0)
    with pytest.raises(PermissionNeeded, match="offset 1 of rows-3"):
        opens(1)


def test_a_look_is_good_for_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tasks that a process opens together share a look. A task that it opens later does not."""
    committed, clock = {"rows-0": 5, "rows-1": 6}, ManualClock()
    opens = watch(monkeypatch, lambda: committed, clock=clock)
    opens(0)
    committed["rows-1"] = 8
    opens(1)
    clock.now += 61
    with pytest.raises(PermissionNeeded, match="offset 8 of rows-1"):
        opens(1)


def test_no_task_begins_if_a_topic_of_the_old_job_has_grown(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the old job writes its changelogs, and its checkpoints if it keeps them on a topic."""
    opens = watch(monkeypatch, lambda: {"rows-0": 5, "rows-1": 6}, {"old-counts": 10})
    for task in (0, 1):
        with pytest.raises(PermissionNeeded, match="the old job has written to old-counts-0"):
            opens(task)


def test_the_ends_of_all_partitions_take_one_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """An old job may have thousands of partitions. One without a leader is asked for alone, and waited for."""
    broker, asked = MemoryBroker(), list[int]()
    broker.create("old-counts", 3, {})
    old = replace(OLD, group=None, ends={f"old-counts-{n}": 0 for n in range(3)} | {"deleted-0": 0, "old-counts-7": 0})
    real = MemoryAdmin.list_offsets

    def list_offsets(self: MemoryAdmin, places: Mapping[Any, Any], **options: Any) -> Any:
        asked.append(len(places))
        found = real(self, places, **options)
        if len(asked) == 1:
            place = next(place for place in places if (place.topic, place.partition) == ("old-counts", 1))
            found[place] = Future()
            found[place].set_exception(KafkaException(KafkaError(KafkaError._NOENT)))
        return found

    monkeypatch.setattr(MemoryAdmin, "list_offsets", list_offsets)
    config = JobConfig.from_mapping({"job.name": "new", "kafka.bootstrap.servers": "memory:ends"})
    with served(broker, "memory:ends"), TopicMetadata(config, ManualClock()) as metadata:
        assert adopted_job.gone_on(metadata, old) == []
        assert asked == [5, 1, 1], "the start and the end of the partition that had no leader"
        broker.append("old-counts", 1, b"key", b"1")
        assert adopted_job.gone_on(metadata, old) == [(None, "the old job has written to old-counts-1")]
