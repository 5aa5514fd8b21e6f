"""Openings that meet others: a close in progress, a lost partition, and transactions that a dead process left
behind."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from statemgr import JobConfig, StateManager, Task
from statemgr.errors import InvalidError, OpeningCancelled
from statemgr.flows.opening import open_job
from statemgr.ids import task_name
from statemgr.phases import Phase, observed
from statemgr.services import Services
from tests.commits import TASK, commit, totals, write
from tests.jobs import DUAL, elsewhere, job_mapping
from tests.kafka_jobs import make_topics
from tests.owners import killed_in_all_commits
from tests.servers import KafkaServer


@pytest.fixture
def config(kafka: KafkaServer, tmp_path: Path) -> JobConfig:
    """A dual-commit job of one task."""
    return JobConfig.from_mapping(job_mapping(kafka, tmp_path))


def test_an_opening_waits_for_a_close_in_progress(config: JobConfig) -> None:
    """FAULT 40: an opening of a task whose close is still in progress waits, instead of failing because the task is
    open."""
    in_commit, go_on = threading.Event(), threading.Event()

    def hold(phase: Phase, _: str) -> None:
        if phase is Phase.BEGIN:
            in_commit.set()
            assert go_on.wait(60)

    with StateManager(config) as manager, ThreadPoolExecutor(2) as pool:
        task = manager.open_task(TASK)
        with pytest.raises(InvalidError, match="already open in this process"):
            manager.open_task(TASK)
        write(task, {b"a": b"1"})
        with observed(hold):
            commit = task.commit_async({"orders-0": 1})
            assert in_commit.wait(60)
            closing = pool.submit(task.close)
            while not task.closed:
                time.sleep(0.01)
            opening = pool.submit(manager.open_task, TASK)
            with pytest.raises(TimeoutError):
                opening.result(0.5)
            go_on.set()
            commit.result(60)
            closing.result(60)
            again = opening.result(60)
        assert again.store("totals").get(b"a") == b"1"


def test_an_opening_whose_partition_was_lost_fences_nobody(config: JobConfig, tmp_path: Path) -> None:
    """FAULT 40, invariant 7: an opening checks the assignment just before it fences."""
    there = elsewhere(config, tmp_path / "other", "blob-store")
    with StateManager(config) as rightful, StateManager(there) as late:
        owner = rightful.open_task(TASK)
        with pytest.raises(OpeningCancelled):
            late.open_task(TASK, still_owned=lambda: False)
        late.fence_tasks([TASK], still_owned=lambda task: False)
        write(owner, {b"a": b"1"})
        assert owner.commit({"orders-0": 1}).sequence == 1


@pytest.mark.parametrize("factory", DUAL)
def test_a_restore_of_a_lost_partition_is_cancelled(config: JobConfig, tmp_path: Path, factory: str) -> None:
    """FAULT 40: the opening stops during the restore, and the next opening of the same task succeeds."""
    with StateManager(config) as manager, manager.open_task(TASK) as task:
        write(task, {b"%d" % number: b"v" * 100 for number in range(5000)})
        task.commit({"orders-0": 1})
    lost = threading.Event()

    def lose(phase: Phase, _: str) -> None:
        if phase in (Phase.FETCH, Phase.REPLAY):
            lost.set()

    swapped: list[str] = []
    with StateManager(elsewhere(config, tmp_path / "other", factory)) as manager:
        with (
            observed(lose),
            observed(lambda phase, subject: swapped.append(subject) if phase is Phase.OPEN else None),
            pytest.raises(OpeningCancelled),
        ):
            manager.open_task(TASK, still_owned=lambda: not lost.is_set())
        assert lost.is_set()
        assert not swapped, "it was not carried through"
        task = manager.open_task(TASK)
        assert len(list(task.store("totals").range())) == 5000


@pytest.mark.parametrize("topic_is", ["missing", "there"])
def test_another_process_publishes_first_beside_a_first_start(
    kafka: KafkaServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, topic_is: str
) -> None:
    """FAULT 50: if the first blobs appear after the check of the topic and before the check of the blobs, the start
    does not treat them as a lost job."""
    config = JobConfig.from_mapping(job_mapping(kafka, tmp_path, tasks=2))
    refuse, other = open_job.refuse_lost_job, elsewhere(config, tmp_path / "other", "blob-store")

    def overtaken(services: Services) -> None:
        monkeypatch.undo()
        commit(other, {b"a": b"1"}, 1)
        refuse(services)

    if topic_is == "there":
        make_topics(config)
    monkeypatch.setattr(open_job, "refuse_lost_job", overtaken)
    with StateManager(config) as manager:
        write(manager.open_task(task_name(1)), {b"b": b"2"})
    assert totals(config, "blob-store") == {TASK: {b"a": b"1"}}


def test_tasks_of_a_process_that_died_in_all_their_commits_open_at_once(kafka: KafkaServer, tmp_path: Path) -> None:
    """FAULT 41: all tasks are fenced before any is read, so no opening waits for a transaction to time out."""
    timeout_s = 120
    config = JobConfig.from_mapping(job_mapping(kafka, tmp_path, tasks=8, task__commit__timeout__ms=timeout_s * 1000))
    names = [task_name(index) for index in range(config.tasks)]
    killed_in_all_commits(config)
    with StateManager(config) as manager, ThreadPoolExecutor(4) as pool:
        begun = time.monotonic()
        manager.fence_tasks(names)
        tasks: list[Task] = list(pool.map(manager.open_task, names))
        assert time.monotonic() - begun < timeout_s / 3
        for task in tasks:
            assert task.store("totals").get(b"number") == b"1"
            assert task.last_checkpoint is not None
            assert set(task.last_checkpoint.input_offsets.values()) == {1}
