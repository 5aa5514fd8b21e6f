"""The suites that every blob store and every state backend passes: ``pytest``, in this directory."""

from __future__ import annotations

from uuid import uuid4

import pytest
from shared_directory import SharedDirectory
from sqlite_blobs import SqliteBlobStore

from statemgr.testing.conformance import BlobStoreSuite, StateBackendSuite


class TestSqlite(BlobStoreSuite):
    """Each test gets an empty store."""

    @pytest.fixture
    def blobs(self, tmp_path):
        store = SqliteBlobStore(tmp_path / "blobs.db")
        yield store
        store.close()


class TestSharedDirectory(StateBackendSuite):
    """Each test gets a job that has never run, on a broker: `statemgr dev up --no-s3`."""

    @pytest.fixture
    def settings(self, tmp_path, monkeypatch):
        monkeypatch.setenv("SHARED_STATE", str(tmp_path / "shared"))
        factory = f"{SharedDirectory.__module__}.{SharedDirectory.__name__}"  # or the entry point's name
        return {
            "job.name": f"proof-{uuid4().hex}",
            "kafka.bootstrap.servers": "localhost:9092",
            "task.backup.factories": [factory],
            "task.restore.factories": [factory],
        }
