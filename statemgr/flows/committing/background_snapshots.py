"""Background snapshots (materialisation) of stores whose commits are segments of changes: the steps, and the snapshots
of stores that a task keeps open. (:mod:`statemgr.flows.committing.attempt_snapshots` has those of attempts.)

Steps, for one store at a time, while its task continues or the next attempts run:

1. decide whether a snapshot is due, by commits, bytes or time since the last one, at different times for different
   tasks
2. make a directory: a RocksDB checkpoint of a store that a task keeps open, or a link to the local copy of the
   published state where attempts open the store for a moment each
3. upload the files that the last snapshot lacks
4. the next commit begins with the snapshot, and leaves out the segments that it covers. In a task the open store knows
   the snapshot. Attempts, and the next owner after a task was closed or killed, find it in a note on this machine

Nothing here changes which state is current, and the segments keep everything meanwhile. A task tolerates failures up to
a limit. Attempts tolerate all of them. But if the segments reach twice the amount that makes a snapshot due, the next
attempt, or the first commit of an owner, makes the snapshot itself. If no number of commits makes one due, and the
snapshot is twice as old as the interval, an owner starts one in the background after its first commit. So a job whose
owners never live long enough for a background snapshot to become due has bounded chains, too.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from statemgr.errors import CorruptError, MissingError, RetryableError, StatemgrError
from statemgr.flows.worker import Worker
from statemgr.logs import Event, size, tell
from statemgr.model.chain import MAX_SEGMENTS
from statemgr.model.checkpoint import Checkpoint, Marker
from statemgr.model.hashing import content_hash
from statemgr.phases import Phase, flow
from statemgr.ports import Backlog, Clock, FinishedDirectory, SegmentBackupManager, StoreIdentity, StoreSnapshot
from statemgr.services import Services
from statemgr.stores.open_store import OpenStore

log = logging.getLogger(__name__)
#: Number of intervals after which an attempt, or an owner's first commit, makes the snapshot itself.
_OVERDUE = 2
#: Segments that make a snapshot due, whatever the interval. A chain cannot have more than four times as many.
_MOST_SEGMENTS = MAX_SEGMENTS // 4
#: Seconds that the closes of a process together wait for snapshots that are nearly done, within a minute.
_PATIENCE_S = 1.0
_MINUTE_S = 60.0


class SnapshotMetrics(Protocol):
    """Receives numbers about the snapshots of one task's stores."""

    def backlog(self, store: str, segments: int, size: int) -> None:
        """Set the number and the bytes of the segments in a store's published chain."""
        ...

    def materialized(self, store: str, seconds: float | None, error: Exception | None = None) -> None:
        """Count a snapshot that took ``seconds``; None if it failed with ``error``."""
        ...


@dataclass(frozen=True, slots=True)
class PublishedChain:
    """A store's published chain in one backend, and what a restore would apply on top of its snapshot."""

    services: Services
    store: OpenStore
    manager: SegmentBackupManager
    marker: Marker
    backlog: Backlog

    @property
    def needs_snapshot(self) -> bool:
        return self.backlog.segments > 0 and not self.backlog.waiting

    @property
    def is_overdue(self) -> bool:
        """Whether so many commits or bytes follow the last snapshot that a commit should make one itself. Time does not
        count, so that a job that seldom commits still has its snapshots made in the background."""
        return self.is_over(intervals=_OVERDUE)

    def is_over(self, *, intervals: int = 1, seconds: float = 0) -> bool:
        """Whether a new snapshot is due: at least this many intervals of commits or bytes follow the last one, or it
        is ``seconds`` old and that is an interval or more."""
        commits, size = self.backlog.segments // intervals, self.backlog.size // intervals
        share = share_of_interval(self.store.identity)
        interval = self.services.config.snapshot_interval
        return commits >= _MOST_SEGMENTS or interval.is_over(commits, size, seconds, share=share)

    def snapshot_age_s(self) -> float:
        """Seconds since the snapshot was made; infinite if its index is lost."""
        try:
            made_ms = self.manager.snapshot_made_ms(self.store.identity, self.marker)
        except (MissingError, CorruptError):
            return float("inf")
        return self.services.clock.time_ns() / 1e9 - made_ms / 1e3


def published_chains(
    services: Services, store: OpenStore, checkpoint: Checkpoint, *, in_session: bool
) -> Iterator[PublishedChain]:
    """The published chains of a store. ``in_session``: whether the open store may know newer snapshots than the
    notes on this machine. Raises: MissingBlob, CorruptBlob, UnavailableError."""
    for factory, manager in services.segment_backends(store.config):
        marker = checkpoint.marker(factory, store.identity.store)
        if marker is not None:
            backlog = manager.backlog(store.identity, marker, store.session if in_session else None)
            yield PublishedChain(services, store, manager, marker, backlog)


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
        now, limits = services.clock.monotonic(), services.config.snapshot_interval
        interval = limits.seconds or 0
        #: store → start of its last snapshot; the first interval is shorter
        self._last = {name: now - interval * (1 - share_of_interval(store.identity)) for name, store in stores.items()}
        self.worker: Worker[None] = Worker(services, f"snapshot-{task}", f"task {task}")
        #: Held while a snapshot uses the database.
        self._at_database = threading.Lock()
        #: stores of which this owner has not looked whether a snapshot is overdue, and whether it is old
        self._inherited = set(stores)
        self._of_unknown_age = set(stores) if interval and limits.commits is None else set[str]()
        #: store → the database's sequence number that its last snapshot does not exceed
        self._made: dict[str, int] = {}
        #: the newest checkpoint, and the sequence number of each store there
        self._published: tuple[Checkpoint, Mapping[str, int]] | None = None
        #: store → number of snapshots that failed in a row, and the last error until a commit has raised it
        self._failures: dict[str, int] = {}
        self._failed: dict[str, Exception] = {}

    def overdue(self, checkpoint: Checkpoint | None) -> list[str]:
        """Before a commit: the stores that it should store as snapshots, because earlier owners have made none in the
        background. Only the first commit of an owner finds any."""
        able = {name for name in self._inherited if self._stores[name].is_whole}
        self._inherited -= able
        return [name for name in able if self._is_overdue(self._stores[name], checkpoint)]

    def after_commit(self, checkpoint: Checkpoint) -> None:
        """Start a due snapshot, one store at a time. If the check fails, the next commit checks again."""
        self._published = checkpoint, {name: store.committed_at for name, store in self._stores.items()}
        if self.worker.closing:
            return
        for name, store in sorted(self._stores.items(), key=lambda item: self._last[item[0]]):
            try:
                due = self._due(store, checkpoint)
                if due is not None and self.worker.start(partial(self._make, due)) is not None:
                    self._last[name] = self._services.clock.monotonic()
            except StatemgrError as error:
                log.warning("%s: no snapshot of %s is made now: %s", self._task, name, error)
                if isinstance(error, MissingError | CorruptError):
                    self._suspect()

    def raise_failures(self) -> None:
        """Before a commit. Raises: RetryableError if more snapshots in a row have failed than are tolerated."""
        for store, error in tuple(self._failed.items()):
            failures = self._failures.get(store, 0)  # none if a snapshot succeeds at this moment
            if failures > self._services.config.tolerated_snapshot_failures:
                self._failed.pop(store, None)  # let the next commit continue and try a snapshot again
                raise RetryableError(
                    f"{failures} snapshots in a row have failed: {error}",
                    hint="fix the cause: nothing is lost, but a restore takes longer with each commit",
                    job=self._services.config.job_name,
                    task=self._task,
                    store=store,
                ) from error

    def close(self) -> None:
        """Leave finished snapshots to the next owner on this machine. Waits for one that is nearly done, and until the
        database is no longer in use. What is not finished expires."""
        _PATIENCE.wait(self.worker, self._services.clock)
        self.worker.close(wait=False)
        with self._at_database:
            pass
        for name in tuple(self._made):
            self._leave(name)

    def _leave(self, name: str) -> None:
        """Leave a finished snapshot to the next owner, unless it may have changes that are not published."""
        store, published, made = self._stores[name], self._published, self._made.get(name)
        if published is None or store.session is None or made is None or made > published[1][name]:
            return
        for factory, manager in self._services.segment_backends(store.config):
            marker = published[0].marker(factory, name)
            try:
                if marker is not None:
                    manager.leave_snapshot(store.identity, store.session, marker)
            except (StatemgrError, OSError) as error:  # its blobs expire
                log.warning("%s: a snapshot of %s is not left to the next owner: %s", self._task, name, error)

    def _is_overdue(self, store: OpenStore, checkpoint: Checkpoint | None) -> bool:
        try:
            chains = list(published_chains(self._services, store, checkpoint, in_session=True)) if checkpoint else []
        except StatemgrError as error:  # the commit notices what is damaged, and fills the backend again
            log.warning(
                "%s: it is not known whether a snapshot of %s is overdue: %s", self._task, store.identity, error
            )
            return False
        return any(chain.needs_snapshot and chain.is_overdue for chain in chains)

    def _due(self, store: OpenStore, checkpoint: Checkpoint) -> PublishedChain | None:
        """Step 1."""
        name, interval_s = store.identity.store, self._services.config.snapshot_interval.seconds or 0
        for chain in published_chains(self._services, store, checkpoint, in_session=True):
            self._metrics.backlog(name, chain.backlog.segments, chain.backlog.size)
            if name in self._of_unknown_age and chain.needs_snapshot:
                self._of_unknown_age.discard(name)  # one question is enough if there is no answer
                if chain.snapshot_age_s() >= _OVERDUE * interval_s:  # no earlier owner has lived long enough
                    self._last[name] = -math.inf
            seconds = self._services.clock.monotonic() - self._last[name]
            if chain.needs_snapshot and store.is_whole and chain.is_over(seconds=seconds):
                return chain
        return None

    def _make(self, due: PublishedChain) -> None:
        name = due.store.identity.store
        begun = self._services.clock.elapsed()
        self._made.pop(name, None)
        try:
            self._made[name] = materialize(
                self._services, due.store, due.manager, due.marker, self._at_database, self.worker.go_on
            )
            self._leave(name)
            self._metrics.materialized(name, self._services.clock.elapsed() - begun)
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
) -> int:
    """Steps 2 and 3 for a store that a task keeps open. Keeps the directory as a local copy.

    Args:
        manager: the backend that gets the snapshot.
        marker: the backend's published marker of the store.
        at_database: a lock to hold while using the store's database.
        go_on: called now and then; an exception from it ends the snapshot.

    Returns: the database's sequence number after which the snapshot has no change.
    Raises: RetryableError, AccessDenied, DiskFull, CorruptError, ClosedError.
    """
    identity = store.identity
    with flow("snapshot", str(identity), identity.job_key) as making:
        identity.announce(Phase.MATERIALIZE)
        begun = services.clock.elapsed()
        attempt = services.ids.attempt_id()
        with at_database:
            go_on()
            staging, covered, until = store.concurrent_snapshot()
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
    tell_made(identity, made, services.clock.elapsed() - begun)
    return until


class _Patience:
    """How long the closes of this process may still wait for snapshots. Together they wait a second in a minute, so
    that the end of a process with many tasks is not delayed by a blob store that is slow."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._left_s, self._since = _PATIENCE_S, 0.0

    def wait(self, worker: Worker[None], clock: Clock) -> None:
        """Wait for the worker's snapshot, if it has one."""
        if not worker.busy:
            return
        with self._lock:
            begun = clock.monotonic()
            if begun - self._since > _MINUTE_S:
                self._left_s, self._since = _PATIENCE_S, begun
            worker.wait(self._left_s)
            self._left_s = max(0.0, self._left_s - (clock.monotonic() - begun))


_PATIENCE = _Patience()


def tell_made(identity: StoreIdentity, made: FinishedDirectory, seconds: float) -> None:
    """Log that a snapshot was made."""
    total = sum(length for length, _ in made.files.values())
    tell(
        log, Event.SNAPSHOT, "%s: made a snapshot of %s in %.3f s; later commits build on it",
        identity, size(total), seconds,
        job=identity.job_name, task=identity.task, store=identity.store, bytes=total, seconds=round(seconds, 3),
    )  # fmt: skip


def share_of_interval(identity: StoreIdentity) -> float:
    """From 1/2 to 1, spread evenly over tasks and stores, so that their snapshots are due at different times."""
    digest = content_hash(f"{identity.job_key}/{identity.task}/{identity.store}".encode())
    return 0.5 + int.from_bytes(digest[:4], "big") / 2**33
