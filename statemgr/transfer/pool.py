"""The jobs of many callers on one bounded pool of threads, with fair turns.

The jobs of one call are a batch. Batches with waiting jobs take turns, so that a large one does not starve a small one;
the jobs of a batch start in their order. No job waits for another one, so any number of callers can share a pool.

A batch in the background has a :class:`Pace`, and gives way to what somebody waits for.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self

from statemgr.errors import ClosedError, RetryableError
from statemgr.ports import Clock, Executors, wait_for

#: Seconds between two reports of progress.
_REPORT_INTERVAL_S = 0.2
#: Most waiting jobs of one batch. This bounds the memory of a caller with a million files.
_WINDOW = 1000
#: Fewest jobs at a time of a transfer in the background: two move while the third one waits for its answer.
_LEAST = 3
#: Seconds after a read until nobody waits, and of a pause before a piece.
_QUIET_S, _PAUSE_S = 1.0, 0.2
#: Seconds of a quick piece of a body, and at most of the wait before the next one.
_QUICK_S, _MOVER_S = 0.02, 0.2
#: Reads whose latency is known. One has waited if it took so much of the shortest latency longer, and so many seconds.
_KNOWN, _SLOWER, _SLOWER_S = 64, 0.25, 0.003


class Cancelled(RetryableError):
    """Another job of the batch failed. Callers see the error of that job instead."""


class Room:
    """Bounds the bytes in flight; a single larger piece goes alone. Who comes first goes first, so that small pieces do
    not keep a large one out. Safe to use from many threads.

    Args:
        most: bytes.
        patience_s: seconds that a piece waits for room; None waits as long as it takes.
    """

    def __init__(self, clock: Clock, most: int, patience_s: float | None = None) -> None:
        self._clock = clock
        self._most = most
        self._patience_s = patience_s
        self._used = 0
        self._waiting: deque[object] = deque()
        self._changed = threading.Condition()
        #: Number of pieces that had to wait.
        self.waited = 0

    @contextmanager
    def taken(self, size: int) -> Iterator[None]:
        """Take room for a piece of ``size`` bytes inside the block. Raises: RetryableError without room in time."""
        with self._changed:
            if self._waiting or not self._fits(size):
                self.waited += 1
                self._wait(size)
            self._used += size
        try:
            yield
        finally:
            with self._changed:
                self._used -= size
                self._changed.notify_all()

    def _wait(self, size: int) -> None:
        turn = object()
        self._waiting.append(turn)
        try:
            if not wait_for(
                self._clock,
                self._changed,
                lambda: self._waiting[0] is turn and self._fits(size),
                self._patience_s,
            ):
                raise RetryableError(
                    f"uploads of {self._used} bytes make no progress",
                    hint="check the network and the blob store; the next commit has the changes of this one",
                )
        finally:
            self._waiting.remove(turn)
            self._changed.notify_all()

    def _fits(self, size: int) -> bool:
        return self._used == 0 or self._used + size <= self._most


class Movers:
    """Threads of which few at a time move what has already arrived. On few processors, threads that all have a piece
    mostly wait for each other: for a processor, and for Python's interpreter. Safe to use from many threads.

    Args:
        most: threads at a time.
    """

    def __init__(self, clock: Clock, most: int) -> None:
        self.clock = clock
        self.most = most
        #: Threads that move a piece, also those that did not wait.
        self.running = 0
        self.changed = threading.Condition()


class Mover:
    """A block that moves one piece of a body, and can be repeated.

    It waits for others only if its last piece was quick, because the next one has probably arrived, too. It does not
    wait for long, because another one may hang.
    """

    def __init__(self, movers: Movers) -> None:
        self._movers = movers
        self._begun = math.nan
        self._took = math.inf

    def __enter__(self) -> None:
        movers = self._movers
        with movers.changed:
            if self._took < _QUICK_S:
                wait_for(movers.clock, movers.changed, lambda: movers.running < movers.most, _MOVER_S)
            movers.running += 1
        self._begun = movers.clock.elapsed()

    def __exit__(self, *_: object) -> None:
        movers = self._movers
        self._took = movers.clock.elapsed() - self._begun
        with movers.changed:
            movers.running -= 1
            movers.changed.notify()


class Pool:
    """Threads that run the jobs of batches in turn.

    Args:
        threads: jobs that run at a time.
        most_bytes: sum of the sizes of the jobs that run at a time; a larger one runs alone.
    """

    def __init__(self, clock: Clock, executors: Executors, threads: int, most_bytes: int) -> None:
        self.clock = clock
        self.threads = threads
        self._executor = executors.pool("transfer", threads)
        self._room = Room(clock, most_bytes)
        self._turns: deque[Batch] = deque()
        self._closed = False
        #: Guards this and all batches. Notified when a job ends.
        self.changed = threading.Condition()

    def batch(self, report: Callable[[], None] = lambda: None) -> Batch:
        """The jobs of one call. ``report`` is called on the caller's thread while it waits."""
        return Batch(self, report)

    def close(self) -> None:
        """Wait for running jobs and stop the threads. A batch that has waiting jobs, or gets more, fails."""
        with self.changed:
            self._closed = True
            for batch in self._turns:
                batch.error = batch.error or _closed()
            self.changed.notify_all()
        self._executor.shutdown(wait=True, cancel_futures=True)

    def enqueue(self, batch: Batch, job: Callable[[], object], size: int) -> None:
        with self.changed:
            if self._closed:
                raise _closed()
            batch.waiting.append((job, size))
            if len(batch.waiting) == 1:
                self._turns.append(batch)
            self._executor.submit(self._run_next)

    def _run_next(self) -> None:
        with self.changed:
            while self._turns and not self._turns[0].waiting:
                self._turns.popleft()  # the batch has failed
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


def _closed() -> ClosedError:
    return ClosedError("the services of the job were closed before the transfer had ended")


class Batch:
    """The jobs of one call. A context manager that waits for all of them; the first error ends the batch.

    ``waiting`` (jobs and their sizes), ``running`` and ``error`` belong to the pool.
    """

    def __init__(self, pool: Pool, report: Callable[[], None]) -> None:
        self._pool = pool
        self._report = report
        self._cancelled = False
        self.waiting: deque[tuple[Callable[[], object], int]] = deque()
        self.running = 0
        self.error: BaseException | None = None

    def submit(self, job: Callable[[], object], size: int = 0, pace: Pace | None = None) -> None:
        """Add a job that moves ``size`` bytes. Blocks while too many are waiting, or more than ``pace`` allows are
        waiting or running. Raises: the first error so far."""
        allowed = pace.allowed if pace is not None else lambda: _WINDOW
        self._wait(lambda: len(self.waiting) < _WINDOW and len(self.waiting) + self.running < allowed())
        self._pool.enqueue(self, job, size)

    def check(self) -> None:
        """A job calls this between pieces of work. Raises: Cancelled if the batch has failed."""
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
            # also after an error: when this returns, no job of the batch runs any more
            with self._pool.changed:
                self._cancelled = True
                self.waiting.clear()
                self._pool.changed.wait_for(lambda: not self.running)
        self._report()

    def _wait(self, ready: Callable[[], bool]) -> None:
        changed = self._pool.changed
        while True:
            with changed:
                is_ready = wait_for(self._pool.clock, changed, lambda: bool(self.error) or ready(), _REPORT_INTERVAL_S)
                if self.error is not None:
                    raise self.error
            if is_ready:
                return
            self._report()


class Pace:
    """How many jobs of a transfer in the background run at a time: few while somebody waits for the same server.

    This works as LEDBAT (RFC 6817) does. The fastest of the last reads tells what one takes with nothing in its way. If
    one took much longer, it had waited behind the background, which then has one job less at a time; otherwise it gets
    a part of a job more. Safe to use from many threads.

    Args:
        most: jobs at a time while nobody waits.
    """

    def __init__(self, clock: Clock, most: int) -> None:
        self._clock = clock
        self._most = most
        self._fewer = float(min(_LEAST, most))
        self._reads = 0
        #: From when on nobody waits, if nothing else is read.
        self._quiet_s = -math.inf
        self._took: deque[float] = deque(maxlen=_KNOWN)
        self._running = 0
        self._changed = threading.Condition()

    @contextmanager
    def read(self, *, alike: bool) -> Iterator[None]:
        """A block in which somebody waits for a request. ``alike``: it asks for about as much as most."""
        with self._changed:
            self._reads += 1
        took, begun = None, self._clock.elapsed()
        try:
            yield
            took = self._clock.elapsed() - begun if alike else None
        finally:
            with self._changed:
                self._reads -= 1
                self._quiet_s = self._clock.elapsed() + _QUIET_S
                if took is not None:
                    self._learn(took)

    def allowed(self) -> int:
        """How many jobs may run now."""
        with self._changed:
            return self._allowed()

    @contextmanager
    def job(self) -> Iterator[Callable[[], None]]:
        """A block that is one job. Yields what it calls before each piece of its work, and which may take a moment."""
        with self._changed:
            self._running += 1
        try:
            yield self._give_way
        finally:
            with self._changed:
                self._running -= 1
                self._changed.notify()

    def _give_way(self) -> None:
        with self._changed:
            if self._running <= self._allowed():
                return
            self._running -= 1
            # not for longer, because a server ends a connection on which nothing moves
            wait_for(self._clock, self._changed, lambda: self._running < self._allowed(), _PAUSE_S)
            self._running += 1

    def _allowed(self) -> int:
        quiet = not self._reads and self._clock.elapsed() >= self._quiet_s
        return self._most if quiet else int(self._fewer)

    def _learn(self, took: float) -> None:
        self._took.append(took)
        waited = took - min(self._took)
        if waited > max(_SLOWER * min(self._took), _SLOWER_S):
            self._fewer = max(self._fewer - 1, min(_LEAST, self._most))
        else:
            self._fewer = min(self._fewer + 1 / self._fewer, self._most)


class Counter:
    """A number of bytes, counted from many threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.value = 0

    def add(self, amount: int) -> None:
        """Add ``amount``, which may be negative."""
        with self._lock:
            self.value += amount
