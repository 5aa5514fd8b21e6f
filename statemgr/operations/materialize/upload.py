"""Stores the first snapshot of a running job that this process does not own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple, dataclass
from typing import Any

from statemgr.backends.blobs.catalogue import Catalogue
from statemgr.backends.blobs.snapshots import Snapshots, UploadNotes
from statemgr.errors import MissingError
from statemgr.local.machine import moment
from statemgr.model.checkpoint import BlobRef
from statemgr.model.snapshot import DirIndex, FileIndex
from statemgr.operations.materialize.build_place import UPLOADED, BuildPlace
from statemgr.operations.materialize.early_upload import EarlyUpload
from statemgr.ports import Moment, Progress, StoreIdentity, StoreSnapshot
from statemgr.services import Services
from statemgr.stores.open_store import NO_CHANGES

#: Seconds for which files that a killed upload has stored may still be used.
_KEPT_S = 6 * 3600


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


def store_snapshot(
    services: Services,
    identity: StoreIdentity,
    place: BuildPlace,
    state_id: str,
    early: EarlyUpload,
    progress: Progress,
) -> OfferedSnapshot:
    """Upload the finished directory of a place, which this process holds, with TTLs. Files that a killed upload of
    the same state has stored are used, and those that were uploaded early.

    Raises: UnavailableError, AccessDenied, DiskFull, CorruptFile.
    """
    attempt, catalogue = services.ids.attempt_id(), Catalogue(services.transfer)
    began, known = _stored_before(services, place, state_id)
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
    snapshot = StoreSnapshot(identity, state_id, attempt, made, NO_CHANGES, None)
    snapshots = Snapshots(services.transfer, services.clock, catalogue)
    done = snapshots.store(snapshot, None, UploadNotes(root, stored, progress))
    index = catalogue.index(identity, done.index)
    blobs = tuple(dict.fromkeys(blob.blob_id for blob in index.blobs()))
    before = sum(size for file in uploaded.values() for _, size in file.stored())
    return OfferedSnapshot(done.index, blobs, index.root.size, before + done.size, began)


def _stored_before(services: Services, place: BuildPlace, state_id: str) -> tuple[Moment, dict[str, FileIndex]]:
    """When an earlier upload began, and the files that it has stored; no files if they might soon be deleted as
    garbage. A file that lacks a blob is left out: the blob was deleted, or the configuration names another store.

    Raises: UnavailableError, AccessDenied.
    """
    now, note = moment(services.clock), place.note(UPLOADED)
    if not isinstance(note, dict) or note.get("state_id") != state_id:
        return now, {}
    began = Moment(*note["began"])
    age_s = now.seconds_since(began)
    if age_s is None or age_s > _KEPT_S:
        return now, {}
    files = dict(map(_from_json, note["files"]))
    gone = services.transfer().absent({part.blob_id for file in files.values() for part in file.parts})
    for error in gone.values():
        if not isinstance(error, MissingError):
            raise error
    return began, {path: file for path, file in files.items() if not any(part.blob_id in gone for part in file.parts)}


def _to_json(path: str, file: FileIndex) -> dict[str, Any]:
    parts = [(part.blob_id, part.size, part.hash.hex(), part.offset) for part in file.parts]
    return {"path": path, "size": file.size, "hash": file.hash.hex(), "parts": parts, "frames": file.frames}


def _from_json(found: dict[str, Any]) -> tuple[str, FileIndex]:
    path, size, parts = found["path"], found["size"], found["parts"]
    refs = tuple(BlobRef(blob_id, length, bytes.fromhex(digest), offset) for blob_id, length, digest, offset in parts)
    name = path.rpartition("/")[2]
    return path, FileIndex(name, size, bytes.fromhex(found["hash"]), None, refs, tuple(found["frames"]))
