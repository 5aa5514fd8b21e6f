"""The suite runs on several workers, and some tests stay together on one of them."""

from __future__ import annotations

import pytest


@pytest.mark.xdist_group("together")
def test_a_group_stays_on_one_worker(request: pytest.FixtureRequest) -> None:
    """The plugin spreads tests by their IDs, and the groups reach it as a part of these."""
    if not getattr(request.config.option, "loadgroup", False):
        pytest.skip("needs --dist loadgroup")
    assert request.node.nodeid.endswith("@together")
