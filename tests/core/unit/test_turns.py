"""Commits and repairs of a task take turns."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from statemgr.config.factories import KAFKA_CHANGELOG
from statemgr.engine.pending_commit import Turn
from statemgr.flows.opening.repair import GivesWay
from statemgr.kafka.transactions.producer import KafkaTransaction
from statemgr.testing.memory_servers import MemoryServers
from tests.commits import TASK
from tests.kafka_jobs import wait_until

CONFIG: dict[str, object] = {"job.name": "orders", "stores.totals.value.serde": "bytes"}


def test_a_repair_that_was_asked_gives_way() -> None:
    """Until the next commit has begun. Later repairs run again."""
    turn = Turn()
    assert turn.ask()
    with turn.repair() as is_free:
        assert is_free
        turn.give_way()
        assert not turn.ask()
        with pytest.raises(GivesWay):
            turn.give_way()
    with turn.commit():
        pass
    with turn.repair():
        turn.give_way()


def test_a_repair_that_waits_for_the_brokers(servers: MemoryServers, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread of the loop does not wait for it. A commit can begin when it has ended."""
    flush, waits, answer = KafkaTransaction.flush, threading.Event(), threading.Event()

    def slow(self: KafkaTransaction) -> Any:
        if threading.current_thread().name.startswith("statemgr-repair"):
            waits.set()
            assert answer.wait(60)
        return flush(self)

    monkeypatch.setattr(KafkaTransaction, "flush", slow)
    config = servers.on_disk(servers.config, "one")
    with servers.manager(config, "kafka-partition") as manager, manager.open_task(TASK) as task:
        task.store("totals").put(b"k", b"1")
        task.commit({"in-0": 1})
        try:
            task.damage.found(KAFKA_CHANGELOG, "totals", "told to")
            assert waits.wait(60)
            assert not task.may_commit()
        finally:
            answer.set()
        wait_until(task.may_commit)
        task.commit({"in-0": 2})
        assert not task.damage.pairs
