"""The real clock, and IDs made from it and from the operating system's random source."""

from __future__ import annotations

import time
import uuid

from statemgr.ids import IdSource


class SystemClock:
    """Wall time, monotonic time and waiting of this machine."""

    def time_ns(self) -> int:
        """Nanoseconds since the epoch."""
        return time.time_ns()

    def monotonic(self) -> float:
        """Seconds, never going backwards."""
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        """Wait ``seconds`` (nothing when it is not positive)."""
        if seconds > 0:
            time.sleep(seconds)


def system_ids() -> IdSource:
    """IDs from the wall clock and random tokens of 32 hexadecimal digits."""
    return IdSource(time_ns=time.time_ns, token=lambda: uuid.uuid4().hex)
