"""The tests run on several workers, and some of them stay together on one worker."""

from __future__ import annotations

import pytest


@pytest.mark.xdist_group("together")
def test_a_group_stays_on_one_worker(request: pytest.FixtureRequest) -> None:
    """The plugin spreads tests by their IDs, which include the groups."""
    if not getattr(request.config.option, "loadgroup", False):
        pytest.skip("needs --dist loadgroup")
    assert request.node.nodeid.endswith("@together")
