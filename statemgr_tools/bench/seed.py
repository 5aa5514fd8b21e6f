"""A custom state backend that starts stores from a generated directory with hard links, at no cost.

Its marker is the directory's path. It backs up nothing.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping
from pathlib import Path

from statemgr.errors import InvalidError
from statemgr.ids import CheckpointId
from statemgr.model.checkpoint import Checkpoint, Marker, OpaqueMarker
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

#: The factory name, for ``task.restore.factories``.
SEED = "statemgr_tools.bench.seed:SeedBackend"
TASK = "Partition 0"
STORE = "s"
_HASHES = ".hashes.json"

Files = Mapping[str, tuple[int, bytes]]


def seeded(directory: Path) -> Checkpoint:
    """Return a checkpoint whose store ``s`` has this directory, with the hashes that :func:`write_hashes` left."""
    return Checkpoint(
        checkpoint_id=CheckpointId(1_700_000_000_000, 1),
        sequence=1,
        epoch=1,
        input_offsets={},
        stores={STORE: f"seed-{directory.name}"},
        state_checkpoint_markers={SEED: {STORE: OpaqueMarker(os.fsencode(directory))}},
        backup_factories={STORE: (SEED,)},
        restore_factories={STORE: (SEED,)},
    )


def write_hashes(directory: Path, files: Files) -> None:
    """Keep the hashes next to the directory, so that no later step has to read all of it again."""
    text = json.dumps({name: [size, digest.hex()] for name, (size, digest) in files.items()})
    directory.with_name(directory.name + _HASHES).write_text(text)


def read_hashes(directory: Path) -> Files:
    """Read the hashes that :func:`write_hashes` wrote."""
    found = json.loads(directory.with_name(directory.name + _HASHES).read_text())
    return {name: (size, bytes.fromhex(digest)) for name, (size, digest) in found.items()}


class SeedBackend:
    """Implements :class:`statemgr.ports.StateBackend`, for restores only."""

    def __init__(self, services: Services) -> None:
        """Keep none of the services."""

    def backup_manager(self) -> BackupManager:
        return _NoBackup()

    def restore_manager(self) -> RestoreManager:
        return _SeedRestore()

    def close(self) -> None:
        """Close nothing."""


class _NoBackup(BackupManager):
    """Backs up nothing, and has nothing to clean up when another backend takes over."""

    def prepare(self, snapshot: StoreSnapshot, base: Marker | None, *, portable: bool) -> PreparedBackup:
        raise InvalidError("a seed is for restoring only", task=snapshot.identity.task)

    def carry(self, identity: StoreIdentity, base: Marker) -> Marker | None:
        return None

    def referenced_blobs(self, identity: StoreIdentity, marker: Marker) -> Collection[str]:
        return ()


class _SeedRestore(RestoreManager):
    def restore(self, request: RestoreRequest) -> Restored:
        """Make hard links to every file."""
        marker: Marker = request.marker
        assert isinstance(marker, OpaqueMarker)
        directory = Path(os.fsdecode(marker.data))
        files = read_hashes(directory)
        request.staging.mkdir(parents=True)
        for name in files:
            os.link(directory / name, request.staging / name)
        return Restored(files)
