"""Consumer group members for tests, in threads and in their own processes, and the input that they read."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from confluent_kafka import Consumer, Message, Producer
from confluent_kafka.admin import AdminClient, NewTopic

from statemgr import JobConfig, StateManager, Task
from statemgr.errors import MissingState, StatemgrError, from_json
from statemgr.reader import JobReader
from tests.jobs import with_changes
from tests.kafka_jobs import wait_until
from tests.servers import KafkaServer

ROOT = Path(__file__).resolve().parents[1]
#: A group that notices quickly when members join, leave or die. 6 s is the minimum that a broker allows by default.
QUICK_GROUP = {"kafka__consumer__session__timeout__ms": 6000, "kafka__consumer__heartbeat__interval__ms": 300}


def make_topic(kafka: KafkaServer, name: str, partitions: int, **settings: str) -> None:
    """Create an input topic and wait until the broker's metadata list it. ``settings`` use ``__`` for ``.``."""
    admin = AdminClient({"bootstrap.servers": kafka.bootstrap_servers})
    new = NewTopic(name, partitions, 1, config={key.replace("__", "."): value for key, value in settings.items()})
    admin.create_topics([new])[name].result(15)
    wait_until(lambda: name in admin.list_topics(timeout=60).topics)


def delete_topic(kafka: KafkaServer, name: str) -> None:
    """Delete a topic and wait until the broker's metadata no longer list it."""
    admin = AdminClient({"bootstrap.servers": kafka.bootstrap_servers})
    admin.delete_topics([name])[name].result(15)
    wait_until(lambda: name not in admin.list_topics(timeout=60).topics)


def produce(kafka: KafkaServer, topic: str, partitions: int, numbers: Iterable[int], size: int = 0) -> None:
    """Produce one message per number, with key ``k<number % 50>``; the key decides the partition.

    With a ``size``, values have that many bytes, and each message is its own batch on the broker.
    """
    producer = Producer({"bootstrap.servers": kafka.bootstrap_servers})
    for number in numbers:
        key = number % 50
        producer.produce(topic, str(number).encode().ljust(size), f"k{key}".encode(), partition=key % partitions)
        if size:
            producer.flush(15)
    producer.flush(15)


def count(task: Task, message: Message) -> None:
    """Process a message: count messages by key."""
    totals = task.store("totals")
    key = message.key()
    assert isinstance(key, bytes)
    totals.put(key, b"%d" % (int(totals.get(key) or 0) + 1))


def member(
    config: JobConfig,
    group: str,
    topic: str | Sequence[str],
    process: Callable[[Task, Message], None] | None = count,
    consumer: Consumer | None = None,
    **options: Any,
) -> tuple[Callable[[], None], list[Exception]]:
    """Start a group member in a thread. Return a function that stops it, and the list of errors that it raised.

    ``options`` are arguments of the loop.
    """
    consumer = consumer or with_changes(config, **QUICK_GROUP).consumer(group)
    manager = StateManager(config)
    topics = [topic] if isinstance(topic, str) else topic
    loop = manager.loop(consumer, process, topics=topics, **options)
    errors: list[Exception] = []

    def run() -> None:
        try:
            loop.run()
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()

    def stop() -> None:
        loop.stop()
        thread.join(60)
        manager.close()
        consumer.close()

    return stop, errors


def published(config: JobConfig) -> dict[str, int]:
    """Maps each source partition to its next offset, for all tasks."""
    with suppress(MissingState), JobReader(config) as reader:
        return {source: at for found in reader.records().values() for source, at in found.current.input_offsets.items()}
    return {}  # the job has not made its topics yet


@dataclass
class Process:
    """A member in its own process."""

    child: subprocess.Popen[str]
    log: Path

    @classmethod
    def start(cls, config: JobConfig, group: str, topic: str, log: Path, **order: object) -> Process:
        """Start the process. :mod:`tests.loop_child` documents ``order``."""
        text = json.dumps({"config": config.to_mapping(), "group": group, "topics": [topic], "log": str(log)} | order)
        log.touch()
        command = [sys.executable, "-m", "tests.loop_child", text]
        with log.with_suffix(".err").open("a") as errors:
            child = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=errors, text=True)
        return cls(child, log)

    def lines(self) -> list[str]:
        """Return the lines that it has written, without an unfinished line."""
        return self.log.read_text(encoding="utf-8").split("\n")[:-1]

    def processed(self) -> list[str]:
        """Return the messages that it has processed, in order."""
        return [line for line in self.lines() if not line.startswith("phase ")]

    def wait_for(self, done: Callable[[list[str]], bool], deadline_s: float = 300.0) -> None:
        """Wait until ``done`` accepts its lines."""

        def ready() -> bool:
            assert self.child.poll() is None, self.log.with_suffix(".err").read_text()[-3000:]
            return done(self.lines())

        wait_until(ready, deadline_s)

    def terminate(self) -> tuple[float, StatemgrError | None]:
        """Send SIGTERM. Return the seconds until the process ended, and its typed error."""
        began = time.monotonic()
        self.child.send_signal(signal.SIGTERM)
        return self.ended(began)

    def ended(self, began: float | None = None) -> tuple[float, StatemgrError | None]:
        """Wait for the end. Return the seconds since ``began``, and the typed error."""
        began = time.monotonic() if began is None else began
        out, _ = self.child.communicate(timeout=300)
        seconds = time.monotonic() - began
        if self.child.returncode == 0:
            return seconds, None
        assert self.child.returncode == 1, self.log.with_suffix(".err").read_text()[-3000:]
        return seconds, from_json(out.strip().splitlines()[-1])

    def kill(self) -> None:
        """Send SIGKILL if the process still runs."""
        if self.child.poll() is None:
            self.child.kill()
            self.child.communicate()
