"""A test that a person gives up: it tells the PID of its run's S3 server, and waits. It runs only if it is named."""

from __future__ import annotations

import time

from statemgr_tools.dev import status
from tests import servers


def test_that_takes_long(s3: servers.S3Server) -> None:
    """Wait for a signal."""
    print(status(servers.run_directory() / "s3").s3_pid, flush=True)
    time.sleep(100)
