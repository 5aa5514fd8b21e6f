"""What a type checker reports for a user's program: nothing for correct lines, and an error for each mistake."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
#: Each line with a mistake ends with mypy's code for it. All other lines are correct.
PROGRAM = """
from collections.abc import Sequence

from confluent_kafka import Message
from typing_extensions import assert_type

from statemgr import InputMessage, JobConfig, Serde, StateManager, Store, Task

Order = dict[str, int]
ORDER: Serde[Order] = Serde(lambda order: b"", lambda data: {}, "order", 1)
PAIR = (str.encode, bytes.decode)


def process(task: Task, message: InputMessage[str, Order]) -> None:
    totals: Store[str, int] = task.store("totals")
    key, order = message.key(), message.value()
    totals.get(key)  # error: arg-type
    if key is not None and order is not None:
        totals.put(key, (totals.get(key) or 0) + order["amount"])
        totals.put(key, order)  # error: arg-type
        totals.get(key) + 1  # error: operator
    totals.put_many({b"key": 1})  # error: arg-type
    for name, total in totals.range("a", "b"):
        name.upper(), total + 1
        name + total  # error: operator


def plain(task: Task, message: Message) -> None:
    store = task.store("totals")
    store.put(message.key(), b"1")


def batch(task: Task, messages: Sequence[InputMessage[str, Order]]) -> None:
    totals = task.store("totals", "string", ORDER)
    totals.put_many((message.key(), message.value() or {}) for message in messages)


def on_open(task: Task) -> None:
    task.every(10, flush).cancel()
    task.every("10", flush)  # error: arg-type
    task.every(10, process)  # error: arg-type


def flush(task: Task) -> None:
    assert_type(task.store("orders", value_serde=ORDER).get(b"key"), Order | None)
    assert_type(task.store("orders", key_serde=ORDER).get({}), "object")  # error: assert-type
    task.store("orders", ORDER).put("key", 1)  # error: arg-type
    task.store("orders", value_serde=ORDER).put("key", 1)  # error: arg-type
    task.store("orders", "strng")  # error: call-overload
    task.store("orders", "string", "jsn")  # error: call-overload
    wrong: Store[str, int] = task.store("orders", value_serde=ORDER)  # error: arg-type
    task.commit({"orders-0": "1"})  # error: dict-item
    task.comit({})  # error: attr-defined


config = JobConfig.from_file("job.toml")
consumer = config.consumer("orders")
with StateManager(config) as manager:
    manager.run(consumer, process, on_open=on_open, allow_new_stores=True)
    manager.run(consumer, plain, topics=["orders"])
    manager.run(consumer, process_batch=batch, key_serde=PAIR, value_serde=ORDER)
    manager.loop(consumer, process, key_serde="string").stop()
    manager.run(consumer, process, allow_new_store=True)  # error: call-arg
    manager.loop(consumer, process, allow_new_store=True)  # error: call-arg
    manager.acquire(allow_new_store=True)  # error: call-arg
    manager.run(consumer, flush)  # error: arg-type
    manager.run(consumer, process_batch=process)  # error: arg-type
    manager.run(consumer, process, on_open=process)  # error: arg-type
    manager.run(consumer, process, value_serde="jsn")  # error: arg-type
    manager.open_task("Partition 0", alow_empty_start=True)  # error: call-arg
    manager.open_task("Partition 0", allow_empty_start="yes")  # error: arg-type
    with manager.open_task("Partition 0", allow_empty_start=True) as task:
        assert_type(task, Task)
"""


def test_mypy_catches_each_mistake_of_a_user_and_nothing_else(tmp_path: Path) -> None:
    """The test runs mypy in strict mode, as a user does on a program of their own."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    lines = enumerate(PROGRAM.splitlines(), 1)
    expected = {(number, found[1]) for number, line in lines if (found := re.search(r"# error: ([\w-]+)$", line))}
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file=", "--no-error-summary", "--hide-error-context"]
    cache = f"--cache-dir={tmp_path / 'cache'}"
    environment = {**os.environ, "MYPYPATH": str(ROOT)}
    done = subprocess.run(
        [*command, cache, str(program)], env=environment, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert not done.stderr
    found = re.findall(r"program\.py:(\d+): error: .*\[([\w-]+)\]$", done.stdout, re.M)
    assert {(int(number), code) for number, code in found} == expected, done.stdout
