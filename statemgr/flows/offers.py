"""Snapshots of stores that are opened for one attempt at a time: made in the background, from what is published.

Steps, beside the attempts of a process, for one store at a time:

1. when an attempt opens at a published checkpoint: is a snapshot due, and is none offered yet
2. link the local copy of that state into a directory of its own
3. upload what the last snapshot lacks, and leave an offer on this machine
4. the next attempt that prepares a commit here begins with it, and leaves out the segments that it covers

Nothing here changes what is current. What fails is tried again by a later attempt; an attempt that finds twice as
much as makes a snapshot due makes it itself (:func:`overdue_stores`).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Mapping

from statemgr.errors import ClosedError, CorruptError, MissingError, StatemgrError
from statemgr.flows.materialize import share_of_interval
from statemgr.flows.open_store import NO_CHANGES, OpenStore
from statemgr.flows.parts import Parts
from statemgr.model.checkpoint import Checkpoint, Marker
from statemgr.phases import Phase, announce
from statemgr.ports import SegmentBackupManager, StoreSnapshot

log = logging.getLogger(__name__)
#: How many intervals an attempt lets pass before it makes the snapshot itself.
_OVERDUE = 2


class SnapshotOffers:
    """The background snapshots of one process. Safe to use from many threads."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._lock = threading.Lock()
        self._running: threading.Thread | None = None
        self._closing = threading.Event()

    def start(self, stores: Mapping[str, OpenStore], checkpoint: Checkpoint) -> None:
        """Step 1, with stores that were just opened at a checkpoint; the rest has a thread of its own."""
        if not self._lock.acquire(blocking=False):
            return  # another attempt is about to start one
        try:
            if self._closing.is_set() or (self._running is not None and self._running.is_alive()):
                return
            due = next(_due(self._parts, stores, checkpoint, 1), None)
            if due is not None:
                # a daemon: a process that ends does not wait for it
                self._running = threading.Thread(target=self._tried, args=due, name="statemgr-snapshot", daemon=True)
                self._running.start()
        except StatemgrError as error:
            log.warning("no snapshot is made beside this attempt: %s", error)
        finally:
            self._lock.release()

    def close(self) -> None:
        """Give up what is being uploaded: it expires."""
        self._closing.set()
        with self._lock:
            if self._running is not None:
                self._running.join()

    def _tried(self, store: OpenStore, state_id: str, manager: SegmentBackupManager, marker: Marker) -> None:
        identity = store.identity
        try:
            self._offer(store, state_id, manager, marker)
        except Exception as error:
            if not self._closing.is_set():
                log.warning(
                    "task %s: a snapshot of %s failed, it is tried again: %s",
                    identity.task, identity.store, error, exc_info=not isinstance(error, StatemgrError),
                )  # fmt: skip

    def _offer(self, store: OpenStore, state_id: str, manager: SegmentBackupManager, marker: Marker) -> None:
        """Steps 2 and 3."""
        identity, directories = store.identity, store.directories
        subject = f"{identity.task}/{identity.store}"
        announce(Phase.MATERIALIZE, subject)
        copy = directories.find(state_id)
        if copy is None:
            return  # a later attempt has tidied it away
        own = directories.clone(copy)
        try:
            made = directories.finished(own)
            attempt = self._parts.ids.attempt_id()
            manager.offer(StoreSnapshot(identity, state_id, attempt, made, NO_CHANGES, None, check=self._go_on), marker)
        finally:
            directories.discard(own)
        announce(Phase.MATERIALIZED, subject)

    def _go_on(self) -> None:
        if self._closing.is_set():
            raise ClosedError("the process is being closed")


def overdue_stores(parts: Parts, stores: Mapping[str, OpenStore], checkpoint: Checkpoint | None) -> list[str]:
    """The stores that an attempt had better store as snapshots than as segments, since nobody else has.

    Raises: UnavailableError, AccessDenied.
    """
    if checkpoint is None:
        return []
    return [store.identity.store for store, *_ in _due(parts, stores, checkpoint, _OVERDUE)]


def _due(
    parts: Parts, stores: Mapping[str, OpenStore], checkpoint: Checkpoint, intervals: int
) -> Iterator[tuple[OpenStore, str, SegmentBackupManager, Marker]]:
    """The stores whose last snapshot is so many intervals old, with their published states."""
    interval = parts.config.snapshot_interval
    for name, store in stores.items():
        for factory, manager in parts.segment_backends(store.config):
            marker = checkpoint.marker(factory, name)
            if marker is None:
                continue
            try:
                backlog = manager.backlog(store.identity, marker)
                seconds = 0.0
                if interval.seconds is not None and backlog.segments:
                    seconds = parts.clock.time_ns() / 1e9 - manager.snapshot_made_ms(store.identity, marker) / 1e3
            except (MissingError, CorruptError):
                continue  # the commit finds that, too, and fills the backend anew
            if (
                backlog.segments
                and not backlog.waiting
                and interval.is_over(
                    backlog.segments // intervals,
                    backlog.size // intervals,
                    seconds / intervals,
                    share=share_of_interval(store.identity),
                )
            ):
                yield store, checkpoint.stores[name], manager, marker
