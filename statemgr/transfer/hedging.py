"""Hedged calls: when an attempt takes longer than most, another one starts, and the first to succeed wins.

Attempts run on threads of the hedger; they do the I/O. The delay is learnt from recent latencies. A budget limits the
extra attempts, so that a store that is slow as a whole gets no more work.

The defaults come from a simulation of 100 writers at once and a long-tailed store (p50 459 ms, p99 1.5 s, p999
3.2 s): 8 % extra attempts reduce the 99.9th percentile of the time until all 100 are durable to 0.43 of its value. A
third attempt waits half as long as the second: it is rare, but decides how long the slowest calls take.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from statemgr.ports import Clock, Executors, wait_for

T = TypeVar("T")
log = logging.getLogger(__name__)

#: Most extra attempts of one call.
_MOST_EXTRA = 2
#: Most extra attempts that the budget can save up in quiet times.
_BURST = 20.0
#: An extra attempt starts when a call has taken longer than this share of recent calls.
_PERCENTILE = 0.93
#: Number of recent latencies that the delay is learnt from.
_WINDOW = 500


class Hedger:
    """Hedges calls of one kind, whose latencies are alike. Safe to use from many threads.

    Args:
        clock: measures latencies, and waits until an extra attempt starts.
        threads: attempts that run at a time; further ones queue.
        budget: extra attempts for each first one, in the long run.
        least_samples: latencies that must be known before anything is hedged.
        least_delay: seconds below which hedging is not worth its request.
        count: called for each extra attempt that begins.

    Attributes:
        first, extra, lost: number of first attempts, of extra ones, and of those that succeeded too late.
    """

    def __init__(
        self,
        clock: Clock,
        executors: Executors,
        *,
        threads: int,
        budget: float = 0.1,
        least_samples: int = 20,
        least_delay: float = 0.05,
        count: Callable[[], None] = lambda: None,
    ) -> None:
        self._clock = clock
        self._pool = executors.pool("hedged", threads)
        self._budget = budget
        self._count = count
        self._least_samples = least_samples
        self._least_delay = least_delay
        self._lock = threading.Lock()
        self._latencies: deque[float] = deque(maxlen=_WINDOW)
        self._tokens = 0.0
        self.first = 0
        self.extra = 0
        self.lost = 0

    def call(self, attempt: Callable[[int], T], lost: Callable[[T], None] | None = None) -> T:
        """The result of the first attempt that succeeds.

        Args:
            attempt: called with 0, and with 1 and 2 for extra attempts, which must not get in each other's way: a
                PUT takes a blob name for each number, so that a late loser never touches the winner's blob.
            lost: gets the result of each attempt that succeeds too late, on another thread; its errors are logged.

        Raises: the error of the last attempt to fail, if all have failed. A failure starts no attempt: an attempt
            retries by itself.
        """
        race = _Race(self._clock, attempt, lost)
        with self._lock:
            self.first += 1
            self._tokens = min(self._tokens + self._budget, _BURST)
        self._start(race, 0)
        try:
            for number in range(1, _MOST_EXTRA + 1):
                delay = self.delay()
                if race.ends_within(delay and delay / number) or not self._take_token():
                    break
                self._start(race, number)
            return race.result()
        except BaseException:
            for unwanted in race.give_up():
                race.discard(unwanted)
            raise

    def delay(self) -> float | None:
        """Seconds to wait before an extra attempt; None while too little is known."""
        with self._lock:
            known = sorted(self._latencies)
        if len(known) < self._least_samples:
            return None
        return max(known[int(_PERCENTILE * len(known))], self._least_delay)

    def close(self) -> None:
        """Wait for all running attempts, also those that have lost, and stop the threads."""
        self._pool.shutdown(wait=True)

    def _start(self, race: _Race[T], number: int) -> None:
        race.enter()
        self._pool.submit(self._run, race, number)

    def _run(self, race: _Race[T], number: int) -> None:
        if not race.begin(number):
            with self._lock:  # it was still queued when another attempt succeeded: no request was made
                self.extra -= 1
                self._tokens = min(self._tokens + 1, _BURST)
            return
        if number:
            self._count()
        started = self._clock.monotonic()
        try:
            result = race.attempt(number)
        except BaseException as error:
            race.fail(error)
            return
        with self._lock:
            self._latencies.append(self._clock.monotonic() - started)
        if not race.win(result):
            with self._lock:
                self.lost += 1
            race.discard(result)

    def _take_token(self) -> bool:
        with self._lock:
            if self._tokens < 1:
                return False
            self._tokens -= 1
            self.extra += 1
            return True


class _Race(Generic[T]):
    """The attempts of one call."""

    def __init__(self, clock: Clock, attempt: Callable[[int], T], lost: Callable[[T], None] | None) -> None:
        self.attempt = attempt
        self._clock = clock
        self._lost = lost
        self._changed = threading.Condition()
        self._begun = False
        self._pending = 0
        self._decided = False
        self._won: list[T] = []
        self._error: BaseException | None = None

    def enter(self) -> None:
        """Count an attempt that is about to be queued."""
        with self._changed:
            self._pending += 1

    def begin(self, number: int) -> bool:
        """An attempt begins to run. Returns: False for an extra one that is no longer needed."""
        with self._changed:
            if number and self._over():
                self._pending -= 1
                return False
            self._begun = True
            self._changed.notify_all()
            return True

    def win(self, result: T) -> bool:
        """An attempt has succeeded. Returns: False if another one was first."""
        with self._changed:
            self._pending -= 1
            if self._decided:
                return False
            self._decided = True
            self._won.append(result)
            self._changed.notify_all()
            return True

    def fail(self, error: BaseException) -> None:
        with self._changed:
            self._pending -= 1
            self._error = error
            self._changed.notify_all()

    def give_up(self) -> Sequence[T]:
        """The caller no longer waits, and later results are lost. Returns: the result, if there already was one."""
        with self._changed:
            self._decided = True
            return self._won

    def discard(self, result: T) -> None:
        """Give a late result to ``lost``."""
        if self._lost is not None:
            try:
                self._lost(result)
            except Exception:
                log.warning("the blob of a late attempt could not be deleted; it expires", exc_info=True)

    def ends_within(self, seconds: float | None) -> bool:
        """Wait until an attempt runs, and then at most ``seconds`` (None: as long as it takes) for the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._begun)
            return wait_for(self._clock, self._changed, self._over, seconds)

    def result(self) -> T:
        """Wait for the end. Raises: the last attempt's error."""
        with self._changed:
            self._changed.wait_for(self._over)
            if self._won:
                return self._won[0]
            assert self._error is not None
            raise self._error

    def _over(self) -> bool:
        return self._decided or self._pending == 0
