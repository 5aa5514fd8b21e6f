"""Clocks of machines that do not run all the time."""

from __future__ import annotations

from statemgr.local.machine import SystemClock


class SuspendedClock(SystemClock):
    """The clock of a machine that was suspended for some seconds: only its wall clock has gone on."""

    suspended_s = 0.0

    def time_ns(self) -> int:
        """The time on the wall."""
        return super().time_ns() + int(self.suspended_s * 1e9)
