"""Background snapshots (materialisation) of stores whose commits are segments of changes.

Steps, for one store at a time, while its task continues:

1. decide whether a snapshot is due, by commits, bytes or time since the last one, at different times for different
   tasks
2. make a checkpoint directory
3. upload the files that the last snapshot lacks, and keep the directory as the local copy for a restart on this machine
4. the next commit begins with the snapshot, and leaves out the segments that it covers

Nothing here changes which state is current. Failures are tolerated up to a limit, because the segments keep everything
meanwhile.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Protocol

from statemgr.backends.services import Services
from statemgr.errors import CorruptError, MissingError, RetryableError, StatemgrError
from statemgr.flows.open_store import OpenStore
from statemgr.flows.worker import Worker
from statemgr.model.checkpoint import Checkpoint, Marker
from statemgr.model.hashing import content_hash
from statemgr.phases import Phase, announce
from statemgr.ports import SegmentBackupManager, StoreIdentity, StoreSnapshot

log = logging.getLogger(__name__)


class SnapshotMetrics(Protocol):
    """Receives numbers about the snapshots of one task's stores."""

    def backlog(self, store: str, segments: int, size: int) -> None:
        """Set the number and the bytes of the segments in a store's published chain."""
        ...

    def materialized(self, store: str, seconds: float | None) -> None:
        """Count a snapshot that took ``seconds``; None if it failed."""
        ...


class BackgroundSnapshots:
    """The background snapshots of one task's stores. ``suspect`` is called if a published chain looks damaged."""

    def __init__(
        self,
        services: Services,
        task: str,
        stores: Mapping[str, OpenStore],
        metrics: SnapshotMetrics,
        suspect: Callable[[], None] = lambda: None,
    ) -> None:
        self._services = services
        self._suspect = suspect
        self._task = task
        self._stores = stores
        self._metrics = metrics
        now, interval = services.clock.monotonic(), services.config.snapshot_interval.seconds or 0
        #: store → start of its last snapshot; the first interval is shorter
        self._last = {name: now - interval * (1 - share_of_interval(store.identity)) for name, store in stores.items()}
        self.worker: Worker[None] = Worker(services, f"snapshot-{task}", f"task {task}")
        #: Held while a snapshot uses the database.
        self._at_database = threading.Lock()
        #: store → number of snapshots that failed in a row, and the last error until a commit has raised it
        self._failures: dict[str, int] = {}
        self._failed: dict[str, Exception] = {}

    def after_commit(self, checkpoint: Checkpoint) -> None:
        """Start a due snapshot, one store at a time. If the check fails, the next commit checks again."""
        if self.worker.closing:
            return
        for name, store in sorted(self._stores.items(), key=lambda item: self._last[item[0]]):
            try:
                due = self._due(store, checkpoint)
            except StatemgrError as error:
                log.warning("task %s: no snapshot of %s is made now: %s", self._task, name, error)
                if isinstance(error, MissingError | CorruptError):
                    self._suspect()
                continue
            if due is not None and self.worker.start(partial(self._tried, store, *due)) is not None:
                self._last[name] = self._services.clock.monotonic()

    def check(self) -> None:
        """Before a commit. Raises: RetryableError if more snapshots in a row have failed than are tolerated."""
        for store, error in tuple(self._failed.items()):
            if self._failures[store] > self._services.config.tolerated_snapshot_failures:
                del self._failed[store]  # let the next commit continue and try a snapshot again
                raise RetryableError(
                    f"{self._failures[store]} snapshots in a row have failed: {error}",
                    hint="fix the reason: nothing is lost, but a restore takes longer with each commit",
                    job=self._services.config.job_name,
                    task=self._task,
                    store=store,
                ) from error

    def close(self) -> None:
        """Stop uploading; the uploaded blobs expire. Waits only until the database is no longer in use."""
        self.worker.close(wait=False)
        with self._at_database:
            pass

    # --- step 1 ---------------------------------------------------------------------------------------------------

    def _due(self, store: OpenStore, checkpoint: Checkpoint) -> tuple[SegmentBackupManager, Marker] | None:
        """The backend in which a snapshot of the store is due, and its published marker."""
        name = store.identity.store
        for factory, manager in self._services.segment_backends(store.config):
            marker = checkpoint.marker(factory, name)
            if marker is None:
                continue
            backlog = manager.backlog(store.identity, marker, store.session)
            self._metrics.backlog(name, backlog.segments, backlog.size)
            if not backlog.segments or backlog.waiting:
                continue
            seconds = self._services.clock.monotonic() - self._last[name]
            share = share_of_interval(store.identity)
            if self._services.config.snapshot_interval.is_over(backlog.segments, backlog.size, seconds, share=share):
                return manager, marker
        return None

    # --- steps 2 and 3 --------------------------------------------------------------------------------------------

    def _tried(self, store: OpenStore, manager: SegmentBackupManager, marker: Marker) -> None:
        name = store.identity.store
        begun = self._services.clock.monotonic()
        try:
            materialize(self._services, store, manager, marker, self._at_database, self.worker.go_on)
            self._metrics.materialized(name, self._services.clock.monotonic() - begun)
            self._failures.pop(name, None)
            self._failed.pop(name, None)
        except Exception as error:  # any exception: nobody waits for this thread
            if self.worker.closing:
                return
            self._failures[name] = self._failures.get(name, 0) + 1
            self._failed[name] = error
            self._metrics.materialized(name, None)
            log.warning("task %s: a snapshot of %s failed and will be tried again: %s", self._task, name, error)


def materialize(
    services: Services,
    store: OpenStore,
    manager: SegmentBackupManager,
    marker: Marker,
    at_database: AbstractContextManager[object],
    go_on: Callable[[], None],
) -> None:
    """Make and upload a snapshot of an open store.

    Args:
        manager: the backend that gets it.
        marker: the backend's published marker of the store.
        at_database: a lock to hold while using the store's database.
        go_on: called now and then; an exception from it ends the snapshot.

    Raises: RetryableError, AccessDenied, DiskFull, CorruptError, ClosedError.
    """
    identity = store.identity
    subject = f"{identity.task}/{identity.store}"
    announce(Phase.MATERIALIZE, subject, identity.job_key)
    attempt = services.ids.attempt_id()
    with at_database:
        go_on()
        staging, covered = store.snapshot_beside()
    try:
        made, state_id = store.finished(staging), f"{attempt}-{identity.store}"
        with store.local_files():
            manager.materialize(StoreSnapshot(identity, state_id, attempt, made, covered, None, check=go_on), marker)
        store.keep_beside(made, state_id)
    finally:
        store.directories.discard(staging)
    announce(Phase.MATERIALIZED, subject, identity.job_key)


def share_of_interval(identity: StoreIdentity) -> float:
    """From 1/2 to 1, spread evenly over tasks and stores, so that their snapshots are due at different times."""
    digest = content_hash(f"{identity.job_name}/{identity.job_id}/{identity.task}/{identity.store}".encode())
    return 0.5 + int.from_bytes(digest[:4], "big") / 2**33
