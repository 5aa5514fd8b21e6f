"""Snapshots of a store's directory. Each one uploads only the files that the last one lacks, and has an index.

Steps of :meth:`Snapshots.store`:

1. diff the directory against the acknowledged index, by content; a file without a known hash is read only if a file of
   the same size exists
2. upload new files, and hash them in the same pass (small files go inside the index or into packs)
3. put the index blob, from which alone the directory can be rebuilt
"""

from __future__ import annotations

import stat
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from statemgr.backends.blobs.catalogue import Catalogue, validate_for
from statemgr.backends.blobs.names import file_prefix, index_blob, pack_blob
from statemgr.errors import InvalidError
from statemgr.local import TABLE_SUFFIX, tail_offsets
from statemgr.local.durable import open_file
from statemgr.local.trees import look_up
from statemgr.model.checkpoint import BlobRef
from statemgr.model.codecs import encode_index
from statemgr.model.diff import LocalFile, LocalTree, assemble, comparable, diff
from statemgr.model.hashing import content_hash
from statemgr.model.snapshot import (
    INLINE_LIMIT,
    INLINE_TOTAL_LIMIT,
    MAX_INDEX_SIZE,
    DirIndex,
    FileIndex,
    SnapshotIndex,
    Tail,
)
from statemgr.os_errors import disk_errors
from statemgr.phases import Phase
from statemgr.ports import Clock, FinishedDirectory, Progress, StoreIdentity, StoreSnapshot
from statemgr.transfer.packs import PACK_LIMIT, read_file, upload_packs
from statemgr.transfer.transfer import Transfer, Upload

#: Bytes of files that are uploaded before it is noted that they are stored.
_GROUP_BYTES = 1024 * 1024 * 1024
#: A table file below this size is always fetched whole.
_LARGE = 256 * 1024
#: The most bytes of a table's foot that the index contains.
_FOOT = 8 * 1024


@dataclass(frozen=True, slots=True)
class StoredSnapshot:
    """A snapshot's index; the blobs that were added for it, including the index, and their bytes."""

    index: BlobRef
    blobs: tuple[str, ...]
    size: int


@dataclass(frozen=True, slots=True)
class UploadNotes:
    """Lets an upload continue that was killed.

    Attributes:
        known: files that it has stored.
        stored: called with path → file now and then, when more of them are stored.
        progress: called while files are uploaded.
    """

    known: DirIndex | None
    stored: Callable[[Mapping[str, FileIndex]], None]
    progress: Progress


class Snapshots:
    """Stores snapshots of a job's stores."""

    def __init__(self, transfer: Callable[[], Transfer], clock: Clock, catalogue: Catalogue) -> None:
        self._transfer = transfer
        self._clock = clock
        self._catalogue = catalogue

    def store(self, snapshot: StoreSnapshot, base: BlobRef | None, notes: UploadNotes | None = None) -> StoredSnapshot:
        """Store a finished directory; ``base`` is the index that it is diffed against. Uploads have a TTL.

        ``notes``: for a snapshot without a base, whose upload can continue after it was killed.

        Raises: UnavailableError, AccessDenied, DiskFull, CorruptError (a local file is not what was committed).
        """
        identity, attempt = snapshot.identity, snapshot.attempt
        identity.announce(Phase.DIFF)
        base_index = self._catalogue.if_readable(identity, self._catalogue.index, base) if base else None
        known = base_index.root if base_index else notes.known if notes else None
        tree = self._tree(snapshot.directory, known)
        added, kept = diff(tree, known)

        identity.announce(Phase.UPLOAD)
        inline, large = _split(added, kept)
        uploaded = self._upload(snapshot, large, notes)
        files = {
            **kept,
            **{file.path: _inline(snapshot.directory.path, file) for file in inline},
            **uploaded,
        }
        files = {path: self._with_tail(snapshot.directory.path / path, file) for path, file in files.items()}
        snapshot.directory.files.update((path, file.identity) for path, file in files.items())

        identity.announce(Phase.PUT_INDEX)
        index = SnapshotIndex(
            identity.job_name, identity.job_id, identity.task, identity.store, snapshot.state_id, attempt,
            self._clock.time_ns() // 1_000_000, assemble(tree, files), previous=base,
        )  # fmt: skip
        ref = self._put_index(identity, index)
        parts = dict(pair for file in uploaded.values() for pair in file.stored())
        blobs = (*dict.fromkeys(part.blob_id for part in parts), ref.blob_id)
        return StoredSnapshot(ref, blobs, sum(parts.values()) + ref.size)

    def new_bytes(self, snapshot: StoreSnapshot, base: BlobRef) -> int | None:
        """An upper bound of the bytes of a directory's files that a base lacks; None if the base cannot be read.

        Raises: UnavailableError, AccessDenied.
        """
        index = self._catalogue.if_readable(snapshot.identity, self._catalogue.index, base)
        if index is None:
            return None
        known = {file.identity for _, file in index.root.walk()}
        return sum(file[0] for file in snapshot.directory.files.values() if file not in known)

    def _tree(self, directory: FinishedDirectory, base: DirIndex | None) -> LocalTree:
        """The local side of the diff. Hashes that it needs and that are unknown are added to the directory."""
        for path in comparable({path: size for path, (size, _) in directory.files.items()}, base):
            size, known = directory.files[path]
            directory.files[path] = size, known or self._transfer().hash_of(directory.path / path, 0, size)
        with disk_errors(directory.path):
            there = look_up(directory.path, sorted(directory.files))
        files = []
        for path, (size, known) in sorted(directory.files.items()):
            status = there.files[path]
            mode, modified_ms = stat.S_IMODE(status.st_mode), status.st_mtime_ns // 1_000_000
            files.append(LocalFile(path, size, known, mode, modified_ms))
        return LocalTree(tuple(files), there.dirs)

    def _upload(
        self, snapshot: StoreSnapshot, files: Sequence[LocalFile], notes: UploadNotes | None
    ) -> dict[str, FileIndex]:
        # files of the same content are uploaded once; no other one has the size of a file without a hash
        first = {(file.size, file.hash): file for file in reversed(files)}
        transfer, root, identity = self._transfer(), snapshot.directory.path, snapshot.identity
        limit = min(PACK_LIMIT, transfer.part_size)
        small = [file for file in first.values() if 0 < file.size <= limit]
        if len(small) == 1:
            small = []
        done = upload_packs(transfer, root, small, lambda number: pack_blob(identity, snapshot.attempt, number))
        others = [file for file in first.values() if file.path not in done]
        uploads = [
            Upload(root / file.path, file.size, file.hash, file_prefix(identity, snapshot.attempt, file.path))
            for file in others
        ]
        if notes is None:
            uploaded = transfer.upload_files(uploads, lambda *_: snapshot.check())
            done |= {file.path: found for file, found in zip(others, uploaded, strict=True)}
        else:
            done |= _upload_in_groups(transfer, dict(zip((file.path for file in others), uploads, strict=True)), notes)
        return {file.path: done[first[file.size, file.hash].path] for file in files}

    def _with_tail(self, path: Path, file: FileIndex) -> FileIndex:
        """A large table file gets a tail, if it has none yet."""
        if path.suffix != TABLE_SUFFIX or file.size < _LARGE or file.inline is not None or file.tail is not None:
            return file
        offsets = tail_offsets(path)
        if offsets is None:
            return file
        begin, foot = offsets
        tail = Tail(begin, self._transfer().hash_of(path, begin, file.size - begin))
        if file.size - foot <= _FOOT:
            with disk_errors(path), open_file(path) as table:
                table.seek(foot)
                tail = replace(tail, foot=table.read())
        return replace(file, tail=tail)

    def _put_index(self, identity: StoreIdentity, index: SnapshotIndex) -> BlobRef:
        blob_id = index_blob(identity, index.attempt)
        # an index that a restore would refuse must never be published
        validate_for(index, identity, blob_id)
        data = encode_index(index)
        if len(data) > MAX_INDEX_SIZE:
            raise InvalidError(
                f"the index would have {len(data)} bytes, but the limit is {MAX_INDEX_SIZE}",
                hint="spread the state over more tasks", task=identity.task, store=identity.store,
            )  # fmt: skip
        ref = BlobRef(self._transfer().put_hedged(blob_id, data), len(data), content_hash(data))
        self._catalogue.remember_index(ref, index)
        return ref


def _upload_in_groups(transfer: Transfer, uploads: Mapping[str, Upload], notes: UploadNotes) -> dict[str, FileIndex]:
    """Upload files by path, and note after each group what is stored."""
    done: dict[str, FileIndex] = {}
    total = sum(upload.size for upload in uploads.values())
    reached = 0
    group: dict[str, Upload] = {}
    for number, (path, upload) in enumerate(uploads.items(), 1):
        group[path] = upload
        size = sum(one.size for one in group.values())
        if size < _GROUP_BYTES and number < len(uploads):
            continue

        def progress(what: str, now: int, _: int, before: int = reached) -> None:
            notes.progress(what, before + now, total)

        done |= zip(group, transfer.upload_files(list(group.values()), progress), strict=True)
        notes.stored(done)
        group, reached = {}, reached + size
    return done


def _split(added: Sequence[LocalFile], kept: Mapping[str, FileIndex]) -> tuple[list[LocalFile], list[LocalFile]]:
    """The files to put inside the index, smallest first until its limit, and those to store as blobs."""
    room = INLINE_TOTAL_LIMIT - sum(len(file.inline or b"") for file in kept.values())
    inline: list[LocalFile] = []
    large: list[LocalFile] = []
    for file in sorted(added, key=lambda file: (file.size, file.path)):
        if file.size <= min(INLINE_LIMIT, room):
            room -= file.size
            inline.append(file)
        else:
            large.append(file)
    return inline, large


def _inline(root: Path, file: LocalFile) -> FileIndex:
    data, digest = read_file(root, file)
    return FileIndex(file.path.rpartition("/")[2], file.size, digest, inline=data)
