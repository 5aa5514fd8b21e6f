"""Every state backend passes the suite that others get, on each kind of storage that it has."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from statemgr.testing.conformance import StateBackendSuite
from tests.jobs import job_mapping
from tests.servers import KafkaServer


class TestKafkaChangelog(StateBackendSuite):
    """One changelog topic for each store."""

    @pytest.fixture
    def settings(self, kafka: KafkaServer, tmp_path: Path) -> Mapping[str, object]:
        """A job that only has changelogs."""
        return job_mapping(kafka, tmp_path, backup=("kafka-changelog",))


class TestBlobStore(StateBackendSuite):
    """Snapshots, and the changes after them."""

    @pytest.fixture(params=["1 commit", "50 commits"])
    def settings(self, request: pytest.FixtureRequest, kafka: KafkaServer, tmp_path: Path) -> Mapping[str, object]:
        """A job with a snapshot at each commit, and one with segments in between."""
        mapping = job_mapping(kafka, tmp_path, backup=("blob-store",))
        return mapping | {"task.commit.snapshot.interval": [request.param]}
