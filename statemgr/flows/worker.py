"""A background worker: runs one piece of work at a time next to its owner, and ends with it.

Its owner says when there is work, in one of three ways:

- :meth:`Worker.start`: the owner takes the result, or the error, when it needs it (:meth:`Worker.take`)
- :meth:`Worker.attempt`: nobody waits; an error is logged, and the owner tries again on another occasion
- :meth:`Worker.wake`: the work is repeated until it says that nothing is left to do. Where it has to wait, it is called
  again soon; where it fails, after a pause that doubles, a limited number of times

An error is reported once: to who takes it, or to the log.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Generic, TypeVar

from statemgr.backends.services import Services
from statemgr.errors import ClosedError, FencedError, StatemgrError

T = TypeVar("T")
log = logging.getLogger(__name__)
#: Seconds after a first failure, and at most between two tries.
FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 60.0
#: Tries in a row that may fail: some five minutes.
TRIES = 12
#: Seconds until work that has to wait is called again.
_SOON_S = 0.5


class Worker(Generic[T]):
    """Safe to use from many threads. Its thread starts with its first work.

    Args:
        name: the thread's.
        subject: whose work it is, as messages begin: ``task Partition 0``.
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
        """Whether something runs."""
        return self._last is not None and not self._last.done()

    @property
    def closing(self) -> bool:
        """Whether :meth:`close` was called."""
        return self._closing

    def start(self, work: Callable[[], T]) -> Future[T] | None:
        """Run ``work``. Returns: None when something runs already, or the worker is closed."""
        with self._changed:
            if self._closing or self.busy:
                return None
            self._last = future = self._executor.submit(work)
            return future

    def attempt(self, what: str, work: Callable[[], object]) -> bool:
        """Run ``work`` that nobody waits for. Returns: whether it was started. ``what`` it is, for the log."""

        def tried() -> None:
            try:
                work()
            except Exception as error:
                if not (self._closing and isinstance(error, ClosedError)):
                    self._log_failure(what, error)

        return self.start(tried) is not None  # type: ignore[arg-type]

    def wait(self, seconds: float | None = None) -> bool:
        """Wait for what runs. Returns: whether it has ended."""
        if self._last is not None:
            wait([self._last], seconds)
        return not self.busy

    def take(self) -> T | None:
        """Wait for what was started last. Returns: its result; None when it was taken already. Raises: its error."""
        last, self._last = self._last, None
        return last.result() if last is not None else None

    def forget(self) -> None:
        """What was started last has ended, and its error was seen elsewhere: nobody is told again."""
        if not self.busy:
            self._last = None

    def go_on(self) -> None:
        """For long work, between two pieces of it. Raises: ClosedError when the worker is closed meanwhile."""
        if self._closing:
            raise ClosedError(f"{self._subject}: it is closed, and its work in the background is given up")

    def pause(self, seconds: float) -> bool:
        """For the work itself: wait so long, but not after the worker is closed. Returns: whether it is still open."""
        with self._changed:
            if not self._closing:
                self._clock.wait(self._changed, seconds)
            return not self._closing

    def close(self, what: str = "the last work in the background failed", *, wait: bool = True) -> None:
        """Begin nothing more, and wait for what runs. An error that nobody has taken is logged, after ``what``."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._executor.shutdown(wait=wait, cancel_futures=not wait)
        last, self._last = self._last, None
        if wait and last is not None and (error := last.exception()) is not None:
            log.error("%s: %s: %s", self._subject, what, error)

    # --- work that is repeated -----------------------------------------------------------------------------------

    def wake(self, what: str, look: Callable[[], bool]) -> None:
        """Call ``look`` until it returns that nothing is left to do, and once more if it is woken meanwhile.

        What it raises counts as a failure, but for FencedError and ClosedError, which end it. ``what`` it does, for
        the log.
        """
        with self._changed:
            self._woken = True
            self._changed.notify_all()
            if not self._closing and not self._repeating:
                self._repeating = True
                self._last = self._executor.submit(self._repeat, what, look)  # type: ignore[arg-type]

    def _repeat(self, what: str, look: Callable[[], bool]) -> None:
        failures, pause_s = 0, None
        while self._is_due(pause_s):
            try:
                failures, pause_s = 0, None if look() else _SOON_S
            except (FencedError, ClosedError) as error:
                log.warning("%s: %s ends: %s", self._subject, what, error)
                failures, pause_s = 0, None
            except Exception as error:
                failures += 1
                pause_s = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** (failures - 1))
                if failures < TRIES:
                    self._log_failure(what, error)
                    continue
                log.error(
                    "%s: %s failed %d times in a row, and gives up: %s. Fix what the error says; the next commit or "
                    "opening tries again",
                    self._subject, what, failures, error,
                )  # fmt: skip
                failures, pause_s = 0, None

    def _is_due(self, pause_s: float | None) -> bool:
        """Wait until it is time for the next call. Returns: False when none is left to do."""
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
        log.warning("%s: %s failed, and is tried again: %s", self._subject, what, error, exc_info=unexpected)
