"""Whether a process is alive and ready, for probes such as those of Kubernetes. ``http.py`` serves it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass

NOT_YET = "no task is open"


@dataclass(frozen=True, slots=True)
class Condition:
    """What one part of a process says about itself.

    Attributes:
        dead: why the process must be restarted: a thread that must run has ended or is stuck. Empty if it is alive.
        unready: why the process does not do its work yet. Empty if only restores, or nothing, is in the way.
        restoring: tasks that are assigned and not open yet.
        open: number of tasks that are open.
    """

    dead: tuple[str, ...] = ()
    unready: tuple[str, ...] = ()
    restoring: tuple[str, ...] = ()
    open: int = 0

    @property
    def tasks(self) -> int:
        """Number of tasks that are open or being opened, or wait for that."""
        return self.open + len(self.restoring)

    @property
    def is_ready(self) -> bool:
        return not (self.dead or self.unready or self.restoring)


def together(conditions: Iterable[Condition]) -> Condition:
    """The condition of several parts: alive if all are, ready if all are."""
    found = list(conditions)
    return Condition(
        tuple(why for one in found for why in one.dead),
        tuple(why for one in found for why in one.unready),
        tuple(task for one in found for task in one.restoring),
        sum(one.open for one in found),
    )


class Health:
    """The parts of one state manager. Safe to use from many threads.

    Attributes:
        base: tells the condition while nothing is watched.
    """

    def __init__(self) -> None:
        self.base: Callable[[], Condition] = lambda: Condition(unready=(NOT_YET,))
        self._lock = threading.Lock()
        self._parts: list[Callable[[], Condition]] = []

    def watch(self, part: Callable[[], Condition]) -> None:
        """Ask ``part`` for its condition at every probe, on another thread. It must not wait for anything."""
        with self._lock:
            self._parts.append(part)

    def unwatch(self, part: Callable[[], Condition]) -> None:
        """Ask it no more. A part that was not watched is ignored."""
        with self._lock:
            self._parts = [one for one in self._parts if one != part]

    def condition(self) -> Condition:
        """The condition of all parts."""
        with self._lock:
            parts = self._parts or [self.base]
        return together(part() for part in parts)
