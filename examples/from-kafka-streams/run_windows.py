"""A job with windows moves to statemgr: ``python examples/from-kafka-streams/run_windows.py --broker localhost:9092``.

Needs Java and Maven, which fetches Kafka Streams 4.3.1.
"""

import sys
from pathlib import Path

from confluent_kafka import Message

from statemgr import Task
from statemgr.serdes import WindowKey

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from steps import Example, run  # noqa: E402 - it is next to the examples

HOUR_MS = 3_600_000

example = Example("kafka-streams")
java = example.built_java(HERE, "Windows")

# 1. the old job counts the first half of the rows in windows of an hour, and stops
example.send_half()
run(*java, example.broker, example.name, example.topic, example.half, example.work / "streams")
example.await_stopped(example.name)

# 2. the new job adopts its windows and its offsets; ttl.ms in job.toml is how long the old job's changelog keeps them
config = example.adopt(stores__hours__key__serde="kafka-streams-window(string)", stores__hours__value__serde="string")


def count(task: Task, row: Message) -> None:
    """One more row in the window of its key and hour."""
    hours, key, time_ms = task.store("hours"), (row.key() or b"").decode(), row.timestamp()[1]
    window = WindowKey(key, time_ms - time_ms % HOUR_MS)
    hours.put(window, str(int(hours.get(window) or 0) + 1))


# 3. and goes on in the same windows
totals: dict[str, int] = {}
for window, found in example.continued(config, "hours", count):
    totals[window.key] = totals.get(window.key, 0) + int(found)
example.check(totals, {f"key-{number}": 2 * example.each for number in range(example.keys)})
