"""Formats in which other stream processors keep their state in Kafka. Pure."""

from __future__ import annotations

from statemgr.model.origins.kafka_streams import KafkaStreams
from statemgr.model.origins.origin import (
    CheckpointingOrigin,
    Decoded,
    Decoder,
    OldCheckpoints,
    OldRecord,
    Origin,
    Place,
    Skip,
)
from statemgr.model.origins.quix import QuixStreams
from statemgr.model.origins.raw import Raw
from statemgr.model.origins.samza import Samza

__all__ = [
    "ORIGINS",
    "CheckpointingOrigin",
    "Decoded",
    "Decoder",
    "OldCheckpoints",
    "OldRecord",
    "Origin",
    "Place",
    "Raw",
    "Skip",
]

#: Name on the command line → the origin.
ORIGINS: dict[str, Origin] = {origin.name: origin for origin in (KafkaStreams(), QuixStreams(), Raw(), Samza())}
