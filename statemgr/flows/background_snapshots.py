"""Background snapshots (materialisation) of stores whose commits are segments of changes.

Steps, for one store at a time, while its task continues or the next attempts run:

1. decide whether a snapshot is due, by commits, bytes or time since the last one, at different times for different
   tasks
2. make a directory: a RocksDB checkpoint of a store that a task keeps open, or a link to the local copy of the
   published state where attempts open the store for a moment each
3. upload the files that the last snapshot lacks
4. the next commit begins with the snapshot, and leaves out the segments that it covers. In a task the open store knows
   the snapshot; attempts find it in a note on this machine

Nothing here changes which state is current, and the segments keep everything meanwhile. A task tolerates failures up to
a limit. Attempts tolerate all of them. But if the segments reach twice the amount that makes a snapshot due, the next
attempt makes the snapshot itself (:func:`overdue_stores`).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from statemgr.backends.services import Services
from statemgr.errors import CorruptError, MissingError, RetryableError, StatemgrError
from statemgr.flows.open_store import NO_CHANGES, OpenStore
from statemgr.flows.worker import Worker
from statemgr.logs import Event, size, tell
from statemgr.model.checkpoint import Checkpoint, Marker
from statemgr.model.hashing import content_hash
from statemgr.phases import Phase, flow
from statemgr.ports import Backlog, FinishedDirectory, SegmentBackupManager, StoreIdentity, StoreSnapshot

log = logging.getLogger(__name__)
#: Number of intervals after which an attempt makes the snapshot itself.
_OVERDUE = 2


class SnapshotMetrics(Protocol):
    """Receives numbers about the snapshots of one task's stores."""

    def backlog(self, store: str, segments: int, size: int) -> None:
        """Set the number and the bytes of the segments in a store's published chain."""
        ...

    def materialized(self, store: str, seconds: float | None, error: Exception | None = None) -> None:
        """Count a snapshot that took ``seconds``; None if it failed with ``error``."""
        ...


@dataclass(frozen=True, slots=True)
class _Chain:
    """A store's published chain in one backend, and what a restore would apply on top of its snapshot."""

    services: Services
    store: OpenStore
    manager: SegmentBackupManager
    marker: Marker
    backlog: Backlog

    @property
    def needs_snapshot(self) -> bool:
        return self.backlog.segments > 0 and not self.backlog.waiting

    def is_over(self, *, intervals: int = 1, seconds: float = 0) -> bool:
        """Whether a new snapshot is due: at least this many intervals of commits or bytes follow the last one, or it
        is ``seconds`` old and that is an interval or more."""
        commits, size = self.backlog.segments // intervals, self.backlog.size // intervals
        share = share_of_interval(self.store.identity)
        return self.services.config.snapshot_interval.is_over(commits, size, seconds, share=share)

    def snapshot_age_s(self) -> float:
        """Seconds since the snapshot was made; infinite if its index is lost."""
        try:
            made_ms = self.manager.snapshot_made_ms(self.store.identity, self.marker)
        except (MissingError, CorruptError):
            return float("inf")
        return self.services.clock.time_ns() / 1e9 - made_ms / 1e3


def _chains(services: Services, store: OpenStore, checkpoint: Checkpoint, *, in_session: bool) -> Iterator[_Chain]:
    """The published chains of a store. ``in_session``: whether the open store knows the newest snapshots, instead of
    the notes on this machine. Raises: MissingBlob, CorruptBlob, UnavailableError."""
    for factory, manager in services.segment_backends(store.config):
        marker = checkpoint.marker(factory, store.identity.store)
        if marker is not None:
            backlog = manager.backlog(store.identity, marker, store.session if in_session else None)
            yield _Chain(services, store, manager, marker, backlog)


# --- stores that a task keeps open -------------------------------------------------------------------------------


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
                log.warning("%s: no snapshot of %s is made now: %s", self._task, name, error)
                if isinstance(error, MissingError | CorruptError):
                    self._suspect()
                continue
            if due is not None and self.worker.start(partial(self._make, due)) is not None:
                self._last[name] = self._services.clock.monotonic()

    def raise_failures(self) -> None:
        """Before a commit. Raises: RetryableError if more snapshots in a row have failed than are tolerated."""
        for store, error in tuple(self._failed.items()):
            if self._failures[store] > self._services.config.tolerated_snapshot_failures:
                del self._failed[store]  # let the next commit continue and try a snapshot again
                raise RetryableError(
                    f"{self._failures[store]} snapshots in a row have failed: {error}",
                    hint="fix the cause: nothing is lost, but a restore takes longer with each commit",
                    job=self._services.config.job_name,
                    task=self._task,
                    store=store,
                ) from error

    def close(self) -> None:
        """Stop uploading; the uploaded blobs expire. Waits only until the database is no longer in use."""
        self.worker.close(wait=False)
        with self._at_database:
            pass

    def _due(self, store: OpenStore, checkpoint: Checkpoint) -> _Chain | None:
        """Step 1."""
        name = store.identity.store
        seconds = self._services.clock.monotonic() - self._last[name]
        for chain in _chains(self._services, store, checkpoint, in_session=True):
            self._metrics.backlog(name, chain.backlog.segments, chain.backlog.size)
            if chain.needs_snapshot and chain.is_over(seconds=seconds):
                return chain
        return None

    def _make(self, due: _Chain) -> None:
        name = due.store.identity.store
        begun = self._services.clock.monotonic()
        try:
            materialize(self._services, due.store, due.manager, due.marker, self._at_database, self.worker.go_on)
            self._metrics.materialized(name, self._services.clock.monotonic() - begun)
            self._failures.pop(name, None)
            self._failed.pop(name, None)
        except Exception as error:  # any exception: nobody waits for this thread
            if self.worker.closing:
                return
            self._failures[name] = self._failures.get(name, 0) + 1
            self._failed[name] = error
            self._metrics.materialized(name, None, error)
            tell(
                log, Event.RETRYING, "%s: a snapshot of %s failed and will be tried again: %s", self._task, name, error,
                level=logging.WARNING, job=self._services.config.job_name, task=self._task, store=name,
            )  # fmt: skip


def materialize(
    services: Services,
    store: OpenStore,
    manager: SegmentBackupManager,
    marker: Marker,
    at_database: AbstractContextManager[object],
    go_on: Callable[[], None],
) -> None:
    """Steps 2 and 3 for a store that a task keeps open. Keeps the directory as a local copy.

    Args:
        manager: the backend that gets the snapshot.
        marker: the backend's published marker of the store.
        at_database: a lock to hold while using the store's database.
        go_on: called now and then; an exception from it ends the snapshot.

    Raises: RetryableError, AccessDenied, DiskFull, CorruptError, ClosedError.
    """
    identity = store.identity
    with flow("snapshot", str(identity), identity.job_key) as making:
        identity.announce(Phase.MATERIALIZE)
        begun = services.clock.monotonic()
        attempt = services.ids.attempt_id()
        with at_database:
            go_on()
            staging, covered = store.concurrent_snapshot()
        try:
            made, state_id = store.finished(staging), f"{attempt}-{identity.store}"
            snapshot = StoreSnapshot(identity, state_id, attempt, made, covered, None, check=go_on)
            with store.local_files():
                manager.materialize(snapshot, marker)
            store.keep_snapshot(made, state_id)
        finally:
            store.directories.discard(staging)
        making.attributes["bytes"] = sum(length for length, _ in made.files.values())
        identity.announce(Phase.MATERIALIZED)
    _tell_made(identity, made, services.clock.monotonic() - begun)


def _tell_made(identity: StoreIdentity, made: FinishedDirectory, seconds: float) -> None:
    total = sum(length for length, _ in made.files.values())
    tell(
        log, Event.SNAPSHOT, "%s: made a snapshot of %s in %.3f s; later commits build on it",
        identity, size(total), seconds,
        job=identity.job_name, task=identity.task, store=identity.store, bytes=total, seconds=round(seconds, 3),
    )  # fmt: skip


def share_of_interval(identity: StoreIdentity) -> float:
    """From 1/2 to 1, spread evenly over tasks and stores, so that their snapshots are due at different times."""
    digest = content_hash(f"{identity.job_name}/{identity.job_id}/{identity.task}/{identity.store}".encode())
    return 0.5 + int.from_bytes(digest[:4], "big") / 2**33


# --- stores that attempts open for a moment each -----------------------------------------------------------------


class AttemptSnapshots:
    """The background snapshots of one process that runs attempts. Safe to use from many threads."""

    def __init__(self, services: Services) -> None:
        self._services = services
        # a process that ends waits at most for the parts that are being uploaded
        self.worker: Worker[None] = Worker(services, "snapshot", services.config.job_name, background=True)

    def start(self, stores: Mapping[str, OpenStore], checkpoint: Checkpoint) -> None:
        """Start a due snapshot of one of the stores, which were just opened at the checkpoint."""
        if self.worker.busy:
            return
        interval_s = self._services.config.snapshot_interval.seconds
        try:
            for chain in _published_chains(self._services, stores, checkpoint):
                if chain.is_over(intervals=_OVERDUE):
                    continue  # the attempt makes this one itself
                identity = chain.store.identity
                age_s = interval_s and interval_s * share_of_interval(identity)
                if chain.is_over() or (age_s is not None and chain.snapshot_age_s() >= age_s):
                    state_id = checkpoint.stores[identity.store]
                    what = f"a snapshot of {identity}"
                    self.worker.attempt(what, partial(self._make, chain, state_id))
                    return
        except Exception as error:  # an attempt must not fail because of it
            log.warning("no background snapshot was started for this attempt: %s", error)

    def _make(self, due: _Chain, state_id: str) -> None:
        """Steps 2 and 3."""
        identity, directories = due.store.identity, due.store.directories
        identity.announce(Phase.MATERIALIZE)
        copy = directories.find(state_id)
        if copy is None:
            return  # a later attempt has removed it
        own, begun = directories.clone(copy), self._services.clock.monotonic()
        try:
            made, attempt = due.store.finished(own), self._services.ids.attempt_id()
            snapshot = StoreSnapshot(identity, state_id, attempt, made, NO_CHANGES, None, check=self.worker.go_on)
            with due.store.local_files():
                due.manager.materialize_published(snapshot, due.marker)
        finally:
            directories.discard(own)
        identity.announce(Phase.MATERIALIZED)
        _tell_made(identity, made, self._services.clock.monotonic() - begun)


def overdue_stores(
    services: Services, stores: Mapping[str, OpenStore], checkpoint: Checkpoint | None
) -> tuple[list[str], Mapping[str, tuple[int, int]]]:
    """The stores that an attempt should store as snapshots instead of segments, because nobody has made their
    snapshots; and store → number and bytes of the segments in its published chain.

    Counts commits and bytes, but not time, so that a job that seldom commits still has its snapshots made in the
    background.

    Raises: UnavailableError, AccessDenied.
    """
    chains = list(_published_chains(services, stores, checkpoint)) if checkpoint is not None else []
    backlogs = {name: (0, 0) for name, store in stores.items() if any(services.segment_backends(store.config))}
    backlogs |= {chain.store.identity.store: (chain.backlog.segments, chain.backlog.size) for chain in chains}
    overdue = [chain.store.identity.store for chain in chains if chain.is_over(intervals=_OVERDUE)]
    return overdue, backlogs


def _published_chains(services: Services, stores: Mapping[str, OpenStore], checkpoint: Checkpoint) -> Iterator[_Chain]:
    """The published chains that no snapshot waits for on this machine."""
    for store in stores.values():
        try:
            chains = list(_chains(services, store, checkpoint, in_session=False))
        except (MissingError, CorruptError):
            continue  # the commit notices that too, and fills the backend again
        yield from (chain for chain in chains if chain.needs_snapshot)
