"""The jobs of many callers on one bounded pool of threads, with fair turns.

A call's jobs are a batch. Batches with jobs to do take turns, so that a huge one does not starve a small one; within
a batch jobs start in their order. Jobs are leaves: none waits for another, so any number of callers can share a pool.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self

from statemgr.errors import RetryableError
from statemgr.local.executors import Threads
from statemgr.ports import Executors

#: Seconds between two reports of progress.
_REPORT_INTERVAL_S = 0.2
#: Most jobs of one batch that wait for their turn: what a caller with a million files holds in memory.
_WINDOW = 1000


class Cancelled(RetryableError):
    """The job was given up because another of its batch failed. Callers see that other's error instead."""


class Room:
    """Bytes that may be on their way at a time; a single larger piece goes alone. Safe to use from many threads.

    Args:
        most: bytes.
        patience_s: seconds that a piece waits for room; None waits as long as it takes.
    """

    def __init__(self, most: int, patience_s: float | None = None) -> None:
        self._most = most
        self._patience_s = patience_s
        self._used = 0
        self._changed = threading.Condition()
        #: Pieces that had to wait so far.
        self.waited = 0

    @contextmanager
    def taken(self, size: int) -> Iterator[None]:
        """While a piece of ``size`` bytes is on its way. Raises: RetryableError when there is no room in time."""
        with self._changed:
            if not self._fits(size):
                self.waited += 1
                if not self._changed.wait_for(lambda: self._fits(size), self._patience_s):
                    raise RetryableError(
                        f"uploads of {self._used} bytes make no progress",
                        hint="check the network and the blob store; the next commit has the changes of this one",
                    )
            self._used += size
        try:
            yield
        finally:
            with self._changed:
                self._used -= size
                self._changed.notify_all()

    def _fits(self, size: int) -> bool:
        return self._used == 0 or self._used + size <= self._most


class Pool:
    """Threads that run the jobs of batches in turn.

    Args:
        threads: jobs that run at a time.
        most_bytes: sum of the sizes of the jobs that run at a time; a larger one runs alone.
    """

    def __init__(self, threads: int, most_bytes: int, executors: Executors | None = None) -> None:
        self._executor = (executors or Threads()).pool("transfer", threads)
        self._room = Room(most_bytes)
        self._turns: deque[Batch] = deque()
        #: guards this and all batches; told whenever a job ends
        self.changed = threading.Condition()

    def batch(self, report: Callable[[], None] = lambda: None) -> Batch:
        """The jobs of one call; ``report`` is called on the caller's thread while it waits."""
        return Batch(self, report)

    def close(self) -> None:
        """Wait for what runs and stop the threads."""
        self._executor.shutdown(wait=True, cancel_futures=True)

    def offer(self, batch: Batch) -> None:
        """A batch has one more job waiting; the lock is held."""
        if len(batch.waiting) == 1:
            self._turns.append(batch)
        self._executor.submit(self._run_next)

    def _run_next(self) -> None:
        with self.changed:
            while self._turns and not self._turns[0].waiting:
                self._turns.popleft()  # it was given up
            if not self._turns:
                return
            batch = self._turns.popleft()
            job, size = batch.waiting.popleft()
            if batch.waiting:
                self._turns.append(batch)
            batch.running += 1
        error: BaseException | None = None
        try:
            with self._room.taken(size):
                batch.check()
                job()
        except BaseException as raised:
            error = raised
        with self.changed:
            batch.running -= 1
            if error is not None and (batch.error is None or isinstance(batch.error, Cancelled)):
                batch.error = error
            self.changed.notify_all()


class Batch:
    """The jobs of one call; use as a context manager, which waits for them all. The first error ends it.

    ``waiting`` (jobs and their sizes), ``running`` and ``error`` belong to the pool.
    """

    def __init__(self, pool: Pool, report: Callable[[], None]) -> None:
        self._pool = pool
        self._report = report
        self._cancelled = False
        self.waiting: deque[tuple[Callable[[], object], int]] = deque()
        self.running = 0
        self.error: BaseException | None = None

    def submit(self, job: Callable[[], object], size: int = 0) -> None:
        """Add a job that moves ``size`` bytes. Waits while too many are waiting. Raises: the first error so far."""
        self._wait(lambda: len(self.waiting) < _WINDOW)
        with self._pool.changed:
            self.waiting.append((job, size))
            self._pool.offer(self)

    def check(self) -> None:
        """For a job, between pieces of work. Raises: Cancelled when the batch has failed."""
        if self._cancelled or self.error is not None:
            raise Cancelled("cancelled: another part of the transfer failed")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self._wait(lambda: not self.waiting and not self.running)
        finally:
            # after an error, or one that the caller's thread raised: nothing runs on when this returns
            with self._pool.changed:
                self._cancelled = True
                self.waiting.clear()
                self._pool.changed.wait_for(lambda: not self.running)
        self._report()

    def _wait(self, ready: Callable[[], bool]) -> None:
        while True:
            with self._pool.changed:
                is_ready = self._pool.changed.wait_for(lambda: self.error or ready(), timeout=_REPORT_INTERVAL_S)
                if self.error is not None:
                    raise self.error
            if is_ready:
                return
            self._report()


class Counter:
    """Bytes or blobs done so far, counted from many threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._value = 0

    def add(self, amount: int) -> None:
        """Count ``amount`` more (or fewer)."""
        with self._lock:
            self._value += amount

    @property
    def value(self) -> int:
        """What was counted."""
        with self._lock:
            return self._value
