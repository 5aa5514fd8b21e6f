"""Real RocksDB directories through ``blob-store``, on every kind of blob store, including S3."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from statemgr.blobs import open_blob_store
from statemgr.config import JobConfig
from statemgr.local.directories import StoreDirectories
from statemgr.local.machine import SystemClock, system_ids
from statemgr.local.stores import open_store
from statemgr.model.checkpoint import BlobMarker
from statemgr.ports import BlobStore, CommittedDirectory, LocalStore, list_blobs
from tests.blob_snapshots import Snapshots, finished, index_of


@pytest.fixture(params=["memory", "file", "s3"])
def blobs(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[BlobStore]:
    """Open an empty blob store of each kind, as a job gets it."""
    settings: dict[str, object] = {"job.name": "orders", "blob.store.uri": f"memory://{tmp_path}"}
    if request.param == "file":
        settings["blob.store.uri"] = (tmp_path / "blobs").as_uri()
    if request.param == "s3":
        s3 = request.getfixturevalue("s3")
        settings |= {
            "blob.store.uri": f"s3://{s3.bucket}/{s3.fresh_prefix('snapshots')}",
            "blob.store.s3.endpoint": s3.endpoint,
            "blob.store.s3.region": s3.region,
            "blob.store.s3.access.key": s3.access_key,
            "blob.store.s3.secret.key": s3.secret_key,
            "blob.store.s3.path.style": True,
        }
    store = open_blob_store(JobConfig.from_mapping(settings), SystemClock())
    yield store
    store.close()


@pytest.fixture
def snapshots(blobs: BlobStore, tmp_path: Path) -> Iterator[Snapshots]:
    """Create the backend of one store, with parts smaller than RocksDB's files."""
    made = Snapshots(tmp_path / "work", blobs, SystemClock(), part_size=20_000)
    yield made
    made.transfer.close()


def checkpoint(store: LocalStore, directories: StoreDirectories, state_id: str) -> CommittedDirectory:
    """Make a finished local directory of the store's current state."""
    staging = directories.staging()
    store.flush()
    store.checkpoint(staging)
    return directories.adopt(staging, state_id, directories.finished(staging).files)


def change(store: LocalStore, model: dict[bytes, bytes], chance: random.Random) -> None:
    """Apply random puts and deletes to both the store and the model."""
    changes: list[tuple[bytes, bytes | None]] = []
    for _ in range(2_000):
        key = b"%05d" % chance.randrange(20_000)
        value = chance.randbytes(chance.randrange(200)) if chance.random() < 0.8 else None
        changes.append((key, value))
        model.pop(key, None)
        if value is not None:
            model[key] = value
    store.write(changes)


@pytest.mark.parametrize("kind", ["rocksdb", "memory"])
def test_every_commit_comes_back(snapshots: Snapshots, tmp_path: Path, kind: str) -> None:
    """A4, A5, A10, A19, A40: a real store commits incrementally, and each retained commit is restored exactly.

    A restore on this host reuses files; a restore on another host fetches all of them.
    """
    snapshots.kind = kind
    directories = StoreDirectories(tmp_path / "local", SystemClock(), system_ids())
    live = directories.clone(None)
    store = open_store(kind, live, {})
    chance, model = random.Random(7), dict[bytes, bytes]()
    commits: list[tuple[BlobMarker, dict[bytes, bytes]]] = []
    for number in range(5):
        change(store, model, chance)
        directory = checkpoint(store, directories, f"state-{number}")
        base = commits[-1][0] if commits else None
        prepared = snapshots.prepare_directory(finished(directory), base, attempt=f"attempt-{number}")
        assert isinstance(prepared.marker, BlobMarker)
        assert snapshots.transfer.remove_ttl_all(prepared.added_blobs) == {}
        commits.append((prepared.marker, dict(model)))
        if number >= 2:
            snapshots.clean_up([commits[number - 2][0]], [commits[number][0], commits[number - 1][0]])
    store.close()
    retained = commits[-2:]
    assert snapshots.names() == snapshots.referenced(*(marker for marker, _ in retained))

    for marker, expected in retained:
        snapshots.reopen()
        for reusable in ((), directories.reusable()):
            staging = tmp_path / "restored" / f"{index_of(marker).blob_id.split('/')[-2]}-{bool(reusable)}"
            restored = snapshots.restore_into(marker, staging, reusable)
            # A20: lock and log files are not part of the state
            assert not any(name.startswith(("LOCK", "LOG")) for name in restored.files or {})
            opened = open_store(kind, staging, {})
            assert dict(opened.scan(None, None)) == expected
            opened.close()
    directories.close()


def test_unchanged_files_are_not_uploaded_again(snapshots: Snapshots, tmp_path: Path) -> None:
    """A5: a commit after a small change uploads little, whatever the size of the state."""
    directories = StoreDirectories(tmp_path / "local", SystemClock(), system_ids())
    store = open_store("rocksdb", directories.clone(None), {})
    chance = random.Random(3)
    store.write([(b"%06d" % n, chance.randbytes(100)) for n in range(20_000)])
    first = snapshots.prepare_directory(finished(checkpoint(store, directories, "s1")), attempt="a1")
    store.write([(b"000001", b"changed")])
    second = snapshots.prepare_directory(finished(checkpoint(store, directories, "s2")), first.marker, attempt="a2")
    sizes = {info.blob_id: info.size for info in list_blobs(snapshots.blobs, "")}
    assert sum(sizes[name] for name in first.added_blobs) > 2_000_000
    assert sum(sizes[name] for name in second.added_blobs) < 100_000
    store.close()
    directories.close()
