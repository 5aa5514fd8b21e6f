"""chain: which segment chains are refused before statemgr uses them, and which segments a restore needs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from statemgr.errors import CorruptBlob
from statemgr.model.chain import ChainSegment, ChainSnapshot, SegmentChain, truncated, validate_chain
from statemgr.model.checkpoint import BlobRef
from tests import model_samples as sample

CHAIN = sample.CHAIN.lying_in("orders/1/Partition_0/_segments/1700-ef")


def validate(chain: SegmentChain, **owner: str) -> None:
    """Validate a chain as one of the sample's owner."""
    known = {"job_name": "orders", "job_id": "1", "task": sample.TASK, "store": "totals"}
    validate_chain(chain, "j/1/o", **{**known, **owner})


def with_segments(*ranges: tuple[int, int], start: int = 10) -> SegmentChain:
    """Return the sample with other segments, on a snapshot that covers ``start``."""
    segments = tuple(ChainSegment(first, end, inline=b"") for first, end in ranges)
    snapshot = ChainSnapshot(sample.INDEX_BLOB, "s", start)
    return replace(CHAIN, segments=segments, snapshot=snapshot)


def test_a_chain_is_what_it_should_be() -> None:
    """A chain without gaps, whose first segment straddles its snapshot, is accepted."""
    validate(CHAIN)
    assert (CHAIN.start, CHAIN.end) == (10, 20)
    assert CHAIN.segments[-1].blob == BlobRef("orders/1/Partition_0/_segments/1700-ef", 200, sample.HASH, offset=0)


@pytest.mark.parametrize("owner", [{"job_name": "x"}, {"job_id": "2"}, {"task": "Partition 1"}, {"store": "seen"}])
def test_a_chain_of_another_owner_is_refused(owner: dict[str, str]) -> None:
    """FAULT 29: a chain of another job, task or store is refused."""
    with pytest.raises(CorruptBlob, match="belongs to"):
        validate(CHAIN, **owner)


@pytest.mark.parametrize(
    "chain",
    [
        with_segments((11, 12)),
        with_segments((10, 12), (13, 14)),
        with_segments((10, 12), (11, 14)),
        with_segments((10, 10)),
        with_segments((12, 10)),
        with_segments((-1, 12)),
        with_segments((5, 9)),
        with_segments((1, 2), start=0),
    ],
)
def test_a_chain_with_a_gap_is_refused(chain: SegmentChain) -> None:
    """B9: missing, repeated or misordered changes are an error, and never a shorter history."""
    with pytest.raises(CorruptBlob, match="refused"):
        validate(chain)


@pytest.mark.parametrize("ranges", [[], [(0, 10)], [(5, 11)], [(10, 11), (11, 30)]])
def test_chains_without_gaps_are_accepted(ranges: list[tuple[int, int]]) -> None:
    """A chain may have no segments, and its snapshot may cover segments completely or in part."""
    validate(with_segments(*ranges))


@pytest.mark.parametrize(
    "chain",
    [
        replace(CHAIN, state_id="../x"),
        replace(CHAIN, attempt="a/b"),
        replace(CHAIN, snapshot=replace(CHAIN.snapshot, state_id="..")),
        replace(CHAIN, snapshot=ChainSnapshot(BlobRef("other/1/index", 1, sample.HASH), "s", 10)),
        replace(CHAIN, segments=(ChainSegment(8, 20, BlobRef("orders/1/../../x", 1, sample.HASH)),)),
        replace(CHAIN, added=("/etc/passwd",)),
    ],
)
def test_a_hostile_chain_is_refused(chain: SegmentChain) -> None:
    """FAULT 27: names that lead elsewhere are refused."""
    with pytest.raises(CorruptBlob, match="refused"):
        validate(chain)


def test_a_segment_that_straddles_stays_whole() -> None:
    """C1: truncating before a number removes segments that end there, and keeps those that go beyond it."""
    segments = with_segments((0, 5), (5, 10), (10, 12)).segments
    assert truncated(segments, 0) == segments
    assert truncated(segments, 5) == segments[1:]
    assert truncated(segments, 6) == segments[1:]
    assert truncated(segments, 12) == ()
