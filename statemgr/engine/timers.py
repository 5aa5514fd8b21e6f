"""Timers of a task: callbacks at regular times, on the task's own thread. In memory only."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Coroutine, Generator

from statemgr.errors import InvalidError
from statemgr.ports import Clock


def runs_nothing(what: str) -> InvalidError:
    """The error for a generator or a coroutine in place of a function."""
    return InvalidError(
        f"{what} is a generator or a coroutine: a call of it runs none of its code",
        hint="write a plain function, without yield and without async",
    )


def check_ran(result: object) -> None:
    """Check what a function of the application returned. Raises: InvalidError if none of its code has run."""
    if result is not None and isinstance(result, Generator | Coroutine | AsyncGenerator):
        if not isinstance(result, AsyncGenerator):
            result.close()  # a coroutine warns if nothing ever awaits it
        raise runs_nothing("a function of the application")


class Timer:
    """One timer of a task; :meth:`cancel` ends it."""

    def __init__(self, every_s: float, due_s: float, call: Callable[[], object]) -> None:
        self.every_s = every_s
        self.due_s = due_s
        self.call = call
        self.cancelled = False

    def cancel(self) -> None:
        """The callback is not called any more. Idempotent."""
        self.cancelled = True


class Timers:
    """Timers on the monotonic time of a clock."""

    def __init__(self, clock: Clock, task: str) -> None:
        self._clock = clock
        self._task = task
        self._timers: list[Timer] = []

    def add(self, seconds: float, call: Callable[[], object]) -> Timer:
        """Raises: InvalidError if ``seconds`` is not a positive number."""
        if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds < float("inf"):
            raise InvalidError(f"a timer needs a positive number of seconds, not {seconds!r}", task=self._task)
        timer = Timer(seconds, self._clock.monotonic() + seconds, call)
        self._timers.append(timer)
        return timer

    def run(self) -> bool:
        """Call what is due, earliest first. Returns: whether anything was called.

        Raises: what a callback raises; InvalidError if it is a generator or a coroutine.
        """
        if not self._timers:
            return False
        now = self._clock.monotonic()
        due = sorted((timer for timer in self._timers if timer.due_s <= now), key=lambda timer: timer.due_s)
        called = False
        for timer in due:
            if not timer.cancelled:  # an earlier callback may cancel it
                timer.due_s += timer.every_s * ((now - timer.due_s) // timer.every_s + 1)
                called = True
                check_ran(timer.call())
        self._timers = [timer for timer in self._timers if not timer.cancelled]
        return called
