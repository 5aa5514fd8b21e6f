"""The port of time. No I/O here."""

from __future__ import annotations

from typing import Protocol


class Clock(Protocol):
    """Wall time for people and TTLs; monotonic time for deadlines."""

    def time_ns(self) -> int:
        """Nanoseconds since the epoch."""

    def monotonic(self) -> float:
        """Seconds, never going backwards."""

    def sleep(self, seconds: float) -> None: ...
