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
import math
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
#: A store that was opened at a published state: that state's ID, a backend, and what it has published of the state.
_Published = tuple[OpenStore, str, SegmentBackupManager, Marker]


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
            overdue = overdue_stores(self._parts, stores, checkpoint)  # the attempt makes these itself
            due = (found for found in _due(self._parts, stores, checkpoint) if found[0].identity.store not in overdue)
            first = next(due, None)
            if first is not None:
                # a daemon: a process that ends waits at most for the parts that are on their way
                self._running = threading.Thread(target=self._tried, args=first, name="statemgr-snapshot", daemon=True)
                self._running.start()
        except Exception as error:  # no attempt fails by it
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
    """The stores that an attempt had better store as snapshots than as segments, since nobody else has: by commits and
    bytes, so that a job that seldom commits still has its snapshots made in the background.

    Raises: UnavailableError, AccessDenied.
    """
    if checkpoint is None:
        return []
    interval, found = parts.config.snapshot_interval, []
    for store, _, manager, marker in _with_segments(parts, stores, checkpoint):
        backlog = manager.backlog(store.identity, marker)
        commits, size = backlog.segments // _OVERDUE, backlog.size // _OVERDUE
        if not backlog.waiting and interval.is_over(commits, size, share=share_of_interval(store.identity)):
            found.append(store.identity.store)
    return found


def _due(parts: Parts, stores: Mapping[str, OpenStore], checkpoint: Checkpoint) -> Iterator[_Published]:
    """The stores whose last snapshot has an interval behind it."""
    interval = parts.config.snapshot_interval
    for published in _with_segments(parts, stores, checkpoint):
        store, _, manager, marker = published
        backlog, share = manager.backlog(store.identity, marker), share_of_interval(store.identity)
        if backlog.waiting:
            continue
        if interval.is_over(backlog.segments, backlog.size, share=share) or (
            interval.seconds is not None and _age_s(parts, store, manager, marker) >= interval.seconds * share
        ):
            yield published


def _with_segments(parts: Parts, stores: Mapping[str, OpenStore], checkpoint: Checkpoint) -> Iterator[_Published]:
    for name, store in stores.items():
        for factory, manager in parts.segment_backends(store.config):
            marker = checkpoint.marker(factory, name)
            if marker is None:
                continue
            try:
                has_segments = manager.backlog(store.identity, marker).segments > 0
            except (MissingError, CorruptError):
                continue  # the commit finds that, too, and fills the backend anew
            if has_segments:
                yield store, checkpoint.stores[name], manager, marker


def _age_s(parts: Parts, store: OpenStore, manager: SegmentBackupManager, marker: Marker) -> float:
    """Seconds since the last snapshot was made; one that is lost is as old as can be."""
    try:
        return parts.clock.time_ns() / 1e9 - manager.snapshot_made_ms(store.identity, marker) / 1e3
    except (MissingError, CorruptError):
        return math.inf
