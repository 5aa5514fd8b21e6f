"""A rate limit for the lines of client libraries: during one outage they write hundreds of lines that say the same."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable

#: Lines of one kind that pass in a window, and the seconds of a window.
MOST, WINDOW_S = 3, 60.0
_limits: list[RateLimit] = []


class RateLimit(logging.Filter):
    """Lets a few lines of each kind pass in each window, and then says how many it has held back.

    A window begins with the first line after the last window. The count of a window follows it, as one line with the
    event ``client``, the field ``suppressed`` and the highest level of what it counts: before the next line of the
    library, or before the next event of statemgr. Lines at the level DEBUG pass, because somebody asked for them. Safe
    to use from many threads.

    Args:
        library: the name of the library in the count.
        kind_of: tells from a record what kind of line it is.
        level: the lowest level of the lines that are counted.
        clock: seconds on a clock that never goes back.
    """

    def __init__(
        self,
        library: str,
        kind_of: Callable[[logging.LogRecord], str],
        *,
        level: int = logging.INFO,
        most: int = MOST,
        window_s: float = WINDOW_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__()
        self._library = library
        self._kind_of = kind_of
        self._level = level
        self._most = most
        self._window_s = window_s
        self._clock = clock
        self._lock = threading.Lock()
        self._ends = float("-inf")
        self._seen: Counter[str] = Counter()
        #: The highest level of the lines that are held back.
        self._loudest = logging.NOTSET
        self._log: logging.Logger | None = None
        _limits.append(self)

    def filter(self, record: logging.LogRecord) -> bool:
        """Mark a record as the library's, and say whether it passes."""
        if record.levelno < self._level or hasattr(record, "suppressed"):
            return True
        if not hasattr(record, "event"):
            record.event = "client"
        self.flush()
        kind = self._kind_of(record)
        with self._lock:
            now = self._clock()
            if now >= self._ends:
                self._ends = now + self._window_s
                self._log = logging.getLogger(record.name)
            self._seen[kind] += 1
            passes = self._seen[kind] <= self._most
            if not passes:
                self._loudest = max(self._loudest, record.levelno)
            return passes

    def flush(self, *, now: bool = False) -> None:
        """Write the count of a window that has ended; with ``now``, also of one that has not."""
        with self._lock:
            if not self._seen or (self._clock() < self._ends and not now):
                return
            held = {kind: count - self._most for kind, count in self._seen.items() if count > self._most}
            self._seen.clear()
            self._ends, log = float("-inf"), self._log
            level, self._loudest = self._loudest, logging.NOTSET
        if held and log is not None:
            total = sum(held.values())
            kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(held.items(), key=lambda one: -one[1]))
            log.log(
                level,
                "%d more line%s of %s suppressed in %.0f s: %s",
                total, "s" * (total > 1), self._library, self._window_s, kinds,
                extra={"event": "client", "suppressed": total},
            )  # fmt: skip


def flush_suppressed(*, now: bool = False) -> None:
    """Write the counts of all libraries whose windows have ended; with ``now``, of all that have held lines back."""
    for limit in _limits:
        limit.flush(now=now)
