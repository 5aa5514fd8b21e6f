"""``statemgr adopt`` of windows and sessions that the real Kafka Streams keeps."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from confluent_kafka import Producer

from statemgr import InputMessage, JobConfig, StateManager, Task
from statemgr.cli.main import cli
from statemgr.serdes import SessionKey, WindowKey
from tests.old_jobs import Adopter, await_empty, make
from tests.peers.environments import run, streams_java
from tests.servers import KafkaServer

pytestmark = pytest.mark.long
STORES = ("tumbling", "hopping", "sliding", "sessions")
MINUTE, DAY = 60_000, 86_400_000
#: A row: key and time.
Rows = Sequence[tuple[str, int]]
#: Store → key → its value.
Content = dict[str, dict[Any, int]]


def send(kafka: KafkaServer, topic: str, rows: Rows) -> None:
    """Send rows to the partitions that Kafka's Java clients choose."""
    producer = Producer({"bootstrap.servers": kafka.bootstrap_servers, "partitioner": "murmur2_random"})
    for key, at in rows:
        producer.produce(topic, b"row", key, timestamp=at)
    assert producer.flush(30) == 0


def some_rows(begin: int) -> list[tuple[str, int]]:
    """Return rows of 20 keys in five minutes: nine of them every ten seconds, the others every 90 seconds."""
    times = range(begin, begin + 5 * MINUTE, 10_000)
    return [(f"key-{n}", at) for at in times for n in range(20) if n < 9 or (at - begin) % 90_000 == 0]


def printed(file: Path, since: int) -> Content:
    """Return what the application says of its stores, without what has expired: a cached store shows that, too."""
    found: Content = {store: {} for store in STORES}
    for line in file.read_text().splitlines():
        store, key, start, end, value = line.split("\t")
        of = SessionKey(key, int(start), int(end)) if store == "sessions" else WindowKey(key, int(start))
        if of.start_ms >= since:
            found[store][of] = int(value)
    return found


def adopted(config: JobConfig) -> Content:
    """Return what the stores of the new job have in all tasks: each key in one of them."""
    found: Content = {store: {} for store in STORES}
    with StateManager(config) as manager:
        for number in range(config.tasks):
            with manager.open_task(f"Partition {number}") as task:
                for store in STORES:
                    of = {key: int.from_bytes(value, "big") for key, value in task.store(store).range()}
                    assert not found[store].keys() & of.keys()
                    found[store] |= of
    return found


def tumbling(rows: Iterable[tuple[str, int]]) -> dict[WindowKey, int]:
    """Return the rows of each key and minute."""
    return dict(Counter(WindowKey(key, at - at % MINUTE) for key, at in rows))


def statemgr(file: Path, *arguments: str) -> Any:
    """Run a command on the new job, which must succeed. Return what it prints."""
    result = CliRunner().invoke(cli, [*arguments, "--json", "--config", str(file)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def go_on(config: JobConfig, count: int) -> None:
    """Count rows in tumbling windows, as the old job did, with a consumer loop."""
    seen: list[int] = []

    def process(task: Task, message: InputMessage[str, bytes]) -> None:
        store, (_, at) = task.store("tumbling"), message.raw.timestamp()
        key = WindowKey(message.key(), at - at % MINUTE)
        store.put(key, (int.from_bytes(store.get(key) or bytes(8), "big") + 1).to_bytes(8, "big"))
        seen.append(at)
        if len(seen) == count:
            loop.stop()

    consumer = config.consumer(f"{config.job_name}-group")
    with StateManager(config) as manager:
        loop = manager.loop(consumer, process, key_serde="string")
        loop.run()
    consumer.close()


def test_windows_of_the_real_kafka_streams(kafka: KafkaServer, tmp_path: Path) -> None:
    """E16: the stores have window by window what the application says of them, with caching, grace, and a suppression
    behind them. A new job goes on with them, goes back, and gets another number of tasks."""
    name = kafka.fresh_name("windows")
    topic, file = f"{name}.in", tmp_path / "windows.txt"
    make(kafka, topic, cleanup__policy="delete")
    now = time.time_ns() // 1_000_000
    old, rows = [(f"key-{n}", now - 5 * DAY) for n in range(9)], some_rows(now - 10 * MINUTE)
    send(kafka, topic, old)
    send(kafka, topic, rows)
    run([*streams_java("StreamsShapes"), kafka.bootstrap_servers, name, topic, "windows", str(len(old + rows)), file])
    await_empty(kafka, name)
    adopter = Adopter(kafka, tmp_path, "--from", "kafka-streams", "--job", name)
    servers = f"kafka.bootstrap.servers={kafka.bootstrap_servers}"
    refused = adopter.run("--init", "--name", "new", "--set", servers, status=2)
    assert "does not emit the results that it holds back" in refused
    assert f"topic={name}-late-store-changelog" in refused
    named = [option for store in STORES for option in ("--changelog", f"{store}={name}-{store}-changelog")]
    adopter.init(f"{name}-new", *named)
    text = adopter.file.read_text().replace('kafka-streams-window"', 'kafka-streams-window(string)"')
    adopter.file.write_text(text.replace('kafka-streams-session"', 'kafka-streams-session(string)"'))
    config = adopter.config
    # the retention of the store, and what Kafka Streams adds to that of the changelog
    assert {store.ttl_ms for store in config.stores.values()} == {60 * MINUTE + DAY}
    adopter.run("--write", *named)

    before = adopted(config)
    assert before == printed(file, now - 60 * MINUTE)
    assert all(before.values())
    assert before["tumbling"] == tumbling(rows)

    (first,) = {one["checkpoint_id"] for one in statemgr(adopter.file, "checkpoints", "list")}
    more = some_rows(now - 7 * MINUTE)
    send(kafka, topic, more)
    go_on(config, len(more))
    after = {**before, "tumbling": tumbling(rows + more)}
    assert adopted(config) == after
    key = next(key for key in after["tumbling"] if key not in before["tumbling"])

    statemgr(adopter.file, "rescale", "--tasks", "4")
    assert statemgr(adopter.file, "rescale", "--tasks", "4", "--write")["partitioner"] == "murmur2"
    assert adopter.config.tasks == 4
    assert adopted(adopter.config) == after
    scanned = statemgr(adopter.file, "store", "scan", "tumbling", "--prefix", json.dumps([key.key]))
    assert [row["key"] for row in scanned] == sorted(list(one) for one in after["tumbling"] if one.key == key.key)
    assert statemgr(adopter.file, "store", "get", "tumbling", json.dumps(key))["value"] is not None

    statemgr(adopter.file, "rescale", "--undo", "--write")
    for task in ("0", "1"):
        statemgr(adopter.file, "checkpoints", "rollback", "--task", task, "--to", first, "--write")
    assert adopted(adopter.config) == before
