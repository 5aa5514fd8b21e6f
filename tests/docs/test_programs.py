"""Documented programs that run in memory. Tests of other topics run those that need servers or Spark."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from statemgr import Serde, StateManager, Store, Task
from statemgr.errors import CorruptRecord
from statemgr.testing import JobTester
from tests.docs.blocks import Block, blocks, claims, every_block, run
from tests.kafka_jobs import wait_until

_SETTINGS: dict[str, Any] = {
    "job.name": "orders",
    "task.inputs": ["orders"],
    "blob.store.uri": "memory://orders",
    "stores.totals.value.serde": "json",
}


def _not_asked_for() -> list[Block]:
    asked = claims()
    return [b for b in every_block("python") if (b.page, b.heading, "python") not in asked]


@pytest.mark.parametrize("block", _not_asked_for(), ids=str)
def test_a_program_that_no_other_test_asks_for_runs(
    block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An unclaimed program runs unchanged in a directory with the README's job.toml.

    If that cannot work, write a separate test that gets the program with `blocks(page, heading)`.
    """
    (toml,) = blocks("README.md", "## Ten lines", "toml")
    (tmp_path / "job.toml").write_text(toml, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    statements = ast.parse(block.text).body
    inert = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef)
    own = f"write a test that gets it with blocks({block.page!r}, {block.heading!r})"
    if all(isinstance(one, inert) for one in statements):
        pytest.fail(f"{block} only defines something: {own}, and calls it", pytrace=False)
    if re.search(r"spark|manager\.run", block.text):
        pytest.fail(f"{block} needs Spark or a loop: {own}", pytrace=False)
    run(block.text, {"__name__": "__main__"})


def test_a_record_that_is_refused_goes_elsewhere() -> None:
    """docs/consumer-loop.md: the function catches the refusal, and says why in a record of another topic."""
    (program,) = blocks("docs/consumer-loop.md", "### Records that a topic refuses", "python")
    names = run(program, {})
    settings = {**_SETTINGS, "task.outputs": ["totals-out", "totals-rejected"]}
    with JobTester(settings, names["process"]) as tester:
        tester.send("orders", b"a", b"1")
        tester.send("orders", b"b", b"x" * 1_500_000)
        tester.commit()
        assert [record.value for record in tester.output("totals-out")] == [b"1"]
        (rejected,) = tester.output("totals-rejected")
    assert rejected.key == b"b"
    assert b"kafka.producer.message.max.bytes" in dict(rejected.headers)["error"]


class Manager:
    """Stands in for a manager: its ``run`` starts the application in memory."""

    def __init__(self, config: Any) -> None:
        self.config = config
        self.started: list[JobTester] = []

    def run(self, consumer: object, process: Any = None, **more: Any) -> None:
        assert not set(more) - set(StateManager.run.__annotations__)
        self.started.append(JobTester(self.config, process, **more))

    def __enter__(self) -> Manager:
        return self

    def __exit__(self, *exc: object) -> None:
        pass


def test_the_loop_of_the_page() -> None:
    """docs/consumer-loop.md: a manager runs `process` with a group's consumer."""
    (program,) = blocks("docs/consumer-loop.md", "# Consumer loops")
    managers: list[Manager] = []

    def process(task: Task, message: Any) -> None:
        task.store("totals").put(message.key(), 1)

    def made(config: Any) -> Manager:
        managers.append(Manager(_SETTINGS))
        return managers[0]

    config = SimpleNamespace(consumer={"orders": "the consumer of this group"}.__getitem__)
    run(program, {"StateManager": made, "config": config, "process": process})
    with managers[0].started[0] as tester:
        tester.send("orders", "ann", "1")
        assert dict(tester.store("totals").range()) == {b"ann": 1}


def test_the_first_page_has_the_program_of_the_readme() -> None:
    """docs/index.md shows the README's program, which a test of the loop runs."""
    (program,) = blocks("docs/index.md", "# statemgr")
    assert program == blocks("README.md", "## Ten lines")[0]


def test_the_function_of_the_quickstart() -> None:
    """docs/quickstart.md: the function keeps the orders and the amount of each customer."""
    (program,) = blocks("docs/quickstart.md", "## A service")
    serdes = {"stores.totals.key.serde": "string"}
    with JobTester({**_SETTINGS, **serdes}, run(program, {})["process"]) as tester:
        for amount in (2, 3):
            tester.send("orders", "ann", f'{{"amount": {amount}}}')
        assert tester.store("totals").get("ann") == {"orders": 2, "amount": 5}


def test_the_batches_of_the_page() -> None:
    """docs/consumer-loop.md: the function counts keys with one read and one write per batch."""
    (program,) = blocks("docs/consumer-loop.md", "## Batches")
    manager = Manager(_SETTINGS)
    run(program, {"manager": manager, "consumer": None, "Counter": Counter})
    with manager.started[0] as tester:
        for key in ("ann", "bob", "ann"):
            tester.send("orders", key, "1")
        assert dict(tester.store("totals").range()) == {b"ann": 2, b"bob": 1}


def test_the_timer_of_the_page() -> None:
    """docs/consumer-loop.md: the loop calls `flush` every minute."""
    (program,) = blocks("docs/consumer-loop.md", "## Timers")
    manager = Manager(_SETTINGS)
    names = {"manager": manager, "consumer": None, "process": lambda task, message: None}
    run(program, names)
    calls: list[Task] = []
    names["flush"] = calls.append
    with manager.started[0] as tester:
        for _ in range(3):
            tester.advance(seconds=60)
        assert len(calls) == 3


def test_a_loop_reads_a_table_of_another_job() -> None:
    """docs/consumer-loop.md: each order is multiplied by the newest rate, and a timer brings one that is committed
    later."""
    (program,) = blocks("docs/consumer-loop.md", "## A table of another job")

    def rate(task: Task, message: Any) -> None:
        task.store("rates").put(message.key(), message.value())

    other = {
        "job.name": "rates",
        "task.inputs": ["rates"],
        "blob.store.uri": "memory://rates",
        "stores.rates.type": "memory",
    }
    with JobTester(other, rate) as rates:
        manager = Manager(_SETTINGS)
        given = SimpleNamespace(from_file={"rates.toml": rates.config}.__getitem__)
        text = program.replace("from statemgr import FollowedStore, JobConfig", "from statemgr import FollowedStore")
        names = run(text.removesuffix("rates.close()\n"), {"manager": manager, "consumer": None, "JobConfig": given})
        rates.send("rates", "USD", "0.5")
        rates.commit()
        with manager.started[0] as tester:
            order = '{"currency": "USD", "amount": 3}'
            tester.send("orders", "ann", order)
            tester.send("orders", "bob", order.replace("USD", "SEK"))
            assert dict(tester.store("totals").range()) == {b"ann": 1.5}
            rates.send("rates", "USD", "2")
            rates.commit()

            def sees_it() -> bool:
                tester.advance(seconds=1)
                tester.send("orders", "ann", order)
                return bool(tester.store("totals").get(b"ann") == 6.0)

            wait_until(sees_it)
        names["rates"].close()


def test_a_poison_message_is_put_aside() -> None:
    """docs/operations.md: a poison message goes to another topic once, with its key, value and error."""
    (program,) = blocks("docs/operations.md", "## A poison message")
    names = run(program, {"CorruptRecord": CorruptRecord})
    with JobTester(
        {**_SETTINGS, "task.outputs": ["orders-rejected"], "task.input.value.serde": "json"}, names["process"]
    ) as tester:
        tester.send("orders", "ann", b"no JSON")
        tester.send("orders", "ann", 1)
        tester.commit()
        (rejected,) = tester.output("orders-rejected")
    assert (rejected.key, rejected.value) == (b"ann", b"no JSON")
    ((name, error),) = rejected.headers
    assert name == "error"
    assert b"offset=0" in (error or b"")


def test_the_calls_of_a_store() -> None:
    """docs/stores.md: the calls of a store return the documented results."""
    (program,) = blocks("docs/stores.md", "# Stores")
    serdes = {"stores.totals.key.serde": "string", "stores.totals.value.serde": "integer"}
    with opened({**_SETTINGS, **serdes}) as task:
        names = run(program, {"task": task})
        assert (names["key"], names["value"]) == ("bob", 2)
        assert task.store("totals").get("eve") is None


def test_keys_with_times() -> None:
    """docs/stores.md: the windows of a key are one range of the store."""
    (program,) = blocks("docs/stores.md", "## Keys with times")
    serdes = {"stores.hits.key.serde": "kafka-streams-window(string)", "stores.hits.value.serde": "integer"}
    with opened({**_SETTINGS, **serdes}) as task:
        names = run(program, {"task": task})
        assert (len(names["before"]), names["everything"]) == (1, 2)


def test_another_program_reads_a_store(capsys: pytest.CaptureFixture) -> None:
    """docs/stores.md: a reader shows what is published, next to the running job."""
    (program,) = blocks("docs/stores.md", "## Reading from another program")

    def process(task: Task, message: Any) -> None:
        task.store("totals").put(message.key(), 1)

    with JobTester(_SETTINGS, process) as tester:
        tester.send("orders", "ann", "1")
        tester.commit()
        tester.send("orders", "bob", "1")
        run(program, {"config": tester.config})
    assert capsys.readouterr().out == "Partition 0 b'ann' b'1'\n"


def test_the_types_of_stores() -> None:
    """docs/stores.md: a store takes a custom serde, or the serdes that the configuration names."""
    (program,) = blocks("docs/stores.md", "## Types")
    serdes = {"stores.totals.key.serde": "string", "stores.totals.value.serde": "integer"}
    codec = {"to_bytes": lambda order: order.encode(), "from_bytes": bytes.decode, "Order": str}
    with opened({**_SETTINGS, **serdes, "stores.orders.type": "rocksdb"}) as task:
        names = run(program, {"task": task, "Serde": Serde, "Store": Store, **codec})
        names["totals"].put("ann", 1)
        names["orders"].put("1", "two mugs")
        assert (names["totals"].get("ann"), names["orders"].get("1")) == (1, "two mugs")


@contextmanager
def opened(settings: dict[str, Any]) -> Iterator[Task]:
    """Open a task in memory."""
    tasks: list[Task] = []
    with JobTester(settings, lambda task, message: None, on_open=tasks.append):
        yield tasks[0]
