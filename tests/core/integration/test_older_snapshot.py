"""Each blob of a chain is damaged in turn. A restore elsewhere gives exactly the published state, or a typed error."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from statemgr import JobConfig, StateManager
from statemgr.engine.task import Task
from statemgr.errors import CorruptError, MissingError
from statemgr.model.chain import SegmentChain
from tests.commits import TASK, current, totals
from tests.core.integration.test_blob_changelog import BIG, FACTORY, chain_of, config_of, published, snapshot_now
from tests.core.integration.test_repair import wait_until
from tests.jobs import elsewhere, with_changes
from tests.servers import KafkaServer

DAMAGES: dict[str, Callable[[bytes], bytes | None]] = {
    "deleted": lambda data: None,
    "cut": lambda data: data[: len(data) // 2],
    "flipped": lambda data: data[: len(data) // 2] + bytes([data[len(data) // 2] ^ 4]) + data[len(data) // 2 + 1 :],
}


def committed(config: JobConfig, directory: Path) -> tuple[dict[bytes, bytes], list[SegmentChain]]:
    """Make commits and two snapshots. Returns: the published state, and the retained chains, newest first."""
    state: dict[bytes, bytes] = {}

    def change(task: Task, number: int) -> None:
        for key in (b"%d" % number, b"hot"):
            state[key] = random.Random(number).randbytes(6_000)
            task.store("totals").put(key, state[key])
        if number % 3 == 2:
            state.pop(b"%d" % (number - 1), None)
            task.store("totals").delete(b"%d" % (number - 1))

    with StateManager(config) as manager:
        task = manager.open_task(TASK)
        for number in range(6):
            change(task, number)
            task.commit({"orders-0": number})
            if number in (1, 3):
                change(task, 20 + number)  # some of these changes are in the snapshot and also in the segment after it
                snapshot_now(task)
    record = current(config)
    assert record is not None
    return state, [chain_of(config, checkpoint) for checkpoint in record.checkpoints]


def restored(config: JobConfig, directory: Path) -> dict[bytes, bytes] | None:
    """Return the current state on an empty disk, or None if a typed error says that it is unavailable."""
    try:
        return published(config, directory)
    except (MissingError, CorruptError):
        return None


@pytest.mark.parametrize("damages", [["flipped"], pytest.param([*DAMAGES], marks=pytest.mark.long)], ids=len)
def test_every_blob_is_damaged_in_turn(
    kafka: KafkaServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damages: list[str]
) -> None:
    """FAULT 46: an older snapshot and the segments after it replace a damaged newest one, and the state is exact."""
    monkeypatch.setattr("statemgr.engine.task.Task.check_up", lambda self: True)
    config = config_of(kafka, tmp_path, task__checkpoint__retained=20)
    state, chains = committed(config, tmp_path)
    newest = chains[0]
    indexes = list(dict.fromkeys(chain.snapshot.index.blob_id for chain in chains))
    assert len(indexes) == 3
    needed = {blob.blob_id for blob in newest.blobs()}
    root = tmp_path / "blobs"
    older_blobs = {path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file()}
    exact: dict[str, set[str]] = {}
    for number, name in enumerate(sorted(older_blobs)):
        path = root / name
        if path.name.startswith("."):
            continue
        data = path.read_bytes()
        for damage in damages:
            spoilt = DAMAGES[damage](data)
            if spoilt is None:
                path.unlink()
            else:
                path.write_bytes(spoilt)
            found = restored(config, tmp_path / f"elsewhere-{number}-{damage}")
            assert found in (None, state), (name, damage)
            if found is None:
                assert name in needed or ".sst" in name or "/packs/" in name, (name, damage)
            else:
                exact.setdefault(name, set()).add(damage)
            path.write_bytes(data)
    # damage to any one index leaves the state exact
    for index in indexes:
        assert exact[index] == set(damages)
    own = {name for name in older_blobs if name.startswith(indexes[0].rpartition("/")[0] + "/")}
    assert len(own) > 1
    assert all(exact.get(name) == set(damages) for name in own), "what only the newest snapshot has"


def test_the_newest_two_snapshots_are_damaged(
    kafka: KafkaServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FAULT 46: the oldest retained snapshot still supplies the state. Without it, the restore raises a typed error."""
    config = config_of(kafka, tmp_path, task__checkpoint__retained=20)
    with monkeypatch.context() as patch:
        patch.setattr("statemgr.engine.task.Task.check_up", lambda self: True)
        state, chains = committed(config, tmp_path)
        indexes = list(dict.fromkeys(chain.snapshot.index.blob_id for chain in chains))
        for index in indexes[:2]:
            (tmp_path / "blobs" / index).unlink()
        assert restored(config, tmp_path / "a") == state
        kept = (tmp_path / "blobs" / indexes[2]).read_bytes()
        (tmp_path / "blobs" / indexes[2]).unlink()
        assert restored(config, tmp_path / "b") is None
        (tmp_path / "blobs" / indexes[2]).write_bytes(kept)
    # FAULT 45: after a restore from an older snapshot, the task publishes a new chain without any input
    before = current(config)
    with StateManager(elsewhere(config, tmp_path / "c", FACTORY)) as manager, manager.open_task(TASK) as task:
        assert dict(task.store("totals").range()) == state
        wait_until(lambda: current(config) != before)
    record = current(config)
    assert record is not None
    assert chain_of(config, record.current).lineage != chains[0].lineage
    (tmp_path / "blobs" / indexes[2]).unlink()
    assert totals(config, FACTORY)[TASK] == state


def test_a_new_lineage_is_never_mixed_with_the_old_one(
    kafka: KafkaServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FAULT 46, invariant 11: a backend that is filled again counts its changes from the beginning. Its earlier
    segments have the same numbers but other changes, and a restore never mixes the two."""
    monkeypatch.setattr("statemgr.engine.task.Task.check_up", lambda self: True)
    config = config_of(kafka, tmp_path, backup=["kafka-changelog", FACTORY], task__checkpoint__retained=20)
    with StateManager(config) as manager, manager.open_task(TASK) as task:
        for number in range(4):
            task.store("totals").put(b"old-%d" % number, BIG)
            task.commit({"orders-0": number})
    without = with_changes(
        config, task__backup__factories=["kafka-changelog"], task__restore__factories=["kafka-changelog"]
    )
    with StateManager(without) as manager, manager.open_task(TASK) as task:
        task.store("totals").delete(b"old-1")
        task.commit({"orders-0": 4})
    with StateManager(with_changes(config, task__restore__factories=["kafka-changelog"])) as manager:
        task = manager.open_task(TASK)
        for number in range(5, 8):
            task.store("totals").put(b"new-%d" % number, BIG)
            task.commit({"orders-0": number})
        record = current(config)
        assert record is not None
        newest = chain_of(config, record.current)
    (tmp_path / "blobs" / newest.snapshot.index.blob_id).unlink()
    assert restored(config, tmp_path / "other") is None
