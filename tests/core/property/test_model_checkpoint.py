"""Retention and the choice between record versions, for any history."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from statemgr.model.checkpoint import Checkpoint, CheckpointRecord, Retention, with_version_one
from tests.core.property import model_strategies as some


@given(some.records, st.lists(some.checkpoints, max_size=5), st.integers(1, 4))
def test_retention_keeps_the_newest(record: CheckpointRecord, published: list[Checkpoint], retained: int) -> None:
    """After any publishes, a record holds the newest N checkpoints in order. Only the newest has outstanding TTLs."""
    history = list(record.checkpoints)
    for checkpoint in published:
        record = record.followed_by(checkpoint, Retention(newest=retained))
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


@given(
    st.lists(st.integers(0, 200), max_size=40),
    st.builds(Retention, newest=st.integers(1, 3), hourly=st.integers(0, 4), daily=st.integers(0, 3)),
)
def test_what_stays_commit_by_commit_is_what_stays_at_once(half_hours: list[int], retention: Retention) -> None:
    """A commit forgets nothing that a later one would still want, also when clocks go back."""
    there: list[tuple[int, int]] = []  # number and time, newest first
    for number, half_hour in enumerate(half_hours):
        there.insert(0, (number, half_hour * 1_800_000))
        stay = retention.stay([time_ms for _, time_ms in there])
        there = [one for position, one in enumerate(there) if position in stay]
    times_ms = [half_hour * 1_800_000 for half_hour in reversed(half_hours)]
    assert {number for number, _ in there} == {len(half_hours) - 1 - position for position in retention.stay(times_ms)}


@given(
    st.lists(st.integers(0, 200), unique=True, max_size=40),
    st.builds(Retention, newest=st.integers(1, 3), hourly=st.integers(0, 4), daily=st.integers(0, 3)),
)
def test_the_last_checkpoint_of_each_hour_and_day_stays(half_hours: list[int], retention: Retention) -> None:
    """With a clock that goes ahead: what stays is what somebody would choose who sees the whole calendar."""
    halves = sorted(half_hours, reverse=True)
    wanted = set(halves[: retention.newest])
    for count, length in ((retention.hourly, 2), (retention.daily, 48)):
        spans = sorted({half // length for half in halves}, reverse=True)[:count]
        wanted |= {max(half for half in halves if half // length == span) for span in spans}
    assert {halves[position] for position in retention.stay([half * 1_800_000 for half in halves])} == wanted
