"""Offers: first snapshots that ``statemgr materialize`` has built next to a running job. Pure.

An offer waits on the checkpoint topic under a key of its own until the owner of its task adopts it or it expires. It
changes nothing about which state is current. It is *live* until it expires, by the clock of the Kafka brokers.
"""

from __future__ import annotations

from dataclasses import dataclass

from statemgr.errors import InvalidError
from statemgr.ids import CheckpointId, task_index
from statemgr.model.checkpoint import BlobRef, ChangelogMarker
from statemgr.model.codecs.generic import Codec
from statemgr.model.codecs.records import Place, opened, sealed
from statemgr.model.codecs.special_types import SHAPES
from statemgr.model.snapshot import blob_id_problem, name_problem


@dataclass(frozen=True, slots=True)
class OfferKey:
    """The key of an offer. ``attempt``: of the snapshot, and so unique for each offer."""

    job_name: str
    job_id: str
    layout_generation: int
    task: str
    store: str
    attempt: str

    def encoded(self) -> bytes:
        """The bytes of the key on the topic. Raises: InvalidError if it does not fit the schema."""
        return _KEY.encode(self, task=self.task, store=self.store)


@dataclass(frozen=True, slots=True)
class Offer:
    """The content of an offer.

    Attributes:
        checkpoint_id: the checkpoint whose state the snapshot is.
        state_id: the store's state in that checkpoint.
        index: the snapshot's index blob.
        changelog: the changelog that the snapshot was built from, and the offset after the last record that it has.
        as_of_ms: a time by the broker's clock (epoch milliseconds). All records of the changelog that the snapshot does
            not have are younger.
        expires_ms: until when the offer may be adopted, by the same clock.
    """

    checkpoint_id: CheckpointId
    state_id: str
    index: BlobRef
    changelog: ChangelogMarker
    as_of_ms: int
    expires_ms: int


_KEY = Codec("offer_key.v1", OfferKey, SHAPES)
_VALUE = Codec("offer.v2", Offer, SHAPES)


def encode_offer(key: OfferKey, offer: Offer) -> tuple[bytes, bytes]:
    """Key and value of a record. Raises: InvalidError if they do not fit the schemas."""
    data = key.encoded()
    return data, sealed(data, _VALUE.encode(offer, task=key.task, store=key.store))


def is_offer(key: bytes) -> bool:
    """Whether a record of the checkpoint topic is an offer."""
    return key.startswith(_KEY.header)


def decode_offer(key: bytes, value: bytes | None, place: Place) -> tuple[OfferKey, Offer | None]:
    """The offer in a record; None if the record is a delete. Raises: CorruptRecord."""
    refuse = place.refuser("offer")
    at = _KEY.decode(key, refuse)
    try:
        task_index(at.task)
    except InvalidError as error:
        raise refuse(error.message) from error
    if value is None:
        return at, None
    offer = _VALUE.decode(opened(key, value, refuse), refuse)
    problem = blob_id_problem(offer.index.blob_id, at.job_name, at.job_id)
    if problem is None and (why := name_problem(offer.state_id)):
        problem = f"its state ID {offer.state_id!r} {why}"
    if problem is None and offer.changelog.topic_id is None:
        problem = "its changelog has no topic ID"
    if problem is not None:
        raise refuse(problem)
    return at, offer
