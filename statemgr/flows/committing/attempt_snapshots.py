"""Background snapshots of stores that attempts open for a moment each. The steps are those of
:mod:`statemgr.flows.committing.background_snapshots`."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial

from statemgr.errors import CorruptError, MissingError
from statemgr.flows.committing.background_snapshots import (
    PublishedChain,
    published_chains,
    share_of_interval,
    tell_made,
)
from statemgr.flows.worker import Worker
from statemgr.model.checkpoint import Checkpoint
from statemgr.phases import Phase
from statemgr.ports import StoreSnapshot
from statemgr.services import Services
from statemgr.stores.open_store import NO_CHANGES, OpenStore

log = logging.getLogger(__name__)


#: A snapshot that has ended: its task and store, its seconds (None if it failed), and the class of its error.
SnapshotEnd = tuple[str, str, float | None, str | None]
#: Older ones are dropped if nobody takes them.
_MOST_ENDED = 1000


class AttemptSnapshots:
    """The background snapshots of one process that runs attempts. Safe to use from many threads."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._ended = deque[SnapshotEnd](maxlen=_MOST_ENDED)
        # a process that ends waits at most for the parts that are being uploaded
        self.worker: Worker[None] = Worker(services, "snapshot", services.config.job_name, background=True)

    def start(self, stores: Mapping[str, OpenStore], checkpoint: Checkpoint) -> None:
        """Start a due snapshot of one of the stores, which were just opened at the checkpoint."""
        if self.worker.busy:
            return
        interval_s = self._services.config.snapshot_interval.seconds
        try:
            for chain in _chains_in_need(self._services, stores, checkpoint):
                if chain.is_overdue:
                    continue  # the attempt makes this one itself
                identity = chain.store.identity
                age_s = interval_s and interval_s * share_of_interval(identity)
                if chain.is_over() or (age_s is not None and chain.snapshot_age_s() >= age_s):
                    state_id = checkpoint.stores[identity.store]
                    what = f"a snapshot of {identity}"
                    self.worker.attempt(what, partial(self._make_and_note, chain, state_id))
                    return
        except Exception as error:  # an attempt must not fail because of it
            log.warning("no background snapshot was started for this attempt: %s", error)

    def take_ended(self) -> Sequence[SnapshotEnd]:
        """The snapshots that have ended since the last call, for the metrics."""
        found = list[SnapshotEnd]()
        with suppress(IndexError):  # other threads may take them, too
            while True:
                found.append(self._ended.popleft())
        return found

    def _make_and_note(self, due: PublishedChain, state_id: str) -> None:
        task, store = due.store.identity.task, due.store.identity.store
        try:
            seconds = self._make(due, state_id)
            if seconds is not None:
                self._ended.append((task, store, seconds, None))
        except Exception as error:
            self._ended.append((task, store, None, type(error).__name__))
            raise

    def _make(self, due: PublishedChain, state_id: str) -> float | None:
        """Steps 2 and 3. Returns: the seconds that they took; None if a later attempt has removed the state."""
        identity, directories = due.store.identity, due.store.directories
        identity.announce(Phase.MATERIALIZE)
        copy = directories.find(state_id)
        if copy is None:
            return None
        own, begun = directories.clone(copy), self._services.clock.elapsed()
        try:
            made, attempt = due.store.finished(own), self._services.ids.attempt_id()
            snapshot = StoreSnapshot(identity, state_id, attempt, made, NO_CHANGES, None, check=self.worker.go_on)
            with due.store.local_files():
                due.manager.materialize_published(snapshot, due.marker)
        finally:
            directories.discard(own)
        identity.announce(Phase.MATERIALIZED)
        seconds = self._services.clock.elapsed() - begun
        tell_made(identity, made, seconds)
        return seconds


def overdue_stores(
    services: Services, stores: Mapping[str, OpenStore], checkpoint: Checkpoint | None
) -> tuple[list[str], Mapping[str, tuple[int, int]]]:
    """The stores that an attempt should store as snapshots instead of segments, because nobody has made their
    snapshots; and store → number and bytes of the segments in its published chain.

    Raises: UnavailableError, AccessDenied.
    """
    chains = list(_chains_in_need(services, stores, checkpoint)) if checkpoint is not None else []
    backlogs = {name: (0, 0) for name, store in stores.items() if any(services.segment_backends(store.config))}
    backlogs |= {chain.store.identity.store: (chain.backlog.segments, chain.backlog.size) for chain in chains}
    overdue = [chain.store.identity.store for chain in chains if chain.is_overdue]
    return overdue, backlogs


def _chains_in_need(
    services: Services, stores: Mapping[str, OpenStore], checkpoint: Checkpoint
) -> Iterator[PublishedChain]:
    """The published chains that no snapshot waits for on this machine."""
    for store in stores.values():
        try:
            chains = list(published_chains(services, store, checkpoint, in_session=False))
        except (MissingError, CorruptError):
            continue  # the commit notices that too, and fills the backend again
        yield from (chain for chain in chains if chain.needs_snapshot)
