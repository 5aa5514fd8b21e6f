"""Histories that a seed decides (:mod:`tests.simulation`)."""

from __future__ import annotations

import pytest

from tests.simulation.__main__ import lived
from tests.simulation.known_faults import KNOWN

#: Seeds in which each known fault must show.
_SEEDS = 2000


def test_histories() -> None:
    """Owners die, sleep too long and lose answers. Whoever opens a task finds the state of the newest checkpoint. At
    peace every backend restores it."""
    failed = [result for result in lived(0, 60, 2) if result["error"] is not None]
    assert not failed


def test_a_seed_is_a_history() -> None:
    """The same seed gives the same history, turn by turn and byte by byte."""
    one, other = ({result["seed"]: result["fingerprint"] for result in lived(0, 12, jobs)} for jobs in (1, 2))
    assert one == other


@pytest.mark.long
@pytest.mark.parametrize("fault", sorted(KNOWN))
def test_a_known_fault_is_found(fault: str) -> None:
    """A fault that is put back shows."""
    assert any(result["error"] is not None for result in lived(0, _SEEDS, 2, fault))
