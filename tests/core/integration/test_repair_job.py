"""The owner of all tasks of a job rebuilds damaged backups, without a commit of the engine."""

from __future__ import annotations

import random
import threading
from pathlib import Path

import pytest

from statemgr import JobConfig, StateManager
from statemgr.engine import MicroBatch, coordinator, read_attachment
from tests.commits import TASK, attempt, blob_files, current, totals
from tests.core.integration.test_repair import (
    FACTORY,
    KINDS,
    OF_SEGMENTS,
    OF_SNAPSHOTS,
    delete,
    is_whole,
    record_of,
    wait_until,
)
from tests.jobs import SNAPSHOTS, job_mapping, with_changes
from tests.kafka_jobs import delete_records
from tests.servers import KafkaServer

OTHER = "Partition 1"
BATCH = MicroBatch("query", 3, "{}", "{}")
ROWS = {"output": random.Random(0).randbytes(20_000)}
ITEMS = {b"key": random.Random(1).randbytes(80_000)}


def job(kafka: KafkaServer, directory: Path, kind: str) -> JobConfig:
    """Create a job of two tasks in dual commit."""
    mapping = job_mapping(kafka, directory, backup=("kafka-changelog", FACTORY), restore=("kafka-changelog",), tasks=2)
    return JobConfig.from_mapping(
        mapping | {"task.checkpoint.retained": 2, "task.commit.snapshot.interval": KINDS[kind]}
    )


@pytest.mark.parametrize("kind", OF_SEGMENTS)
def test_damage_is_repaired_between_the_batches(kafka: KafkaServer, tmp_path: Path, kind: str) -> None:
    """FAULT 45, invariant 12: no micro-batch arrives. The repair keeps the batch, its output and its output
    sequence."""
    config = job(kafka, tmp_path, kind)
    with StateManager(config) as manager:
        epoch = manager.acquire()
        prepared = [attempt(config, epoch, task, ITEMS, 7, ROWS) for task in (TASK, OTHER)]
        manager.publish(prepared, BATCH)
    before, other = record_of(config), current(config, OTHER)
    assert other is not None
    delete(config, tmp_path, "index")
    with StateManager(config) as manager:
        epoch = manager.acquire()
        repaired = threading.Event()

        def repair() -> bool:
            manager.repair()
            repaired.set()
            return True

        manager.when_damaged(repair)
        assert repaired.wait(60)
        after = record_of(config).current
        assert is_whole(config, ITEMS)
        assert totals(config, FACTORY)[OTHER] == ITEMS
        assert (after.batch, after.input_offsets, after.stores) == (BATCH, {"orders-0": 7}, before.current.stores)
        assert after.sequence == before.current.sequence + 1
        assert after.output_sequence == before.current.sequence
        output = next(attached for attached in after.attachments if attached.name == "output")
        assert read_attachment(config, output) == ROWS["output"]
        # nothing more is published without need, and the next batch continues from the repair
        wait_until(lambda: not any(manager.damaged().values()))
        checkpoints = manager.repair()
        assert checkpoints[TASK].sequence == after.sequence
        prepared = [
            attempt(config, epoch.after_publish(), task, {b"next": b"1"}, 8, ROWS, checkpoints)
            for task in (TASK, OTHER)
        ]
        manager.publish(prepared, BATCH)
        assert record_of(config).current.output_sequence == after.sequence + 1
    assert totals(config, FACTORY) == {TASK: ITEMS | {b"next": b"1"}, OTHER: ITEMS | {b"next": b"1"}}


@pytest.mark.long
def test_a_changelog_is_cut_between_the_batches(
    kafka: KafkaServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The owner of the whole job looks from time to time, and has the whole state written to the changelog again."""
    monkeypatch.setattr(coordinator, "LOOK_S", 0.2)
    config = job(kafka, tmp_path, SNAPSHOTS)
    with StateManager(config) as manager:
        epoch = manager.acquire()
        manager.publish([attempt(config, epoch, task, ITEMS, 7, ROWS) for task in (TASK, OTHER)], BATCH)
        repaired = threading.Event()

        def repair() -> bool:
            manager.repair()
            repaired.set()
            return True

        manager.when_damaged(repair)
        delete_records(config, config.stores["totals"].changelog_topic, 1)
        assert repaired.wait(60)
        wait_until(lambda: not any(manager.damaged().values()))
    assert totals(config, "kafka-changelog") == {TASK: ITEMS, OTHER: ITEMS}


@pytest.mark.parametrize("kind", OF_SNAPSHOTS)
def test_what_an_attempt_fell_back_from_is_in_its_commit(kafka: KafkaServer, tmp_path: Path, kind: str) -> None:
    """FAULT 45: an executor restores from the changelog because blobs are damaged, and its commit rebuilds them."""
    config = with_changes(job(kafka, tmp_path, kind), task__restore__factories=[FACTORY, "kafka-changelog"])
    with StateManager(config) as manager:
        epoch = manager.acquire()
        manager.publish([attempt(config, epoch, task, ITEMS, 7) for task in (TASK, OTHER)], BATCH)
    spoilt = [name for name in blob_files(tmp_path) if "Partition_0/" in name and not name.endswith("/index")]
    for name in spoilt:
        path = tmp_path / "blobs" / name
        data = path.read_bytes()
        path.write_bytes(data[:50] + bytes([data[50] ^ 1]) + data[51:])
    moved = with_changes(config, state__dir=str(tmp_path / "other"))
    with StateManager(moved) as manager:
        epoch = manager.acquire()
        manager.publish([attempt(moved, epoch, task, {b"b": b"2"}, 8) for task in (TASK, OTHER)], BATCH)
    assert totals(config, FACTORY)[TASK] == ITEMS | {b"b": b"2"}
