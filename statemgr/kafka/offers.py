"""Writes offers to the checkpoint topic, without a transaction and without any transactional ID, so that nobody is
fenced."""

from __future__ import annotations

from collections.abc import Iterable

from confluent_kafka import TIMESTAMP_LOG_APPEND_TIME, KafkaError, Message

from statemgr.config import JobConfig
from statemgr.errors import UnavailableError
from statemgr.kafka.checkpoint_assembly import PARTITION
from statemgr.kafka.clients import DEADLINE_S, producer
from statemgr.kafka.errors import ClientErrors, translate, translated
from statemgr.model.jobs.offers import Offer, OfferKey, encode_offer


def write_offer(config: JobConfig, key: OfferKey, offer: Offer) -> int | None:
    """Write an offer, and wait until the brokers have it.

    Returns: when they got it, by their clock (epoch milliseconds); None if the topic does not say.
    Raises: UnavailableError, AccessDenied, InvalidError.
    """
    return _write(config, [encode_offer(key, offer)])


def withdraw_offers(config: JobConfig, keys: Iterable[OfferKey]) -> None:
    """Delete offers. Raises: UnavailableError, AccessDenied."""
    records = [(key.encoded(), None) for key in keys]
    if records:
        _write(config, records)


def _write(config: JobConfig, records: Iterable[tuple[bytes, bytes | None]]) -> int | None:
    """Returns: the broker's time of the last record."""
    errors, doing, topic = ClientErrors(), "writing an offer", config.checkpoint_topic
    failed: list[KafkaError] = []
    written_ms: int | None = None

    def delivered(error: KafkaError | None, message: Message) -> None:
        nonlocal written_ms
        if error is not None:
            failed.append(error)
            return
        kind, timestamp_ms = message.timestamp()
        written_ms = timestamp_ms if kind == TIMESTAMP_LOG_APPEND_TIME else None

    client = producer(config, errors, acks="all", message_timeout_ms=int(DEADLINE_S * 1000))
    with translated(doing, errors, topic=topic):
        for key, value in records:
            client.produce(topic, value, key, PARTITION, on_delivery=delivered)
        left = client.flush(DEADLINE_S + 5)
    if failed:
        raise translate(failed[0], doing, reported=errors, topic=topic)
    if left:
        raise UnavailableError("the brokers have not answered the write of an offer", topic=topic)
    return written_ms
