"""A scheduler that owns threads, locks, time and randomness of this Python process, so that a seed decides a history.

The model is FoundationDB's simulation, in the way of madsim: nothing has to be told that it runs in one. While
:meth:`Scheduler.run` runs, ``threading``, ``time`` and ``os.urandom`` are the scheduler's. Its threads are threads of
the operating system, but each waits for its turn. The one that runs gives its turn away where it waits (for a lock, a
condition, time), where it does I/O, and at some uncontended locks that the seed chooses. Time passes only when all
threads wait.

Threads belong to simulated processes. A process that is killed gets no further turn: none of its ``finally`` blocks
run, and its file locks are free. A process that is paused gets none for a while.
"""

from __future__ import annotations

import _thread
import concurrent.futures
import fcntl
import heapq
import os
import queue
import random
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from hashlib import blake2b
from itertools import count
from typing import Any

#: Turns that a history may take; more of them are a loop that never waits.
MOST_TURNS = 400_000
#: The part of free locks and operations on files at which another thread gets a turn.
_PREEMPT = 1 / 12
#: Operations on files that another process can see, and before which a process may die.
_ON_FILES = ("fsync", "link", "mkdir", "rename", "unlink")
#: The shortest wait, in seconds.
_TICK_S = 1e-6


class Stuck(AssertionError):
    """Every thread waits for another one, or one never waits."""


class Unwound(BaseException):
    """Ends the thread of a process that was killed, when the history is over."""


class Process:
    """A simulated process: its threads, and the files that it has locked."""

    def __init__(self, name: str, machine: str) -> None:
        self.name = name
        self.machine = machine
        self.alive = True
        self.ended_at = 0.0
        self.paused_until = 0.0
        self.locked_files: set[int] = set()
        self.calls: dict[str, int] = {}


class _Turn:
    """A thread of the operating system that runs when it is given a turn."""

    __slots__ = ("baton", "ended", "holds_shared", "name", "number", "process", "ready", "thread", "wake_at")

    def __init__(self, number: int, name: str, process: Process) -> None:
        self.number = number
        self.name = name
        self.process = process
        self.baton = _allocate_lock()
        self.baton.acquire()
        self.ready = True
        self.ended = False
        #: How many locks of the world it holds: nobody else gets the turn inside a server.
        self.holds_shared = 0
        self.wake_at: float | None = None
        self.thread: Thread | None = None


_allocate_lock = _thread.allocate_lock
_real: dict[str, Callable[..., Any]] = {
    "urandom": os.urandom, "flock": fcntl.flock, "close": os.close,
}  # fmt: skip


class Scheduler:
    """Runs one history.

    Args:
        seed: decides everything that happens.
        start_s: the wall time at the beginning, in seconds since the epoch.
        quiet: events that do not happen, for a shorter story.

    Attributes:
        now: seconds since the beginning.
        events: what happened although it need not have, in order: see :meth:`chance`.
        story: what was noted so far: seconds, the thread, and a text.
    """

    active: Scheduler | None = None

    def __init__(
        self, seed: int | str, start_s: float = 1_704_067_200.0, *, quiet: frozenset[str] = frozenset()
    ) -> None:
        self.seed = str(seed)
        self._quiet = quiet
        self.events: list[str] = []
        self.start_s = start_s
        self.now = 0.0
        self.story: list[tuple[float, str, str]] = []
        self.world = Process("world", "")
        self._random = random.Random(f"turns {seed}")
        #: A source for each use: what a module draws when it is first imported must not change names.
        self._bytes = {kind: random.Random(f"{kind} {seed}") for kind in ("urandom", "uuid4", "token")}
        self._threads: list[_Turn] = []
        self._numbers = count()
        self._timers: list[tuple[float, int, _Turn]] = []
        self._timer_numbers = count()
        self._ready: list[_Turn] = []
        self.turns = 0
        #: called before an operation on files, with its name
        self.before_file: Callable[[str], None] = lambda name: None
        self._digest = blake2b(digest_size=16)
        self._over = _allocate_lock()
        self._over.acquire()
        self._error: BaseException | None = None
        self._unwinding = False
        self.current: _Turn | None = None

    # --- for the world -------------------------------------------------------------------------------------------

    def run(self, main: Callable[[], None]) -> None:
        """Run ``main`` on a thread of the world, until it ends. Raises: what it raises; Stuck."""
        with self._installed():
            first = self.spawn(main, "world", self.world)
            self.current = self._next()
            first.baton.release()
            self._over.acquire()
            self._unwind()
        if self._error is not None:
            raise self._error

    def decide(self, what: str, of: int) -> int:
        """A number from 0 to ``of`` - 1, by the seed and by what is decided. Other decisions do not change it."""
        digest = blake2b(f"{self.seed}/{what}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") % of

    def chance(self, what: str, probability: float) -> bool:
        """Whether something happens that happens with this probability."""
        if probability <= 0 or self.decide(what, 1_000_000) >= probability * 1_000_000 or what in self._quiet:
            return False
        self.events.append(what)
        return True

    def note(self, text: str) -> None:
        """Add a line to the story."""
        who = self.current.name if self.current is not None else "-"
        self.story.append((self.now, who, text))
        self._digest.update(f"{self.now:.6f} {who} {text}\n".encode())

    def token(self) -> str:
        """32 random hexadecimal digits."""
        return self._bytes["token"].randbytes(16).hex()

    def trace(self, text: str) -> None:
        """Make ``text`` a part of the fingerprint, but not of the story."""
        self._digest.update(f"{self.now:.6f} {text}\n".encode())

    def fingerprint(self) -> str:
        """What all notes and turns of the history so far have in common with no other history."""
        return f"{self._digest.hexdigest()}-{self.turns}"

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
        if self.current is not None and self.current.process is process:
            self.point()

    # --- turns ---------------------------------------------------------------------------------------------------

    def spawn(self, work: Callable[[], None], name: str, process: Process) -> _Turn:
        turn = _Turn(next(self._numbers), name, process)
        self._threads.append(turn)
        self._ready.append(turn)

        def run() -> None:
            turn.baton.acquire()
            try:
                if not self._unwinding:
                    work()
            except Unwound:
                pass
            except BaseException as error:
                self._fail(error)
            turn.ended = True
            if turn.name == "world" or self._error is not None:
                self._finish()
            else:
                self._pass_on()

        _thread.start_new_thread(run, ())
        return turn

    def point(self) -> None:
        """Let another thread have the turn, if the seed says so."""
        turn = self.current
        assert turn is not None
        if not turn.holds_shared:
            self._ready.append(turn)
            self._give_turn()

    def may_point(self) -> None:
        """Let another thread have the turn, rarely."""
        if self._random.random() < _PREEMPT:
            self.point()

    def block(self, wake_at: float | None = None) -> bool:
        """Wait until :meth:`wake`, or until a time. Returns: whether it was woken."""
        turn = self.current
        assert turn is not None
        turn.ready = False
        if wake_at is not None:
            turn.wake_at = wake_at
            heapq.heappush(self._timers, (wake_at, next(self._timer_numbers), turn))
        self._give_turn()
        woken = turn.wake_at is None or turn.wake_at < 0
        turn.wake_at = None
        return woken or wake_at is None

    def wake(self, turn: _Turn) -> None:
        """End the wait of a thread."""
        if not turn.ready and not turn.ended:
            turn.ready = True
            if turn.wake_at is not None:
                turn.wake_at = -1.0
            self._ready.append(turn)

    def sleep(self, seconds: float) -> None:
        """Wait so long."""
        self.block(self.now + max(seconds, _TICK_S))

    def _give_turn(self) -> None:
        """Hand the turn to the next thread, and wait for the next one of the caller."""
        turn = self.current
        assert turn is not None
        if self._unwinding:
            raise Unwound
        following = self._next()
        if following is not turn:
            if following is None:
                self._finish()
            else:
                self.current = following
                following.baton.release()
            turn.baton.acquire()
            if self._unwinding:
                raise Unwound

    def _pass_on(self) -> None:
        """The caller has ended: hand the turn to the next thread."""
        if self._unwinding:
            self._over.release()
            return
        following = self._next()
        if following is None:
            self._finish()
        else:
            self.current = following
            following.baton.release()

    def _next(self) -> _Turn | None:
        """The thread whose turn it is; None if the history is over."""
        self.turns += 1
        if self.turns > MOST_TURNS:
            self._fail(Stuck(f"{MOST_TURNS} turns: a thread never waits"))
            return None
        while True:
            able = [t for t in self._ready if t.process.alive and t.process.paused_until <= self.now]
            if len(able) < len(self._ready):
                self._ready = [t for t in self._ready if t.process.alive]
            if able:
                chosen = able[int(self._random.random() * len(able))] if len(able) > 1 else able[0]
                self._ready.remove(chosen)
                chosen.ready = True
                return chosen
            paused = [t.process.paused_until for t in self._ready]
            while self._timers and (self._timers[0][2].ready or not self._timers[0][2].process.alive):
                heapq.heappop(self._timers)
            if self._timers and (not paused or self._timers[0][0] <= min(paused)):
                at, _, turn = heapq.heappop(self._timers)
                if turn.wake_at != at:
                    continue  # an older wait of this thread
                self.now = max(self.now, at)
                turn.ready = True
                self._ready.append(turn)
            elif paused:
                self.now = max(self.now, min(paused))
            else:
                waiting = ", ".join(t.name for t in self._threads if not t.ended and t.process.alive)
                self._fail(Stuck(f"every thread waits for another one: {waiting}"))
                return None

    def _fail(self, error: BaseException) -> None:
        if self._error is None:
            self._error = error

    def _finish(self) -> None:
        self._over.release()

    def _unwind(self) -> None:
        """End all threads, whose errors no longer matter."""
        self._unwinding = True
        failed = self._error
        for turn in self._threads:
            while not turn.ended:
                self.current = turn
                turn.baton.release()
                self._over.acquire()
        self._error = failed

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
            (threading, "_allocate_lock", _Waiter),
            (threading, "Thread", Thread),
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
        Scheduler.active = self
        try:
            yield
        finally:
            Scheduler.active = None
            for owner, name, value in before:
                delattr(owner, name) if value is _MISSING else setattr(owner, name, value)

    def _current_thread(self) -> Any:
        return self.current.thread if self.current is not None and self.current.thread is not None else _WORLD


_MISSING = object()


def _scheduler() -> Scheduler:
    found = Scheduler.active
    assert found is not None, "this lock belongs to a history that is over"
    return found


class Lock:
    """``threading.Lock`` of simulated threads. One that the world has made is part of a server."""

    _preempts = True

    def __init__(self) -> None:
        scheduler = Scheduler.active
        self._shared = scheduler is not None and (
            scheduler.current is None or scheduler.current.process is scheduler.world
        )
        self._held = False
        self._waiting: deque[_Turn] = deque()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        scheduler = Scheduler.active
        if scheduler is None or scheduler.current is None:
            self._held = True
            return True
        if scheduler._unwinding:
            if blocking:
                raise Unwound
            return True
        if not self._held and blocking and self._preempts and scheduler._random.random() < _PREEMPT:
            scheduler.point()
        if self._held and (not blocking or not self._wait(scheduler, scheduler.current, timeout)):
            return False
        self._held = True
        scheduler.current.holds_shared += self._shared
        return True

    def _wait(self, scheduler: Scheduler, turn: _Turn, timeout: float) -> bool:
        # time passes in every wait: what is left of a deadline may be too little to change a float
        until = None if timeout < 0 else scheduler.now + (max(timeout, _TICK_S) if timeout else 0.0)
        while self._held:
            if until is not None and scheduler.now >= until:
                return False
            self._waiting.append(turn)
            scheduler.block(until)
            if turn in self._waiting:
                self._waiting.remove(turn)
        return True

    def release(self) -> None:
        scheduler = Scheduler.active
        self._held = False
        if scheduler is not None and scheduler.current is not None and not scheduler._unwinding:
            scheduler.current.holds_shared -= self._shared
            while self._waiting:
                scheduler.wake(self._waiting.popleft())

    def locked(self) -> bool:
        return self._held

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *exc: object) -> None:
        self.release()


class _Waiter(Lock):
    """What ``threading.Condition`` waits on."""

    _preempts = False

    def __init__(self) -> None:
        super().__init__()
        self._shared = False


class RLock:
    """``threading.RLock`` of simulated threads."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._owner: object = None
        self._depth = 0

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        scheduler = Scheduler.active
        me = scheduler.current if scheduler is not None else None
        if self._depth and self._owner is me:
            self._depth += 1
            return True
        if not self._lock.acquire(blocking, timeout):
            return False
        self._owner, self._depth = me, 1
        return True

    def release(self) -> None:
        self._depth -= 1
        if self._depth <= 0:
            self._owner, self._depth = None, 0
            self._lock.release()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *exc: object) -> None:
        self.release()

    # for threading.Condition

    def _is_owned(self) -> bool:
        scheduler = Scheduler.active
        return scheduler is None or scheduler._unwinding or (self._depth > 0 and self._owner is scheduler.current)

    def _release_save(self) -> int:
        depth, self._depth, self._owner = self._depth, 0, None
        self._lock.release()
        return depth

    def _acquire_restore(self, depth: int) -> None:
        self._lock.acquire()
        self._owner, self._depth = _scheduler().current, depth


class Thread:
    """``threading.Thread`` whose turns the scheduler gives."""

    def __init__(
        self,
        group: None = None,
        target: Callable[..., object] | None = None,
        name: str | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        *,
        daemon: bool | None = None,
    ) -> None:
        self._work: Callable[[], object] = self.run if target is None else lambda: target(*args, **(kwargs or {}))
        self.name = name or "thread"
        self.daemon = bool(daemon)
        self._turn: _Turn | None = None
        self._joining: list[_Turn] = []

    def run(self) -> None:
        """For subclasses."""

    def start(self) -> None:
        current = _scheduler().current
        assert current is not None
        self.start_in(current.process)

    def start_in(self, process: Process) -> None:
        """Start in a process."""
        scheduler = _scheduler()

        def run() -> None:
            try:
                self._work()
            finally:
                self.let_join()

        self._turn = scheduler.spawn(run, self.name, process)
        self._turn.thread = self

    def let_join(self) -> None:
        """Wake those that wait for its end."""
        scheduler = _scheduler()
        while self._joining:
            scheduler.wake(self._joining.pop())

    def join(self, timeout: float | None = None) -> None:
        scheduler = _scheduler()
        assert self._turn is not None
        assert scheduler.current is not None
        until = None if timeout is None else scheduler.now + timeout
        while self.is_alive() and (until is None or scheduler.now < until):
            self._joining.append(scheduler.current)
            scheduler.block(until)

    def is_alive(self) -> bool:
        return self._turn is not None and not self._turn.ended and self._turn.process.alive

    @property
    def ident(self) -> int | None:
        return self._turn.number if self._turn is not None else None


class _World(Thread):
    """What a thread sees as the current one when it has none of its own."""


_WORLD = _World(name="world")


class Executors:
    """Implements :class:`statemgr.ports.Executors` with threads of the scheduler."""

    def __init__(self) -> None:
        self._workers: list[_Calls] = []

    def pool(self, name: str, threads: int) -> Executor:
        return _Calls(name, threads)

    def worker(self, name: str, *, background: bool) -> Executor:
        self._workers.append(_Calls(name, 1))
        return self._workers[-1]

    def close(self) -> None:
        for worker in self._workers:
            worker.shutdown()


class _Calls(Executor):
    """Runs up to ``most`` calls at a time."""

    def __init__(self, name: str, most: int) -> None:
        self._name = name
        self._most = most
        self._waiting: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._threads: list[Thread] = []
        self._closed = False

    def submit(self, work: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        if self._closed:
            raise RuntimeError("cannot schedule new futures after shutdown")
        future: Future[Any] = Future()
        self._waiting.append((future, lambda: work(*args, **kwargs)))
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        if len(self._threads) < self._most:
            current = _scheduler().current
            assert current is not None
            thread = Thread(target=self._run, name=f"{current.process.name}:{self._name}")
            self._threads.append(thread)
            thread.start()
        return future

    def _run(self) -> None:
        while self._waiting:
            future, work = self._waiting.popleft()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                result = work()
            except Unwound:
                raise
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self._closed = True
        while cancel_futures and self._waiting:
            self._waiting.popleft()[0].cancel()
        me = _scheduler().current
        for thread in tuple(self._threads) if wait else ():
            if thread._turn is not me:
                thread.join()
