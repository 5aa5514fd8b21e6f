"""How a job's numbers have developed since its page was started: lag, bytes of state, and seconds of commits.

The topic and the metrics have only the newest numbers. A thread reads them from time to time, also while nobody looks
at the page, and the page draws them. The history is bounded: when it is full, every other point is dropped, and points
are taken half as often.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from statemgr.health.processes import Sample

#: Seconds between the first points, and the most points.
_EVERY_S, _MOST = 10.0, 240


@dataclass(frozen=True, slots=True)
class Point:
    """The job at one moment (epoch milliseconds). A number that is not known is None.

    ``lag``: messages; ``state``: bytes of all stores of the processes; ``commit_s``: of the slowest task's last commit.
    """

    at_ms: int
    lag: int | None
    state: float | None
    commit_s: float | None


def point(at_ms: int, lag: int | None, samples: Iterable[Sample]) -> Point:
    """Make a point from the lag and the metrics of the job's processes."""
    state, commits = None, dict[str, float]()
    for one in samples:
        if one.name == "statemgr_state_bytes":
            state = (state or 0.0) + one.value
        elif one.name == "statemgr_commit_seconds":
            task = one.labels.get("task", "")
            commits[task] = commits.get(task, 0.0) + one.value
    return Point(at_ms, lag, state, max(commits.values(), default=None))


class History:
    """The points since the page was started, oldest first. Safe to use from many threads; close it when done.

    Args:
        take: returns the newest point, or None if the job cannot be read now.
    """

    def __init__(self, take: Callable[[], Point | None]) -> None:
        self._take = take
        self._points: list[Point] = []
        self._every_s = _EVERY_S
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="history", daemon=True)

    def start(self) -> None:
        """Take points on a thread until :meth:`close`."""
        self._thread.start()

    @property
    def points(self) -> tuple[Point, ...]:
        """Return all points."""
        return tuple(self._points)

    def add(self) -> None:
        """Take a point now."""
        taken = self._take()
        if taken is None:
            return
        points = [*self._points, taken]
        if len(points) > _MOST:
            points, self._every_s = points[::2], self._every_s * 2
        self._points = points

    def _run(self) -> None:
        while not self._closed.is_set():
            self.add()
            self._closed.wait(self._every_s)

    def close(self) -> None:
        """Take no more points. A point that is being taken is not waited for."""
        self._closed.set()
