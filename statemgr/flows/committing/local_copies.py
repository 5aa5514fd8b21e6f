"""The local copies that attempts leave on a machine, which are compacted in the background.

A store that is closed after every micro-batch is closed before RocksDB's own compaction ends. Steps of
:class:`Compactions`, for one store at a time on a machine:

1. when an attempt has kept its local copy, check whether more files wait for compaction than the task's share of the
   limit; tasks begin at different numbers of files, so that they are not due together
2. link the copy into a directory of its own, and let RocksDB compact that directory
3. replace the copy by the result, which has the same content
4. the next attempt on this machine begins with it: at the same state, or, if the backend keeps segments, at a later
   state by applying the segments in between (:meth:`statemgr.ports.SegmentBackupManager.note_compacted`)

Nothing waits for a compaction. But an attempt that finds very many files (:func:`most_files`), because no compaction
has ended in time, compacts its own store.

Everything here is a cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from statemgr.config import StoreConfig
from statemgr.errors import StatemgrError
from statemgr.flows.committing.background_snapshots import share_of_interval
from statemgr.flows.worker import Worker
from statemgr.local.shared_directories import exclusive_if_free
from statemgr.model.checkpoint import Checkpoint
from statemgr.ports import SegmentBackupManager
from statemgr.services import Services
from statemgr.stores.open_store import OpenStore

#: Files in level 0 from which a store is compacted in the background: half to all of this number, by task.
_LIMIT = 10
#: Files in level 0 from which an attempt compacts the store itself. A restore leaves fewer, and RocksDB delays writes
#: only at more (statemgr.local.rocksdb.options).
_MOST = 100
_LEVEL0 = "rocksdb.num-files-at-level0"


def most_files(store: OpenStore) -> int:
    """Number of files in level 0 from which an attempt compacts its own store."""
    return _MOST - int(_LIMIT * (1 - share_of_interval(store.identity)))


class Compactions:
    """The compactions of one process. Safe to use from many threads.

    Args:
        lock: a lock file, so that the processes of a machine take turns.
    """

    def __init__(self, services: Services, lock: Path) -> None:
        self._services = services
        self._lock = lock
        self.worker: Worker[None] = Worker(services, "compaction", services.config.job_name, background=True)

    def start(self, stores: Mapping[OpenStore, str]) -> None:
        """Step 1, for stores and the state IDs of their local copies. The other steps run on another thread."""
        for store, state_id in stores.items():
            files = store.local.statistics().get(_LEVEL0, 0)
            if files >= int(_LIMIT * share_of_interval(store.identity)):
                what = f"the compaction of {store.identity}"
                self.worker.attempt(what, lambda due=store, of=state_id: self._compact(due, of))  # type: ignore[misc]
                return

    def _compact(self, store: OpenStore, state_id: str) -> None:
        """Steps 2 and 3."""
        with exclusive_if_free(self._lock) as is_free:
            directories = store.directories
            copy = directories.find(state_id) if is_free else None
            if copy is None:
                return
            own = directories.clone(copy)
            staging = directories.staging()
            try:
                opened = self._services.open_store(store.config, own, False)
                try:
                    opened.compact_if_needed(1)
                    opened.checkpoint(staging)
                finally:
                    opened.close()
                made = directories.finished(staging)
                directories.replace(staging, state_id, made.files)
                for _, manager in restores_first(self._services, store.config):
                    manager.note_compacted(store.identity, state_id)
            finally:
                directories.discard(own)
                directories.discard(staging)


def restores_first(services: Services, config: StoreConfig) -> Iterator[tuple[str, SegmentBackupManager]]:
    """The preferred restore backend of a store, if it keeps segments: factory and manager."""
    return (found for found in services.segment_backends(config) if config.restore_factories[:1] == (found[0],))


def prefer_compacted(services: Services, task: str, checkpoint: Checkpoint) -> dict[str, set[str]]:
    """Before an attempt opens its stores: make the restore begin with a compacted directory of an earlier state, if
    there is one and the segments in between are known. Removes the copy of the checkpoint's own state for that.

    Returns: store → the state IDs of compacted directories, which are kept until they are used.
    """
    kept = {name: compacted_copies(services, task, checkpoint, name) for name in services.config.stores}
    for name, compacted in kept.items():
        directories = services.directories(task, name)
        own = checkpoint.stores.get(name)
        if own is not None and own not in compacted and any(directories.find(state_id) for state_id in compacted):
            directories.remove(own)
    return kept


def compacted_copies(services: Services, task: str, checkpoint: Checkpoint | None, store: str) -> set[str]:
    """State IDs of a store's compacted directories from which the checkpoint's state can be reached."""
    for factory, manager in restores_first(services, services.config.stores[store]):
        marker = checkpoint.marker(factory, store) if checkpoint is not None else None
        if marker is not None:
            with suppress(StatemgrError):  # a restore notices that too
                return set(manager.compacted(services.identity(task, store), marker))
    return set()
