"""offers: the records of offers, and what a reader refuses."""

from __future__ import annotations

from dataclasses import replace

import pytest

from statemgr.errors import CorruptRecord
from statemgr.flows.published import Published
from statemgr.ids import CheckpointId
from statemgr.model import codecs
from statemgr.model.checkpoint import ChangelogMarker, Layout
from statemgr.model.jobs.offers import Offer, OfferKey, decode_offer, encode_offer, is_offer
from statemgr.model.jobs.permissions import Permissions, Permit
from tests import model_samples as sample

KEY = OfferKey("orders", "1", 0, sample.TASK, "totals", "1700-ab")
OFFER = Offer(
    CheckpointId(1_700_000_000_000, 42),
    "1700-ab-totals",
    sample.INDEX_BLOB,
    ChangelogMarker("orders-1-totals-changelog", "Zm9v", 0, 99),
    1_700_000_000_000,
    1_700_000_086_400,
)
AT = codecs.Place("__checkpoints", 0, 41)


def test_an_offer_is_read_as_it_was_written() -> None:
    """An offer survives a round trip, and its delete has the same key."""
    key, value = encode_offer(KEY, OFFER)
    assert is_offer(key)
    assert decode_offer(key, value, AT) == (KEY, OFFER)
    assert decode_offer(KEY.encoded(), None, AT) == (KEY, None)
    assert not is_offer(codecs.encode_key(sample.RECORD.key(sample.CHECKPOINT)))


def test_every_flipped_bit_is_noticed() -> None:
    """Every changed bit in a value raises an error, and so does a value under another key."""
    key, value = encode_offer(KEY, OFFER)
    for position in range(len(value) * 8):
        damaged = bytearray(value)
        damaged[position // 8] ^= 1 << position % 8
        with pytest.raises(CorruptRecord):
            decode_offer(key, bytes(damaged), AT)
    other = replace(KEY, store="seen").encoded()
    with pytest.raises(CorruptRecord, match="checksum"):
        decode_offer(other, value, AT)


@pytest.mark.parametrize(
    ("offer", "why"),
    [
        (replace(OFFER, index=replace(sample.INDEX_BLOB, blob_id="other/1/Partition_0/totals/x/index")), "blob"),
        (replace(OFFER, index=replace(sample.INDEX_BLOB, blob_id="orders/1/../x/index")), "blob"),
        (replace(OFFER, state_id="../x"), "separator"),
        (replace(OFFER, changelog=replace(OFFER.changelog, topic_id=None)), "topic ID"),
        (replace(OFFER, changelog=replace(OFFER.changelog, offset=-1)), "offset"),
        (replace(OFFER, index=replace(sample.INDEX_BLOB, size=-1)), "negative"),
    ],
)
def test_a_hostile_offer_is_refused(offer: Offer, why: str) -> None:
    """The reader refuses the offer before it reads anything that the offer names."""
    key, value = encode_offer(KEY, offer)
    with pytest.raises(CorruptRecord, match=why):
        decode_offer(key, value, AT)


def test_a_key_of_no_task_is_refused() -> None:
    """A task's name becomes a path, so a wrong name is refused."""
    key, value = encode_offer(replace(KEY, task="Partition x"), OFFER)
    with pytest.raises(CorruptRecord, match="Partition x"):
        decode_offer(key, value, AT)


def test_an_adoption_uses_up_no_permission() -> None:
    """The acknowledgement of an adoption, which sends no permission, may come late, when the next commit settles it.
    The permissions of that commit are still to be used up."""
    permit = Permit("orders", "1", sample.TASK, "token", Permissions(allow_empty_start=True), 0)
    published = Published({sample.TASK: None}, 1, Layout(1, 1, "kafka-partition"), permits=(permit,))
    published.acknowledge({})
    assert published.permits == (permit,)
    published.used = published.permits
    published.acknowledge({})
    assert published.permits == ()
