"""A user's program: mypy finds each of its mistakes, and nothing else.

A line with a mistake ignores the error that mypy reports for it. `make lint` checks this file in strict mode, in which
an ignored error that is not there is one, too. Nothing runs this program.
"""

from collections.abc import Sequence
from typing import assert_type

from confluent_kafka import Message

from statemgr import InputMessage, JobConfig, Serde, StateManager, Store, Task

Order = dict[str, int]
ORDER: Serde[Order] = Serde(lambda order: b"", lambda data: {}, "order", 1)
PAIR = (str.encode, bytes.decode)


def process(task: Task, message: InputMessage[str, Order]) -> None:
    totals: Store[str, int] = task.store("totals")
    key, order = message.key(), message.value()
    totals.get(key)  # type: ignore[arg-type]
    if key is not None and order is not None:
        totals.put(key, (totals.get(key) or 0) + order["amount"])
        totals.put(key, order)  # type: ignore[arg-type]
        totals.get(key) + 1  # type: ignore[operator]
    totals.put_many({b"key": 1})  # type: ignore[arg-type]
    for name, total in totals.range("a", "b"):
        name.upper(), total + 1
        name + total  # type: ignore[operator]


def plain(task: Task, message: Message) -> None:
    store = task.store("totals")
    store.put(message.key(), b"1")


def batch(task: Task, messages: Sequence[InputMessage[str, Order]]) -> None:
    totals = task.store("totals", "string", ORDER)
    totals.put_many((message.key(), message.value() or {}) for message in messages)


def on_open(task: Task) -> None:
    task.every(10, flush).cancel()
    task.every("10", flush)  # type: ignore[arg-type]
    task.every(10, process)  # type: ignore[arg-type]


def flush(task: Task) -> None:
    assert_type(task.store("orders", value_serde=ORDER).get(b"key"), Order | None)
    assert_type(task.store("orders", key_serde=ORDER).get({}), "object")  # type: ignore[assert-type]
    task.store("orders", ORDER).put("key", 1)  # type: ignore[arg-type]
    task.store("orders", value_serde=ORDER).put("key", 1)  # type: ignore[arg-type]
    task.store("orders", "strng")  # type: ignore[call-overload]
    task.store("orders", "string", "jsn")  # type: ignore[call-overload]
    wrong: Store[str, int] = task.store("orders", value_serde=ORDER)  # type: ignore[arg-type]
    task.commit({"orders-0": "1"})  # type: ignore[dict-item]
    task.comit({})  # type: ignore[attr-defined]


config = JobConfig.from_file("job.toml")
consumer = config.consumer("orders")
with StateManager(config) as manager:
    manager.run(consumer, process, on_open=on_open, allow_new_stores=True)
    manager.run(consumer, plain, topics=["orders"])
    manager.run(consumer, process_batch=batch, key_serde=PAIR, value_serde=ORDER)
    manager.loop(consumer, process, key_serde="string").stop()
    manager.run(consumer, process, allow_new_store=True)  # type: ignore[call-arg]
    manager.loop(consumer, process, allow_new_store=True)  # type: ignore[call-arg]
    manager.acquire(allow_new_store=True)  # type: ignore[call-arg]
    manager.run(consumer, flush)  # type: ignore[arg-type]
    manager.run(consumer, process_batch=process)  # type: ignore[arg-type]
    manager.run(consumer, process, on_open=process)  # type: ignore[arg-type]
    manager.run(consumer, process, value_serde="jsn")  # type: ignore[arg-type]
    manager.open_task("Partition 0", alow_empty_start=True)  # type: ignore[call-arg]
    manager.open_task("Partition 0", allow_empty_start="yes")  # type: ignore[arg-type]
    with manager.open_task("Partition 0", allow_empty_start=True) as task:
        assert_type(task, Task)
