"""SIGTERM and SIGHUP become exceptions, so that a command stops the servers that it started before it ends."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

#: What ends a command from outside: a supervisor, and a terminal that is closed.
SIGNALS = (signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def exit_on_signals() -> Iterator[None]:
    """Inside the block, the first signal raises SystemExit (128 + its number) in the main thread. Others do nothing.

    A signal that the process ignores (``nohup``) stays ignored. Has no effect in other threads.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in SIGNALS}
    ours = [number for number, handler in before.items() if handler is not signal.SIG_IGN]

    def leave(number: int, frame: FrameType | None) -> None:
        # another signal must not interrupt the clean-up; SIGKILL still can
        for signal_number in ours:
            signal.signal(signal_number, signal.SIG_IGN)
        raise SystemExit(128 + number)

    for number in ours:
        signal.signal(number, leave)
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, before[number] or signal.SIG_DFL)
