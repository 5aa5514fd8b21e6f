"""chain_positions: a local directory counts as a point of exactly those chains that go through its state."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from statemgr.backends.blobs.local_notes import ChainPositions
from statemgr.model.chain import ChainSegment, SegmentChain
from statemgr.wiring import open_services
from tests.core.unit.test_pending_snapshots import CHAIN, IDENTITY, MADE, SEGMENTS
from tests.segment_tasks import config_of

OLDER = replace(CHAIN, state_id="older", segments=SEGMENTS[:2])


@pytest.fixture
def positions(tmp_path: Path) -> ChainPositions:
    """The positions of a store with a directory."""
    positions = ChainPositions(open_services(config_of(tmp_path)), IDENTITY)
    positions._path.parent.mkdir(parents=True)
    return positions


def test_a_noted_state_fits_the_chains_that_go_through_it(positions: ChainPositions) -> None:
    """A state fits its own chain and longer ones, wherever their segments are stored, and later notes keep it."""
    positions.note(OLDER)
    positions.note(CHAIN)
    assert set(positions.fitting(CHAIN)) == {"older", "id"}
    inline = (replace(SEGMENTS[0], blob=None, inline=b"100"), *SEGMENTS[1:])
    assert set(positions.fitting(replace(CHAIN, segments=inline))) == {"older", "id"}
    assert set(positions.fitting(OLDER)) == {"older"}
    assert positions.fitting(CHAIN)["older"].end == 120


@pytest.mark.parametrize(
    "chain",
    [
        replace(CHAIN, snapshot=replace(CHAIN.snapshot, index=MADE)),
        replace(CHAIN, segments=SEGMENTS[:1]),
        replace(CHAIN, segments=(SEGMENTS[0], replace(SEGMENTS[1], blob=None, inline=b"other"), SEGMENTS[2])),
        replace(CHAIN, segments=(SEGMENTS[0], ChainSegment(110, 125, SEGMENTS[1].blob))),
    ],
    ids=["another snapshot", "older", "other content", "other numbers"],
)
def test_another_history(positions: ChainPositions, chain: SegmentChain) -> None:
    """After a rollback or an unpublished attempt, the numbers may be the same but the state is not."""
    positions.note(OLDER)
    assert positions.fitting(chain) == {}


def test_what_is_compacted(positions: ChainPositions) -> None:
    """A known state can be marked as compacted, and this mark can be removed."""
    positions.note(OLDER)
    positions.mark_compacted("unknown", compacted=True)
    assert not positions.compacted()
    positions.mark_compacted("older", compacted=True)
    assert [found.state_id for found in positions.compacted()] == ["older"]
    positions.mark_compacted("older", compacted=False)
    assert not positions.compacted()


@pytest.mark.parametrize("damage", ["cut", "flipped", "fifo", "link", "huge", "gone"])
def test_a_file_that_is_no_use(positions: ChainPositions, tmp_path: Path, damage: str) -> None:
    """A damaged or missing file gives no positions. The next note replaces it, and never follows a link."""
    positions.note(OLDER)
    path, data = positions._path, positions._path.read_bytes()
    path.unlink()
    if damage == "fifo":
        os.mkfifo(path)
    elif damage == "link":
        (tmp_path / "elsewhere").write_bytes(data)
        path.symlink_to(tmp_path / "elsewhere")
    elif damage != "gone":
        changed = {"cut": data[:-5], "flipped": data[:50] + b"~" + data[51:], "huge": data + b" " * 100_000}
        path.write_bytes(changed[damage])
    assert positions.fitting(CHAIN) == {}
    positions.note(CHAIN)
    assert set(positions.fitting(CHAIN)) == {"id"}
    assert not path.is_symlink()
