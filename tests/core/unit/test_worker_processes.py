"""What worker processes report to the process that started them."""

from __future__ import annotations

from queue import SimpleQueue

import pytest

from statemgr.wiring import _pass_on


def test_reports_are_read_after_one_could_not_be_shown(caplog: pytest.LogCaptureFixture) -> None:
    """Invariant 13: the workers wait while the pipe is full of reports. The log has one line."""
    reports: SimpleQueue[tuple[str, int, int] | None] = SimpleQueue()
    for report in (("replay", 1, 3), ("replay", 2, 3), ("replay", 3, 3), None):
        reports.put(report)

    def progress(what: str, done: int, total: int) -> None:
        raise BrokenPipeError("the terminal is gone")

    _pass_on(reports, progress)
    assert reports.empty()
    assert caplog.messages == ["the progress of the work cannot be shown: the terminal is gone"]
