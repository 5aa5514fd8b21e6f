"""What the flows are given: configuration, time, IDs, and how to get each engine and local directory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from statemgr.config import JobConfig, StoreConfig
from statemgr.ids import IdSource
from statemgr.ports import (
    BackupManager,
    BlobStore,
    Changelog,
    Clock,
    LocalDirectories,
    LocalStore,
    RestoreManager,
    SegmentBackupManager,
    StoreIdentity,
)

if TYPE_CHECKING:
    from statemgr.transfer.transfer import Transfer


@dataclass(frozen=True)
class Parts:
    """The parts of one process for one job. The callables make a thing when it is first asked for."""

    config: JobConfig
    clock: Clock
    ids: IdSource
    blobs: Callable[[], BlobStore]
    transfer: Callable[[], Transfer]
    changelog: Callable[[], Changelog]
    backup_manager: Callable[[str], BackupManager]
    restore_manager: Callable[[str], RestoreManager]
    directories: Callable[[str, str], LocalDirectories]
    open_store: Callable[[StoreConfig, Path, bool], LocalStore]
    task_directory: Callable[[str], Path]

    def identity(self, task: str, store: str) -> StoreIdentity:
        return StoreIdentity(self.config.job_name, self.config.job_id, task, store)

    def segment_backends(self, store: StoreConfig) -> Iterator[tuple[str, SegmentBackupManager]]:
        """Those of a store's backends that may store its changes as segments: factory and manager."""
        for factory in store.backup_factories:
            manager = self.backup_manager(factory)
            if isinstance(manager, SegmentBackupManager) and manager.needs_changes:
                yield factory, manager

    @property
    def durable(self) -> Mapping[str, bool]:
        """Store → whether it is backed up at all."""
        return {name: bool(store.backup_factories) for name, store in self.config.stores.items()}

    @property
    def factories(self) -> frozenset[str]:
        """Every factory that some store is backed up to or restored from."""
        stores = self.config.stores.values()
        return frozenset(f for store in stores for f in (*store.backup_factories, *store.restore_factories))
