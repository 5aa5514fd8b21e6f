"""The events of the log: each line that tells the story of a job has one, and fields that JSON lines contain. The lines
of client libraries are events too, with a rate limit: during one outage they write hundreds of lines that say the same.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from enum import StrEnum

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
#: Lines of one kind that pass in a window, and the seconds of a window.
MOST, WINDOW_S = 3, 60.0
_limits: list[RateLimit] = []


class Event(StrEnum):
    """What a line is about. The values are part of the public surface: filters and alerts use them."""

    #: The consumer group, or an engine such as Spark, gave this process tasks.
    ASSIGNED = "assigned"
    REVOKED = "revoked"
    #: A task is restored, and processes messages from now on.
    OPENED = "opened"
    #: A store is restored.
    RESTORED = "restored"
    COMMITTED = "committed"
    SNAPSHOT = "snapshot"
    #: Something failed, and will be tried again.
    RETRYING = "retrying"
    #: Something takes long. The line says what it waits for.
    WAITING = "waiting"
    #: Something failed, and will not be tried again by itself.
    FAILED = "failed"
    STOPPING = "stopping"
    STOPPED = "stopped"
    #: A line of a client library: librdkafka, botocore or urllib3.
    CLIENT = "client"


def tell(
    log: logging.Logger, event: Event, message: str, *args: object, level: int = logging.INFO, **fields: object
) -> None:
    """Write one line. Any thread may call this.

    Args:
        message: the line, with ``%s`` for each of ``args``. It is complete without the fields.
        fields: attributes of the record, and members of a JSON line: ``job``, ``task``, ``store``, ``bytes``,
            ``seconds`` and others. None is left out.
    """
    flush_suppressed()
    if log.isEnabledFor(level):
        given = {name: value for name, value in fields.items() if value is not None}
        log.log(level, message, *args, extra={"event": event.value, **given}, stacklevel=2)


def counted(number: int, noun: str, plural: str | None = None) -> str:
    """A number of things for people, such as ``1 task`` or ``2 tasks``. ``plural``: if it is not ``noun`` with an s."""
    return f"{number} {noun if number == 1 else plural or noun + 's'}"


def size(count: int) -> str:
    """A number of bytes for people, such as ``12.3 MiB``."""
    value, unit = float(count), 0
    while value >= 1024 and unit < len(_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{count} B" if unit == 0 else f"{value:.1f} {_UNITS[unit]}"


def ranges(numbers: Iterable[int]) -> str:
    """Numbers for people, such as ``0-3, 7``."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and runs[-1][-1] == number - 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    return ", ".join("-".join(map(str, run)) for run in runs) or "none"


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
