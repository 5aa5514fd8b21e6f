"""Both clouds' stores pass the public conformance suite on real servers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from statemgr.blobs import open_raw_blob_store
from statemgr.config import JobConfig
from statemgr.local.machine import SystemClock
from statemgr.ports import BlobStore
from statemgr.testing.conformance import BlobStoreSuite
from tests.servers import CloudServer

pytestmark = [pytest.mark.integration, pytest.mark.heavy]


class TestClouds(BlobStoreSuite):
    """The bare adapters."""

    @pytest.fixture
    def blobs(self, cloud: CloudServer) -> Iterator[BlobStore]:
        """Open an empty store."""
        config = JobConfig.from_mapping({"job.name": "orders", **cloud.settings("conformance")})
        store = open_raw_blob_store(config, SystemClock())
        yield store
        store.close()
