"""Attempts on executors: stores are compacted outside the attempts, and a restore starts with what the executor has."""

from __future__ import annotations

import os
import random
import threading
from pathlib import Path

import pytest

from statemgr import Checkpoint, JobConfig, StateManager
from statemgr.engine import Attempt, Epoch, open_attempt
from statemgr.engine.host import attempt_host
from statemgr.flows.committing import local_copies
from statemgr.local import durable
from statemgr.local.rocksdb.store import RocksDbStore
from statemgr.model.commit import PreparedCommit
from tests.commits import TASK, attempt
from tests.jobs import DUAL, SEGMENTS, elsewhere, job_mapping
from tests.servers import KafkaServer

FACTORY = "blob-store"
Model = dict[bytes, bytes]


def job(kafka: KafkaServer, directory: Path, *backup: str, interval: str = "100000 commits") -> JobConfig:
    """A job of one task that makes no snapshots, unless the interval says so."""
    more = {"task__commit__snapshot__interval": [interval]}
    return JobConfig.from_mapping(job_mapping(kafka, directory, backup=backup, tasks=1, **more))  # type: ignore[arg-type]


def level0(opened: Attempt) -> int:
    """How many files wait for compaction."""
    return int(opened._open["totals"].local.statistics()["rocksdb.num-files-at-level0"])


class Executor:
    """A machine that runs attempts at the one task, each with 50 random changes, and keeps a model of the state."""

    def __init__(self, config: JobConfig, epoch: Epoch, chance: random.Random) -> None:
        self.config, self.epoch, self.chance = config, epoch, chance
        self.files: list[int] = []

    def attempt(self, checkpoint: Checkpoint | None, model: Model) -> tuple[PreparedCommit, Attempt]:
        """Check the state, change it and prepare a commit; the model follows."""
        with open_attempt(self.config, TASK, checkpoint, self.epoch) as opened:
            assert dict(opened.store("totals").range()) == model
            self.files.append(level0(opened))
            for _ in range(50):
                key, value = b"%05d" % self.chance.randrange(2000), self.chance.randbytes(300)
                opened.store("totals").put(key, value)
                model[key] = value
            gone = self.chance.choice(sorted(model))
            opened.store("totals").delete(gone)
            del model[gone]
            return opened.prepare({}), opened


def published(driver: StateManager, prepared: PreparedCommit) -> Checkpoint:
    """Publish the one task."""
    return driver.publish([prepared])[TASK]


@pytest.mark.parametrize(("backup", "interval"), [((FACTORY,), "100000 commits"), (DUAL, "1 commit")])
def test_stores_are_compacted_between_attempts(
    kafka: KafkaServer, tmp_path: Path, backup: tuple[str, ...], interval: str
) -> None:
    """If there is time between batches, files do not pile up and no attempt compacts its own store."""
    config = job(kafka, tmp_path, *backup, interval=interval)
    model: Model = {}
    with StateManager(config) as driver:
        epoch = driver.acquire()
        here = Executor(elsewhere(config, tmp_path / "executor", backup), epoch, random.Random(1))
        checkpoint = epoch.checkpoints[TASK]
        for _ in range(40):
            prepared, _ = here.attempt(checkpoint, model)
            checkpoint = published(driver, prepared)
            attempt_host(here.config).compactions.worker.wait()
    assert max(here.files) <= local_copies._LIMIT
    assert len([1 for before, after in zip(here.files, here.files[1:], strict=False) if after < before]) >= 2


def test_a_compaction_that_ends_some_batches_later(
    kafka: KafkaServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a busy executor the next attempts use the files as they are. The first attempt after the compaction starts
    with the compacted state and applies the segments since then, which gives exactly the published state."""
    go_on, waiting = threading.Event(), threading.Event()
    really = RocksDbStore.compact_if_needed

    def slow(self: RocksDbStore, limit: int) -> bool:
        if threading.current_thread().name == "statemgr-compaction":
            waiting.set()
            assert go_on.wait(60)
        return really(self, limit)

    monkeypatch.setattr(RocksDbStore, "compact_if_needed", slow)
    config = job(kafka, tmp_path, FACTORY)
    model: Model = {}
    with StateManager(config) as driver:
        epoch = driver.acquire()
        here = Executor(elsewhere(config, tmp_path / "executor", FACTORY), epoch, random.Random(2))
        checkpoint = epoch.checkpoints[TASK]
        for _ in range(local_copies._LIMIT + 1):
            checkpoint = published(driver, here.attempt(checkpoint, model)[0])
            if waiting.is_set():
                break
        assert waiting.wait(60)
        for _ in range(3):
            prepared, opened = here.attempt(checkpoint, model)
            assert opened.restored[0].factory == "local"
            checkpoint = published(driver, prepared)
        go_on.set()
        attempt_host(here.config).compactions.worker.wait()
        prepared, opened = here.attempt(checkpoint, model)
        published(driver, prepared)

    assert opened.restored[0].factory == FACTORY
    assert 3 * 45 < opened.restored[0].records <= 3 * 51
    assert here.files[-1] < here.files[-2]


def test_a_sweep_bounds_the_disk_of_an_executor(kafka: KafkaServer, tmp_path: Path) -> None:
    """When batches have run for an hour without a task, its copies go, and the directories of a dead process. Open
    directories and the copies of other tasks stay."""
    config = JobConfig.from_mapping(job_mapping(kafka, tmp_path, backup=[FACTORY], kind=SEGMENTS, tasks=3))
    tasks = [f"Partition {i}" for i in range(3)]
    here = elsewhere(config, tmp_path / "executor", FACTORY)
    with StateManager(config) as driver:
        epoch = driver.acquire()
        for task in tasks:
            attempt(here, epoch, task, {b"key": b"value"}, 1)
        host = attempt_host(here)
        roots = [host.services.task_directory(task) / "totals" for task in tasks]
        (roots[1] / "live" / f"1-{0:016x}.{1:016x}").mkdir()  # its owner is dead
        host.sweep.worker.wait()
        note = roots[0].parent.parent / "swept"
        with open_attempt(here, tasks[2], None, epoch):
            for _ in range(7):
                durable.write_note(note, [0, durable.read_note(note, 10_000)[1]])  # ten minutes pass
                host.sweep.start(tasks[:1])
                host.sweep.look()
            assert os.listdir(roots[2] / "live")

    assert len(os.listdir(roots[0] / "committed")) == 2
    assert os.listdir(roots[1] / "committed") == os.listdir(roots[1] / "live") == []


def test_an_older_position_of_the_same_chain(kafka: KafkaServer, tmp_path: Path) -> None:
    """When executors take turns, each fetches only the newer segments. A prepared commit that nobody published does not
    count as part of the chain."""
    config = job(kafka, tmp_path, FACTORY)
    model: Model = {}
    chance = random.Random(3)
    with StateManager(config) as driver:
        epoch = driver.acquire()
        executors = [Executor(elsewhere(config, tmp_path / f"executor-{i}", FACTORY), epoch, chance) for i in range(3)]
        checkpoint = epoch.checkpoints[TASK]
        for turn in range(15):
            here = executors[turn % 3]
            if turn % 4 == 3:
                here.attempt(checkpoint, dict(model))  # this attempt is never published
            prepared, opened = executors[turn % 3].attempt(checkpoint, model)
            checkpoint = published(driver, prepared)
            (restored,) = opened.restored
            if turn >= 3 and turn % 4 != 3:
                assert restored.factory == FACTORY
                # its last prepared commit was published, and two others have followed
                assert 0 < restored.records <= 2 * 51
                assert restored.bytes_fetched <= 2 * 51 * 400
                assert restored.bytes_reused > 0
