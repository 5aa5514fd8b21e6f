"""A run of the tests that is ended early leaves no server."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.servers import RUN_DIRECTORY_VARIABLE


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGHUP, marks=pytest.mark.long)])
def test_a_signal_stops_the_servers(number: signal.Signals) -> None:
    """A supervisor ends the run, or its terminal is closed."""
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", RUN_DIRECTORY_VARIABLE))
    }
    command = [sys.executable, "-m", "pytest", "-q", "-s", str(Path(__file__).with_name("endless_run.py"))]
    before = signal.signal(number, signal.SIG_DFL)  # it may be ignored here, as under nohup
    try:
        run = subprocess.Popen(command, env=kept, stdout=subprocess.PIPE, text=True)
    finally:
        signal.signal(number, before)
    with run:
        assert run.stdout is not None
        pid = int(next(line for line in run.stdout if line.strip().isdecimal()))
        assert psutil.pid_exists(pid)
        run.send_signal(number)
        assert "KeyboardInterrupt" in run.stdout.read()
    assert run.returncode == pytest.ExitCode.INTERRUPTED
    assert not psutil.pid_exists(pid)
