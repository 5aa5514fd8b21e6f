"""Tasks that commit segments of changes without a broker. The helper publishes their prepared commits by hand."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from statemgr import JobConfig
from statemgr.flows.committing.background_snapshots import BackgroundSnapshots
from statemgr.flows.committing.commit import CommitBase, freeze, prepare
from statemgr.model.checkpoint import Checkpoint, Layout
from statemgr.services import Services
from statemgr.stores.open_store import OpenStore

FACTORY, STORE = "blob-store", "totals"


def config_of(directory: Path, **more: object) -> JobConfig:
    """Return a job with one small store on a directory of blobs. Keys in ``more`` use ``__`` for ``.``."""
    return JobConfig.from_mapping(
        {
            "job.name": "orders",
            "state.dir": str(directory / "state"),
            "blob.store.uri": (directory / "blobs").as_uri(),
            "task.backup.factories": [FACTORY],
            "task.restore.factories": [FACTORY],
            f"stores.{STORE}.type": "memory",
            **{key.replace("__", "."): value for key, value in more.items()},
        }
    )


@dataclass
class Told:
    """The reports that the metrics of one task received, newest last."""

    backlogs: list[tuple[int, int]] = field(default_factory=list)
    seconds: list[float | None] = field(default_factory=list)

    def backlog(self, store: str, segments: int, size: int) -> None:
        """Record a backlog, as the protocol defines it."""
        self.backlogs.append((segments, size))

    def materialized(self, store: str, seconds: float | None, error: Exception | None = None) -> None:
        """Record a materialization, as the protocol defines it."""
        self.seconds.append(seconds)


class SegmentTask:
    """A task with one store. ``checkpoint`` is its newest."""

    def __init__(self, services: Services, number: int) -> None:
        self.name = f"Partition {number}"
        self.told = Told()
        self._services = services
        config = services.config.stores[STORE]
        self._store = OpenStore(services, services.identity(self.name, STORE), config, None, None, track_changes=True)
        self._stores = {STORE: self._store}
        self.snapshots = BackgroundSnapshots(services, self.name, self._stores, self.told)
        self.checkpoint: Checkpoint | None = None
        self._commits = itertools.count()

    def write_table(self, items: Mapping[bytes, bytes | None]) -> None:
        """Write the items into a file of their own."""
        self._store.content.write(items.items())
        self._store.content.flush()
        self._store.local.flush()

    def commit(self, items: Mapping[bytes, bytes | None] | None = None) -> Checkpoint:
        """Write the items (or change one key), commit, and wait for the snapshot if the commit starts one."""
        number = next(self._commits)
        self._store.content.write(items.items() if items is not None else [(b"key", b"%d" % number)])
        base = CommitBase(self.name, Layout(1, 1, "kafka-partition"), 1, self.checkpoint)
        frozen = freeze(self._services, self._stores, base, {})
        prepared = prepare(self._services, self._stores, frozen, portable=False)
        stored = prepared.stores[STORE]
        markers = {factory: {STORE: marker} for factory, marker in stored.markers.items()}
        self.checkpoint = Checkpoint(
            self._services.ids.checkpoint_id(), number, 1, {}, {STORE: stored.state_id}, markers
        )
        self._store.acknowledged(frozen.stores[STORE], stored.state_id)
        self.snapshots.after_commit(self.checkpoint)
        self.snapshots.worker.wait(30)
        return self.checkpoint

    def close(self) -> None:
        """Close the task's store."""
        self.snapshots.close()
        self._store.close()
