"""Writes offers to the checkpoint topic, and fences nobody."""

from __future__ import annotations

from collections.abc import Iterable

from statemgr.config import JobConfig
from statemgr.kafka.checkpoint_assembly import PARTITION
from statemgr.kafka.plain_writes import write_plainly
from statemgr.model.jobs.offers import Offer, OfferKey, encode_offer

_DOING = "writing an offer"


def write_offer(config: JobConfig, key: OfferKey, offer: Offer) -> int | None:
    """Write an offer, and wait until the brokers have it.

    Returns: when they got it, by their clock (epoch milliseconds); None if the topic does not say.
    Raises: UnavailableError, AccessDenied, InvalidError.
    """
    return write_plainly(config, config.checkpoint_topic, PARTITION, [encode_offer(key, offer)], _DOING)


def withdraw_offers(config: JobConfig, keys: Iterable[OfferKey]) -> None:
    """Delete offers. Raises: UnavailableError, AccessDenied."""
    records = [(key.encoded(), None) for key in keys]
    if records:
        write_plainly(config, config.checkpoint_topic, PARTITION, records, _DOING)
