"""Counts of requests to a job's blob store, in this process. No I/O.

A count has a name and labels: ``("requests", operation, outcome)``, ``("bytes", direction)``, ``("retries",
operation)`` or ``("hedges", operation)``. ``statemgr/telemetry/metric_declarations.py`` says what they mean.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping

from statemgr.errors import AccessDenied, DiskFull, MissingBlob, UnavailableError

#: What a request can end with. The first one that fits an error.
OUTCOMES: Mapping[str, type[BaseException]] = {
    "missing": MissingBlob,
    "unavailable": UnavailableError,
    "denied": AccessDenied,
    "full": DiskFull,
    "error": BaseException,
}
#: Operations of requests.
OPERATIONS = ("put", "get", "read", "stat", "list", "copy", "delete", "remove-ttl")
Counted = Mapping[tuple[str, ...], int]


class BlobCounts:
    """Counts since the process began. Safe to use from many threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[tuple[str, ...], int] = {}
        self._taken: dict[tuple[str, ...], int] = {}

    def add(self, *name: str, by: int = 1) -> None:
        """Add to one count."""
        with self._lock:
            self._counts[name] = self._counts.get(name, 0) + by

    def request(self, operation: str, error: BaseException | None = None) -> None:
        """Count one request by its outcome."""
        outcome = "ok" if error is None else next(name for name, kind in OUTCOMES.items() if isinstance(error, kind))
        self.add("requests", operation, outcome)

    def merge(self, counted: Counted) -> None:
        """Add the counts of another process."""
        for name, number in counted.items():
            self.add(*name, by=number)

    def read(self) -> Counted:
        """All counts."""
        with self._lock:
            return dict(self._counts)

    def take(self) -> Counted:
        """What was counted since the last call, for a process that reports to another one."""
        with self._lock:
            new = {name: number - self._taken.get(name, 0) for name, number in self._counts.items()}
            self._taken = dict(self._counts)
        return {name: number for name, number in new.items() if number}


_of_jobs: dict[str, BlobCounts] = {}
_lock = threading.Lock()


def counts_of(job: str) -> BlobCounts:
    """The counts of a job (``<name>/<ID>``) in this process. All its clients of the blob store share them."""
    with _lock:
        return _of_jobs.setdefault(job, BlobCounts())
