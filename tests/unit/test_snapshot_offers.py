"""snapshot_offers: what is offered on this machine is taken by exactly the histories that it fits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from statemgr.backends.blobs.local_notes import Offer, Offers
from statemgr.backends.blobs.writer_state import REUSE_S
from statemgr.config import JobConfig
from statemgr.model.chain import ChainSegment, ChainSnapshot, SegmentChain, history_of
from statemgr.model.checkpoint import BlobRef
from statemgr.model.hashing import content_hash
from statemgr.ports import Moment, StoreIdentity
from statemgr.wiring import open_services


def at(seconds: float) -> Moment:
    """A moment of one run of the machine."""
    return Moment("run", float(seconds), int(seconds * 1000))


BASE, MADE = BlobRef("j/1/a/index", 1, bytes(16)), BlobRef("j/1/b/index", 2, b"1" * 16, 7)
SEGMENTS = tuple(
    ChainSegment(first, first + 10, BlobRef(f"j/1/{first}", 1, content_hash(b"%d" % first), 5))
    for first in (100, 110, 120)
)
CHAIN = SegmentChain("j", "1", "Partition 0", "s", "id", "a", "l", 0, ChainSnapshot(BASE, "snap", 100), SEGMENTS)
OFFER = Offer(ChainSnapshot(MADE, "newer", 120), BASE, history_of(SEGMENTS[:2]), ("j/1/b/x", "j/1/b/index"), at(1000))
IDENTITY = StoreIdentity("j", "1", "Partition 0", "s")


def test_an_offer_fits_every_chain_that_has_what_it_has() -> None:
    """What came after it does not matter, nor where its segments are stored."""
    assert OFFER.fits(CHAIN, at(1000))
    assert OFFER.fits(replace(CHAIN, segments=SEGMENTS[:2]), at(1000 + REUSE_S - 1))
    inline = replace(SEGMENTS[0], blob=None, inline=b"100")
    assert OFFER.fits(replace(CHAIN, segments=(inline, *SEGMENTS[1:])), at(1000))


@pytest.mark.parametrize(
    ("chain", "now"),
    [
        (CHAIN, at(1000 + REUSE_S)),
        (CHAIN, replace(at(2000), wall_ms=1_000_000 + 3 * 24 * 3_600_000)),
        (CHAIN, replace(at(2000), boot="another")),
        (replace(CHAIN, snapshot=ChainSnapshot(MADE, "newer", 120)), at(1000)),
        (replace(CHAIN, segments=SEGMENTS[:1]), at(1000)),
        (replace(CHAIN, segments=()), at(1000)),
        (
            replace(CHAIN, segments=(SEGMENTS[0], replace(SEGMENTS[1], blob=BlobRef("j/1/110", 1, bytes(16), 5)))),
            at(1000),
        ),
        (replace(CHAIN, segments=(SEGMENTS[0], ChainSegment(110, 115, SEGMENTS[1].blob))), at(1000)),
    ],
    ids=[
        "too old",
        "the clock was set",
        "another run of the machine",
        "another snapshot",
        "older",
        "nothing",
        "other content",
        "other numbers",
    ],
)
def test_an_offer_of_another_history_is_not_taken(chain: SegmentChain, now: Moment) -> None:
    """After a rollback the same numbers may name other changes."""
    assert not OFFER.fits(chain, now)


def test_offers_are_found_by_every_process_and_damaged_ones_by_none(tmp_path: Path) -> None:
    """It is a file: one process at a time makes it, another reads it, the newest wins, a damaged one counts as none."""
    config = {
        "job.name": "j",
        "state.dir": str(tmp_path),
        "kafka.bootstrap.servers": "none:1",
        "stores.s.type": "memory",
    }
    offers, others = (Offers(open_services(JobConfig.from_mapping(config))) for _ in range(2))
    assert others.find(IDENTITY, CHAIN, at(1000)) is None
    with offers.making(IDENTITY) as is_free, others.making(IDENTITY) as is_free_too:
        assert (is_free, is_free_too) == (True, False)
        offers.make(IDENTITY, replace(OFFER, base=MADE))
        offers.make(IDENTITY, OFFER)
    assert others.find(IDENTITY, CHAIN, at(1000)) == OFFER
    assert others.find(replace(IDENTITY, store="t"), CHAIN, at(1000)) is None
    [path] = (p for p in tmp_path.rglob("snapshot.offer*") if p.suffix == ".offer")
    whole = path.read_bytes()
    for damaged in (b"", whole[:-1], whole.replace(b"120", b"110"), whole[40:], b"{}", b"\n{}"):
        path.write_bytes(damaged)
        assert others.find(IDENTITY, CHAIN, at(1000)) is None
