"""Policies that consist of several settings: when to retry, and when to make a snapshot. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf

from statemgr.config.units import MILLIS

_LIMIT = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]+)\Z")
#: What is limited → the units that a limit may have.
_UNITS: Mapping[str, Mapping[str, float]] = {
    "commits": {"commit": 1, "commits": 1},
    "size": {"b": 1, "bytes": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "kb": 10**3, "mb": 10**6, "gb": 10**9},
    "seconds": {name: millis / 1000 for name, millis in MILLIS.items()},
}


@dataclass(frozen=True, kw_only=True)
class RetryPolicy:
    """When to try again.

    If ``max_retries`` is -1, only ``max_duration_ms`` limits the retries. The n-th wait is ``backoff_ms`` ·
    ``factor``ⁿ⁻¹, at most ``backoff_max_ms``; ``jitter`` (0 to 1) is the share of it that is random.
    """

    max_retries: int
    max_duration_ms: int
    backoff_ms: int
    backoff_max_ms: int
    factor: float
    jitter: float


@dataclass(frozen=True, kw_only=True)
class SnapshotInterval:
    """How many commits, bytes or seconds may follow a snapshot before the next one is made. None is no limit."""

    commits: float | None = None
    size: float | None = None
    seconds: float | None = None

    @classmethod
    def parse(cls, limits: Sequence[str]) -> SnapshotInterval:
        """From texts such as ``50 commits``, ``256 MiB`` and ``10 min``, one of a kind. Raises: ValueError."""
        found: dict[str, float] = {}
        for limit in limits:
            match = _LIMIT.match(limit.strip())
            unit = match[2].lower() if match else ""
            kind = next((kind for kind, units in _UNITS.items() if unit in units and kind not in found), None)
            if match is None or kind is None or not 0 < float(match[1]) < inf:
                raise ValueError
            found[kind] = float(match[1]) * _UNITS[kind][unit]
        if not found:
            raise ValueError
        return cls(**found)

    @property
    def is_every_commit(self) -> bool:
        """Whether every commit stores a snapshot, and no changes are recorded."""
        return self.commits is not None and self.commits <= 1

    def is_over(self, commits: int, size: int, seconds: float = 0, *, share: float = 1) -> bool:
        """Whether a limit is reached. ``share``: the part of the limit of commits that counts."""
        return (
            (self.commits is not None and commits >= self.commits * share)
            or (self.size is not None and size >= self.size)
            or (self.seconds is not None and seconds >= self.seconds)
        )
