"""Back up and restore a store's directory through ``blob-store`` without the flows around it."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from statemgr.backends.blobs.backend import BlobStoreBackend
from statemgr.config import JobConfig
from statemgr.ids import IdSource
from statemgr.local.machine import Threads
from statemgr.model.chain import ChainSnapshot, SegmentChain
from statemgr.model.checkpoint import BlobMarker, BlobRef, Marker
from statemgr.model.codecs import decode_chain, decode_index, encode_chain
from statemgr.model.hashing import content_hash
from statemgr.model.snapshot import SnapshotIndex
from statemgr.ports import (
    BlobStore,
    Changelog,
    Clock,
    CommittedDirectory,
    FinishedDirectory,
    PreparedBackup,
    Progress,
    Restored,
    RestoreRequest,
    StoreIdentity,
    StoreSnapshot,
    list_blobs,
    no_progress,
)
from statemgr.stores.open_store import NO_CHANGES
from statemgr.transfer.transfer import Transfer
from statemgr.wiring import open_services
from tests.jobs import INTERVALS, SNAPSHOTS

IDENTITY = StoreIdentity("orders", "1", "Partition 0", "totals")
#: Contents of a directory: path → bytes. A path that ends in "/" is an empty directory.
Tree = Mapping[str, bytes]


def committed(root: Path, tree: Tree, state_id: str = "state") -> CommittedDirectory:
    """Write a tree to a new local directory and return it with the hashes of its files."""
    root.mkdir(parents=True)
    for path, data in tree.items():
        target = root / path
        if path.endswith("/"):
            target.mkdir(parents=True)
        else:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(data)
    files = {path: (len(data), content_hash(data)) for path, data in tree.items() if not path.endswith("/")}
    return CommittedDirectory(state_id, root, files)


def finished(directory: CommittedDirectory) -> FinishedDirectory:
    """Return a directory whose files all have hashes."""
    return FinishedDirectory(directory.path, dict(directory.files))


def read_tree(root: Path) -> dict[str, bytes]:
    """Return the contents of a directory."""
    found: dict[str, bytes] = {}
    for path in sorted(root.rglob("*")):
        name = path.relative_to(root).as_posix()
        assert not path.is_symlink()
        if path.is_file():
            found[name] = path.read_bytes()
        elif not any(path.iterdir()):
            found[f"{name}/"] = b""
    return found


def index_of(marker: Marker | None) -> BlobRef:
    """Return the snapshot index of a marker that holds its chain inline."""
    assert isinstance(marker, BlobMarker)
    assert marker.inline is not None
    return decode_chain(marker.inline).snapshot.index


def marker_of(index: BlobRef, identity: StoreIdentity = IDENTITY, state_id: str = "state") -> BlobMarker:
    """Return a marker for a state that consists of one snapshot."""
    owner = (identity.job_name, identity.job_id, identity.task, identity.store)
    return BlobMarker(
        inline=encode_chain(SegmentChain(*owner, state_id, "attempt", "attempt", 0, ChainSnapshot(index, state_id, 0)))
    )


class Snapshots:
    """The backend of one store on top of ``blobs``; attempts have numbers. ``kind``: the type of the store."""

    kind = "rocksdb"

    def __init__(
        self, tmp_path: Path, blobs: BlobStore, clock: Clock, *, part_size: int = 100_000,
        identity: StoreIdentity = IDENTITY,
    ) -> None:  # fmt: skip
        self.blobs = blobs
        self.identity = identity
        self.transfer = Transfer(blobs, clock, Threads(), parallelism=4, part_size=part_size, ttl_days=30)
        self.tmp_path = tmp_path
        self._numbers = itertools.count()
        self._clock = clock
        self.reopen()

    def reopen(self) -> None:
        """Open the backend as a new process would, without any memory of earlier work."""
        settings = {
            "job.name": self.identity.job_name,
            f"stores.{self.identity.store}.type": self.kind,
            "state.dir": str(self.tmp_path / "state"),
            "task.commit.snapshot.interval": INTERVALS[SNAPSHOTS],
        }
        ids = IdSource(self._clock.time_ns, lambda: "0" * 32)
        services = open_services(JobConfig.from_mapping(settings), self._clock, ids)
        self.backend = BlobStoreBackend(
            replace(services, blobs=lambda: self.blobs, transfer=lambda: self.transfer, changelog=_no_changelog)
        )
        self.backup = self.backend.backup_manager()
        self.restoring = self.backend.restore_manager()

    def prepare(self, tree: Tree, base: Marker | None = None, attempt: str | None = None) -> PreparedBackup:
        """Upload one commit."""
        number = next(self._numbers)
        directory = committed(self.tmp_path / f"local-{number}", tree, f"state-{number}")
        made = FinishedDirectory(directory.path, {path: (size, None) for path, (size, _) in directory.files.items()})
        prepared = self.prepare_directory(made, base, f"state-{number}", attempt or f"attempt-{number}")
        assert made.files == directory.files, "who reads a file notes its hash"
        return prepared

    def prepare_directory(
        self, made: FinishedDirectory, base: Marker | None = None, state_id: str = "state", attempt: str = "attempt"
    ) -> PreparedBackup:
        """Upload one commit from a directory that already exists."""
        snapshot = StoreSnapshot(self.identity, state_id, attempt, made, NO_CHANGES, None)
        return self.backup.prepare(snapshot, base, portable=False)

    def commit(self, tree: Tree, base: Marker | None = None) -> BlobMarker:
        """Run one commit up to its publish: upload, then remove the time to live of the blobs that it added."""
        prepared = self.prepare(tree, base)
        assert isinstance(prepared.marker, BlobMarker)
        assert self.transfer.remove_ttl_all(prepared.added_blobs) == {}
        return prepared.marker

    def restore(
        self, marker: Marker, reusable: Sequence[CommittedDirectory] = (), progress: Progress = no_progress
    ) -> tuple[dict[str, bytes], Restored]:
        """Restore into a new staging directory and return its contents."""
        staging = self.tmp_path / f"staging-{next(self._numbers)}"
        restored = self.restore_into(marker, staging, reusable, progress)
        return read_tree(staging), restored

    def restore_into(
        self, marker: Marker, staging: Path, reusable: Sequence[CommittedDirectory] = (),
        progress: Progress = no_progress,
    ) -> Restored:  # fmt: skip
        """Restore into a given directory."""
        return self.restoring.restore(RestoreRequest(self.identity, marker, staging, reusable, progress))

    def clean_up(self, evicted: Sequence[Marker], retained: Sequence[Marker]) -> None:
        """Run one clean-up."""
        self.backup.clean_up_all(self.identity, {self.identity.store: evicted}, {self.identity.store: retained})

    def index(self, marker: Marker) -> SnapshotIndex:
        """Read the index that a marker points to, without going through the backend."""
        ref = index_of(marker)
        return decode_index(self.transfer.get_bytes(ref, 10**9), ref.blob_id)

    def names(self) -> set[str]:
        """Return the name of every blob in the store."""
        return {info.blob_id for info in list_blobs(self.blobs, "")}

    def referenced(self, *markers: Marker) -> set[str]:
        """Return the blobs that these checkpoints need."""
        return {index_of(m).blob_id for m in markers} | {b.blob_id for m in markers for b in self.index(m).blobs()}


def _no_changelog() -> Changelog:
    raise AssertionError("blob-store needs no Kafka")
