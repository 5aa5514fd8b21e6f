"""A clock that a test moves."""

from __future__ import annotations

import threading
import time

from statemgr.local.clock import SystemClock

#: Real seconds after which a wait looks whether the clock was moved.
_LOOK_S = 0.02


class ControlledClock(SystemClock):
    """Time stamps stand still until :meth:`advance`. Deadlines and intervals also count real time: nothing hangs.

    Args:
        start_ms: the first time stamp, in epoch milliseconds.
    """

    def __init__(self, start_ms: int) -> None:
        super().__init__()
        self._start_ns = start_ms * 1_000_000
        self._advanced_ns = 0

    def advance(self, seconds: float) -> None:
        """Move all time ahead. Waits that are over then end within a few hundredths of a second."""
        self._advanced_ns += int(seconds * 1e9)

    def time_ns(self) -> int:
        return self._start_ns + self._advanced_ns

    def elapsed(self) -> float:
        return super().elapsed() + self._advanced_ns / 1e9

    def sleep(self, seconds: float) -> None:
        until = self.monotonic() + seconds
        while (left := until - self.monotonic()) > 0 and not self._given_up:
            time.sleep(min(left, _LOOK_S))

    def wait(self, changed: threading.Condition, seconds: float) -> bool:
        until = self.monotonic() + seconds
        while (left := until - self.monotonic()) > 0 and not self._given_up:
            if changed.wait(min(left, _LOOK_S)):
                return True
        return changed.wait(_LOOK_S) if self._given_up else False
