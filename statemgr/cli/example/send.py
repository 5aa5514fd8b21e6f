"""Sends orders to the input topic, which it creates if it is missing: ``python send.py 1000``."""

from __future__ import annotations

import json
import sys

from confluent_kafka import KafkaException, Producer
from confluent_kafka.admin import AdminClient, NewTopic

from statemgr import JobConfig

CUSTOMERS = ["ada", "barbara", "dorothy", "edsger", "grace", "leslie", "niklaus", "tony"]


def main() -> None:
    """Send as many orders as the command line says."""
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 1000
    config = JobConfig.from_file("job.toml")
    (topic,) = config.inputs
    admin = AdminClient(config.kafka_client("admin"))
    try:
        topics = admin.list_topics(timeout=10).topics
    except KafkaException as error:
        sys.exit(f"no broker answers; is it running (`statemgr dev status`)? {error}")
    if topic not in topics:
        admin.create_topics([NewTopic(topic, config.tasks)])[topic].result(10)
    producer = Producer(config.kafka_client("producer"))
    for number in range(count):
        order = {"number": number, "amount": number % 10 + 1}
        producer.produce(topic, key=CUSTOMERS[number % len(CUSTOMERS)], value=json.dumps(order))
        producer.poll(1 if len(producer) > 50_000 else 0)  # it holds 100,000 messages
    if unsent := producer.flush(30):
        sys.exit(f"{unsent} orders could not be sent")
    print(f"sent {count} orders to {topic}")


if __name__ == "__main__":
    main()
