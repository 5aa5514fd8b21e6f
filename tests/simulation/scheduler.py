"""A scheduler that owns threads, locks, time and randomness of this Python process, so that a seed decides a history.

The model is FoundationDB's simulation, in the way of madsim: nothing has to be told that it runs in one. While
:meth:`Scheduler.run` runs, ``threading``, ``time`` and ``os.urandom`` are the scheduler's. One of its threads has the
turn, and gives it away where it waits (for a lock, a condition, time), where it does I/O, and at some uncontended locks
that the seed chooses. Time passes only when all threads wait.

Threads belong to simulated processes. A process that is killed gets no further turn: none of its ``finally`` blocks
run, and its file locks are free. A process that is paused gets none for a while.
"""

from __future__ import annotations

import concurrent.futures
import fcntl
import os
import queue
import random
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from itertools import count
from typing import Any

from greenlet import getcurrent

from tests.simulation.threads import WORLD, Local, Lock, RLock, Thread, Waiter
from tests.simulation.turns import Process, Turns

#: Operations on files that another process can see, and before which a process may die.
_ON_FILES = ("fsync", "link", "mkdir", "rename", "unlink")
_real: dict[str, Callable[..., Any]] = {
    "urandom": os.urandom, "flock": fcntl.flock, "close": os.close,
}  # fmt: skip


class Scheduler(Turns):
    """Runs one history."""

    def run(self, main: Callable[[], None]) -> None:
        """Run ``main`` on a thread of the world, until it ends. Raises: what it raises; Stuck."""
        with self._installed():
            self._caller = getcurrent()
            self.spawn(main, "world", self.world)
            self.current = self._next()
            self._take_turns()
            self._unwind()
        if self._error is not None:
            raise self._error

    def start(self, name: str, process: Process, work: Callable[[], None]) -> Thread:
        """Start the first thread of a process."""
        thread = Thread(target=work, name=name)
        thread.start_in(process)
        return thread

    def kill(self, process: Process) -> None:
        """End a process now. If the caller belongs to it, this does not return."""
        process.alive = False
        process.ended_at = self.now
        for descriptor in sorted(process.locked_files):
            _real["flock"](descriptor, fcntl.LOCK_UN)
        process.locked_files.clear()
        for turn in self._threads:
            if turn.process is process and turn.thread is not None:
                turn.thread.let_join()
        if self.current is not None and self.current.process is process:
            self._give_turn()

    def pause(self, process: Process, seconds: float) -> None:
        """Give a process no turn for so long."""
        process.paused_until = self.now + seconds
        process.paused_s += seconds
        if self.current is not None and self.current.process is process:
            self.point()

    # --- what the process sees -----------------------------------------------------------------------------------

    def _urandom(self, size: int) -> bytes:
        return self._bytes["urandom"].randbytes(size) if self.current is not None else bytes(_real["urandom"](size))

    def _flock(self, descriptor: int, operation: int) -> None:
        _real["flock"](descriptor, operation)
        if self.current is not None and operation & (fcntl.LOCK_EX | fcntl.LOCK_SH):
            self.current.process.locked_files.add(descriptor)

    def _close(self, descriptor: int) -> None:
        _real["close"](descriptor)
        if self.current is not None:
            self.current.process.locked_files.discard(descriptor)

    def _on_file(self, name: str) -> Callable[..., Any]:
        real = getattr(os, name)

        def operation(*args: Any, **more: Any) -> Any:
            if self.current is not None and self.current.process is not self.world and not self._unwinding:
                self.before_file(name)
            return real(*args, **more)

        return operation

    @contextmanager
    def _installed(self) -> Iterator[None]:
        serial = count()

        def new_future(future: Any) -> None:
            _init_future(future)
            future._serial = next(serial)

        base: Any = concurrent.futures._base
        _init_future = Future.__init__
        changes: list[tuple[Any, str, Any]] = [
            (threading, "Lock", Lock),
            (threading, "RLock", RLock),
            (threading, "_allocate_lock", Waiter),
            (threading, "Thread", Thread),
            (threading, "local", Local),
            (threading, "current_thread", self._current_thread),
            (threading, "_time", lambda: self.now),
            (time, "monotonic", lambda: self.now),
            (time, "time", lambda: self.start_s + self.now),
            (time, "time_ns", lambda: int((self.start_s + self.now) * 1e9)),
            (time, "sleep", self.sleep),
            (os, "urandom", self._urandom),
            (uuid, "uuid4", lambda: uuid.UUID(bytes=self._bytes["uuid4"].randbytes(16), version=4)),
            (fcntl, "flock", self._flock),
            (os, "close", self._close),
            *((os, name, self._on_file(name)) for name in _ON_FILES),
            (queue, "SimpleQueue", queue._PySimpleQueue),  # type: ignore[attr-defined]
            (Future, "__init__", new_future),
            # sets of futures, and locks of futures in the order of their addresses, would differ between runs
            (Future, "__hash__", lambda future: future._serial),
            (base, "id", lambda future: future._serial),
        ]
        before = [(owner, name, owner.__dict__.get(name, _MISSING)) for owner, name, _ in changes]
        for owner, name, value in changes:
            setattr(owner, name, value)
        random.seed(f"random {self.seed}")
        Turns.active = self
        try:
            yield
        finally:
            Turns.active = None
            for owner, name, value in before:
                delattr(owner, name) if value is _MISSING else setattr(owner, name, value)

    def _current_thread(self) -> Any:
        return self.current.thread if self.current is not None and self.current.thread is not None else WORLD


_MISSING = object()
