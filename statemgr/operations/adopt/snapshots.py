"""Adopts snapshots that the old job stored as blobs. Steps for each store of each task:

1. read the index blob, and fetch each file into a directory of this machine, with its size and checksum verified
2. open the database, which proves that it is whole, count its keys, and make a checkpoint of it
3. store that as the new job's first snapshot: upload its files, or refer to the old job's blobs in place, which then
   belong to the new job. Opening a database leaves RocksDB's tables as they are, so none of them is uploaded again

Steps 1 and 2 write only temporary files.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from statemgr.errors import ConfigError, CorruptBlob
from statemgr.ids import task_name
from statemgr.local import open_store
from statemgr.local.transfer_files import NewFile
from statemgr.model.checkpoint import BlobRef
from statemgr.model.content import of_pairs
from statemgr.model.hashing import hasher
from statemgr.model.snapshot import INLINE_LIMIT, DirIndex, FileIndex, blob_id_problem
from statemgr.operations.adopt.adopted_chain import store_adopted
from statemgr.operations.adopt.found import OldJob
from statemgr.operations.adopt.origins.samza_snapshot import (
    MAX_OLD_INDEX,
    OldFile,
    OldSnapshot,
    check_options,
    decode_snapshot,
)
from statemgr.ports import BlobReader, BlobStore, PreparedBackup, Progress
from statemgr.services import Services

#: Bytes that the fetch of a file reads at a time.
_CHUNK = 1024 * 1024


@dataclass(frozen=True)
class SnapshotCounts:
    """What a snapshot has: files and their bytes, keys, bytes of keys and values, and the hash of its content."""

    files: int
    stored: int
    keys: int
    size: int
    hash: str


@dataclass(frozen=True)
class AdoptedSnapshot:
    """One adopted snapshot: its counts, the state's ID, and the new job's backup."""

    counts: SnapshotCounts
    state_id: str
    backup: PreparedBackup


@dataclass(frozen=True)
class OldSnapshots:
    """Reads the snapshots of an old job.

    Attributes:
        blobs: the old job's blob store.
        place: the prefix that the names of its blobs have in the new job's blob store; None if they are not in it.
    """

    services: Services
    blobs: BlobStore
    place: str | None
    progress: Progress

    def check_target(self, indexes: Mapping[str, Sequence[str]], *, in_place: bool) -> None:
        """Check that the new job's configuration suits the snapshots (store → index blobs). Raises: ConfigError."""
        config = self.services.config
        for store, blob_ids in indexes.items():
            if config.stores[store].type != "rocksdb":
                raise ConfigError(
                    f"store {store!r} must be of the type rocksdb: the old job has a snapshot of a RocksDB store",
                    hint=f"set stores.{store}.type",
                    key=f"stores.{store}.type",
                )
            for blob_id in blob_ids:
                problem = "is in another blob store"
                if self.place is not None:
                    problem = blob_id_problem(f"{self.place}{blob_id}", config.job_name, config.job_id) or ""
                if in_place and problem:
                    raise ConfigError(
                        f"the old job's snapshot {blob_id} cannot be adopted in place: it {problem}",
                        hint="use `statemgr adopt` without `--in-place`, which uploads the snapshots; or set "
                        "blob.store.uri so that the names of these blobs begin with the new job's name and ID",
                        key="blob.store.uri",
                    )
                if not in_place and not problem:
                    raise ConfigError(
                        f"the old job's snapshot {blob_id} is where the new job keeps its own blobs, and garbage "
                        "collection would delete it",
                        hint="set another job.name, or make the blobs the new job's with `statemgr adopt --in-place`",
                        key="job.name",
                    )

    def count(self, found: OldJob) -> Mapping[str, Sequence[SnapshotCounts]]:
        """Steps 1 and 2 for every snapshot: store → the counts of each task's.

        Raises: MissingBlob, CorruptBlob, CorruptError, InvalidError (the kind of store).
        """
        return {
            store: [self._counted(found, store, task) for task in range(len(of))]
            for store, of in found.snapshots.items()
        }

    def _counted(self, found: OldJob, store: str, task: int) -> SnapshotCounts:
        with self._fetched(found, store, task) as (snapshot, directory, _):
            return self._opened(store, snapshot, directory, None)

    def adopt(self, found: OldJob, store: str, task: int, attempt: str, *, in_place: bool) -> AdoptedSnapshot:
        """Steps 1 to 3. The blobs that are added have a TTL. Raises: as :meth:`count`, DiskFull, UnavailableError."""
        directories = self.services.directories(task_name(task), store)
        with self._fetched(found, store, task) as (snapshot, directory, held):
            staging, state_id = directories.staging(), f"{attempt}-{store}"
            try:
                counts = self._opened(store, snapshot, directory, staging)
                identity = self.services.identity(task_name(task), store)
                made = directories.finished(staging)
                if in_place:
                    self._keep(held)
                kept = held if in_place else None
                backup = store_adopted(self.services, identity, state_id, attempt, made, kept, self.progress)
            finally:
                directories.discard(staging)
            return AdoptedSnapshot(counts, state_id, backup)

    @contextmanager
    def _fetched(self, found: OldJob, store: str, task: int) -> Iterator[tuple[OldSnapshot, Path, DirIndex]]:
        """Step 1: the snapshot, a private directory with its files, and those that the blob store has."""
        blob_id = found.snapshots[store][task]
        with self.blobs.get(blob_id, length=MAX_OLD_INDEX) as reader:
            data = b"".join(_pieces(reader))
        snapshot = decode_snapshot(data, blob_id, task=task, store=found.old_names.get(store, store))
        directories = self.services.directories(task_name(task), store)
        live = directories.clone(None)
        try:
            fetched = self.services.in_parallel("adopt", lambda file: self._fetch(file, live), snapshot.files)
            held = sorted((file for file in fetched if file.parts), key=lambda file: file.name)
            self.progress(f"fetch {store} {task}", snapshot.size, snapshot.size)
            yield snapshot, live, DirIndex("", tuple(held))
        finally:
            directories.discard(live)

    def _fetch(self, file: OldFile, directory: Path) -> FileIndex:
        """Raises: MissingBlob, CorruptBlob (size or checksum), DiskFull, UnavailableError."""
        target, whole, crc = NewFile(directory / file.name, file.size, 1), hasher(), 0
        parts = []
        with target.part() as fd:
            for blob_id, offset, size in file.parts():
                of_part, done = hasher(), 0
                with self.blobs.get(blob_id) as reader:
                    for piece in _pieces(reader):
                        if done + len(piece) > size:
                            raise _differs(file, blob_id, "more bytes than the index says")
                        target.write(fd, offset + done, memoryview(piece))
                        for one in (of_part, whole):
                            one.update(piece)
                        crc = zlib.crc32(piece, crc)
                        done += len(piece)
                if done < size:
                    raise _differs(file, blob_id, f"{done} bytes instead of {size}")
                parts.append(BlobRef(f"{self.place or ''}{blob_id}", size, of_part.digest()))
        if crc != file.crc:
            raise _differs(file, file.blobs[0][0] if file.blobs else "", "another checksum than the index says")
        if file.size <= INLINE_LIMIT:
            parts = []  # it will be inside the new index
        return FileIndex(file.name, file.size, whole.digest(), parts=tuple(parts))

    def _opened(self, store: str, snapshot: OldSnapshot, directory: Path, copy: Path | None) -> SnapshotCounts:
        """Step 2; ``copy``: where to make the checkpoint. Raises: CorruptError, InvalidError."""
        for name in snapshot.options:
            check_options((directory / name).read_text(errors="replace"), store)
        config, size = self.services.config.stores[store], 0

        def pairs() -> Iterator[tuple[bytes, bytes]]:
            nonlocal size
            for key, value in opened.scan(None, None):
                size += len(key) + len(value)
                yield key, value

        opened = open_store("rocksdb", directory, config.rocksdb, briefly=True)
        try:
            content = of_pairs(pairs())
            if copy is not None:
                opened.flush()
                opened.checkpoint(copy)
        finally:
            opened.close()
        return SnapshotCounts(len(snapshot.files), snapshot.size, content.keys, size, content.hash)

    def _keep(self, held: DirIndex) -> None:
        """Remove the TTL that the old job may have left on its blobs. Raises: MissingBlob, UnavailableError."""
        blobs = [part.blob_id for file in held.files for part in file.parts]
        for error in self.services.transfer().remove_ttl_all(blobs).values():
            raise error


def place_of(old_uri: str, new_uri: str | None) -> str | None:
    """The prefix that the names of blobs below the old URI have below the new one; None if they are not below it."""
    old, new = old_uri.rstrip("/") + "/", (new_uri or "").rstrip("/") + "/"
    return old.removeprefix(new) if new_uri and old.startswith(new) else None


def _pieces(reader: BlobReader) -> Iterator[bytes]:
    buffer = memoryview(bytearray(_CHUNK))
    while size := reader.readinto(buffer):
        yield bytes(buffer[:size])


def _differs(file: OldFile, blob_id: str, what: str) -> CorruptBlob:
    return CorruptBlob(
        f"file {file.name!r} of the old job's snapshot has {what}",
        hint="the blob is damaged, or the old job's blob store encodes what it stores: then adopt its changelogs",
        blob=blob_id,
    )
