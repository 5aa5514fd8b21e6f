"""How worker processes start, and what they report to the process that started them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from queue import SimpleQueue

import pytest

from statemgr.wiring import _pass_on

_ANSWER = """
from statemgr import JobConfig
from statemgr.wiring import WorkerProcesses
with WorkerProcesses(JobConfig.from_mapping({"job.name": "orders"}), 1) as workers:
    print(workers.submit(bool).result())
"""


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


@pytest.mark.parametrize("length", [10, 150])
def test_workers_start_wherever_temporary_files_are(tmp_path: Path, length: int) -> None:
    """The path of a Unix socket has at most some hundred bytes."""
    directory = tmp_path / ("d" * length)
    directory.mkdir()
    environment = {**os.environ, "TMPDIR": str(directory)}
    done = subprocess.run([sys.executable, "-c", _ANSWER], env=environment, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "True", done.stderr
