"""The threads of this machine."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Any
from weakref import WeakSet


class Threads:
    """Implements :class:`statemgr.ports.Executors`."""

    def __init__(self) -> None:
        self._workers: WeakSet[Executor] = WeakSet()

    def pool(self, name: str, threads: int) -> Executor:
        """See the port."""
        return ThreadPoolExecutor(threads, thread_name_prefix=f"statemgr-{name}")

    def worker(self, name: str, *, background: bool) -> Executor:
        """See the port."""
        executor = _DaemonThreads(f"statemgr-{name}") if background else self.pool(name, 1)
        self._workers.add(executor)
        return executor

    def close(self) -> None:
        """See the port."""
        for executor in tuple(self._workers):
            executor.shutdown(wait=True)


class _DaemonThreads(Executor):
    """A thread for each call. Unlike a pool of the standard library, it does not delay the end of the process."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._threads: WeakSet[threading.Thread] = WeakSet()

    def submit(self, work: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Begin at once."""
        future: Future[Any] = Future()
        future.set_running_or_notify_cancel()

        def run() -> None:
            try:
                future.set_result(work(*args, **kwargs))
            except BaseException as error:
                future.set_exception(error)

        thread = threading.Thread(target=run, name=self._name, daemon=True)
        self._threads.add(thread)
        thread.start()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Wait for the running calls. If one of them calls this, it does not wait for itself."""
        for thread in tuple(self._threads) if wait else ():
            if thread is not threading.current_thread():
                thread.join()
