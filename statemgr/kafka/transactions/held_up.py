"""Finds out which transaction holds up a partition: nobody receives what follows its first message until it ends.

What is asked, and with which right:

1. since when: the timestamp of the message at the last stable offset, which is its first one (Read on the topic)
2. which producer: the partition's leader knows the IDs of producers with open transactions (Read on the topic), and the
   coordinators know their transactional IDs (Describe on the transactional ID)

librdkafka has no requests for 2. So this is asked through kafka-python, if that is installed (the extra
``transactions``). Source: KIP-664, which is also what ``kafka-transactions.sh`` uses.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from confluent_kafka import TIMESTAMP_NOT_AVAILABLE, TopicPartition

from statemgr.config import JobConfig
from statemgr.errors import StatemgrError
from statemgr.kafka.clients import ANSWER_S, consumer
from statemgr.kafka.errors import ClientErrors
from statemgr.logs import counted

#: Milliseconds after which an open transaction counts as a fault.
LONG_MS = 10_000
#: Settings of librdkafka → those of kafka-python that mean the same.
_SETTINGS = {
    "security.protocol": "security_protocol",
    "sasl.mechanism": "sasl_mechanism",
    "sasl.mechanisms": "sasl_mechanism",
    "sasl.username": "sasl_plain_username",
    "sasl.password": "sasl_plain_password",
    "ssl.ca.location": "ssl_cafile",
    "ssl.certificate.location": "ssl_certfile",
    "ssl.key.location": "ssl_keyfile",
    "ssl.key.password": "ssl_password",
}
_TIME_OUTS = ("bootstrap_timeout_ms", "request_timeout_ms")


@dataclass(frozen=True, slots=True)
class HeldUp:
    """A source partition in which a transaction is open.

    Attributes:
        offset: the last stable offset: that of the first message of the transaction.
        behind: offsets from there to the end of the log.
        since_ms: timestamp of that message, epoch milliseconds. None if it could not be read.
        producer: who has opened it, as far as this user may see that.
    """

    source: str
    offset: int
    behind: int
    since_ms: int | None
    producer: str

    def describe(self, now_ms: int) -> str:
        """Two sentences for people."""
        age = "" if self.since_ms is None else f" for {max(now_ms - self.since_ms, 0) / 1000:.0f} s"
        waits = counted(self.behind, "offset")
        return (
            f"A transaction has been open at offset {self.offset}{age}, and nobody receives the {waits} from there on. "
            f"{self.producer}."
        )


def held_up(config: JobConfig, source: tuple[str, int], stable: int, end: int) -> HeldUp:
    """What holds up a partition whose last stable offset is below its end. Takes a few seconds at most."""
    topic, partition = source
    producer = _producer(config, topic, partition, stable)
    return HeldUp(f"{topic}-{partition}", stable, end - stable, _since_ms(config, topic, partition, stable), producer)


def _since_ms(config: JobConfig, topic: str, partition: int, offset: int) -> int | None:
    try:
        with closing(consumer(config, ClientErrors(), isolation_level="read_uncommitted")) as client:
            client.assign([TopicPartition(topic, partition, offset)])
            message = client.poll(ANSWER_S)
    except StatemgrError:
        return None
    if message is None or message.error() is not None:
        return None
    kind, at_ms = message.timestamp()
    return None if kind == TIMESTAMP_NOT_AVAILABLE else at_ms


def _producer(config: JobConfig, topic: str, partition: int, offset: int) -> str:
    tool = (
        f"Find its producer with `kafka-transactions.sh describe-producers --topic {topic} --partition {partition}` "
        "and `list`"
    )
    try:
        from kafka import KafkaAdminClient
        from kafka import TopicPartition as Partition
        from kafka.errors import KafkaError as NotTold
    except ImportError:
        return f"{tool}, or install 'statemgr[transactions]'"
    place = Partition(topic, partition)
    try:
        client = KafkaAdminClient(**_settings(config.kafka_client("admin")))
        try:
            states = client.describe_producers([place])[place].active_producers
            ids = {one.producer_id for one in states if one.current_transaction_start_offset == offset}
            listed = client.list_transactions(producer_id_filters=sorted(ids)) if ids else {}
        finally:
            client.close()
    except (NotTold, ValueError, AssertionError, OSError) as error:
        return f"The brokers do not say who has opened it ({type(error).__name__}). {tool}"
    if not ids:
        return "It has just ended"
    names = sorted({one.transactional_id for found in listed.values() for one in found if one.producer_id in ids})
    number = ", ".join(map(str, sorted(ids)))
    if names:
        return f"Its producer has the transactional ID {', '.join(names)} (producer ID {number})"
    return f"Its producer ID is {number}, and the brokers show no transactional ID for it"


def _settings(given: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of kafka-python for the same brokers and the same user."""
    found: dict[str, Any] = {_SETTINGS[name]: value for name, value in given.items() if name in _SETTINGS}
    if "security_protocol" in found:
        found["security_protocol"] = str(found["security_protocol"]).upper()
    if str(given.get("ssl.endpoint.identification.algorithm", "https")) == "none":
        found["ssl_check_hostname"] = False
    servers = [server.strip() for server in str(given["bootstrap.servers"]).split(",")]
    return {**found, "bootstrap_servers": servers, **dict.fromkeys(_TIME_OUTS, int(ANSWER_S * 1000))}
