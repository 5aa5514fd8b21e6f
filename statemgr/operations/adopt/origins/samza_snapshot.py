"""Snapshots of Apache Samza: the index blob of a store's directory in RocksDB. Pure.

The format is that of Samza 1.7.0, which brought blob stores, 1.8.0, and the development branch of 2025, which write the
same: ``SnapshotIndexSerde`` writes JSON without a version, ``BlobStoreUtil`` cuts no file and compresses
nothing, and the checksum of a file is its CRC-32. The names of blobs are those that the job's own ``BlobStoreManager``
gives. An index that was read is checked before any I/O, like one of statemgr's own.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from statemgr.errors import CorruptBlob, InvalidError
from statemgr.model.snapshot import MAX_FILE_SIZE, MAX_FILES, TWICE, as_on_disk, name_problem
from statemgr.operations.adopt.origins.samza import task_of

#: Bytes of an index blob that is read.
MAX_OLD_INDEX = 64 * 1024 * 1024
#: RocksDB's file that names its manifest, and the beginning of the name of its file of options.
_CURRENT, _OPTIONS = "CURRENT", "OPTIONS-"
#: In RocksDB's OPTIONS file of a store with a time to live: each of its values ends with a time.
_TIME_TO_LIVE = "TtlCompactionFilter"
_FAMILY = "[CFOptions "
#: The names of the fields that Samza writes, by record. Another one is a sign of a newer format, whose files may have
#: to be read in another way.
_FIELDS = {
    "the index": {"creation-time-millis", "snapshot-metadata", "dir-index", "prev-snapshot-index-blob-id"},
    "snapshot-metadata": {"checkpoint-id", "job-name", "job-id", "task-name", "store-name"},
    "dir-index": {"dir-name", "files-present", "files-removed", "sub-dirs-present", "sub-dirs-removed"},
    "a file": {"file-name", "blobs", "file-metadata", "checksum"},
    "a blob": {"blob-id", "offset"},
}


@dataclass(frozen=True, slots=True)
class OldFile:
    """A file of a snapshot: its name, its size in bytes, its CRC-32, and its blobs in order, each with where its bytes
    begin in the file."""

    name: str
    size: int
    crc: int
    blobs: tuple[tuple[str, int], ...]

    def parts(self) -> list[tuple[str, int, int]]:
        """Blob, offset and size of each part."""
        if not self.blobs:
            return []
        ends = [*(offset for _, offset in self.blobs[1:]), self.size]
        return [(blob, offset, end - offset) for (blob, offset), end in zip(self.blobs, ends, strict=True)]


@dataclass(frozen=True, slots=True)
class OldSnapshot:
    """A snapshot of one store of one task."""

    files: tuple[OldFile, ...]

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files)

    @property
    def options(self) -> list[str]:
        """The names of RocksDB's OPTIONS files."""
        return [file.name for file in self.files if file.name.startswith(_OPTIONS)]


def decode_snapshot(data: bytes, blob_id: str, *, task: int, store: str) -> OldSnapshot:
    """Decode an index blob, which must be of this task and store.

    Raises: CorruptBlob; InvalidError for a version that is unknown.
    """

    def refuse(what: str) -> CorruptBlob:
        hint = "the blob store is perhaps another one, or it encodes what it stores"
        return CorruptBlob(f"not a snapshot index of Samza: {what}", hint=hint, blob=blob_id, store=store)

    try:
        content = json.loads(data)
        owner = content["snapshot-metadata"]
        directory = content["dir-index"]
        if newer := _unknown_field(content):
            raise InvalidError(
                f"the snapshot index is of an unknown version: {newer}, which Samza up to 1.8 does not write",
                hint="adopt the changelogs, if the stores have some: leave out `--blobs`",
                blob=blob_id,
                store=store,
            )
        number, _ = task_of(owner["task-name"]) or (None, "")
        if (number, owner["store-name"]) != (task, store):
            raise refuse(f"it is one of task {owner['task-name']!r}, store {owner['store-name']!r}")
        if directory["sub-dirs-present"]:
            raise refuse("it has sub-directories, which a RocksDB store does not have")
        if len(directory["files-present"]) > MAX_FILES:
            raise refuse(f"more than {MAX_FILES} files")
        files = tuple(_file(file) for file in directory["files-present"])
    except (ValueError, OverflowError, KeyError, TypeError, AttributeError, RecursionError):
        raise refuse("it is damaged, or in another format") from None
    names: set[str] = set()
    for file in files:
        problem = name_problem(file.name) or (TWICE if as_on_disk(file.name) in names else _problem(file))
        if problem:
            raise refuse(f"file {file.name!r} {problem}")
        names.add(as_on_disk(file.name))
    snapshot = OldSnapshot(files)
    if all(file.name != _CURRENT for file in files):  # RocksDB would make an empty store of it
        raise refuse("it has no file CURRENT, so it is not a whole store of RocksDB")
    if not snapshot.options:  # RocksDB needs none, but only they show a time to live
        raise refuse("it has no OPTIONS file, which says what kind of store it is")
    return snapshot


def check_options(text: str, store: str) -> None:
    """Check RocksDB's OPTIONS file of a snapshot. Raises: InvalidError for a kind of store that cannot be adopted."""
    if _TIME_TO_LIVE in text:
        raise InvalidError(
            "the store has a time to live (rocksdb.ttl.ms): its values end with a time, and its keys expire",
            hint="adopt the other stores; this one can begin empty, or be filled from its source",
            store=store,
        )
    families = [line for line in text.splitlines() if line.startswith(_FAMILY)]
    if families != [f'{_FAMILY}"default"]']:
        raise InvalidError(f"the store has {len(families)} column families, and a store of Samza has one", store=store)


def _unknown_field(content: Mapping[str, Any]) -> str | None:
    """A field of the index that this module does not know, for a message."""
    files = content["dir-index"]["files-present"]
    records = [
        ("the index", content),
        ("snapshot-metadata", content["snapshot-metadata"]),
        ("dir-index", content["dir-index"]),
        *(("a file", file) for file in files),
        *(("a blob", blob) for file in files for blob in file["blobs"]),
    ]
    found = next(((name, extra) for name, one in records for extra in sorted(set(one) - _FIELDS[name])), None)
    return found and f"{found[0]} has the field {found[1]!r}"


def _file(content: Mapping[str, Any]) -> OldFile:
    blobs = sorted((int(blob["offset"]), str(blob["blob-id"])) for blob in content["blobs"])
    size = int(content["file-metadata"]["size"])
    return OldFile(
        str(content["file-name"]),
        size,
        int(content["checksum"]),
        tuple((blob, offset) for offset, blob in blobs) if size else (),
    )


def _problem(file: OldFile) -> str | None:
    if not 0 <= file.size <= MAX_FILE_SIZE or not 0 <= file.crc < 1 << 32:
        return "has an absurd size or checksum"
    offsets = [offset for _, offset in file.blobs]
    if file.size and (not offsets or offsets[0] != 0 or len(set(offsets)) < len(offsets) or offsets[-1] >= file.size):
        return "has blobs that do not make up its content"
    return None
