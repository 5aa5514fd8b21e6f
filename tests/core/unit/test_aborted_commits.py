"""A commit was aborted: the next one begins when it is clear that no record of the aborted one is open any more."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from statemgr import Task
from statemgr.errors import UnavailableError
from statemgr.kafka.transactions.publisher import TransactionalPublisher
from statemgr.phases import Phase, observed
from statemgr.ports import Transaction, TransactionOpen
from statemgr.testing.memory_kafka import MemoryBroker
from statemgr.testing.memory_log import Txn
from statemgr.testing.memory_producer import MemoryProducer
from statemgr.testing.memory_servers import MemoryServers
from tests.commits import TASK

CONFIG: dict[str, object] = {
    "job.name": "orders", "stores.totals.value.serde": "bytes", "task.commit.timeout.ms": 2000,
}  # fmt: skip


@pytest.fixture
def task(servers: MemoryServers) -> Iterator[Task]:
    """A task that has committed output to a topic."""
    servers.broker.create("out", 1)
    config = servers.on_disk(servers.config, "one")
    with servers.manager(config, "kafka-partition") as manager, manager.open_task(TASK) as opened:
        opened.produce("out", b"k", b"1", partition=0)
        opened.commit({"in-0": 1})
        yield opened


@contextmanager
def others_transaction(servers: MemoryServers) -> Iterator[Transaction]:
    """A transaction of other software, with a record in the output topic."""
    publisher = TransactionalPublisher(servers.config, "sink", servers.clock)
    publisher.fence()
    with publisher.transaction() as transaction:
        transaction.send("out", b"k", b"theirs", partition=0)
        transaction.flush()
        yield transaction


def abort(task: Task) -> None:
    """Let a commit fail whose output a broker has."""

    def fail(phase: Phase, subject: str) -> None:
        if phase is Phase.SEND_CHECKPOINT:
            raise UnavailableError("told to")

    task.produce("out", b"k", b"2", partition=0)
    with observed(fail), pytest.raises(UnavailableError, match="told to"):
        task.commit({"in-0": 2})


def output(servers: MemoryServers) -> list[bytes | None]:
    """What readers of committed records get."""
    return [record.value for _, _, record in servers.broker.committed("out")]


def test_a_transaction_that_began_later_is_not_waited_for(servers: MemoryServers, task: Task) -> None:
    """It does not hide that the aborted one has ended."""
    abort(task)
    with others_transaction(servers):
        task.commit({"in-0": 2})
    assert output(servers) == [b"1", b"theirs", b"2"]


def test_a_transaction_that_began_before_is_not_taken_for_the_own(servers: MemoryServers, task: Task) -> None:
    """It hides whether the aborted one has ended, so commits wait for it, and say whose it is."""
    with others_transaction(servers):
        abort(task)
        for _ in range(2):
            with pytest.raises(TransactionOpen, match="another producer's transaction is open") as refused:
                task.commit({"in-0": 2})
            assert refused.value.where == {"topic": "out", "partition": 0, "offset": 2}
            assert "find-hanging" not in str(refused.value)
    task.commit({"in-0": 2})
    assert output(servers) == [b"1", b"theirs", b"2"]


def test_the_own_transaction_is_never_committed(
    servers: MemoryServers, task: Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A partition that has no leader during the abort keeps it open (KAFKA-20734)."""
    end, left = MemoryBroker._end, list[Txn]()

    def leave_open(self: MemoryBroker, owner: object, *, committed: bool) -> None:
        txn: Txn | None = owner.txn  # type: ignore[attr-defined]
        if not left and txn is not None:
            left.append(txn)
            txn.places.discard(("out", 0))
        end(self, owner, committed=committed)  # type: ignore[arg-type]

    monkeypatch.setattr(MemoryBroker, "_end", leave_open)
    abort(task)
    for _ in range(2):
        with pytest.raises(TransactionOpen, match="an aborted transaction is still open"):
            task.commit({"in-0": 2})
    servers.broker.log("out", 0).open.pop(left[0])  # `kafka-transactions.sh abort`
    task.commit({"in-0": 2})
    assert output(servers) == [b"1", b"2"]


def test_a_first_record_that_nobody_has_acknowledged(
    servers: MemoryServers, task: Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any open transaction may be the own one then, also one that began later."""
    with monkeypatch.context() as patched:
        patched.setattr(MemoryProducer, "poll", lambda self, timeout=0: self.purge())
        patched.setattr(MemoryProducer, "flush", lambda self, timeout=0: 0)
        abort(task)
    with others_transaction(servers), pytest.raises(TransactionOpen, match="a transaction is open there"):
        task.commit({"in-0": 2})
    task.commit({"in-0": 2})
    assert output(servers) == [b"1", b"theirs", b"2"]
