"""The port of time. No I/O here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from threading import Condition
from typing import Protocol

#: The wall clock and the monotonic clock may differ by this much over the time between two moments, in seconds.
_CLOCKS_AGREE_S = 60.0


@dataclass(frozen=True, slots=True)
class Moment:
    """A moment on one machine, as seen by two clocks.

    ``boot`` names the run of the operating system (empty: unknown), ``monotonic_s`` counts seconds within it, the same
    for all its processes, and ``wall_ms`` is the wall clock in epoch milliseconds.
    """

    boot: str
    monotonic_s: float
    wall_ms: int

    def seconds_since(self, earlier: Moment) -> float | None:
        """How much later this moment is; None where the clocks cannot tell.

        They cannot when the machine was started again in between, or when the two clocks disagree: somebody set the
        wall clock, or the machine was suspended.
        """
        if not self.boot or self.boot != earlier.boot:
            return None
        passed = self.monotonic_s - earlier.monotonic_s
        by_wall = (self.wall_ms - earlier.wall_ms) / 1000
        return passed if passed >= 0 and abs(passed - by_wall) <= _CLOCKS_AGREE_S else None


class Clock(Protocol):
    """Wall time for people and TTLs; monotonic time for deadlines."""

    def time_ns(self) -> int:
        """Nanoseconds since the epoch."""

    def monotonic(self) -> float:
        """Seconds, never going backwards."""

    def sleep(self, seconds: float) -> None: ...

    def wait(self, changed: Condition, seconds: float) -> bool:
        """Wait on a condition that is held, at most so many seconds. Returns: whether somebody told it."""

    def give_up(self) -> None:
        """End what is in progress: from now on every deadline has passed, and no wait lasts."""


def wait_for(clock: Clock, changed: Condition, ready: Callable[[], bool], seconds: float | None) -> bool:
    """Wait on a condition that is held until ``ready``, at most so many seconds; None waits as long as it takes.

    Returns: whether it is ready.
    """
    if seconds is None:
        return changed.wait_for(ready)
    until = clock.monotonic() + seconds
    while not ready():
        left = until - clock.monotonic()
        if left <= 0:
            return False
        clock.wait(changed, left)
    return True
