"""The clock, the IDs and the threads of a standby can be injected."""

from __future__ import annotations

from pathlib import Path

from statemgr.operations.standby.process import Standby
from tests.core.unit.test_injected import World


def test_a_standby_uses_what_it_is_given(tmp_path: Path) -> None:
    """It makes no services of its own."""
    world = World(tmp_path)
    with Standby(world.config, services=world.services):
        assert len(world.made) == 1
