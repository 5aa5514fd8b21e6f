"""Segments on snapshots under random work: commits that fail or whose outcome is lost, in parallel with snapshots."""

from __future__ import annotations

import random
import threading
from pathlib import Path

import pytest

from statemgr import StateManager
from statemgr.engine.task import Task
from statemgr.errors import OutcomeUnknownError, RetryableError, StatemgrError
from statemgr.flows.owner import Owner
from statemgr.kafka.transactions.publisher import TransactionalPublisher, _State
from statemgr.phases import Phase, observed
from tests.commits import TASK, blob_files, current, referenced
from tests.core.integration.test_blob_changelog import config_of, published, snapshot_now
from tests.servers import KafkaServer


@pytest.mark.long
@pytest.mark.parametrize(
    ("seed", "kind", "retained"),
    [(0, "rocksdb", 2), (1, "memory", 2), (2, "rocksdb", 100)],
)
def test_every_checkpoint_is_exact_whatever_happens(
    kafka: KafkaServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int, kind: str, retained: int
) -> None:
    """Each of the newest retained checkpoints restores exactly the state at its commit. Blobs that no checkpoint needs
    are deleted or have a TTL."""
    monkeypatch.setattr("statemgr.stores.open_store.CHANGE_BUDGET", 20_000)
    config = config_of(
        kafka, tmp_path, stores=("totals", "index"), task__checkpoint__retained=retained, stores__totals__type=kind
    )
    chance = random.Random(seed)
    state: dict[str, dict[bytes, bytes]] = {"totals": {}, "index": {}}
    moments: dict[int, dict[str, dict[bytes, bytes]]] = {}
    plan: dict[str, str] = {}
    notes: list[str] = []

    def fail(phase: Phase, _: str) -> None:
        if plan.get("fail") == phase.value:
            plan.pop("fail")
            raise RetryableError("planned")

    original_commit, original_settle = TransactionalPublisher._commit, Owner.settle

    def commit_(self, *args):  # type: ignore[no-untyped-def]
        how = plan.pop("lost", None)
        if how == "published":
            original_commit(self, *args)
        elif how == "aborted":
            self._abort()
        else:
            return original_commit(self, *args)
        assert self._state is _State.READY
        raise OutcomeUnknownError("lost")

    def settle_(*args):  # type: ignore[no-untyped-def]
        if plan.pop("unsettled", None):
            raise OutcomeUnknownError("not yet")
        return original_settle(*args)

    monkeypatch.setattr(TransactionalPublisher, "_commit", commit_)
    monkeypatch.setattr(Owner, "settle", settle_)
    number = 0
    stop = threading.Event()

    def work(task) -> None:  # type: ignore[no-untyped-def]
        for name in state:
            store = task.store(name)
            for _ in range(chance.choice([0, 1, 5, 60])):
                key = b"%d" % chance.randrange(60)
                roll = chance.random()
                if roll < 0.25:
                    store.delete(key)
                    state[name].pop(key, None)
                elif roll < 0.28:
                    store.delete_range(b"2", b"4")
                    for k in [k for k in state[name] if b"2" <= k < b"4"]:
                        del state[name][k]
                else:
                    state[name][key] = chance.randbytes(chance.choice([0, 5, 500, 3000]))
                    store.put(key, state[name][key])

    with observed(fail):
        for _ in range(3):  # owners
            with StateManager(config) as manager:
                task = manager.open_task(TASK)
                last = task.last_checkpoint
                if last is not None:  # uncommitted changes are gone
                    state = {n: dict(c) for n, c in moments[last.input_offsets["orders-0"]].items()}
                for name in state:
                    assert dict(task.store(name).range()) == state[name], (name, "reopened")
                stop.clear()

                def snapshots(task: Task = task) -> None:
                    rng = random.Random(seed + 100)
                    while not stop.wait(rng.random() * 0.05):
                        if task.last_checkpoint is None:
                            continue
                        try:
                            snapshot_now(task, rng.choice(["totals", "index"]))
                        except StatemgrError as error:
                            notes.append(repr(error)[:150])

                thread = threading.Thread(target=snapshots)
                thread.start()
                try:
                    for _ in range(25):
                        work(task)
                        number += 1
                        moments[number] = {n: dict(c) for n, c in state.items()}
                        roll = chance.random()
                        if roll < 0.15:
                            plan["fail"] = Phase.BEGIN.value
                        elif roll < 0.25:
                            plan["fail"] = Phase.PUT_SEGMENTS.value
                        elif roll < 0.45:
                            plan["lost"] = chance.choice(["published", "aborted"])
                            if chance.random() < 0.6:
                                plan["unsettled"] = "x"
                        try:
                            future = task.commit_async({"orders-0": number}, materialize=chance.random() < 0.05)
                            work(task)
                            future.result(30)
                        except StatemgrError as error:
                            if "planned" not in str(error) and "lost" not in str(error) and "not " not in str(error):
                                notes.append(repr(error)[:300])
                        task._pending.forgive()
                        plan.clear()
                finally:
                    stop.set()
                    thread.join()
    print(set(notes))
    record = current(config)
    assert record is not None
    for checkpoint in record.checkpoints[:12]:
        for name in state:
            there = published(
                config, tmp_path / f"o-{checkpoint.checkpoint_id}-{name}", str(checkpoint.checkpoint_id), name
            )
            assert there == moments[checkpoint.input_offsets["orders-0"]][name], (checkpoint.input_offsets, name)
    needed = referenced(config)
    assert needed <= blob_files(tmp_path)
    with StateManager(config) as manager:
        manager.open_task(TASK)
    assert not needed & blob_files(tmp_path, expiring=True)
    garbage = blob_files(tmp_path) - needed - blob_files(tmp_path, expiring=True)
    assert garbage == set()
