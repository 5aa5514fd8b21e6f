"""The history of a job's numbers on its page."""

from __future__ import annotations

import pytest

from statemgr.health.processes import Sample
from statemgr_tools.ui import history
from statemgr_tools.ui.history import History, Point, point
from statemgr_tools.ui.pages import _history


def test_a_point_sums_stores_and_takes_the_slowest_commit() -> None:
    """Bytes of all tasks are added. The commit is the one whose phases took longest together."""
    samples = [
        Sample("statemgr_state_bytes", {"task": "Partition 0"}, 10.0),
        Sample("statemgr_state_bytes", {"task": "Partition 1"}, 5.0),
        Sample("statemgr_commit_seconds", {"task": "Partition 0", "phase": "flush"}, 1.0),
        Sample("statemgr_commit_seconds", {"task": "Partition 0", "phase": "upload"}, 2.0),
        Sample("statemgr_commit_seconds", {"task": "Partition 1", "phase": "flush"}, 2.5),
    ]
    assert point(7, 3, samples) == Point(7, 3, 15.0, 3.0)
    assert point(7, None, []) == Point(7, None, None, None)


def test_the_history_is_bounded_and_covers_the_whole_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A full history drops every other point. A job that cannot be read adds none."""
    monkeypatch.setattr(history, "_MOST", 8)
    taken = iter([*(Point(at, at, None, None) for at in range(20)), None])
    kept = History(lambda: next(taken))
    for _ in range(21):
        kept.add()
        assert len(kept.points) <= 8
    assert kept.points[0].at_ms == 0
    assert kept.points[-1].at_ms >= 18


def test_a_chart_without_anything_to_show_is_left_out() -> None:
    """The lag was 0 all the time and the state is not known, so only commits are drawn."""
    points = [Point(1000 * at, 0, None, 0.5) for at in range(3)]
    (chart,) = _history(points)  # type: ignore[misc]
    assert "Seconds of the last commit, since 1970-01-01" in chart
    assert _history(points[:1]) == []
