"""Response bodies of an S3 server: large reads that take too long are aborted."""

from __future__ import annotations

import threading

import pytest

from statemgr.blobs import reading
from statemgr.blobs.reading import LargeReads
from statemgr.local.machine import SystemClock


class Raw:
    """A body that sends nothing until it is aborted. The abort may fail as the SDK's does."""

    def __init__(self, failure: Exception | None = None) -> None:
        self._failure = failure
        self._broken_off = threading.Event()

    def readinto(self, buffer: memoryview) -> int:
        """Return nothing once the body is aborted."""
        assert self._broken_off.wait(10), "nobody breaks it off"
        return 0

    def shutdown(self) -> None:
        """Abort the body."""
        self._broken_off.set()
        if self._failure is not None:
            raise self._failure


@pytest.mark.parametrize("failure", [RuntimeError("already released to the pool"), ValueError("not set"), OSError()])
def test_a_read_that_ends_as_it_is_broken_off_leaves_the_others_watched(
    monkeypatch: pytest.MonkeyPatch, failure: Exception
) -> None:
    """FAULT 59: if an abort fails as the connection is released, the next slow read is still aborted."""
    monkeypatch.setattr(reading, "_MOST_S", 0.0)
    monkeypatch.setattr(reading, "_LOOK_S", 0.01)
    large = LargeReads(SystemClock())
    for raw in (Raw(failure), Raw()):
        assert large.read(raw, memoryview(bytearray(1))) == 0
    large.close()
