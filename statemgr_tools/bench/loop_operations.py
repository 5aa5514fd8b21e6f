"""Consumer loops with many tasks, measured in their own process."""

from __future__ import annotations

import os
import resource
import signal
import time
from typing import Any

import psutil
from confluent_kafka import Message, Producer
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from statemgr import JobConfig, StateManager, StatemgrError, Task
from statemgr_tools.bench.seed import STORE

_TIMEOUT_S = 60


def make_input(config: JobConfig, topic: str) -> None:
    """Create the input topic, with a partition for each task."""
    admin = AdminClient(config.kafka_client("admin"))
    admin.create_topics([NewTopic(topic, config.tasks, 1)])[topic].result(_TIMEOUT_S)


def send_input(config: JobConfig, topic: str) -> None:
    """Write a message to each partition."""
    producer = Producer(config.kafka_client("producer"))
    for partition in range(config.tasks):
        producer.produce(topic, b"value", b"key", partition)
        producer.poll(0)
    assert producer.flush(_TIMEOUT_S) == 0


def run_tasks(config: dict[str, Any], topic: str) -> dict[str, Any]:
    """Run a loop until each task has processed a message, then stop it with SIGTERM.

    Returns: seconds until the ``first`` message and until ``all`` tasks have processed one, from the call of ``run``;
    seconds from SIGTERM until everything is closed (``stop``); tasks whose message is not committed then
    (``given_up``), because a stop has ``task.shutdown.ms`` for the last commits; ``threads``, ``descriptors`` and
    resident ``bytes`` at the time of the signal, and ``before``, the same bytes before the loop.
    """
    # each task has about 15 descriptors; many systems allow 1,024 unless a process asks for more
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    parsed, process = JobConfig.from_mapping(config), psutil.Process()
    found: dict[str, Any] = {"before": process.memory_info().rss}
    seen: dict[Task, int] = {}

    def count(task: Task, message: Message) -> None:
        found.setdefault("first", time.perf_counter() - start)
        store = task.store(STORE)
        store.put(b"count", b"%d" % (int(store.get(b"count") or 0) + 1))
        seen[task] = message.offset() + 1  # type: ignore[operator]
        if len(seen) == parsed.tasks and "all" not in found:
            found["all"] = time.perf_counter() - start
            found["threads"], found["descriptors"] = process.num_threads(), process.num_fds()
            found["bytes"], found["signal"] = process.memory_info().rss, time.perf_counter()
            os.kill(os.getpid(), signal.SIGTERM)

    consumer = parsed.consumer(topic)
    with StateManager(parsed) as manager:
        start = time.perf_counter()
        try:
            manager.run(consumer, count, topics=[topic])
        except StatemgrError:  # a stop that takes too long gives up what is in progress
            if "signal" not in found:
                raise
    committed = {task: max(task.start_offsets.values(), default=0) for task in seen}
    found["given_up"] = sum(committed[task] < reached for task, reached in seen.items())
    consumer.close()
    return {**found, "stop": time.perf_counter() - found.pop("signal")}
