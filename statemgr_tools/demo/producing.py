"""Writes the input's rows to a Kafka topic with keys and a plain producer, as another system would."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from confluent_kafka import KafkaException, Producer
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from statemgr.errors import InvalidError, UnavailableError
from statemgr_tools.demo.dataset import Dataset

_REPORT_EVERY = 5_000
_DEADLINE_S = 60
#: A little less than the default maximum of brokers and clients.
_RECORD_LIMIT = 900_000
_OF_A_RUN = re.compile(r"(demo-|__statemgr_checkpoints_demo-)[0-9a-f]{8}(-|\Z)")


def forget_older_runs(bootstrap_servers: str) -> None:
    """Delete the topics of earlier demos on the demo's own broker. Raises: UnavailableError."""
    try:
        admin = AdminClient({"bootstrap.servers": bootstrap_servers, "log_level": 3})
        old = [topic for topic in admin.list_topics(timeout=_DEADLINE_S).topics if _OF_A_RUN.match(topic)]
        if old:
            for deleted in admin.delete_topics(old).values():
                deleted.result(timeout=_DEADLINE_S)
    except KafkaException as error:
        raise UnavailableError(f"the broker did not delete older topics: {error}") from error


def produce(
    dataset: Dataset,
    bootstrap_servers: str,
    topic: str,
    partitions: int,
    progress: Callable[[int], None],
    every: int = _REPORT_EVERY,
) -> int:
    """Create the topic and write every row: the key's bytes, and the columns' texts as a JSON array.

    A malformed row becomes ``null``, so that the pipeline counts it, too.

    Args:
        progress: called after every ``every`` rows with their number. It may wait, to slow the producer down.

    Returns: the number of rows.

    Raises: UnavailableError if the broker did not take them all; InvalidError as :meth:`Dataset.rows`, and for a row
        that is too large for a record.
    """
    try:
        admin = AdminClient({"bootstrap.servers": bootstrap_servers})
        for created in admin.create_topics([NewTopic(topic, partitions, 1)]).values():
            created.result(timeout=_DEADLINE_S)
        producer = Producer(
            {"bootstrap.servers": bootstrap_servers, "linger.ms": 20, "enable.idempotence": True, "log_level": 3}
        )
        count = 0
        for count, (key, row) in enumerate(dataset.rows(), 1):
            value = json.dumps(row).encode()
            if len(key or b"") + len(value) > _RECORD_LIMIT:
                raise InvalidError(
                    f"row {count} has {len(key or b'') + len(value):,} bytes in the columns that are needed, "
                    f"more than {_RECORD_LIMIT:,}",
                    hint="a broker takes no larger records",
                    file=str(dataset.path),
                )
            while True:
                try:
                    producer.produce(topic, key=key, value=value)
                    break
                except BufferError:
                    producer.poll(0.1)
            if count % every == 0:
                producer.poll(0)
                progress(count)
        left = producer.flush(_DEADLINE_S)
    except KafkaException as error:
        raise UnavailableError(f"the rows could not be produced: {error}", topic=topic) from error
    if left:
        raise UnavailableError(f"{left} rows were not taken by the broker", topic=topic)
    progress(count)
    return count
