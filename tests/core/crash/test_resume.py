"""A restore that was killed or that failed continues where it stopped."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from statemgr import JobConfig
from statemgr.backends.changelog.restore import ChangelogRestore
from statemgr.blobs.file import FileBlobStore
from statemgr.errors import (
    AccessDenied,
    CorruptBlob,
    DiskFull,
    MissingBlob,
    MissingState,
    StatemgrError,
    UnavailableError,
)
from statemgr.flows.opening.restore import restore_store
from statemgr.local.machine import SystemClock
from statemgr.model.checkpoint import BlobMarker, ChangelogMarker
from statemgr.model.plan import StorePlan
from statemgr.ports import Restored, no_progress
from statemgr.wiring import open_services
from tests.blob_snapshots import Snapshots, index_of, read_tree
from tests.core.crash.resume_child import STORE, TASK, restore

ROOT = Path(__file__).resolve().parents[3]
PART = 100_000
TREE = {f"{n}.sst": random.Random(n).randbytes(10 * PART) for n in range(4)} | {"CURRENT": b"MANIFEST-1\n"}
SIZE = sum(map(len, TREE.values()))


@pytest.fixture
def config(tmp_path: Path) -> JobConfig:
    """Return a job whose blobs are files. It fetches one part at a time, so that a test knows what it fetched."""
    return JobConfig.from_mapping(
        {
            "job.name": "orders",
            "state.dir": str(tmp_path / "state"),
            "blob.store.uri": f"file://{tmp_path}/blobs",
            "blob.store.parallelism": 1,
            "blob.store.retry.policy.max.retries": 0,
            f"stores.{STORE}.backup.factories": ["blob-store"],
            f"stores.{STORE}.restore.factories": ["blob-store"],
        }
    )


@pytest.fixture
def marker(tmp_path: Path) -> Iterator[BlobMarker]:
    """Commit a snapshot of the tree."""
    snapshots = Snapshots(tmp_path / "source", FileBlobStore(tmp_path / "blobs", SystemClock()), SystemClock())
    yield snapshots.commit(TREE)
    snapshots.transfer.close()


def area(config: JobConfig) -> Path:
    """Return the store's staging area."""
    return Path(config.state_dir, "orders", "1", TASK.replace(" ", "_"), STORE, "staging")


def staging(config: JobConfig) -> list[str]:
    """Return the names in the store's staging area."""
    return os.listdir(area(config))


def fail(monkeypatch: pytest.MonkeyPatch, number: int, error: StatemgrError) -> None:
    """Let the n-th request to the blob store from now on fail."""
    get, calls = FileBlobStore.get, [0]

    def failing(self: FileBlobStore, blob_id: str, *more: object) -> object:
        calls[0] += 1
        if calls[0] == number:
            raise error
        return get(self, blob_id, *more)  # type: ignore[arg-type]

    monkeypatch.setattr(FileBlobStore, "get", failing)


def killed(config: JobConfig, marker: BlobMarker, die_at: int) -> None:
    """Start a restore in a process that dies before it has finished."""
    assert marker.inline is not None
    order = {"config": config.to_mapping(), "marker": marker.inline.hex(), "die_at": die_at}
    command = [sys.executable, "-m", "tests.core.crash.resume_child", json.dumps(order)]
    child = subprocess.run(command, cwd=ROOT, timeout=600)
    assert child.returncode == -signal.SIGKILL


def check_whole(config: JobConfig, marker: BlobMarker, at_most: int) -> None:
    """Check that a restore is exact, fetches at most ``at_most`` bytes and leaves nothing unfinished."""
    directory, restored = restore(config, marker)
    assert directory is not None
    assert read_tree(directory.path) == TREE
    assert restored.bytes_fetched <= at_most
    assert restored.bytes_fetched + restored.bytes_reused >= SIZE - len(TREE["CURRENT"])
    assert staging(config) == []


def test_a_killed_restore_goes_on_where_it_stopped(config: JobConfig, marker: BlobMarker) -> None:
    """A restore does not fetch again the parts that killed processes fetched, even after several crashes."""
    killed(config, marker, 11)
    killed(config, marker, 16)
    check_whole(config, marker, SIZE - 24 * PART + index_of(marker).size)


def test_what_a_killed_restore_left_is_verified(config: JobConfig, marker: BlobMarker) -> None:
    """Invariant 9: a restore fetches bytes again if they differ from the index, and never writes to a linked file."""
    killed(config, marker, 21)
    [left] = staging(config)
    directory = area(config) / left
    first, second = sorted(path for path in directory.iterdir() if path.suffix == ".sst")[:2]
    with first.open("r+b") as file:
        file.write(b"other")
    elsewhere = directory.parent.parent / "elsewhere"
    os.link(second, elsewhere)
    before = elsewhere.read_bytes()
    check_whole(config, marker, SIZE - 9 * PART + index_of(marker).size)
    assert elsewhere.read_bytes() == before


@pytest.mark.parametrize(
    "error",
    [UnavailableError("503"), AccessDenied("403"), DiskFull("full"), MissingBlob("gone"), CorruptBlob("other bytes")],
)
def test_a_restore_that_failed_goes_on_in_the_same_way(
    config: JobConfig, marker: BlobMarker, monkeypatch: pytest.MonkeyPatch, error: StatemgrError
) -> None:
    """A30: after a failure of the blob store, the next try in the same process fetches only the rest."""
    fail(monkeypatch, 20, error)
    with pytest.raises(type(error)):
        restore(config, marker)
    assert len(staging(config)) == 1
    check_whole(config, marker, SIZE - 18 * PART + index_of(marker).size)


def test_a_checkpoint_that_is_deleted_while_it_is_fetched(
    config: JobConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A30: a copy that follows a job fetches of the next checkpoint only what it lacks. However often that happens, it
    keeps no more than the files of one checkpoint, and nothing after a success."""
    snapshots = Snapshots(tmp_path / "source", FileBlobStore(tmp_path / "blobs", SystemClock()), SystemClock())
    new = {f"{n}.sst": random.Random(n).randbytes(10 * PART) for n in range(4, 7)}
    markers = [
        snapshots.commit(TREE),
        snapshots.commit(
            {**{path: TREE[path] for path in ("1.sst", "2.sst", "3.sst", "CURRENT")}, "4.sst": new["4.sst"]}
        ),
        snapshots.commit({**{path: TREE[path] for path in ("1.sst", "3.sst", "CURRENT")}, "4.sst": new["4.sst"]} | new),
    ]
    snapshots.transfer.close()
    for marker, at in zip(markers[:2], (35, 14), strict=True):  # after 33 parts, and after 10 more
        fail(monkeypatch, at, MissingBlob("the owner has deleted it"))
        with pytest.raises(MissingBlob):
            restore(config, marker)
    assert sum(path.stat().st_blocks > 0 for path in area(config).rglob("*.sst")) <= 4
    assert not list(area(config).rglob("0.sst"))
    monkeypatch.undo()
    directory, restored = restore(config, markers[2])
    assert directory is not None
    assert read_tree(directory.path).keys() == {"1.sst", "3.sst", "4.sst", "5.sst", "6.sst", "CURRENT"}
    assert restored.bytes_fetched <= 25 * PART + index_of(markers[2]).size
    assert staging(config) == []


def test_what_was_fetched_takes_no_space_from_another_backend(
    config: JobConfig, marker: BlobMarker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a blob is missing and another backend has the state, its replay finds the staging area empty."""
    found: list[list[str]] = []

    def replay(*_: object) -> Restored:
        found.append(staging(config))
        raise MissingState("told to")

    monkeypatch.setattr(ChangelogRestore, "restore", replay)
    fail(monkeypatch, 20, MissingBlob("gone"))
    services = open_services(config)
    plan = StorePlan(
        STORE, "state-0", (("blob-store", marker), ("kafka-changelog", ChangelogMarker("changes", None, 0, 1))), {}
    )
    with pytest.raises(MissingState):
        restore_store(services, TASK, plan, no_progress)
    services.close()
    assert found == [[]]
