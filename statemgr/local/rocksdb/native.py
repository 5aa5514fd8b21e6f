"""Calls of RocksDB by threads that the end of the process does not wait for.

When the interpreter ends, it ends each daemon thread at the moment at which the thread comes back from native code. If
that code is Rust, as rocksdict's is, the whole process ends with SIGABRT (``FATAL: exception not rethrown``) in place
of its exit code. So the end of the process waits for such calls, and none begins after it.
"""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from statemgr.errors import ClosedError

#: Most seconds that the end of the process waits for calls of other threads.
_MOST_S = 10.0
#: Seconds that a call waits after the end has begun: long enough for the process to be gone.
_LATE_S = 5.0

_changed = threading.Condition()
_inside: set[int] = set()
_ended = False


@contextmanager
def native_calls() -> Iterator[None]:
    """A block that calls RocksDB. Raises: ClosedError in a daemon thread of a process that ends."""
    thread = threading.current_thread()
    if not thread.daemon or thread.ident in _inside:
        yield
        return
    assert thread.ident is not None
    with _changed:
        late = _ended
        if not late:
            _inside.add(thread.ident)
    if late:
        time.sleep(_LATE_S)
        raise ClosedError("the process ends")
    try:
        yield
    finally:
        with _changed:
            _inside.discard(thread.ident)
            _changed.notify_all()


@atexit.register
def _wait_for_calls() -> None:
    global _ended
    with _changed:
        _ended = True
        _changed.wait_for(lambda: not _inside, _MOST_S)
