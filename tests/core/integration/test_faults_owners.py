"""Owners that may have lost their task without knowing it: forgotten IDs, suspended processes, equal clocks."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from statemgr import JobConfig, StateManager, Task
from statemgr.errors import FencedError, MissingState
from statemgr.flows.opening import open_job
from statemgr.kafka.metadata import TopicMetadata
from statemgr.kafka.transactions.publisher import job_transactional_id, task_transactional_id
from statemgr.local.machine import SystemClock
from statemgr.model.checkpoint import Checkpoint
from statemgr.phases import Phase
from statemgr_tools.dev.kafka import KafkaBroker
from tests.commits import TASK, attempt, current, totals, write
from tests.jobs import DUAL, elsewhere, job_mapping
from tests.kafka_jobs import client, committed, plain_producer, recreate, send, state_of, wait_until
from tests.owners import STRICT, Suspended, forgotten, job
from tests.servers import KafkaServer


def ids(config: JobConfig) -> tuple[str, str]:
    """The transactional IDs of the task's owner and of the whole job's owner."""
    return task_transactional_id(config, TASK), job_transactional_id(config)


def commit(task: Task, number: int) -> Checkpoint:
    """Make one more commit of an open task."""
    write(task, {b"number": b"%d" % number, b"k%d" % number: b""})
    return task.commit({"orders-0": number})


def aborted(config: JobConfig) -> None:
    """Wait until the brokers have aborted the open transaction of a suspended process."""
    with TopicMetadata(config, SystemClock()) as metadata:
        metadata.await_ended({(config.stores["totals"].changelog_topic, 0): None}, 30.0)


class Driver:
    """The owner of a whole job: one attempt and one publish at a time."""

    def __init__(self, manager: StateManager) -> None:
        self._manager = manager
        self._epoch = manager.acquire()
        self._checkpoints = self._epoch.checkpoints

    def commit(self, number: int) -> Checkpoint:
        """Make one more publish."""
        items: dict[bytes, bytes | None] = {b"number": b"%d" % number, b"k%d" % number: b""}
        prepared = attempt(self._manager.config, self._epoch, TASK, items, number, checkpoints=self._checkpoints)
        self._checkpoints = self._manager.publish([prepared])
        self._epoch = self._epoch.after_publish()
        return self._checkpoints[TASK]


def whole(config: JobConfig, number: int) -> None:
    """Check that both backends, and the changelog as others read it, have exactly the state of commit ``number``."""
    record = current(config)
    assert record is not None
    assert record.current.input_offsets == {"orders-0": number}
    for factory in DUAL:
        assert totals(config, factory)[TASK][b"number"] == b"%d" % number
    changelog = state_of(committed(config, config.stores["totals"].changelog_topic))
    assert changelog == totals(config, "blob-store")[TASK], "the changelog and the blobs hold the same"


def test_a_zombie_whose_id_was_forgotten_publishes_nothing(forgetful: KafkaServer, tmp_path: Path) -> None:
    """FAULT 39, invariant 7: after another owner has published and both IDs are forgotten, the older owner is
    fenced."""
    config = job(forgetful, tmp_path)
    there = elsewhere(config, tmp_path / "other", "blob-store")
    with StateManager(config) as older, StateManager(there) as newer:
        zombie = older.open_task(TASK)
        commit(zombie, 1)
        owner = newer.open_task(TASK)
        for number in (2, 3, 4):
            commit(owner, number)
        forgotten(forgetful, *ids(config))
        for number in (90, 91):
            with pytest.raises(FencedError):
                commit(zombie, number)
        assert commit(owner, 5).sequence == 5
        whole(config, 5)


def test_a_zombie_task_never_fences_the_owner_of_the_whole_job(forgetful: KafkaServer, tmp_path: Path) -> None:
    """FAULT 39: with one owner of each kind, the older one stops at what it finds on the topic, before it fences
    anybody."""
    config = job(forgetful, tmp_path)
    with StateManager(config) as older, StateManager(elsewhere(config, tmp_path / "other", "blob-store")) as newer:
        zombie = older.open_task(TASK)
        commit(zombie, 1)
        driver = Driver(newer)
        driver.commit(2)
        forgotten(forgetful, *ids(config))
        with pytest.raises(FencedError):
            commit(zombie, 90)
        assert driver.commit(3).sequence == 3
        whole(config, 3)


@pytest.mark.long
def test_a_zombie_driver_never_fences_the_owner_of_a_task(forgetful: KafkaServer, tmp_path: Path) -> None:
    """FAULT 39: an older driver also stops before it fences the owner of a task."""
    config = job(forgetful, tmp_path)
    with StateManager(config) as older, StateManager(elsewhere(config, tmp_path / "other", "blob-store")) as newer:
        zombie = Driver(older)
        zombie.commit(1)
        owner = newer.open_task(TASK)
        commit(owner, 2)
        forgotten(forgetful, *ids(config))
        with pytest.raises(FencedError):
            zombie.commit(90)
        assert commit(owner, 3).sequence == 3
        whole(config, 3)


def test_of_two_owners_that_published_nothing_yet_one_goes_on(forgetful: KafkaServer, tmp_path: Path) -> None:
    """FAULT 39: the topic cannot tell the two apart. The first one to publish fences the other, and their states never
    mix."""
    config = job(forgetful, tmp_path)
    with StateManager(config) as older, StateManager(elsewhere(config, tmp_path / "other", "blob-store")) as newer:
        zombie = older.open_task(TASK)
        commit(zombie, 1)
        driver = Driver(newer)
        forgotten(forgetful, *ids(config))
        commit(zombie, 2)
        with pytest.raises(FencedError):
            driver.commit(90)
        commit(zombie, 3)
        whole(config, 3)


@pytest.mark.parametrize(
    "when", ["a task opens", pytest.param("a job is acquired", marks=pytest.mark.long), "a task commits"]
)
def test_the_very_first_publish_fences_the_other_owner(
    forgetful: KafkaServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """FAULTS 23 and 39: the other owner finds unexplained changes on its changelog. It recognises that another owner
    has published, instead of asking for permission to delete the changes."""
    config = job(forgetful, tmp_path)
    with StateManager(config) as older, StateManager(elsewhere(config, tmp_path / "other", "blob-store")) as newer:
        driver, guard = Driver(older), open_job.guard_targets

        def overtaken(*args: Any) -> Any:
            monkeypatch.undo()
            forgotten(forgetful, *ids(config))
            driver.commit(1)
            return guard(*args)

        if when == "a task commits":
            owner = newer.open_task(TASK)
            act: Callable[[], object] = partial(commit, owner, 90)
            forgotten(forgetful, *ids(config))
            driver.commit(1)
        else:
            act = partial(newer.open_task, TASK) if when == "a task opens" else newer.acquire
            monkeypatch.setattr(open_job, "guard_targets", overtaken)
        with pytest.raises(FencedError, match=r"another owner \(.*\) has published"):
            act()
        driver.commit(2)
        whole(config, 2)


@pytest.mark.parametrize("kind", ["task", pytest.param("whole job", marks=pytest.mark.long)])
def test_an_idle_owner_commits_as_if_nothing_had_happened(forgetful: KafkaServer, tmp_path: Path, kind: str) -> None:
    """FAULT 39: if no other owner came while the ID was forgotten, no commit fails."""
    config = job(forgetful, tmp_path)
    with StateManager(config) as manager:
        if kind == "task":
            task = manager.open_task(TASK)
            step: Callable[[int], Checkpoint] = lambda number: commit(task, number)  # noqa: E731
            mine = ids(config)[0]
        else:
            step, mine = Driver(manager).commit, ids(config)[1]
        step(1)
        for number in (2, 3):
            forgotten(forgetful, mine)
            assert step(number).sequence == number
        whole(config, 3)


@pytest.mark.long
@pytest.mark.parametrize(
    ("phase", "slow"),
    [
        (Phase.SEND_CHECKPOINT, False),
        (Phase.COMMIT_TRANSACTION, False),
        (Phase.COMMIT_TRANSACTION, True),
    ],
)
def test_a_process_that_was_suspended_learns_that_and_goes_on(
    own_kafka: Callable[..., KafkaBroker], tmp_path: Path, phase: Phase, slow: bool
) -> None:
    """FAULT 39: the brokers aborted the transaction of a suspended process and no other owner came. One commit reports
    that the process was suspended, and later commits succeed, even if the brokers are slow to answer at first."""
    broker = own_kafka(**STRICT)
    config = job(broker, tmp_path, task__commit__timeout__ms=4000)
    process = Suspended(config, phase)
    aborted(config)
    if slow:
        broker.process.suspend()
        threading.Timer(1.0, broker.process.resume).start()
    found = process.go_on()
    failed = [one for one in found if "error" in one]
    assert all(one["error"] in ("RetryableError", "OutcomeUnknownError") for one in failed), found
    [why] = [one["message"] for one in failed if "this process was suspended" in one["message"]]
    assert "task.commit.timeout.ms" in why
    assert not [one for one in failed if "another owner has taken over" in one["message"]], found
    sequences = [one["sequence"] for one in found if "sequence" in one]
    assert sequences == list(range(2, 2 + len(sequences))), found
    assert sequences, found
    whole(config, 5)


@pytest.mark.long
def test_a_process_that_was_suspended_while_another_published_is_fenced(
    own_kafka: Callable[..., KafkaBroker], tmp_path: Path
) -> None:
    """FAULTS 23 and 39: the suspended process publishes nothing more and fences nobody."""
    config = job(own_kafka(**STRICT), tmp_path, task__commit__timeout__ms=4000)
    process = Suspended(config, Phase.COMMIT_TRANSACTION)
    with StateManager(elsewhere(config, tmp_path / "other", "blob-store")) as manager:
        owner = manager.open_task(TASK)
        assert commit(owner, 7).sequence == 2
        found = process.go_on()
        assert found[-1]["error"] == "FencedError", found
        assert not [one for one in found if "sequence" in one], found
        assert commit(owner, 8).sequence == 3
        whole(config, 8)


def recreated_by_the_broker(config: JobConfig, topic: str) -> None:
    """Delete a topic and let the broker create it again, as it does for a producer that asks for it."""
    admin, other = client(config), plain_producer(config)
    admin.delete_topics([topic])[topic].result(30)
    wait_until(lambda: other.list_topics(topic, timeout=60).topics[topic].error is None)


@pytest.mark.parametrize("how", ["by hand", pytest.param("by the broker", marks=pytest.mark.long), "and written to"])
def test_a_checkpoint_topic_that_was_created_again_takes_no_commit(
    kafka: KafkaServer,
    own_kafka: Callable[..., KafkaBroker],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    how: str,
) -> None:
    """FAULT 50, invariant 8: the owner's error says that the topic was created again, not that there is another owner,
    and nothing is published."""
    broker = own_kafka(**{"auto.create.topics.enable": "true"}) if how == "by the broker" else kafka
    config = job(broker, tmp_path)
    topic = config.checkpoint_topic
    with StateManager(config) as manager:
        task = manager.open_task(TASK)
        for number in (1, 2):
            commit(task, number)
        if how == "by the broker":
            recreated_by_the_broker(config, topic)
        else:
            recreate(config, topic)
        if how == "and written to":  # the offsets are beyond the offsets of the old topic
            monkeypatch.setattr("statemgr.kafka.topics._EVERY_S", 0.0)
            send(config, topic, [(b"key", b"value")] * 50)
        before = committed(config, topic)
        for number in (3, 4):
            with pytest.raises(MissingState, match="deleted and created again") as caught:
                commit(task, number)
            assert "another owner" not in str(caught.value)
    assert committed(config, topic) == before


def test_owners_never_share_an_epoch(kafka: KafkaServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Invariant 7: even with clocks that stand still, or are behind the newest epoch, owners have different epochs."""
    now = itertools.repeat(1_700_000_000_000_000_000)
    config = JobConfig.from_mapping(job_mapping(kafka, tmp_path))
    with StateManager(config) as first:
        newest = Driver(first).commit(1).epoch
    monkeypatch.setattr(SystemClock, "time_ns", lambda self: next(now))
    epochs = []
    for number in range(4):
        with StateManager(elsewhere(config, tmp_path / str(number), "blob-store")) as manager:
            epochs.append(manager.acquire().number)
    assert len(set(epochs)) == len(epochs)
    assert min(epochs) > newest
