"""Background snapshots of stores that are opened for one attempt at a time, made from the published state.

Steps, next to the attempts of a process, for one store at a time:

1. when an attempt opens at a published checkpoint, check whether a snapshot is due and no offer of one exists
2. link the local copy of that state into a directory of its own
3. upload the files that the last snapshot lacks, and leave an offer on this machine
4. the next attempt that prepares a commit here begins with the snapshot, and leaves out the segments that it covers

Nothing here changes which state is current. A later attempt retries a failure. An attempt that finds twice as much as
makes a snapshot due makes the snapshot itself (:func:`overdue_stores`).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from statemgr.backends.services import Services
from statemgr.config.policies import SnapshotInterval
from statemgr.errors import CorruptError, MissingError
from statemgr.flows.background_snapshots import share_of_interval
from statemgr.flows.open_store import NO_CHANGES, OpenStore
from statemgr.flows.worker import Worker
from statemgr.model.checkpoint import Checkpoint, Marker
from statemgr.phases import Phase, announce
from statemgr.ports import Backlog, SegmentBackupManager, StoreSnapshot

log = logging.getLogger(__name__)
#: Intervals after which an attempt makes the snapshot itself.
_OVERDUE = 2


@dataclass(frozen=True, slots=True)
class _Published:
    """A store that was opened at a published state: the state ID, a backend, and its published chain."""

    store: OpenStore
    state_id: str
    manager: SegmentBackupManager
    marker: Marker
    backlog: Backlog
    interval: SnapshotInterval

    def is_over(self, intervals: int) -> bool:
        """Whether the last snapshot is more than so many intervals old, by commits or bytes."""
        commits, size = self.backlog.segments // intervals, self.backlog.size // intervals
        return self.interval.is_over(commits, size, share=share_of_interval(self.store.identity))

    def is_due(self, services: Services) -> bool:
        """Whether it is more than one interval old, by commits, bytes or time. A lost snapshot is always due."""
        if self.is_over(1):
            return True
        if self.interval.seconds is None:
            return False
        try:
            age_s = (
                services.clock.time_ns() / 1e9 - self.manager.snapshot_made_ms(self.store.identity, self.marker) / 1e3
            )
        except (MissingError, CorruptError):
            return True
        return age_s >= self.interval.seconds * share_of_interval(self.store.identity)


class AttemptSnapshots:
    """The background snapshots of one process. Safe to use from many threads."""

    def __init__(self, services: Services) -> None:
        self._services = services
        # a process that ends waits at most for the parts that are being uploaded
        self.worker: Worker[None] = Worker(services, "snapshot", services.config.job_name, background=True)

    def start(self, stores: Mapping[str, OpenStore], checkpoint: Checkpoint) -> None:
        """Step 1, for stores that were just opened at a checkpoint. The other steps run on another thread."""
        if self.worker.busy:
            return
        try:
            found = list(_published(self._services, stores, checkpoint))
            # the attempt makes these itself
            overdue = {one.store.identity.store for one in found if one.is_over(_OVERDUE)}
            due = (one for one in found if one.store.identity.store not in overdue and one.is_due(self._services))
            first = next(due, None)
        except Exception as error:  # an attempt must not fail because of it
            log.warning("no snapshot is made next to this attempt: %s", error)
            return
        if first is not None:
            what = f"a snapshot of {first.store.identity.task}/{first.store.identity.store}"
            self.worker.attempt(what, lambda: self._offer(first))

    def _offer(self, found: _Published) -> None:
        """Steps 2 and 3."""
        identity, directories = found.store.identity, found.store.directories
        subject = f"{identity.task}/{identity.store}"
        announce(Phase.MATERIALIZE, subject, identity.job_key)
        copy = directories.find(found.state_id)
        if copy is None:
            return  # a later attempt has removed it
        own = directories.clone(copy)
        try:
            made, attempt = found.store.finished(own), self._services.ids.attempt_id()
            snapshot = StoreSnapshot(identity, found.state_id, attempt, made, NO_CHANGES, None, check=self.worker.go_on)
            with found.store.local_files():
                found.manager.offer(snapshot, found.marker)
        finally:
            directories.discard(own)
        announce(Phase.MATERIALIZED, subject, identity.job_key)


def overdue_stores(services: Services, stores: Mapping[str, OpenStore], checkpoint: Checkpoint | None) -> list[str]:
    """The stores that an attempt should store as snapshots instead of segments, because nobody has made their
    snapshots.

    Counts commits and bytes, but not time, so that a job that seldom commits still has its snapshots made in the
    background.

    Raises: UnavailableError, AccessDenied.
    """
    if checkpoint is None:
        return []
    return [one.store.identity.store for one in _published(services, stores, checkpoint) if one.is_over(_OVERDUE)]


def _published(services: Services, stores: Mapping[str, OpenStore], checkpoint: Checkpoint) -> Iterator[_Published]:
    """The published chains of stores that have no offer of a newer snapshot."""
    for name, store in stores.items():
        for factory, manager in services.segment_backends(store.config):
            marker = checkpoint.marker(factory, name)
            if marker is None:
                continue
            try:
                backlog = manager.backlog(store.identity, marker)
            except (MissingError, CorruptError):
                continue  # the commit notices that too, and fills the backend again
            if backlog.segments and not backlog.waiting:
                interval = services.config.snapshot_interval
                yield _Published(store, checkpoint.stores[name], manager, marker, backlog, interval)
