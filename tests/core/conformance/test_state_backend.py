"""Every state backend passes the public conformance suite on each kind of storage that it supports."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from secrets import token_hex

import pytest

from statemgr.blobs.memory import forget
from statemgr.testing.conformance import StateBackendSuite
from statemgr.testing.memory_clients import served
from statemgr.testing.memory_kafka import MemoryBroker
from tests.jobs import job_mapping
from tests.servers import KafkaServer


class TestKafkaChangelog(StateBackendSuite):
    """One changelog topic for each store."""

    @pytest.fixture
    def settings(self, kafka: KafkaServer, tmp_path: Path) -> Mapping[str, object]:
        """Return a job that only has changelogs."""
        return job_mapping(kafka, tmp_path, backup=("kafka-changelog",))


class TestInMemory(StateBackendSuite):
    """Both backends on the in-memory broker and blob store of ``JobTester``."""

    @pytest.fixture(params=["kafka-changelog", "blob-store"])
    def settings(self, request: pytest.FixtureRequest) -> Iterator[Mapping[str, object]]:
        """Return a job that only has this backend."""
        name = token_hex(8)
        with served(MemoryBroker(), f"memory:{name}"):
            yield {
                "job.name": "orders",
                "kafka.bootstrap.servers": f"memory:{name}",
                "blob.store.uri": f"memory://{name}",
                "task.backup.factories": [request.param],
            }
        forget(name)


class TestAnotherPackage(StateBackendSuite):
    """The backend of examples/plug_ins, which docs/extending.md shows. It copies the state into a directory."""

    @pytest.fixture
    def settings(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Mapping[str, object]]:
        """Return a job that only has this backend, on an in-memory broker."""
        monkeypatch.setenv("SHARED_STATE", str(tmp_path / "shared"))
        factory = "examples.plug_ins.shared_directory:SharedDirectory"
        name = token_hex(8)
        with served(MemoryBroker(), f"memory:{name}"):
            yield {
                "job.name": "orders",
                "kafka.bootstrap.servers": f"memory:{name}",
                "task.backup.factories": [factory],
                "task.restore.factories": [factory],
            }


class TestBlobStore(StateBackendSuite):
    """Snapshots, and the changes after them."""

    @pytest.fixture(params=["1 commit", "50 commits"])
    def settings(self, request: pytest.FixtureRequest, kafka: KafkaServer, tmp_path: Path) -> Mapping[str, object]:
        """Return a job that makes a snapshot at each commit, or one with segments in between."""
        mapping = job_mapping(kafka, tmp_path, backup=("blob-store",))
        return mapping | {"task.commit.snapshot.interval": [request.param]}
