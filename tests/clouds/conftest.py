"""A server of each cloud's blob store. A machine that cannot install one skips its tests, and says so."""

from __future__ import annotations

import pytest

from statemgr.errors import PrerequisiteMissing
from tests.servers import CloudServer, cloud_server


@pytest.fixture(params=["gcs", "azure"])
def cloud(request: pytest.FixtureRequest) -> CloudServer:
    """Return the run's server of each cloud."""
    try:
        return cloud_server(request.param)
    except PrerequisiteMissing as missing:
        pytest.skip(f"{missing.message}: {missing.hint}")
