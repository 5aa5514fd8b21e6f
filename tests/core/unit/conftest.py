"""Fixtures of several test files."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from statemgr.testing.memory_servers import MemoryServers


@pytest.fixture
def servers(request: pytest.FixtureRequest) -> Iterator[MemoryServers]:
    """Servers in memory, of the job ``CONFIG`` of the test's file."""
    made = MemoryServers(request.module.CONFIG)
    made.open()
    yield made
    made.close()
