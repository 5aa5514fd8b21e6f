"""What `top` concludes from checkpoints and from the timestamps of the input, on a real broker."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from statemgr import JobConfig
from statemgr.consumer import loop, loop_health, loop_log
from statemgr.engine import input_lag
from statemgr.health.diagnosis import Diagnosis
from statemgr.health.overview import JobMonitor
from statemgr.health.problems import Fault
from statemgr.ids import CheckpointId
from statemgr.model.checkpoint import CheckpointRecord
from statemgr_tools.dev.kafka import KafkaBroker
from tests.commits import commit
from tests.jobs import job_mapping, with_changes
from tests.kafka_jobs import a_record, job, make_topic, make_topics, plain_producer, wait_until
from tests.loop_members import member
from tests.servers import KafkaServer

Found = Callable[[Sequence[tuple[float, int]]], list[Fault]]


class Input:
    """An input of one partition, whose messages have chosen times."""

    def __init__(self, kafka: KafkaServer) -> None:
        self.config = with_changes(job(kafka), task__commit__ms=1000)
        self.topic = kafka.fresh_name("in")
        self.now_ms = time.time_ns() // 1_000_000
        make_topics(self.config)
        make_topic(self.config, self.topic)
        self._producer = plain_producer(self.config)

    def arrive(self, count: int, ago_s: float, until_s: float | None = None) -> None:
        """Let messages arrive, all at one moment or spread over some time."""
        step = 0.0 if until_s is None else (ago_s - until_s) / count
        for number in range(count):
            at_ms = self.now_ms - int((ago_s - number * step) * 1000)
            self._producer.produce(self.topic, b"x", partition=0, timestamp=at_ms)
        assert self._producer.flush(30) == 0

    def record(self, checkpoints: Sequence[tuple[float, int]]) -> CheckpointRecord:
        """Return checkpoints, newest first: how many seconds ago each was published, and its offset."""
        whole = a_record(self.config, 1, input_offsets={f"{self.topic}-0": 0})
        made = [
            replace(
                whole.current,
                checkpoint_id=CheckpointId(self.now_ms - int(ago_s * 1000), 1),
                sequence=9 - number,
                input_offsets={f"{self.topic}-0": offset},
                published_ms=self.now_ms - int(ago_s * 1000),
            )
            for number, (ago_s, offset) in enumerate(checkpoints)
        ]
        return replace(whole, checkpoints=tuple(made))


@pytest.fixture
def given(kafka: KafkaServer) -> Input:
    """Return a job without checkpoints, and its empty input."""
    return Input(kafka)


@pytest.fixture
def faults(given: Input, monkeypatch: pytest.MonkeyPatch) -> Iterator[Found]:
    """Return what `top` finds if a task has these checkpoints. Later calls are later readings."""
    with JobMonitor(given.config) as monitor, closing(Diagnosis(monitor)) as diagnosis:

        def find(checkpoints: Sequence[tuple[float, int]]) -> list[Fault]:
            record = given.record(checkpoints)
            monkeypatch.setattr(monitor.reader, "records", lambda: {record.task: record})
            return [one.fault for one in diagnosis.tasks(monitor.overview())]

        yield find


def test_an_idle_service_that_is_suspended_is_stuck(given: Input, faults: Found) -> None:
    """The service was idle for an hour between its checkpoints. Ten seconds after messages have arrived it is stuck,
    and more processes would not help."""
    given.arrive(1, 3601)
    given.arrive(1, 60.5)
    given.arrive(1000, 50)
    assert faults([(60, 2), (3600, 1)]) == [Fault.MEMBER_STUCK]


def test_a_service_that_commits_rarely_is_not_stuck(given: Input, faults: Found) -> None:
    """Messages had waited for most of an hour for the last checkpoint, so the next one may take as long."""
    given.arrive(1, 7200)
    given.arrive(1, 3500)
    given.arrive(1000, 50)
    assert faults([(60, 2), (3600, 1)]) == []


def test_a_burst_is_no_growing_lag(given: Input, faults: Found) -> None:
    """One second after a burst, neither two checkpoints nor three tell whether the job keeps up."""
    given.arrive(30, 61, 1.5)
    given.arrive(2000, 1)
    assert faults([(0.5, 25), (30, 15)]) == []
    assert faults([(0.5, 25), (30, 15), (60, 1)]) == []


def test_a_lag_that_grows_is_found_and_leaves_with_the_lag(given: Input, faults: Found) -> None:
    """The page keeps what it has seen: its second reading has the third checkpoint. When the job catches up, or stands
    still, the fault is not listed any more."""
    given.arrive(3000, 60, 0)
    assert faults([(30, 100), (60, 1)]) == []
    assert faults([(0.5, 200), (30, 100)]) == [Fault.LAG_GROWS]
    assert faults([(0, 2990), (0.5, 200)]) == []
    assert faults([(0, 3000), (0.5, 200)]) == []


def test_a_blob_that_the_job_has_deleted_is_not_missing(kafka: KafkaServer, tmp_path: Path) -> None:
    """Between two readings, the job evicts the checkpoint whose blob was looked at. A blob that the current checkpoint
    needs is missed at the first reading."""
    mapping = job_mapping(kafka, tmp_path, tasks=1, backup=["blob-store"], task__commit__snapshot__interval="1 commit")
    config = with_changes(JobConfig.from_mapping(mapping), stores__totals__type="rocksdb")

    def faults(diagnosis: Diagnosis, monitor: JobMonitor) -> list[Fault]:
        return [one.fault for one in diagnosis.problems(monitor.overview())]

    commit(config, {b"a": b"0"}, 0)
    with JobMonitor(config) as monitor, closing(Diagnosis(monitor)) as diagnosis:
        assert faults(diagnosis, monitor) == []
        known = diagnosis._known_blob
        for number in range(4):
            commit(config, {b"a": b"%d" % number}, number)
        assert not (tmp_path / "blobs" / str(known)).exists()
        diagnosis._blobs._fresh_s = -1.0
        assert diagnosis.servers() == []
    for file in (tmp_path / "blobs").rglob("*"):
        if file.is_file():
            file.unlink()
    with JobMonitor(config) as monitor, closing(Diagnosis(monitor)) as diagnosis:
        assert Fault.CORRUPT_BLOB in faults(diagnosis, monitor)


@pytest.mark.long
def test_an_idle_service_says_that_the_brokers_are_gone(
    own_kafka: Callable[..., KafkaBroker],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Nothing is to be committed, so no commit fails. The service says in its own words that nobody answers."""
    for module in (input_lag, loop):
        monkeypatch.setattr(module, "ASK_EVERY_S", 0.2)
    for module in (loop_health, loop_log):
        monkeypatch.setattr(module, "SILENT_S", 1.0)
    broker = own_kafka()
    server = KafkaServer(bootstrap_servers=broker.bootstrap_servers, kind="local")
    config = JobConfig.from_mapping(job_mapping(server, tmp_path, tasks=1))
    make_topic(config, "in")
    with caplog.at_level(logging.INFO, "statemgr"):
        stop, _ = member(config, "group", "in")
        wait_until(lambda: "continues at in-0:0" in caplog.text)
        broker.stop()
        wait_until(lambda: f"{config.job_name}: the brokers have not answered for" in caplog.text)
        stop()
    assert "waiting for Kafka" not in caplog.text
