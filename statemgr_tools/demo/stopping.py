"""Raises SIGTERM and SIGHUP as an exception, so that the demo stops everything that it started before it ends."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

_SIGNALS = (signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def exit_on_signals() -> Iterator[None]:
    """Within it the first of the signals raises SystemExit (128 + its number) in the main thread; later ones nothing.

    A signal that the process ignores (``nohup``) stays ignored. Does nothing in other threads.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    ours = [number for number, handler in before.items() if handler is not signal.SIG_IGN]

    def leave(number: int, frame: FrameType | None) -> None:
        # what cleans up now must not be cut off by another one; SIGKILL remains
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
