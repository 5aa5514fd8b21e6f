"""The system's clock and IDs."""

from __future__ import annotations

from statemgr.ids import CheckpointId
from statemgr.local.clock import SystemClock, system_ids


def test_clock_moves_on() -> None:
    """A sleep takes at least as long as requested, and a negative one does not fail."""
    clock = SystemClock()
    before = clock.monotonic()
    clock.sleep(0.01)
    clock.sleep(-1)
    assert clock.monotonic() - before >= 0.01
    assert clock.time_ns() > 1_600_000_000 * 10**9


def test_ids_are_unique() -> None:
    """IDs made in quick succession differ, and a checkpoint ID has the known form."""
    ids = system_ids()
    assert len({ids.attempt_id() for _ in range(1000)}) == 1000
    assert CheckpointId.parse(str(ids.checkpoint_id())).millis > 1_600_000_000_000
