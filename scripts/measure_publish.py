"""Measures publishes: Kafka transactions of many producers that each write a record and a delete to one partition.

``scripts/measure_publish.py [BOOTSTRAP]`` starts a broker on this machine, or uses the one at BOOTSTRAP. It prints for
several numbers of producers the transactions per second and their latency. docs/sizing.md has what it printed.
"""

from __future__ import annotations

import sys
import tempfile
import threading
import time
from pathlib import Path
from uuid import uuid4

from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic

from statemgr_tools.dev.kafka import KafkaBroker

#: Seconds of a round, rounds of which the best one counts (other load only slows), and bytes of a record.
SECONDS, ROUNDS, RECORD = 4.0, 3, 343


def publish(
    bootstrap: str, topic: str, partition: int, until: threading.Event, ready: threading.Barrier
) -> list[float]:
    """Publish until the event is set. Returns: seconds of each transaction."""
    producer = Producer(
        {"bootstrap.servers": bootstrap, "transactional.id": uuid4().hex, "linger.ms": 0, "acks": "all"}
    )
    producer.init_transactions(60)
    ready.wait()
    took = []
    number = 0
    while not until.is_set():
        began = time.perf_counter()
        producer.begin_transaction()
        producer.produce(topic, bytes(RECORD), f"{partition}-{number}".rjust(48), partition=partition)
        producer.produce(topic, None, f"{partition}-{number - 2}".rjust(48), partition=partition)
        producer.commit_transaction(30)
        took.append(time.perf_counter() - began)
        number += 1
    return took


def measure(bootstrap: str, producers: int, partitions: int) -> tuple[float, float, float]:
    """Returns: transactions per second, and milliseconds of the median one and of the 99th percentile."""
    topic = f"publish-{uuid4().hex[:8]}"
    admin = AdminClient({"bootstrap.servers": bootstrap})
    admin.create_topics([NewTopic(topic, partitions, 1)])[topic].result()
    until, ready = threading.Event(), threading.Barrier(producers + 1)
    took: list[float] = []

    def run(number: int) -> None:
        took.extend(publish(bootstrap, topic, number % partitions, until, ready))

    threads = [threading.Thread(target=run, args=(number,)) for number in range(producers)]
    for thread in threads:
        thread.start()
    ready.wait()
    time.sleep(SECONDS)
    until.set()
    for thread in threads:
        thread.join()
    took.sort()
    at = [took[int(part * (len(took) - 1))] * 1000 for part in (0.5, 0.99)]
    return len(took) / SECONDS, at[0], at[1]


def main() -> None:
    """Measure on a broker of this machine, or on a given one."""
    with tempfile.TemporaryDirectory() as directory:
        broker = None if sys.argv[1:] else KafkaBroker(directory=Path(directory) / "kafka")
        if broker is not None:
            broker.start()
        try:
            bootstrap = sys.argv[1] if broker is None else broker.bootstrap_servers
            for producers, partitions in ((1, 1), (8, 1), (32, 1), (100, 1), (100, 50)):
                rate, median, tail = max(measure(bootstrap, producers, partitions) for _ in range(ROUNDS))
                what = f"{producers:4} producers, {partitions:2} partitions"
                print(f"{what}: {rate:5.0f}/s, p50 {median:6.1f} ms, p99 {tail:6.1f} ms", flush=True)
        finally:
            if broker is not None:
                broker.stop()


if __name__ == "__main__":
    main()
