"""Writes records without a transaction and without any transactional ID, so that nobody is fenced: for example
offers."""

from __future__ import annotations

from collections.abc import Iterable

from confluent_kafka import TIMESTAMP_LOG_APPEND_TIME, KafkaError, Message

from statemgr.config import JobConfig
from statemgr.errors import UnavailableError
from statemgr.kafka.checkpoint_assembly import PARTITION
from statemgr.kafka.clients import DEADLINE_S, producer
from statemgr.kafka.errors import ClientErrors, translate, translated
from statemgr.model.jobs.offers import Offer, OfferKey, encode_offer

_OFFERING = "writing an offer"


def write_plainly(
    config: JobConfig, topic: str, partition: int, records: Iterable[tuple[bytes, bytes | None]], doing: str
) -> int | None:
    """Write keys and values, and wait until the brokers have them. ``doing``: for errors.

    Returns: when they got the last one, by their clock (epoch milliseconds); None if the topic does not say.
    Raises: UnavailableError, AccessDenied, InvalidError.
    """
    errors = ClientErrors()
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
            client.produce(topic, value, key, partition, on_delivery=delivered)
        left = client.flush(DEADLINE_S + 5)
    if failed:
        raise translate(failed[0], doing, reported=errors, topic=topic)
    if left:
        raise UnavailableError(f"{doing}: the brokers have not answered", topic=topic)
    return written_ms


def write_offer(config: JobConfig, key: OfferKey, offer: Offer) -> int | None:
    """Write an offer, and wait until the brokers have it.

    Returns: when they got it, by their clock (epoch milliseconds); None if the topic does not say.
    Raises: UnavailableError, AccessDenied, InvalidError.
    """
    return write_plainly(config, config.checkpoint_topic, PARTITION, [encode_offer(key, offer)], _OFFERING)


def withdraw_offers(config: JobConfig, keys: Iterable[OfferKey]) -> None:
    """Delete offers. Raises: UnavailableError, AccessDenied."""
    records = [(key.encoded(), None) for key in keys]
    if records:
        write_plainly(config, config.checkpoint_topic, PARTITION, records, _OFFERING)
