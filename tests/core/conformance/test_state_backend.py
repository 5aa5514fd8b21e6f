"""Every state backend passes the public conformance suite on each kind of storage that it supports."""

from __future__ import annotations

import io
import json
import os
import shutil
import tarfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from secrets import token_hex

import pytest

from examples.plug_ins.shared_directory import SharedBackup, SharedDirectory, SharedRestore
from statemgr.blobs.memory import forget
from statemgr.errors import CorruptBlob, StatemgrError
from statemgr.model.checkpoint import Marker, OpaqueMarker
from statemgr.model.commit import Change
from statemgr.ports import PreparedBackup, Restored, RestoreRequest, StoreIdentity, StoreSnapshot
from statemgr.services import Services
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


def in_memory(
    directory: Path, monkeypatch: pytest.MonkeyPatch, kind: type[SharedDirectory]
) -> Iterator[Mapping[str, object]]:
    """As :func:`on_shared_directory`, with a blob store in memory."""
    name = token_hex(8)
    for settings in on_shared_directory(directory, monkeypatch, f"{__name__}:{kind.__name__}"):
        yield {**settings, "blob.store.uri": f"memory://{name}"}
    forget(name)


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


class KeepsChanges(SharedDirectory):
    """Keeps the changes of each commit in a file of ``SHARED_STATE``."""

    def __init__(self, services: Services) -> None:
        super().__init__(services)
        self.services = services

    def backup_manager(self) -> SharedBackup:
        return _ChangesBackup(self._root)

    def restore_manager(self) -> SharedRestore:
        return _ChangesRestore(self.services, self._root)


class _ChangesBackup(SharedBackup):
    needs_changes, needs_directory, fills_from_changes = True, False, True

    def prepare(self, snapshot: StoreSnapshot, base: Marker | None, *, portable: bool) -> PreparedBackup:
        chain = json.loads(base.data)["names"] if isinstance(base, OpaqueMarker) else []
        path = self._root / f"{snapshot.identity.job_key}/{snapshot.identity}/{snapshot.attempt}"
        path.parent.mkdir(parents=True, exist_ok=True)
        changes = self.changes(snapshot, base)
        path.write_text(json.dumps([[key.hex(), None if value is None else value.hex()] for key, value in changes]))
        names = [*chain, str(path)]
        return PreparedBackup(OpaqueMarker(json.dumps({"name": names[0], "names": names}).encode()), added_bytes=1)

    def changes(self, snapshot: StoreSnapshot, base: Marker | None) -> Iterable[Change]:
        return snapshot.content if base is None else snapshot.changes

    def carry(self, identity: StoreIdentity, base: Marker) -> Marker | None:
        return base

    def clean_up(self, identity: StoreIdentity, evicted: Sequence[Marker], retained: Sequence[Marker]) -> None:
        """Delete nothing."""


class _ChangesRestore(SharedRestore):
    def __init__(self, services: Services, root: Path) -> None:
        super().__init__(root)
        self._services = services

    def restore(self, request: RestoreRequest) -> Restored:
        assert isinstance(request.marker, OpaqueMarker)
        request.staging.mkdir(parents=True)
        config = self._services.config.store(request.identity.store)
        store = self._services.open_store(config, request.staging, False)
        for name in json.loads(request.marker.data)["names"]:
            changes = json.loads(Path(name).read_text())
            store.write(
                [(bytes.fromhex(key), None if value is None else bytes.fromhex(value)) for key, value in changes]
            )
        store.flush()
        store.close()
        return Restored(files=None)


class FillsFromChanges(KeepsChanges):
    """Takes the changes of a commit for the whole state."""

    def backup_manager(self) -> SharedBackup:
        return _OnlyChanges(self._root)


class _OnlyChanges(_ChangesBackup):
    def changes(self, snapshot: StoreSnapshot, base: Marker | None) -> Iterable[Change]:
        return snapshot.changes


class TrustsPrepared(KeepsChanges):
    """Leaves out what an earlier ``prepare`` has written, published or not."""

    def backup_manager(self) -> SharedBackup:
        return _OnlyNew(self._root)


class _OnlyNew(_ChangesBackup):
    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self._done: dict[tuple[str, int], int] = {}

    def changes(self, snapshot: StoreSnapshot, base: Marker | None) -> Iterable[Change]:
        found, place = snapshot.changes, (str(snapshot.identity), id(snapshot.changes.session))
        done, self._done[place] = self._done.get(place, 0), found.end
        return snapshot.content if base is None else found.since(max(found.first, done))


class InBlobs(SharedDirectory):
    """Keeps the whole state in a blob of the job's store."""

    def __init__(self, services: Services) -> None:
        self._services = services

    def backup_manager(self) -> SharedBackup:
        return _BlobBackup(self._services)

    def restore_manager(self) -> SharedRestore:
        return _BlobRestore(self._services)


class _BlobBackup(SharedBackup):
    def __init__(self, services: Services) -> None:
        self._services = services

    def prepare(self, snapshot: StoreSnapshot, base: Marker | None, *, portable: bool) -> PreparedBackup:
        name = f"{snapshot.identity.job_key}/{token_hex(8)}"
        data = io.BytesIO()
        with tarfile.open(fileobj=data, mode="w") as tar:
            tar.add(snapshot.directory.path, "state")
        self._services.blobs().put(name, data.getvalue(), ttl_days=7)
        marker = OpaqueMarker(name.encode())
        added = tuple(self.added_blobs(snapshot.identity, marker))
        return PreparedBackup(marker, added_blobs=added, added_bytes=1)

    def carry(self, identity: StoreIdentity, base: Marker) -> Marker | None:
        return base

    def clean_up(self, identity: StoreIdentity, evicted: Sequence[Marker], retained: Sequence[Marker]) -> None:
        """Leave what is evicted to `gc`."""

    def added_blobs(self, identity: StoreIdentity, marker: Marker) -> Sequence[str]:
        return self.referenced_blobs(identity, marker)

    def referenced_blobs(self, identity: StoreIdentity, marker: Marker) -> Sequence[str]:
        assert isinstance(marker, OpaqueMarker)
        return (marker.data.decode(),)


class _BlobRestore(SharedRestore):
    def __init__(self, services: Services) -> None:
        self._services = services

    def restore(self, request: RestoreRequest) -> Restored:
        assert isinstance(request.marker, OpaqueMarker)
        data = bytearray(1 << 23)
        with self._services.blobs().get(request.marker.data.decode()) as reader:
            at = 0
            while count := reader.readinto(memoryview(data)[at:]):
                at += count
        with tarfile.open(fileobj=io.BytesIO(data[:at])) as tar:
            tar.extractall(request.staging, filter="data")
        for path in (request.staging / "state").iterdir():
            path.rename(request.staging / path.name)
        (request.staging / "state").rmdir()
        return Restored(files=None)


class LeavesTTLs(InBlobs):
    """Does not say which blobs a commit added."""

    def backup_manager(self) -> SharedBackup:
        return _NothingAdded(self._services)


class _NothingAdded(_BlobBackup):
    def added_blobs(self, identity: StoreIdentity, marker: Marker) -> Sequence[str]:
        return ()


class NamesNothing(KeepsChanges):
    """Does not say which blobs it needs. It needs none."""

    def backup_manager(self) -> SharedBackup:
        return _NamesNothing(self._root)


class _NamesNothing(_ChangesBackup):
    def referenced_blobs(self, identity: StoreIdentity, marker: Marker) -> None:
        """Return what a backend returns by default."""


class NamesNoBlobs(InBlobs):
    """Does not say which blobs a checkpoint needs."""

    def backup_manager(self) -> SharedBackup:
        return _NothingReferenced(self._services)


class _NothingReferenced(_BlobBackup):
    def added_blobs(self, identity: StoreIdentity, marker: Marker) -> Sequence[str]:
        return super().referenced_blobs(identity, marker)

    def referenced_blobs(self, identity: StoreIdentity, marker: Marker) -> Sequence[str]:
        return ()


class TestKafkaChangelog(StateBackendSuite):
    """One changelog topic for each store."""

    @pytest.fixture
    def settings(self, kafka: KafkaServer, tmp_path: Path) -> Mapping[str, object]:
        """Return a job that only has changelogs."""
        return job_mapping(kafka, tmp_path, backup=("kafka-changelog",))


def on_memory_servers(*factories: str) -> Iterator[Mapping[str, object]]:
    """Yield a job with these backends, on servers in memory."""
    name = token_hex(8)
    with served(MemoryBroker(), f"memory:{name}"):
        yield {
            "job.name": "orders",
            "kafka.bootstrap.servers": f"memory:{name}",
            "blob.store.uri": f"memory://{name}",
            "task.backup.factories": [*factories],
        }
    forget(name)


class TestInMemory(StateBackendSuite):
    """Both backends on the in-memory broker and blob store of ``JobTester``."""

    @pytest.fixture(params=["kafka-changelog", "blob-store"])
    def settings(self, request: pytest.FixtureRequest) -> Iterator[Mapping[str, object]]:
        """Return a job that only has this backend."""
        yield from on_memory_servers(request.param)


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

    def test_a_copy_that_lacks_a_file_is_damaged(self, opened: Opened) -> None:
        """Another backend supplies the state then, and no retry helps."""
        with opened(0) as task:
            task.store("totals").put(b"a", b"1")
            task.commit({"orders-0": 1})
        next(Path(os.environ["SHARED_STATE"]).rglob("*/totals/*/CURRENT")).unlink()
        with pytest.raises(CorruptBlob, match="is gone"), opened(1):
            pass


class TestOtherKinds(StateBackendSuite):
    """A backend that keeps changes, and one that keeps the state in the job's blob store."""

    @pytest.fixture(params=[KeepsChanges, InBlobs])
    def settings(
        self, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> Iterator[Mapping[str, object]]:
        """Return a job that only has this backend, on an in-memory broker."""
        yield from in_memory(tmp_path, monkeypatch, request.param)


class TestWrongBackends:
    """Each lacks one thing that a backend must do, and one test of the suite finds it."""

    on_machine, opened = StateBackendSuite.on_machine, StateBackendSuite.opened

    @pytest.fixture
    def settings(
        self, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> Iterator[Mapping[str, object]]:
        """Return a job that only has this backend, on an in-memory broker."""
        yield from in_memory(tmp_path, monkeypatch, request.param)

    @pytest.mark.parametrize("settings", [TrustsPrepared], indirect=True)
    def test_what_was_prepared_in_vain(self, opened: Opened) -> None:
        """It is missing in the next commit."""
        with pytest.raises(AssertionError):
            StateBackendSuite().test_a_commit_after_one_that_failed_has_the_changes_of_both(opened)

    @pytest.mark.parametrize("settings", [FillsFromChanges], indirect=True)
    def test_a_fill_without_older_state(
        self, settings: Mapping[str, object], on_machine: OnMachine, opened: Opened, tmp_path: Path
    ) -> None:
        """It has the changes of one commit only."""
        with pytest.raises(AssertionError):
            StateBackendSuite().test_a_backend_that_is_switched_on_gets_the_whole_state(
                settings, on_machine, opened, tmp_path
            )

    @pytest.mark.parametrize("settings", [LeavesTTLs, NamesNoBlobs], indirect=True)
    def test_blobs_that_are_deleted_too_early(self, opened: Opened, on_machine: OnMachine) -> None:
        """A restore does not find them."""
        with pytest.raises(StatemgrError):
            StateBackendSuite().test_what_expires_and_what_gc_deletes_is_not_needed(opened, on_machine)

    @pytest.mark.parametrize("settings", [NamesNothing], indirect=True)
    def test_blobs_that_are_not_named(self, opened: Opened, on_machine: OnMachine) -> None:
        """`statemgr gc` would refuse to run."""
        with pytest.raises(AssertionError, match="write referenced_blobs"):
            StateBackendSuite().test_what_expires_and_what_gc_deletes_is_not_needed(opened, on_machine)


class TestWithoutBlobs(StateBackendSuite):
    """Without a blob store, nobody asks for the names of blobs. The key of the backend is a text."""

    @pytest.fixture
    def settings(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Mapping[str, object]]:
        """Return a job that only has this backend, on an in-memory broker."""
        factory = f"{__name__}:NamesNothing"
        for settings in on_shared_directory(tmp_path, monkeypatch, factory):
            yield {**settings, "task.backup.factories": factory}


class TestBothBackends:
    """Both of this package at once: none is left that could have the state before."""

    on_machine, opened = StateBackendSuite.on_machine, StateBackendSuite.opened

    @pytest.fixture
    def settings(self) -> Iterator[Mapping[str, object]]:
        """Return a job in memory."""
        yield from on_memory_servers("kafka-changelog", "blob-store")

    def test_one_that_is_switched_on(
        self, settings: Mapping[str, object], on_machine: OnMachine, opened: Opened, tmp_path: Path
    ) -> None:
        """The test is skipped."""
        with pytest.raises(pytest.skip.Exception, match="every backend"):
            StateBackendSuite().test_a_backend_that_is_switched_on_gets_the_whole_state(
                settings, on_machine, opened, tmp_path
            )


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
