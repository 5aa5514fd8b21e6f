"""A state backend of another package: every commit copies the whole state into a directory that all machines see.

The environment variable ``SHARED_STATE`` names the directory. Uses only what statemgr offers to plug-ins. Nothing
deletes the copy of a commit that dies before its publish.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from statemgr.errors import CorruptBlob, MissingState, UnavailableError
from statemgr.model.checkpoint import Marker, OpaqueMarker
from statemgr.ports import (
    BackupManager,
    PreparedBackup,
    Restored,
    RestoreManager,
    RestoreRequest,
    StoreIdentity,
    StoreSnapshot,
)
from statemgr.services import Services


class SharedDirectory:
    """The backend, which the entry point names. A job makes one in each process."""

    def __init__(self, services: Services) -> None:
        self._root = Path(os.environ["SHARED_STATE"])

    def backup_manager(self) -> SharedBackup:
        return SharedBackup(self._root)

    def restore_manager(self) -> SharedRestore:
        return SharedRestore(self._root)

    def close(self) -> None:
        """Nothing is open."""


class SharedBackup(BackupManager):
    """Its part of a commit: it copies the files of the whole state."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def prepare(self, snapshot: StoreSnapshot, base: Marker | None, *, portable: bool) -> PreparedBackup:
        """Copy the files, and name the copy and its hashes in the marker. Nobody knows the copy until the publish."""
        name = f"{snapshot.identity.job_key}/{snapshot.identity}/{snapshot.state_id}"
        with _unavailable(name):
            shutil.copytree(snapshot.directory.path, self._root / name, dirs_exist_ok=True)
            files = {path: _hash(self._root / name / path) for path in snapshot.directory.files}
            _sync(self._root, self._root / name)
        size = sum(size for size, _ in snapshot.directory.files.values())
        marker = OpaqueMarker(json.dumps({"name": name, "files": files}).encode())
        return PreparedBackup(marker, added_bytes=size)

    def carry(self, identity: StoreIdentity, base: Marker) -> Marker | None:
        """Keep the copy of an unchanged store; None if it is gone, and the whole state must be copied again."""
        return base if (self._root / _content(base)["name"]).is_dir() else None

    def clean_up(self, identity: StoreIdentity, evicted: Sequence[Marker], retained: Sequence[Marker]) -> None:
        """Delete the copies that no retained checkpoint names."""
        for name in {_content(m)["name"] for m in evicted} - {_content(m)["name"] for m in retained}:
            shutil.rmtree(self._root / name, ignore_errors=True)

    def referenced_blobs(self, identity: StoreIdentity, marker: Marker) -> Collection[str]:
        """It keeps nothing in the job's blob store."""
        return ()


class SharedRestore(RestoreManager):
    """Its part of a restore."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def restore(self, request: RestoreRequest) -> Restored:
        """Copy the files back, and compare their hashes."""
        content = _content(request.marker)
        name, files = content["name"], content["files"]
        if not (self._root / name).is_dir():
            raise MissingState("the copy of the state is gone", hint="restore it from a backup", path=name)
        with _unavailable(name):
            shutil.copytree(self._root / name, request.staging)
            damaged = [
                path
                for path, digest in files.items()
                if not (request.staging / path).is_file() or _hash(request.staging / path) != digest
            ]
        if damaged:
            raise CorruptBlob("a file of the copy is gone, or is not what was written", path=f"{name}/{damaged[0]}")
        size = sum((request.staging / path).stat().st_size for path in files)
        return Restored(files=None, bytes_fetched=size)


def _content(marker: Marker) -> dict:
    assert isinstance(marker, OpaqueMarker)
    return json.loads(marker.data)


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(root: Path, copy: Path) -> None:
    """Write the files of the copy to the disk, and the directories that lead to them."""
    for path in [*copy.rglob("*"), copy, *(parent for parent in copy.parents if parent.is_relative_to(root))]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


@contextmanager
def _unavailable(name: str) -> Iterator[None]:
    try:
        yield
    except (OSError, shutil.Error) as error:
        raise UnavailableError(f"the shared directory does not answer: {error}", path=name) from error
