"""A state backend from outside that starts stores from a directory that was generated: hard links, so at no cost.

Its marker is the directory's path. It backs nothing up.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

from statemgr.backends.context import BackendContext
from statemgr.errors import InvalidError
from statemgr.ids import CheckpointId
from statemgr.model.checkpoint import Checkpoint, Marker, OpaqueMarker
from statemgr.ports import BackupManager, Restored, RestoreManager, RestoreRequest

#: The factory name, for ``task.restore.factories``.
SEED = "statemgr.bench.seed:SeedBackend"
TASK = "Partition 0"
STORE = "s"
_HASHES = ".hashes.json"

Files = Mapping[str, tuple[int, bytes]]


def seeded(directory: Path) -> Checkpoint:
    """A checkpoint that says: store ``s`` is what is in this directory (as :func:`write_hashes` left it)."""
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
    """Keep the hashes beside the directory, so that nobody needs to read it whole again."""
    text = json.dumps({name: [size, digest.hex()] for name, (size, digest) in files.items()})
    directory.with_name(directory.name + _HASHES).write_text(text)


def read_hashes(directory: Path) -> Files:
    """What :func:`write_hashes` wrote."""
    found = json.loads(directory.with_name(directory.name + _HASHES).read_text())
    return {name: (size, bytes.fromhex(digest)) for name, (size, digest) in found.items()}


class SeedBackend:
    """Implements :class:`statemgr.ports.StateBackend`; for restoring only."""

    def __init__(self, context: BackendContext) -> None:
        self._job = context.config.job_name

    def backup_manager(self) -> BackupManager:
        raise InvalidError("a seed is for restoring only", job=self._job)

    def restore_manager(self) -> RestoreManager:
        return _SeedRestore()

    def close(self) -> None:
        """It holds nothing."""


class _SeedRestore:
    def restore(self, request: RestoreRequest) -> Restored:
        """Hard links to every file."""
        marker: Marker = request.marker
        assert isinstance(marker, OpaqueMarker)
        directory = Path(os.fsdecode(marker.data))
        files = read_hashes(directory)
        request.staging.mkdir(parents=True)
        for name in files:
            os.link(directory / name, request.staging / name)
        return Restored(files)
