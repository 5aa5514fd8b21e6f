"""The services of one job in one process. Flows, tasks and state backends share them, also plug-ins."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ParamSpec, Protocol, TypeVar

from statemgr.blobs.file import FileBlobStore
from statemgr.blobs.retrying import undecorated
from statemgr.config import JobConfig, StoreConfig
from statemgr.ids import IdSource
from statemgr.model.checkpoint import Owner
from statemgr.ports import (
    BackupManager,
    BlobStore,
    Changelog,
    Clock,
    Executors,
    LocalDirectories,
    LocalStore,
    RestoreManager,
    SegmentBackupManager,
    StoreIdentity,
)
from statemgr.transfer.transfer import Transfer

T = TypeVar("T")
R = TypeVar("R")
P = ParamSpec("P")
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Services:
    """Configuration, time, IDs, threads, and the adapters of the job. A callable makes its adapter at the first call.

    Attributes:
        owner: this process, for the checkpoints that it publishes; None if the configuration withholds it.
        scratch: a directory on the state's disk for temporary files.
        blobs: the blob store, which retries and verifies.
        transfer: moves files to and from the blob store in parallel.
        backup_manager: factory name → its backup manager. Raises: ConfigError.
        restore_manager: factory name → its restore manager. Raises: ConfigError.
        task_directory: task → the directory of its local state; a backend may have its own directory below it.
        directories: (task, store) → the store's local directories.
        open_store: (store, directory, whether it is read before it is written) → the open local store.
        give_up: ends work in progress on all threads: every deadline has passed, and requests to the blob store fail.
            Afterwards only ``close`` works.
        close: closes all adapters.
    """

    config: JobConfig
    clock: Clock
    ids: IdSource
    executors: Executors
    owner: Owner | None
    scratch: Callable[[], Path]
    blobs: Callable[[], BlobStore]
    transfer: Callable[[], Transfer]
    changelog: Callable[[], Changelog]
    backup_manager: Callable[[str], BackupManager]
    restore_manager: Callable[[str], RestoreManager]
    task_directory: Callable[[str], Path]
    directories: Callable[[str, str], LocalDirectories]
    open_store: Callable[[StoreConfig, Path, bool], LocalStore]
    give_up: Callable[[], None]
    close: Callable[[], None]

    def scratch_file(self, kind: str) -> Path:
        """The path of a new file in :attr:`scratch`; ``kind`` begins its name. Raises: DiskFull."""
        return self.scratch() / f"{kind}-{self.ids.token()}"

    def in_parallel(self, name: str, work: Callable[[T], R], items: Collection[T], most: int = 8) -> list[R]:
        """Call ``work`` with each item, with up to ``most`` at a time on threads of ``name``. Returns: the results, in
        the order of the items. Raises: the first error, after all calls that have begun."""
        if len(items) <= 1:  # a thread would cost a micro-batch some milliseconds
            return [work(item) for item in items]
        with self.executors.pool(name, most) as pool:
            return list(pool.map(work, items))

    def expect_blobs(self) -> None:
        """Say that a checkpoint of the job names blobs. A directory without them is then one whose disk is not mounted,
        which would take blobs and lose them. No request to the store."""
        if (self.config.blob_uri or "").startswith("file:"):  # the client of another store is opened when it is needed
            store = undecorated(self.blobs())
            if isinstance(store, FileBlobStore):
                store.expect(self.config.job_name)

    def identity(self, task: str, store: str) -> StoreIdentity:
        """The full name of a store of this job."""
        return StoreIdentity(self.config.job_name, self.config.job_id, task, store)

    def segment_backends(self, store: StoreConfig) -> Iterator[tuple[str, SegmentBackupManager]]:
        """The backends that may store a store's changes as segments: factory and manager."""
        for factory in store.backup_factories:
            manager = self.backup_manager(factory)
            if isinstance(manager, SegmentBackupManager) and manager.needs_changes:
                yield factory, manager

    @cached_property
    def durable(self) -> Mapping[str, bool]:
        """Store → whether it is backed up at all."""
        return {name: bool(store.backup_factories) for name, store in self.config.stores.items()}

    @property
    def fed(self) -> frozenset[str]:
        """Every factory that some store is backed up to."""
        return frozenset(factory for store in self.config.stores.values() for factory in store.backup_factories)


class Closing(ExitStack):
    """Closes several things, newest first, whatever becomes of the others. The first error is raised. Later ones may
    come from it, and are logged.

    Args:
        first: an error from before, if there is one. An error in the block counts, too.
    """

    def __init__(self, first: BaseException | None = None) -> None:
        super().__init__()
        self._first = first

    def callback(self, close: Callable[P, T], /, *args: P.args, **more: P.kwargs) -> Callable[P, T]:
        def closed() -> None:
            try:
                close(*args, **more)
            except Exception as error:
                if self._first is None:
                    self._first = error
                    raise
                log.warning("closing failed after another error: %s: %s", type(error).__name__, error)

        super().callback(closed)
        return close

    def __exit__(self, *error: Any) -> bool | None:
        self._first = error[1] if self._first is None else self._first
        return super().__exit__(*error)


class Submit(Protocol):
    """Runs ``work(services, *arguments)`` in another process, which has services of its own."""

    def __call__(self, work: Callable[..., T], *arguments: object) -> Future[T]: ...


def submit_here(services: Services) -> Submit:
    """Runs work on the calling thread, for a process that must not start others."""

    def submit(work: Callable[..., T], *arguments: object) -> Future[T]:
        done: Future[T] = Future()
        try:
            done.set_result(work(services, *arguments))
        except Exception as error:
            done.set_exception(error)
        return done

    return submit
