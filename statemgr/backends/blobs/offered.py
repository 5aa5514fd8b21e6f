"""Stores first snapshots of a running job that it does not own, and makes the chain with which the owner continues one.

The owner's chain begins with the offered snapshot. Its segments are the changes that the changelog has had since. Each
is one table or a run of records with the last value of each key. The chain has a lineage of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import astuple, dataclass, replace
from typing import Any

from statemgr.backends.blobs.catalogue import Catalogue, validate_for
from statemgr.backends.blobs.early_upload import EarlyUpload
from statemgr.backends.blobs.names import segments_blob
from statemgr.backends.blobs.snapshots import Snapshots, UploadNotes
from statemgr.backends.blobs.tables import put_segment
from statemgr.backends.services import Services
from statemgr.errors import MissingError
from statemgr.local.build_place import UPLOADED, BuildPlace
from statemgr.local.change_buffer import FrozenChanges
from statemgr.local.clock import moment
from statemgr.model.chain import ChainSegment, ChainSnapshot, SegmentChain
from statemgr.model.checkpoint import BlobMarker, BlobRef
from statemgr.model.codecs import encode_chain
from statemgr.model.commit import Change, StoreSession, size_of
from statemgr.model.record_size import inline_chain_limit
from statemgr.model.snapshot import DirIndex, FileIndex
from statemgr.ports import ChangelogBatch, Moment, PreparedBackup, Progress, StoreIdentity, StoreSnapshot
from statemgr.transfer.packs import PackedBlob

#: Most changes and bytes in one segment, so that it can be a table.
_CHANGES, _BYTES = 400_000, 48 * 1024 * 1024
#: Seconds for which files that a killed upload has stored may still be used.
_KEPT_S = 6 * 3600
_NONE = FrozenChanges(StoreSession(), 0, 0, ())


@dataclass(frozen=True, slots=True)
class OfferedSnapshot:
    """A stored snapshot: its index, its blobs without the index, the bytes of its files and those uploaded now.

    ``began``: before the first of its blobs was uploaded.
    """

    index: BlobRef
    blobs: tuple[str, ...]
    size: int
    uploaded: int
    began: Moment


class OfferedSnapshots:
    """Stores offered snapshots, and continues them. Safe to use from many threads."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._catalogue = Catalogue(services.transfer)
        self._snapshots = Snapshots(services.transfer, services.clock, self._catalogue)

    # --- next to the job ------------------------------------------------------------------------------------------

    def store(
        self, identity: StoreIdentity, place: BuildPlace, state_id: str, early: EarlyUpload, progress: Progress
    ) -> OfferedSnapshot:
        """Upload the finished directory of a place, which this process holds, with TTLs. Files that a killed upload of
        the same state has stored are used, and those that were uploaded early.

        Raises: UnavailableError, AccessDenied, DiskFull, CorruptFile.
        """
        attempt = self._services.ids.attempt_id()
        began, known = self._stored_before(place, state_id)
        uploaded = early.files()
        began, known = early.began or began, known | uploaded
        files = dict(known)

        def stored(more: Mapping[str, FileIndex]) -> None:
            files.update(more)
            found = [_to_json(path, file) for path, file in files.items() if file.parts]
            place.write_note(UPLOADED, {"state_id": state_id, "began": astuple(began), "files": found})

        if uploaded:
            stored({})
        root = DirIndex("", tuple(known.values())) if known else None
        made = place.finished()
        snapshot = StoreSnapshot(identity, state_id, attempt, made, _NONE, None)
        done = self._snapshots.store(snapshot, None, UploadNotes(root, stored, progress))
        index = self._catalogue.index(identity, done.index)
        blobs = tuple(dict.fromkeys(blob.blob_id for blob in index.blobs()))
        before = sum(size for file in uploaded.values() for _, size in file.stored())
        return OfferedSnapshot(done.index, blobs, index.root.size, before + done.size, began)

    def _stored_before(self, place: BuildPlace, state_id: str) -> tuple[Moment, dict[str, FileIndex]]:
        """When an earlier upload began, and the files that it has stored; no files if they might soon be deleted as
        garbage. A file that lacks a blob is left out: the blob was deleted, or the configuration names another store.

        Raises: UnavailableError, AccessDenied.
        """
        now, note = moment(self._services.clock), place.note(UPLOADED)
        if not isinstance(note, dict) or note.get("state_id") != state_id:
            return now, {}
        began = Moment(*note["began"])
        age_s = now.seconds_since(began)
        if age_s is None or age_s > _KEPT_S:
            return now, {}
        files = dict(map(_from_json, note["files"]))
        gone = self._services.transfer().absent({part.blob_id for file in files.values() for part in file.parts})
        for error in gone.values():
            if not isinstance(error, MissingError):
                raise error
        return began, {
            path: file for path, file in files.items() if not any(part.blob_id in gone for part in file.parts)
        }

    # --- the owner of the task ------------------------------------------------------------------------------------

    def blobs_of(self, identity: StoreIdentity, index: BlobRef) -> list[str]:
        """Every blob of an offered snapshot, its index last. Raises: MissingBlob, CorruptBlob, UnavailableError."""
        found = self._catalogue.index(identity, index)
        return [*dict.fromkeys(blob.blob_id for blob in found.blobs()), index.blob_id]

    def whole(self, identity: StoreIdentity, index: BlobRef) -> list[str]:
        """:meth:`blobs_of`, after a check that each of them exists. Raises: as :meth:`blobs_of`."""
        blobs = self.blobs_of(identity, index)
        for error in self._services.transfer().absent(blobs).values():
            raise error
        return blobs

    def continued(
        self,
        identity: StoreIdentity,
        state_id: str,
        offered: ChainSnapshot,
        batches: Iterable[ChangelogBatch],
        *,
        together: bool,
    ) -> PreparedBackup:
        """The chain of a state: an offered snapshot, and the changes after it.

        Args:
            batches: the changes, oldest first.
            together: whether all tasks of the job are published together.

        Raises: MissingBlob if the snapshot has lost a blob; CorruptBlob, UnavailableError, AccessDenied, DiskFull.
        """
        services, attempt = self._services, self._services.ids.attempt_id()
        index = self._catalogue.index(identity, offered.index)
        blobs = self.whole(identity, offered.index)
        segments, number = list[ChainSegment](), offered.end
        for tail in _tails(batches):
            segments.append(self._segment(identity, f"{attempt}.{len(segments)}", tail, number))
            number = segments[-1].end
        # an opening finds the blobs of the index's own attempt through the index
        of_index = {blob.blob_id for blob in index.added()}
        stored = [segment.blob.blob_id for segment in segments if segment.blob is not None]
        added = (*(blob for blob in blobs if blob not in of_index), *stored)
        now_ms = services.clock.time_ns() // 1_000_000
        chain = SegmentChain(
            identity.job_name, identity.job_id, identity.task, identity.store, state_id, attempt, attempt, now_ms,
            offered, tuple(segments), added,
        )  # fmt: skip
        validate_for(chain, identity, offered.index.blob_id)
        data = encode_chain(chain)
        limit = inline_chain_limit(len(services.config.stores), services.config.tasks if together else 1)
        marker = BlobMarker(inline=data)
        if len(data) > limit:
            marker = BlobMarker(services.transfer().put(segments_blob(identity, attempt), data))
            stored.append(segments_blob(identity, attempt))
        size = sum(segment.size for segment in segments)
        return PreparedBackup(marker, added_blobs=(*blobs, *stored), added_bytes=size)

    def _segment(self, identity: StoreIdentity, name: str, tail: _Tail, first: int) -> ChainSegment:
        with closing(PackedBlob(self._services.scratch_file("segments"))) as packed:
            ref = put_segment(self._services, identity, tail, first, packed)
            blob_id = segments_blob(identity, name)
            self._services.transfer().put(blob_id, packed.body())
        return ChainSegment(first, first + tail.count, replace(ref, blob_id=blob_id))


class _Tail:
    """Implements ``ChangeSet``: the last value of each key in a part of a changelog."""

    def __init__(self, changes: Mapping[bytes, bytes | None]) -> None:
        self._changes = changes
        self.count, self.size = len(changes), size_of(changes)

    def __iter__(self) -> Iterator[Change]:
        return iter(self._changes.items())


def _tails(batches: Iterable[ChangelogBatch]) -> Iterator[_Tail]:
    changes: dict[bytes, bytes | None] = {}
    size = 0
    for batch in batches:
        changes.update(batch.changes)
        size += batch.size
        if len(changes) >= _CHANGES or size >= _BYTES:
            yield _Tail(changes)
            changes, size = {}, 0
    if changes:
        yield _Tail(changes)


def _to_json(path: str, file: FileIndex) -> dict[str, Any]:
    parts = [(part.blob_id, part.size, part.hash.hex(), part.offset) for part in file.parts]
    return {"path": path, "size": file.size, "hash": file.hash.hex(), "parts": parts, "frames": file.frames}


def _from_json(found: dict[str, Any]) -> tuple[str, FileIndex]:
    path, size, parts = found["path"], found["size"], found["parts"]
    refs = tuple(BlobRef(blob_id, length, bytes.fromhex(digest), offset) for blob_id, length, digest, offset in parts)
    name = path.rpartition("/")[2]
    return path, FileIndex(name, size, bytes.fromhex(found["hash"]), None, refs, tuple(found["frames"]))
