"""The real clock, and IDs from it and from the operating system's random source."""

from __future__ import annotations

import threading
import time
import uuid

from statemgr.ids import IdSource
from statemgr.local.durable import boot_id
from statemgr.ports import Clock, Moment

#: Seconds, longer than any deadline.
_LEAP_S = 7 * 24 * 3600.0
#: Seconds of each wait after :meth:`SystemClock.give_up`, so that a loop of waits does not keep a processor busy.
_SHORTEST_S = 0.01


class SystemClock:
    """Wall time, monotonic time and waiting on this machine.

    After :meth:`give_up` every deadline has passed and every wait is short, so work in progress ends with a time-out
    error.
    """

    def __init__(self) -> None:
        self._given_up = False
        self._leap_s = 0.0

    def give_up(self) -> None:
        """End the work in progress: from now on each call of :meth:`monotonic` jumps ahead."""
        self._given_up = True

    def time_ns(self) -> int:
        """Nanoseconds since the epoch."""
        return time.time_ns()

    def monotonic(self) -> float:
        """Seconds that never decrease, for deadlines."""
        if self._given_up:
            self._leap_s += _LEAP_S
        return self.elapsed() + self._leap_s

    def elapsed(self) -> float:
        """Seconds that never decrease, for durations."""
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        """Wait ``seconds``; returns at once if they are not positive."""
        if seconds > 0 and not self._given_up:
            time.sleep(seconds)

    def wait(self, changed: threading.Condition, seconds: float) -> bool:
        """Wait on a condition that is held."""
        return changed.wait(min(seconds, _SHORTEST_S) if self._given_up else seconds)


def moment(clock: Clock) -> Moment:
    """The current moment, which other processes on this machine can compare with theirs."""
    return Moment(boot_id(), clock.elapsed(), clock.time_ns() // 1_000_000)


def system_ids() -> IdSource:
    """IDs from the wall clock and random tokens of 32 hexadecimal digits."""
    return IdSource(time_ns=time.time_ns, token=lambda: uuid.uuid4().hex)
