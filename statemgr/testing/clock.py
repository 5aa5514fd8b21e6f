"""A clock that a test moves."""

from __future__ import annotations

import threading
import time
from collections import Counter

from statemgr.local.machine import SystemClock

#: Real seconds after which a sleep looks whether the clock was moved, and of a wait after all work was given up.
_LOOK_S = 0.02


#: Real seconds of the longest wait.
_LONGEST_S = 1.0


class ControlledClock(SystemClock):
    """Time stamps stand still until :meth:`advance`. Deadlines and intervals also count real time: nothing hangs.

    Args:
        start_ms: the first time stamp, in epoch milliseconds.
    """

    def __init__(self, start_ms: int) -> None:
        super().__init__()
        self._start_ns = start_ms * 1_000_000
        self._advanced_ns = 0
        self._waits: Counter[threading.Condition] = Counter()
        self._waits_lock = threading.Lock()

    def advance(self, seconds: float) -> None:
        """Move all time ahead. Waits that are over then end within a few hundredths of a second."""
        self._advanced_ns += int(seconds * 1e9)
        self._wake()

    def time_ns(self) -> int:
        return self._start_ns + self._advanced_ns

    def elapsed(self) -> float:
        return super().elapsed() + self._advanced_ns / 1e9

    def sleep(self, seconds: float) -> None:
        until = self.monotonic() + seconds
        while (left := until - self.monotonic()) > 0 and not self._given_up:
            time.sleep(min(left, _LOOK_S))

    def wait(self, changed: threading.Condition, seconds: float) -> bool:
        """Also ends when the clock is moved, and after a real second: it may have been moved just before."""
        with self._waits_lock:
            self._waits[changed] += 1
        try:
            return changed.wait(min(seconds, _LOOK_S if self._given_up else _LONGEST_S))
        finally:
            with self._waits_lock:
                self._waits[changed] -= 1
                if not self._waits[changed]:
                    del self._waits[changed]

    def give_up(self) -> None:
        super().give_up()
        self._wake()

    def _wake(self) -> None:
        """End all waits. Each condition gets a thread, because the caller may hold one that another thread needs."""

        def notify(changed: threading.Condition) -> None:
            with changed:
                changed.notify_all()

        with self._waits_lock:
            waiting = list(self._waits)
        for changed in waiting:
            threading.Thread(target=notify, args=(changed,), daemon=True).start()
