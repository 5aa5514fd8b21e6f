"""Formats in which other stream processors keep their state in Kafka. Pure."""

from __future__ import annotations

from statemgr.operations.adopt.origins.kafka_streams import KafkaStreams
from statemgr.operations.adopt.origins.kind import (
    PLAIN,
    Decoded,
    Decoder,
    Hint,
    Kind,
    Looks,
    OldRecord,
    Skip,
    Unproved,
    expiring,
)
from statemgr.operations.adopt.origins.origin import CheckpointingOrigin, OldCheckpoints, Origin, Place
from statemgr.operations.adopt.origins.quix import QuixStreams
from statemgr.operations.adopt.origins.raw import Raw
from statemgr.operations.adopt.origins.samza import Samza

__all__ = [
    "ORIGINS",
    "PLAIN",
    "CheckpointingOrigin",
    "Decoded",
    "Decoder",
    "Hint",
    "Kind",
    "Looks",
    "OldCheckpoints",
    "OldRecord",
    "Origin",
    "Place",
    "Raw",
    "Skip",
    "Unproved",
    "expiring",
]

#: Name on the command line → the origin.
ORIGINS: dict[str, Origin] = {origin.name: origin for origin in (KafkaStreams(), QuixStreams(), Raw(), Samza())}
