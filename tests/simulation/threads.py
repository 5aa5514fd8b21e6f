"""``threading`` and executors as simulated processes see them, which take turns (:mod:`tests.simulation.turns`)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any

from tests.simulation.turns import PREEMPT, TICK_S, Process, Turn, Turns, Unwound


def _scheduler() -> Turns:
    found = Turns.active
    assert found is not None, "this lock belongs to a history that is over"
    return found


class Lock:
    """``threading.Lock`` of simulated threads. One that the world has made is part of a server."""

    _preempts = True

    def __init__(self) -> None:
        scheduler = Turns.active
        self._shared = scheduler is not None and (
            scheduler.current is None or scheduler.current.process is scheduler.world
        )
        self._held = False
        self._waiting: deque[Turn] = deque()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        scheduler = Turns.active
        if scheduler is None or scheduler.current is None:
            self._held = True
            return True
        if scheduler._unwinding:
            if blocking:
                raise Unwound
            return True
        if not self._held and blocking and self._preempts and scheduler._random.random() < PREEMPT:
            scheduler.point()
        if self._held and (not blocking or not self._wait(scheduler, scheduler.current, timeout)):
            return False
        self._held = True
        scheduler.current.holds_shared += self._shared
        return True

    def _wait(self, scheduler: Turns, turn: Turn, timeout: float) -> bool:
        # time passes in every wait: what is left of a deadline may be too little to change a float
        until = None if timeout < 0 else scheduler.now + (max(timeout, TICK_S) if timeout else 0.0)
        while self._held:
            if until is not None and scheduler.now >= until:
                return False
            self._waiting.append(turn)
            scheduler.block(until)
            if turn in self._waiting:
                self._waiting.remove(turn)
        return True

    def release(self) -> None:
        scheduler = Turns.active
        self._held = False
        if scheduler is not None and scheduler.current is not None and not scheduler._unwinding:
            scheduler.current.holds_shared -= self._shared
            while self._waiting:
                scheduler.wake(self._waiting.popleft())

    def locked(self) -> bool:
        return self._held

    def __exit__(self, *exc: object) -> None:
        self.release()

    __enter__ = acquire


class Waiter(Lock):
    """What ``threading.Condition`` waits on."""

    _preempts = False

    def __init__(self) -> None:
        super().__init__()
        self._shared = False


class RLock(Lock):
    """``threading.RLock`` of simulated threads."""

    def __init__(self) -> None:
        super().__init__()
        self._owner: object = None
        self._depth = 0

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        scheduler = Turns.active
        me = scheduler.current if scheduler is not None else None
        if self._depth and self._owner is me:
            self._depth += 1
            return True
        if not Lock.acquire(self, blocking, timeout):
            return False
        self._owner, self._depth = me, 1
        return True

    def release(self) -> None:
        self._depth -= 1
        if self._depth <= 0:
            self._owner, self._depth = None, 0
            Lock.release(self)

    def __exit__(self, *exc: object) -> None:
        self.release()

    __enter__ = acquire

    # for threading.Condition

    def _is_owned(self) -> bool:
        scheduler = Turns.active
        return scheduler is None or scheduler._unwinding or (self._depth > 0 and self._owner is scheduler.current)

    def _release_save(self) -> int:
        depth, self._depth, self._owner = self._depth, 0, None
        Lock.release(self)
        return depth

    def _acquire_restore(self, depth: int) -> None:
        Lock.acquire(self)
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
        self._turn: Turn | None = None
        self._joining: list[Turn] = []

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


class Local:
    """``threading.local``: attributes that each simulated thread has for itself."""

    def _values(self) -> dict[str, Any]:
        assert Turns.active is not None
        turn = Turns.active.current
        assert turn is not None
        return turn.values.setdefault(self, {})

    def __getattr__(self, name: str) -> Any:
        try:
            return self._values()[name]
        except KeyError:
            raise AttributeError(name) from None

    def __setattr__(self, name: str, value: Any) -> None:
        self._values()[name] = value


class World(Thread):
    """What a thread sees as the current one when it has none of its own."""


WORLD = World(name="world")


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
