"""Uploads of segments: hedged against a store's slow moments, and bounded in bytes.

All tasks of a process share them. Every upload bears the job's TTL, as in the transfer engine.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from statemgr.backends.services import BackendContext
from statemgr.errors import RetryableError
from statemgr.ports import Body, FileSlice
from statemgr.transfer.hedging import Hedger

#: Uploads at a time. They wait for the store most of the time, and their bytes are bounded beside.
_THREADS = 64
#: Bytes of uploads in flight, above which further ones wait. A single larger one goes alone.
_IN_FLIGHT = 64 * 1024 * 1024


class SegmentUploads:
    """Safe to use from many threads."""

    def __init__(self, context: BackendContext) -> None:
        self._context = context
        self.hedger = Hedger(context.clock, threads=_THREADS)
        self._room = threading.Condition()
        self._in_flight = 0
        #: Uploads that had to wait for room so far.
        self.blocked = 0

    def put(self, blob_id: str, body: Body) -> str:
        """Write one blob; of attempts beside a slow one, each writes to a name of its own.

        Returns: the name of the one that was first.
        Raises: UnavailableError, AccessDenied, DiskFull; RetryableError when there is no room in time.
        """
        size = body.length if isinstance(body, FileSlice) else len(body)
        with self._admitted(size):
            return self.hedger.call(lambda number: self._attempt(blob_id, number, body), lost=self._delete)

    def close(self) -> None:
        """Wait for what runs."""
        self.hedger.close()

    def _attempt(self, blob_id: str, number: int, body: Body) -> str:
        name = f"{blob_id}-{number}" if number else blob_id
        self._context.blobs().put(name, body, ttl_days=self._context.config.ttl_days)
        return name

    def _delete(self, blob_id: str) -> None:
        self._context.blobs().delete(blob_id)

    @contextmanager
    def _admitted(self, size: int) -> Iterator[None]:
        with self._room:
            if not self._has_room(size):
                self.blocked += 1
                if not self._room.wait_for(lambda: self._has_room(size), self._context.config.commit_timeout_ms / 1000):
                    raise RetryableError(
                        f"{self._in_flight} bytes of segments are on their way to the blob store, and none arrives",
                        hint="the changes are in the next commit",
                    )
            self._in_flight += size
        try:
            yield
        finally:
            with self._room:
                self._in_flight -= size
                self._room.notify_all()

    def _has_room(self, size: int) -> bool:
        return self._in_flight == 0 or self._in_flight + size <= _IN_FLIGHT
