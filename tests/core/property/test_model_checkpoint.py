"""Retention and the choice between record versions, for any history."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from statemgr.model.checkpoint import Checkpoint, CheckpointRecord, with_version_one
from tests.core.property import model_strategies as some


@given(some.records, st.lists(some.checkpoints, max_size=5), st.integers(1, 4))
def test_retention_keeps_the_newest(record: CheckpointRecord, published: list[Checkpoint], retained: int) -> None:
    """After any publishes, a record holds the newest N checkpoints in order. Only the newest has outstanding TTLs."""
    history = list(record.checkpoints)
    for checkpoint in published:
        record = record.followed_by(checkpoint, retained)
        history.insert(0, checkpoint)
        assert record.current == checkpoint
        assert len(record.checkpoints) <= retained
        assert all(not older.outstanding_ttl for older in record.checkpoints[1:])
        assert [replace(c, outstanding_ttl=()) for c in record.checkpoints] == [
            replace(c, outstanding_ttl=()) for c in history[: len(record.checkpoints)]
        ]


@given(some.records, some.records, st.integers(0, 9), st.integers(0, 9))
def test_highest_offset_of_any_version_wins(
    newest: CheckpointRecord, old_software: CheckpointRecord, at: int, one_at: int
) -> None:
    """The current checkpoint comes from the record with the higher offset, and no retained checkpoint is lost."""
    newest = replace(newest, offset=2 * at)
    one = replace(old_software, offset=2 * one_at + 1)
    merged = with_version_one(newest, one)
    assert merged is not None
    if one.offset < newest.offset or one.current.checkpoint_id == newest.current.checkpoint_id:
        assert merged == newest
    else:
        assert merged.current.checkpoint_id == one.current.checkpoint_id
        assert merged.current.input_offsets == one.current.input_offsets
        assert merged.current.sequence == newest.current.sequence + 1
        assert [c.checkpoint_id for c in merged.checkpoints[1:]] == [c.checkpoint_id for c in newest.checkpoints]
        assert merged.offset == one.offset
