"""What commits of segments are for: their cost, and every kind of change, in stores of both types."""

from __future__ import annotations

import random
import threading
from pathlib import Path

import pytest

from statemgr import JobConfig, StateManager
from statemgr.errors import UnavailableError
from statemgr.phases import Phase, observed
from tests.commits import TASK, blob_files, referenced, totals, write
from tests.jobs import SEGMENTS, contents, job_mapping
from tests.kafka_jobs import wait_until
from tests.servers import KafkaServer

FACTORY = "blob-store"


def config_of(kafka: KafkaServer, directory: Path, **more: object) -> JobConfig:
    """A job that commits segments."""
    return JobConfig.from_mapping(job_mapping(kafka, directory, backup=(FACTORY,), kind=SEGMENTS, **more))  # type: ignore[arg-type]


def test_a_commit_costs_its_changes_whatever_the_size_of_the_state(kafka: KafkaServer, tmp_path: Path) -> None:
    """B1: the same changes to a state a hundred times larger take as many bytes, in one blob."""
    chance = random.Random(0)
    changes = {b"%d" % n: chance.randbytes(100) for n in range(100)}
    cost = []
    for keys in (100, 10_000):
        directory = tmp_path / f"{keys}"
        config = config_of(kafka, directory)
        with StateManager(config) as manager, manager.open_task(TASK) as task:
            task.store("totals").put_many([(b"%d" % n, chance.randbytes(100)) for n in range(keys)])
            task.commit({"orders-0": 1})
            before = blob_files(directory)
            write(task, changes)
            task.commit({"orders-0": 2})
            [added] = blob_files(directory) - before
            cost.append((directory / "blobs" / added).stat().st_size)
    size = sum(len(key) + len(value) for key, value in changes.items())
    assert size < min(cost)
    assert max(cost) < size * 1.1 + 600  # includes the chain that is stored with the segment
    assert abs(cost[0] - cost[1]) < 100


@pytest.mark.parametrize("kind", ["rocksdb", "memory"])
def test_every_kind_of_change_comes_back(kafka: KafkaServer, tmp_path: Path, kind: str) -> None:
    """B3, B8: every kind of change is restored: a key put, deleted and put again, deletes of absent keys, empty values,
    deleted ranges, and commits without changes, while the background makes snapshots."""
    config = config_of(kafka, tmp_path, stores__totals__type=kind, task__commit__snapshot__interval=["1 B"])
    large = bytes(300_000)
    with StateManager(config) as manager, manager.open_task(TASK) as task:
        store = task.store("totals")
        store.put_many([(b"r%02d" % n, large) for n in range(30)])
        task.commit({"orders-0": 0})
        for number in range(1, 13):
            again = b"again-%d" % number
            store.put(again, b"1")
            store.delete(again)
            store.put(again, b"%d" % number)
            store.delete(b"never there")
            store.put(b"empty", b"")
            store.delete_range(b"r%02d" % (2 * number), b"r%02d" % (2 * number + 1))
            if number % 4:
                store.put(b"last", large[:number])
            else:
                store.delete(b"last")
            task.commit({"orders-0": number})
            assert task.commit({"orders-0": number}).stores == task.last_checkpoint.stores  # type: ignore[union-attr]
        made = ("statemgr_materializations_total", {"job": config.job_name, "outcome": "made"})
        wait_until(lambda: (manager.metrics.registry.get_sample_value(*made) or 0) > 1)
        expected = dict(store.range())
    assert len(expected) == 30 - 12 + 12 + 1
    assert totals(config, FACTORY)[TASK] == expected


@pytest.mark.parametrize("fails", [False, True])
def test_much_that_was_written_is_stored_before_its_commit(
    kafka: KafkaServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    """C7: beyond a size, changes are stored while the task continues, and their commit takes them as they are. If
    storing ahead fails, or the changes are never committed, the result is the same."""
    monkeypatch.setattr("statemgr.flows.committing.persist_ahead.AHEAD_BYTES", 50_000)
    config = config_of(kafka, tmp_path, stores__totals__write__batch__size=4)
    chance = random.Random(0)
    items = {b"%d" % n: chance.randbytes(5000) for n in range(30)}
    tried = threading.Semaphore(0)

    def watch(phase: Phase, _: str) -> None:
        if phase is Phase.PUT_SEGMENTS and threading.current_thread().name.startswith("statemgr-ahead"):
            tried.release()
            if fails:
                raise UnavailableError("told to")

    with StateManager(config) as manager, observed(watch):
        with manager.open_task(TASK) as task:
            task.commit({"orders-0": 0})
            for _ in range(10):  # overwriting the same keys again and again does not add up
                write(task, {b"hot": chance.randbytes(7_000), b"key": b"1"})
            write(task, {key: items[key] for key in list(items)[:12]})
            assert tried.acquire(timeout=30)
            write(task, {key: items[key] for key in list(items)[12:]})
            write(task, {b"hot": None, b"key": None})
            checkpoint = task.commit({"orders-0": 1})
            uploaded = manager.metrics.registry.get_sample_value(
                "statemgr_commit_uploaded_bytes", {"job": config.job_name, "task": TASK}
            )
            assert uploaded is not None
            assert (uploaded > 150_000) == fails
            assert blob_files(tmp_path, expiring=False) == referenced(config)
            if not fails:
                assert blob_files(tmp_path, expiring=True) == set()
            chain = [name for name in referenced(config) if "/_segments/" in name]
            assert len(chain) == 1 if fails else len(chain) > 1
            write(task, {key: value[::-1] for key, value in items.items()})
            assert tried.acquire(timeout=30)
        assert contents(config) == ({"totals": items}, {"orders-0": 1})
        assert totals(config, FACTORY)[TASK] == items
        assert checkpoint.input_offsets == {"orders-0": 1}
    dropped = blob_files(tmp_path) - referenced(config)
    assert dropped
    assert dropped == blob_files(tmp_path, expiring=True)
