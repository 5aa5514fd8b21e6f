"""Where a replay of a changelog can start: only at a state that is certainly of the same topic, and young enough."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from statemgr.backends.changelog_base import newest_base
from statemgr.model.checkpoint import BlobRef, ChangelogMarker, IndexMarker, Marker
from statemgr.model.plan import OlderState
from statemgr.ports import CommittedDirectory

_NOW_MS = 1_700_000_000_000
_HOUR_MS = 3_600_000
_SETTINGS = {"delete.retention.ms": str(_HOUR_MS)}
_MARKER = ChangelogMarker("totals", "id", 3, 100)


def _start(older: dict[str, OlderState], settings: dict[str, str] = _SETTINGS) -> int | None:
    """The offset that a replay to the marker starts at, with a local directory of every state; None: all of it."""
    local = [CommittedDirectory(state, Path(state), {}) for state in ("a", "b", "c")]
    base = newest_base(_MARKER, local, older, settings, _NOW_MS)
    return None if base is None else base.offset


def _at(offset: int, age_ms: int = 0) -> OlderState:
    return OlderState(replace(_MARKER, offset=offset), _NOW_MS - age_ms)


def test_the_shortest_replay_is_taken() -> None:
    """Of all local directories the one with the highest offset, up to the marker's own."""
    assert _start({"a": _at(10), "b": _at(90), "c": _at(50)}) == 90
    assert _start({"a": _at(100)}) == 100
    assert _start({"elsewhere": _at(90)}) is None


def test_deletes_must_still_be_there() -> None:
    """An older checkpoint counts until a delete after it may be compacted away, clocks that differ allowed for."""
    margin_ms = 60_000
    assert _start({"a": _at(10, _HOUR_MS - margin_ms - 1)}) == 10
    assert _start({"a": _at(10, _HOUR_MS - margin_ms)}) is None
    assert _start({"a": _at(10)}, {"delete.retention.ms": "0"}) is None
    assert _start({"a": _at(10)}, {}) is None


_OTHERS: dict[str, Marker] = {
    "after the marker": replace(_MARKER, offset=101),
    "another topic": replace(_MARKER, topic="other", offset=10),
    "made anew": replace(_MARKER, topic_id="other", offset=10),
    "another partition": replace(_MARKER, partition=2, offset=10),
    "an unknown ID": replace(_MARKER, topic_id=None, offset=10),
    "another backend": IndexMarker(BlobRef("index", 1, bytes(16))),
}


@pytest.mark.parametrize("kind", sorted(_OTHERS))
def test_a_state_of_another_changelog_is_not_continued(kind: str) -> None:
    """Offsets mean something only within one topic."""
    assert _start({"a": OlderState(_OTHERS[kind], _NOW_MS)}) is None


def test_without_a_topic_id_nothing_is_known() -> None:
    """A version 1 marker could be of a topic that was made anew since."""
    old = replace(_MARKER, topic_id=None)
    state = OlderState(replace(old, offset=10), _NOW_MS)
    assert newest_base(old, [CommittedDirectory("a", Path("a"), {})], {"a": state}, _SETTINGS, _NOW_MS) is None
