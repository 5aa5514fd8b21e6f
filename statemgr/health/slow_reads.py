"""Reads that may hang: each runs on a thread, and whoever asks waits a little and then learns how long it has run."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from statemgr.errors import StatemgrError
from statemgr.ports import Clock

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Answer(Generic[T]):
    """What the newest read that has ended came to: a value or an error, or neither if none has ended.

    ``waiting_s``: how long the read after it has been running. None if nothing runs.
    """

    value: T | None = None
    error: StatemgrError | None = None
    waiting_s: float | None = None


class Patient(Generic[T]):
    """Repeats a read when somebody asks for it, at most one at a time. Safe to use from many threads.

    Args:
        fresh_s: an answer is given again for so many seconds.
    """

    def __init__(self, read: Callable[[], T], clock: Clock, fresh_s: float) -> None:
        self._read = read
        self._clock = clock
        self._fresh_s = fresh_s
        self._changed = threading.Condition()
        self._answer: Answer[T] = Answer()
        self._ended_s: float | None = None
        self._began_s: float | None = None

    def ask(self, wait_s: float) -> Answer[T]:
        """The newest answer. If it is old, waits for a new one until that read has run for ``wait_s`` seconds."""
        with self._changed:
            now_s = self._clock.monotonic()
            fresh = self._ended_s is not None and now_s - self._ended_s <= self._fresh_s
            if self._began_s is None and not fresh:
                threading.Thread(target=self._run, daemon=True).start()
                self._began_s = now_s
            left_s = max(self._began_s + wait_s - now_s, 0) if self._began_s is not None else 0
            self._changed.wait_for(lambda: self._began_s is None, left_s)
            waiting_s = None if self._began_s is None else self._clock.monotonic() - self._began_s
            return Answer(self._answer.value, self._answer.error, waiting_s)

    def ends_within(self, wait_s: float) -> bool:
        """Wait for the read that is running. Returns: whether none runs any more."""
        with self._changed:
            return self._changed.wait_for(lambda: self._began_s is None, wait_s)

    def _run(self) -> None:
        try:
            answer: Answer[T] = Answer(self._read())
        except StatemgrError as error:
            answer = Answer(error=error)
        except Exception as error:  # given to whoever asks: nobody waits for the thread
            answer = Answer(error=StatemgrError(f"{type(error).__name__}: {error}"))
        with self._changed:
            self._answer, self._began_s, self._ended_s = answer, None, self._clock.monotonic()
            self._changed.notify_all()
