"""A background worker: runs one piece of work at a time on a thread of its own. Its owner closes it.

The owner starts work in one of three ways:

- :meth:`Worker.start`: the owner takes the result, or the error, when it needs it (:meth:`Worker.take`)
- :meth:`Worker.attempt`: nobody waits; an error is logged, and the owner tries again on another occasion
- :meth:`Worker.wake`: the work is repeated until it returns that nothing is left to do. Work that has to wait is called
  again soon. Work that fails is called again after a pause that doubles, a limited number of times

Each error is reported once: to the caller that takes it, or in the log.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Generic, TypeVar

from statemgr.errors import ClosedError, FencedError, RetryableError, StatemgrError
from statemgr.logs import Event, tell
from statemgr.services import Services

T = TypeVar("T")
log = logging.getLogger(__name__)
#: Seconds until the second try, and most seconds between two tries.
FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 60.0
#: Tries in a row that may fail, which take about five minutes.
TRIES = 12
#: Seconds until work that has to wait is called again.
_SOON_S = 0.5


class Worker(Generic[T]):
    """Safe to use from many threads. Its thread starts with its first work.

    Args:
        name: the name of the thread.
        subject: the owner, at the beginning of messages: ``task Partition 0``.
        background: a process that ends does not wait for the work.
    """

    def __init__(self, services: Services, name: str, subject: str, *, background: bool = False) -> None:
        self._executor = services.executors.worker(name, background=background)
        self._clock = services.clock
        self._subject = subject
        self._changed = threading.Condition()
        self._last: Future[T] | None = None
        self._closing = self._repeating = self._woken = False

    @property
    def busy(self) -> bool:
        """Whether work is running."""
        last = self._last  # another thread may take it
        return last is not None and not last.done()

    @property
    def closing(self) -> bool:
        """Whether :meth:`close` was called."""
        return self._closing

    def start(self, work: Callable[[], T]) -> Future[T] | None:
        """Run ``work``. Returns: None if other work is running, or the worker is closed. Raises: RetryableError if this
        process can start no more threads."""
        with self._changed:
            if self._closing or self.busy:
                return None
            self._last = future = self._executor.submit(work)
            return future

    def attempt(self, what: str, work: Callable[[], object]) -> bool:
        """Run ``work`` that nobody waits for; ``what`` names it in the log. Returns: whether it was started."""

        def tried() -> None:
            try:
                work()
            except Exception as error:
                if not (self._closing and isinstance(error, ClosedError)):
                    self._log_failure(what, error)

        try:
            return self.start(tried) is not None  # type: ignore[arg-type]
        except RetryableError as error:
            self._log_failure(what, error)
            return False

    def wait(self, seconds: float | None = None) -> bool:
        """Wait for running work. Returns: whether it has ended."""
        if (last := self._last) is not None:
            wait([last], seconds)
        return not self.busy

    def take(self) -> T | None:
        """Wait for the last work. Returns: its result; None if it was already taken. Raises: its error."""
        last, self._last = self._last, None
        return last.result() if last is not None else None

    def forget(self) -> None:
        """Drop the result or error of the last work, if it has ended: the caller knows it from elsewhere."""
        if not self.busy:
            self._last = None

    def go_on(self) -> None:
        """Long work calls this between two pieces. Raises: ClosedError if the worker was closed meanwhile."""
        if self._closing:
            raise ClosedError(f"{self._subject} is closed: its background work ends")

    def pause(self, seconds: float) -> bool:
        """The work calls this to wait, until the worker is closed. Returns: whether it is still open."""
        with self._changed:
            if not self._closing:
                self._clock.wait(self._changed, seconds)
            return not self._closing

    def close(self, what: str = "the last background work failed", *, wait: bool = True) -> None:
        """Start no more work, and wait for running work. An error that nobody has taken is logged, after ``what``."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._executor.shutdown(wait=wait, cancel_futures=not wait)
        last, self._last = self._last, None
        if wait and last is not None and (error := last.exception()) is not None:
            tell(log, Event.FAILED, "%s: %s: %s", self._subject, what, error, level=logging.ERROR)

    # --- work that is repeated -----------------------------------------------------------------------------------

    def wake(self, what: str, look: Callable[[], bool]) -> None:
        """Call ``look`` until it returns True, because nothing is left to do; once more if it is woken meanwhile.

        An error counts as a failure, except FencedError and ClosedError, which end the work. ``what`` names it in the
        log.
        """
        with self._changed:
            self._woken = True
            self._changed.notify_all()
            if not self._closing and not self._repeating:
                self._repeating = True
                try:
                    self._last = self._executor.submit(self._repeat, what, look)  # type: ignore[arg-type]
                except RetryableError as error:
                    self._repeating = False
                    self._log_failure(what, error)

    def _repeat(self, what: str, look: Callable[[], bool]) -> None:
        failures, pause_s = 0, None
        while self._is_due(pause_s):
            try:
                failures, pause_s = 0, None if look() else _SOON_S
            except (FencedError, ClosedError) as error:
                tell(log, Event.STOPPED, "%s: %s ended: %s", self._subject, what, error, level=logging.WARNING)
                failures, pause_s = 0, None
            except Exception as error:
                if self._closing:
                    continue  # there is no next try, and nobody waits for it
                failures += 1
                pause_s = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** (failures - 1))
                if failures < TRIES:
                    self._log_failure(what, error)
                    continue
                tell(
                    log, Event.FAILED,
                    "%s: %s failed %d times in a row: %s. Fix the reason; it is tried again within an hour, and after "
                    "a commit",
                    self._subject, what, failures, error, level=logging.ERROR,
                )  # fmt: skip
                failures, pause_s = 0, None

    def _is_due(self, pause_s: float | None) -> bool:
        """Wait until it is time for the next call. Returns: False if no call is needed."""
        with self._changed:
            if pause_s is not None and not self._closing:
                self._woken = False
                self._clock.wait(self._changed, pause_s)
            elif not self._woken or self._closing:
                self._repeating = False
                return False
            self._woken = False
            return not self._closing

    def _log_failure(self, what: str, error: Exception) -> None:
        unexpected = not isinstance(error, (StatemgrError, OSError))
        log.warning(
            "%s: %s failed and will be tried again: %s", self._subject, what, error,
            exc_info=unexpected, extra={"event": Event.RETRYING.value},
        )  # fmt: skip
