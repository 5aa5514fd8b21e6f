"""Every state backend passes the public conformance suite on each kind of storage that it supports."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from secrets import token_hex

import pytest

from examples.plug_ins.shared_directory import SharedBackup, SharedDirectory
from statemgr.blobs.memory import forget
from statemgr.model.checkpoint import Marker, OpaqueMarker
from statemgr.ports import PreparedBackup, StoreSnapshot
from statemgr.testing.conformance import StateBackendSuite
from statemgr.testing.conformance.state_backend import OnMachine, Opened
from statemgr.testing.memory_clients import served
from statemgr.testing.memory_kafka import MemoryBroker
from tests.jobs import job_mapping
from tests.servers import KafkaServer

rejected = pytest.mark.xfail(strict=True, raises=AssertionError)


def on_shared_directory(
    directory: Path, monkeypatch: pytest.MonkeyPatch, factory: str
) -> Iterator[Mapping[str, object]]:
    """Yield the keys of a job with a backend that keeps its state below ``SHARED_STATE``."""
    monkeypatch.setenv("SHARED_STATE", str(directory / "shared"))
    name = token_hex(8)
    with served(MemoryBroker(), f"memory:{name}"):
        yield {
            "job.name": "orders",
            "kafka.bootstrap.servers": f"memory:{name}",
            "task.backup.factories": [factory],
            "task.restore.factories": [factory],
        }


class OnePath(SharedDirectory):
    """Keeps the state of a store in one path for all tasks and commits, and verifies nothing."""

    def backup_manager(self) -> SharedBackup:
        return _OnePathBackup(self._root)


class _OnePathBackup(SharedBackup):
    def prepare(self, snapshot: StoreSnapshot, base: Marker | None, *, portable: bool) -> PreparedBackup:
        name = f"{snapshot.identity.job_key}/{snapshot.identity.store}"
        shutil.rmtree(self._root / name, ignore_errors=True)
        shutil.copytree(snapshot.directory.path, self._root / name)
        return PreparedBackup(OpaqueMarker(json.dumps({"name": name, "files": {}}).encode()), added_bytes=0)


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
        yield from on_shared_directory(tmp_path, monkeypatch, "examples.plug_ins.shared_directory:SharedDirectory")

    def test_what_is_prepared_is_on_the_disk(self, opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
        """The copy of a commit, and the directories that lead to it, are synced before the publish."""
        synced: set[int] = set()
        fsync = os.fsync
        monkeypatch.setattr(os, "fsync", lambda fd: (synced.add(os.fstat(fd).st_ino), fsync(fd)))
        with opened(0) as task:
            task.store("totals").put(b"a", b"1")
            task.commit({"orders-0": 1})
        shared = Path(os.environ["SHARED_STATE"])
        assert {path.stat().st_ino for path in (shared, *shared.rglob("*"))} <= synced


class TestOnePathForAll(StateBackendSuite):
    """A wrong backend, whose commits overwrite what others need: the suite says so three times."""

    @pytest.fixture
    def settings(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Mapping[str, object]]:
        """Return a job that only has this backend, on an in-memory broker."""
        yield from on_shared_directory(tmp_path, monkeypatch, f"{__name__}:OnePath")

    @rejected
    def test_a_commit_that_was_not_published_is_gone(self, opened: Opened) -> None:
        """It has overwritten the state of the last commit."""
        super().test_a_commit_that_was_not_published_is_gone(opened)

    @rejected
    def test_an_older_checkpoint_comes_back(self, opened: Opened, on_machine: OnMachine) -> None:
        """A later commit has overwritten it."""
        super().test_an_older_checkpoint_comes_back(opened, on_machine)

    @rejected
    def test_each_task_has_its_own_state(self, opened: Opened) -> None:
        """One task has overwritten the other one's."""
        super().test_each_task_has_its_own_state(opened)


class TestBlobStore(StateBackendSuite):
    """Snapshots, and the changes after them."""

    @pytest.fixture(params=["1 commit", "50 commits"])
    def settings(self, request: pytest.FixtureRequest, kafka: KafkaServer, tmp_path: Path) -> Mapping[str, object]:
        """Return a job that makes a snapshot at each commit, or one with segments in between."""
        mapping = job_mapping(kafka, tmp_path, backup=("blob-store",))
        return mapping | {"task.commit.snapshot.interval": [request.param]}
