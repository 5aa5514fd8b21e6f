"""Compacts stores that are opened for one attempt at a time, next to the attempts, in a copy of their local state.

A store that is closed after every micro-batch is closed before RocksDB's own compaction ends. Steps, for one store at a
time on a machine:

1. when an attempt has kept its local copy, check whether more files wait for compaction than the task's share of the
   limit
2. link the copy into a directory of its own, and let RocksDB compact that directory
3. replace the copy by the result, which has the same content
4. the next attempt on this machine begins with it: at the same state, or, if the backend keeps segments, at a later
   state by applying the segments in between (:meth:`statemgr.ports.SegmentBackupManager.note_compacted`)

Tasks begin at different numbers of files, so that they are not due together. Nothing waits for a compaction. But an
attempt that finds very many files (:func:`most_files`), because no compaction has ended in time, compacts its own
store.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from statemgr.backends.services import Services
from statemgr.config import StoreConfig
from statemgr.errors import StatemgrError
from statemgr.flows.background_snapshots import share_of_interval
from statemgr.flows.open_store import OpenStore
from statemgr.flows.worker import Worker
from statemgr.local.owners import exclusive_if_free
from statemgr.model.checkpoint import Checkpoint
from statemgr.ports import SegmentBackupManager

#: Files in level 0 from which a store is compacted next to the attempts: half to all of this number, by task.
_LIMIT = 10
#: Files from which an attempt compacts itself: below 20, where RocksDB slows writes down.
_MOST = 18
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
        due = next((store for store in stores if _files(store) >= _limit(store)), None)
        if due is not None:
            what = f"the compaction of {due.identity.task}/{due.identity.store}"
            self.worker.attempt(what, lambda: self._in_turn(due, stores[due]))

    def _in_turn(self, store: OpenStore, state_id: str) -> None:
        with exclusive_if_free(self._lock) as is_free:
            if is_free:
                self._compact(store, state_id)

    def _compact(self, store: OpenStore, state_id: str) -> None:
        """Steps 2 and 3."""
        directories = store.directories
        copy = directories.find(state_id)
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
    return (
        (name, manager)
        for name, manager in services.segment_backends(config)
        if config.restore_factories[:1] == (name,)
    )


def make_way(services: Services, task: str, checkpoint: Checkpoint) -> dict[str, set[str]]:
    """Before an attempt opens its stores: make the restore begin with a compacted directory of an earlier state, if
    there is one and the segments in between are known. Removes the copy of the checkpoint's own state for that.

    Returns: store → the state IDs of compacted directories, which are kept until they are used.
    """
    kept: dict[str, set[str]] = {}
    for name, config in services.config.stores.items():
        for factory, manager in restores_first(services, config):
            marker = checkpoint.marker(factory, name)
            if marker is None:
                continue
            try:
                kept[name] = set(manager.compacted(services.identity(task, name), marker))
            except StatemgrError:
                continue  # the restore notices that too
            directories = services.directories(task, name)
            own = checkpoint.stores[name]
            if own not in kept[name] and any(directories.find(state_id) for state_id in kept[name]):
                directories.remove(own)
    return kept


def _limit(store: OpenStore) -> int:
    return int(_LIMIT * share_of_interval(store.identity))


def _files(store: OpenStore) -> float:
    return store.local.statistics().get(_LEVEL0, 0)
