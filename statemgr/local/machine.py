"""This machine and this process: the clock, IDs from it and from random bytes, threads, and the name in checkpoints."""

from __future__ import annotations

import math
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for_all
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakSet

from statemgr.errors import RetryableError
from statemgr.ids import IdSource
from statemgr.local.durable import boot_id
from statemgr.model.checkpoint import MOST_HOST, Owner
from statemgr.ports import Clock, Moment
from statemgr.version import __version__

#: Seconds, longer than any deadline.
_LEAP_S = 7 * 24 * 3600.0
#: Seconds of each wait after :meth:`SystemClock.give_up`, so that a loop of waits does not keep a processor busy.
_SHORTEST_S = 0.01
#: The quota of a container: microseconds of processor time, and for how many (cgroup v2).
_QUOTA = Path("/sys/fs/cgroup/cpu.max")
#: More workers than this never run at the same time.
_MOST_THREADS = 10_000


class SystemClock:
    """Wall time, monotonic time and waiting on this machine.

    After :meth:`give_up` every deadline has passed and every wait is short, so work in progress ends with a time-out
    error.
    """

    def __init__(self) -> None:
        self._given_up = False
        self._sleep_over = threading.Event()
        self._leap_s = 0.0

    def give_up(self) -> None:
        """End the work in progress: from now on each call of :meth:`monotonic` jumps ahead. Sleeps end."""
        self._given_up = True
        self._sleep_over.set()

    def time_ns(self) -> int:
        """Nanoseconds since the epoch."""
        return time.time_ns()

    def monotonic(self) -> float:
        """Seconds that never decrease, for deadlines."""
        if self._given_up:
            self._leap_s += _LEAP_S
        return self.elapsed() + self._leap_s

    def elapsed(self) -> float:
        """Seconds that never decrease, for durations."""
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        """Wait ``seconds``; returns at once if they are not positive."""
        if seconds > 0:
            self._sleep_over.wait(seconds)

    def wait(self, changed: threading.Condition, seconds: float) -> bool:
        """Wait on a condition that is held."""
        return changed.wait(min(seconds, _SHORTEST_S) if self._given_up else seconds)


def processors() -> int:
    """How many processors this process may use: those that it may run on, or as many as the quota of its container."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = _QUOTA.read_text().split()
        return max(1, min(count, math.ceil(int(quota) / int(period))))
    except (OSError, ValueError, ZeroDivisionError):  # no container, or "max"
        return count


def moment(clock: Clock) -> Moment:
    """The current moment, which other processes on this machine can compare with theirs."""
    return Moment(boot_id(), clock.elapsed(), clock.time_ns() // 1_000_000)


def system_ids() -> IdSource:
    """IDs from the wall clock and random tokens of 32 hexadecimal digits."""
    return IdSource(time_ns=time.time_ns, token=lambda: uuid.uuid4().hex)


class Threads:
    """Implements :class:`statemgr.ports.Executors`.

    Workers share threads: there are as many as were ever busy at the same time, not one for each worker.
    """

    def __init__(self) -> None:
        self._workers: WeakSet[Executor] = WeakSet()
        self._shared = ThreadPoolExecutor(_MOST_THREADS, thread_name_prefix="statemgr-worker")

    def pool(self, name: str, threads: int) -> Executor:
        """See the port."""
        return _Pool(threads, thread_name_prefix=f"statemgr-{name}")

    def worker(self, name: str, *, background: bool) -> Executor:
        """See the port."""
        executor = _DaemonThreads(f"statemgr-{name}") if background else _Share(self._shared, f"statemgr-{name}")
        self._workers.add(executor)
        return executor

    def close(self) -> None:
        """See the port."""
        for executor in tuple(self._workers):
            executor.shutdown(wait=True)
        self._shared.shutdown(wait=False)


@contextmanager
def _starting(name: str | None) -> Iterator[None]:
    """A block that may start a thread. Raises: RetryableError if this process can start no more."""
    try:
        yield
    except RuntimeError as error:
        if "new thread" not in str(error):
            raise
        raise RetryableError(
            str(error), hint="raise the number of threads that this process or container may have", thread=name
        ) from error


def _run(future: Future[Any], call: Callable[[], Any]) -> None:
    if future.set_running_or_notify_cancel():
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)
            del future, call  # the error has this frame


class _Pool(ThreadPoolExecutor):
    """If the process can start no more threads, it goes on with those that it has."""

    def submit(self, work: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Begin as soon as a thread is free. Raises: RetryableError if there is none, and none can be started."""
        with _starting(self._thread_name_prefix):
            return super().submit(work, *args, **kwargs)

    def _adjust_thread_count(self) -> None:
        try:
            super()._adjust_thread_count()
        except RuntimeError:
            if not self._threads:
                self._work_queue.get_nowait()  # the call that is being submitted: nothing runs it
                raise


class _Share(Executor):
    """Uses the threads of a pool, which get its name while they work for it. Its calls may wait for each other, so each
    needs a thread of its own."""

    def __init__(self, pool: Executor, name: str) -> None:
        self._pool = pool
        self._name = name
        self._calls: WeakSet[Future[Any]] = WeakSet()

    def submit(self, work: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Begin at once. Raises: RetryableError if there is no free thread, and none can be started."""
        future: Future[Any] = Future()

        def call() -> Any:
            threading.current_thread().name = self._name
            return work(*args, **kwargs)

        try:
            with _starting(self._name):
                self._pool.submit(_run, future, call)
        except RetryableError:
            # the pool has it in its queue all the same, and a thread that has become free may run it already
            if future.cancel():
                raise
        self._calls.add(future)
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Wait for its own calls."""
        calls = tuple(self._calls)
        if cancel_futures:
            for call in calls:
                call.cancel()
        if wait:
            wait_for_all(calls)


class _DaemonThreads(Executor):
    """A thread for each call. Unlike a pool of the standard library, it does not delay the end of the process."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._threads: WeakSet[threading.Thread] = WeakSet()

    def submit(self, work: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Begin at once. Raises: RetryableError if no thread can be started."""
        future: Future[Any] = Future()
        call = partial(work, *args, **kwargs)
        thread = threading.Thread(target=_run, args=(future, call), name=self._name, daemon=True)
        with _starting(self._name):
            thread.start()
        self._threads.add(thread)
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Wait for the running calls. If one of them calls this, it does not wait for itself."""
        for thread in tuple(self._threads) if wait else ():
            if thread is not threading.current_thread():
                thread.join()


def this_process() -> Owner:
    """The name of this machine, the process ID, and the version of statemgr."""
    return Owner(socket.gethostname()[:MOST_HOST], os.getpid(), __version__[:MOST_HOST])
