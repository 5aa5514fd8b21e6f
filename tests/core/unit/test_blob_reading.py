"""Response bodies of an S3 server: large reads that take too long are aborted."""

from __future__ import annotations

import threading
from contextlib import nullcontext

import pytest

from statemgr.blobs import reading
from statemgr.blobs.reading import BodyReader, LargeReads
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


class Sent:
    """A body that has arrived. ``asked``: how many bytes each read asked for."""

    def __init__(self, size: int) -> None:
        self._left = size
        self.asked: list[int] = []

    def read1(self, size: int) -> bytes:
        """Return the next bytes."""
        return bytes(self._took(size))

    def readinto(self, buffer: memoryview) -> int:
        """Fill a buffer."""
        return self._took(len(buffer))

    def _took(self, size: int) -> int:
        self.asked.append(size)
        taken = min(size, self._left)
        self._left -= taken
        return taken


def test_a_fast_body_is_read_with_few_calls() -> None:
    """The first read is small, because the pace is not known. Then one call fills a buffer."""
    large = LargeReads(SystemClock())
    raw = Sent(3 << 20)
    body = BodyReader(raw, 3 << 20, large, nullcontext)
    buffer = memoryview(bytearray(1 << 20))
    assert [body.readinto(buffer) for _ in range(4)] == [1 << 20, 1 << 20, 1 << 20, 0]
    assert raw.asked == [256 << 10, 768 << 10, 1 << 20, 1 << 20]
    large.close()
