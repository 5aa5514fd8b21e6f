"""When a snapshot is due: after so many commits, bytes or seconds, whichever comes first. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite

_LIMIT = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]+)\Z")
_BYTES = {"b": 1, "bytes": 1, "kib": 1024, "mib": 1024**2, "gib": 1024**3, "kb": 1000, "mb": 1000**2, "gb": 1000**3}
_SECONDS = {"s": 1, "seconds": 1, "min": 60, "minutes": 60, "h": 3600, "hours": 3600}
_COMMITS = {"commit": 1, "commits": 1}


@dataclass(frozen=True, kw_only=True)
class SnapshotInterval:
    """What may gather on top of a snapshot before the next is made; None is no limit."""

    commits: float | None = None
    size: float | None = None
    seconds: float | None = None

    @classmethod
    def parse(cls, limits: Sequence[str]) -> SnapshotInterval:
        """From texts like ``50 commits``, ``256 MiB``, ``10 min``, one of a kind. Raises: ValueError."""
        found: dict[str, float] = {}
        for limit in limits:
            match = _LIMIT.match(limit.strip())
            if not match:
                raise ValueError
            number, unit = float(match[1]), match[2].lower()
            if not isfinite(number):
                raise ValueError
            kinds = (("commits", _COMMITS), ("size", _BYTES), ("seconds", _SECONDS))
            kind = next((name for name, units in kinds if unit in units), None)
            if kind is None or kind in found or number <= 0:
                raise ValueError
            found[kind] = number * {**_COMMITS, **_BYTES, **_SECONDS}[unit]
        if not found:
            raise ValueError
        return cls(**found)

    @property
    def is_every_commit(self) -> bool:
        """Whether every commit is a snapshot, and no changes are kept."""
        return self.commits is not None and self.commits <= 1

    def is_over(self, commits: int, size: int, seconds: float = 0, *, share: float = 1) -> bool:
        """Whether a limit is reached; that of commits counts as this share of it."""
        return (
            (self.commits is not None and commits >= self.commits * share)
            or (self.size is not None and size >= self.size)
            or (self.seconds is not None and seconds >= self.seconds)
        )
