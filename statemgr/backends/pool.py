"""Jobs on a shared thread pool: a bounded number in flight, the first error wins and the rest is given up.

Jobs are leaves: none waits for another, so that any number of callers can share one pool.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Executor, Future, wait
from types import TracebackType
from typing import Any, Self

from statemgr.errors import RetryableError

#: Seconds between two reports of progress.
_REPORT_INTERVAL_S = 0.2


class Cancelled(RetryableError):
    """The job was given up because another of its batch failed. Callers see that other's error instead."""


class Batch:
    """The jobs of one call; use as a context manager, which waits for them all.

    Args:
        pool: where the jobs run.
        window: most jobs that are in flight at a time.
        report: called on the caller's thread while it waits.
    """

    def __init__(self, pool: Executor, window: int, report: Callable[[], None] = lambda: None) -> None:
        self._pool = pool
        self._window = window
        self._report = report
        self._running: set[Future[Any]] = set()
        self._cancelled = threading.Event()

    def submit(self, job: Callable[[], object]) -> None:
        """Start a job when there is room. Raises: the first error of a job so far."""
        while len(self._running) >= self._window:
            self._wait()
        self._running.add(self._pool.submit(self._run, job))

    def check(self) -> None:
        """For a job, between pieces of work. Raises: Cancelled when the batch has failed."""
        if self._cancelled.is_set():
            raise Cancelled("given up: another part of the transfer failed")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            while error is None and self._running:
                self._wait()
        finally:
            # after an error, or one that the caller's thread raised: nothing runs on when this returns
            self._cancelled.set()
            for future in self._running:
                future.cancel()
            wait(self._running)
        self._report()

    def _run(self, job: Callable[[], object]) -> None:
        self.check()
        job()

    def _wait(self) -> None:
        done, _ = wait(self._running, timeout=_REPORT_INTERVAL_S, return_when=FIRST_COMPLETED)
        self._report()
        self._running -= done
        errors = [error for future in done if (error := future.exception()) is not None]
        if errors:
            raise next((error for error in errors if not isinstance(error, Cancelled)), errors[0])


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
