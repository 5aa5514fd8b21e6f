"""Where the replay of a changelog can start: only at a recent state that is certainly of the same topic."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from statemgr.backends.changelog.restore import newest_base
from statemgr.model.checkpoint import BlobMarker, ChangelogMarker, Marker
from statemgr.ports import CommittedDirectory, Moment

_HOUR_S = 3600.0
_DAYS_MS = 3 * 24 * 3_600_000
_NOW = Moment("this run", 1_000_000.0, 1_700_000_000_000)
_SETTINGS = {"delete.retention.ms": "3600000"}
_MARKER = ChangelogMarker("totals", "id", 3, 100)


def _start(
    older: dict[str, Marker], age_s: float = 0.0, settings: dict[str, str] = _SETTINGS, now: Moment = _NOW
) -> int | None:
    """Return the offset where a replay to the marker starts, given a local directory of every state. None means all."""
    as_of = Moment(_NOW.boot, _NOW.monotonic_s - age_s, _NOW.wall_ms - int(age_s * 1000))
    local = [CommittedDirectory(state, Path(state), {}, as_of) for state in ("a", "b", "c")]
    base = newest_base(_MARKER, local, older, settings, now)
    return None if base is None else base.offset


def _at(offset: int) -> Marker:
    return replace(_MARKER, offset=offset)


def test_the_shortest_replay_is_taken() -> None:
    """The replay starts at the local directory with the highest offset that is not above the marker's."""
    assert _start({"a": _at(10), "b": _at(90), "c": _at(50)}) == 90
    assert _start({"a": _at(100)}) == 100
    assert _start({"elsewhere": _at(90)}) is None


def test_a_fill_in_between_ends_the_shortcut() -> None:
    """A fill may lack the deletes of keys whose records were gone, so a replay begins after it."""
    assert _start({"a": replace(_MARKER, offset=10, start=5)}) is None


def test_deletes_must_still_be_there() -> None:
    """A state is too old once compaction may have removed a delete that came after it, with a margin."""
    assert _start({"a": _at(10)}, _HOUR_S - 61) == 10
    assert _start({"a": _at(10)}, _HOUR_S - 59) is None
    assert _start({"a": _at(10)}, settings={"delete.retention.ms": "0"}) is None
    assert _start({"a": _at(10)}, settings={}) is None


@pytest.mark.parametrize(
    "now",
    [
        replace(_NOW, wall_ms=_NOW.wall_ms - _DAYS_MS),
        replace(_NOW, wall_ms=_NOW.wall_ms + _DAYS_MS),
        replace(_NOW, boot="another run"),
        replace(_NOW, boot=""),
        replace(_NOW, monotonic_s=_NOW.monotonic_s - 1),
    ],
)
def test_clocks_that_contradict_each_other_are_no_shortcut(now: Moment) -> None:
    """FAULT 54: after a change of the wall clock, a suspend or a reboot, the changelog is replayed from the start."""
    assert _start({"a": _at(10)}, now=now) is None
    local = [CommittedDirectory("a", Path("a"), {})]
    assert newest_base(_MARKER, local, {"a": _at(10)}, _SETTINGS, _NOW) is None, "nobody knows how old it is"


_OTHERS: dict[str, Marker] = {
    "after the marker": replace(_MARKER, offset=101),
    "another topic": replace(_MARKER, topic="other", offset=10),
    "created again": replace(_MARKER, topic_id="other", offset=10),
    "another partition": replace(_MARKER, partition=2, offset=10),
    "an unknown ID": replace(_MARKER, topic_id=None, offset=10),
    "another backend": BlobMarker(inline=b"chain"),
}


@pytest.mark.parametrize("kind", sorted(_OTHERS))
def test_a_state_of_another_changelog_is_not_continued(kind: str) -> None:
    """Offsets are meaningful only within one topic."""
    assert _start({"a": _OTHERS[kind]}) is None


def test_without_a_topic_id_nothing_is_known() -> None:
    """A version 1 marker may refer to a topic that has been deleted and created again."""
    old = replace(_MARKER, topic_id=None)
    local = [CommittedDirectory("a", Path("a"), {}, _NOW)]
    assert newest_base(old, local, {"a": replace(old, offset=10)}, _SETTINGS, _NOW) is None
