"""Latencies of blob stores as distributions, to be added to a fast one. Pure, but for the random source it is given.

``FLIP_158`` stands for the table of Flink's proposal for generalised incremental checkpoints (FLIP-158): a PUT has a
median of 459 ms and a 99.9th percentile of 3.2 s. What lies between is interpolated on a logarithmic scale.
"""

from __future__ import annotations

import bisect
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Latencies:
    """A distribution by some of its quantiles: ``(share, seconds)``, ascending, from 0 to 1."""

    name: str
    quantiles: Sequence[tuple[float, float]]

    def at(self, share: float) -> float:
        """The quantile of a share from 0 to 1, in seconds."""
        shares = [known for known, _ in self.quantiles]
        above = min(max(bisect.bisect_left(shares, share), 1), len(shares) - 1)
        (left, low), (right, high) = self.quantiles[above - 1], self.quantiles[above]
        part = (share - left) / (right - left)
        return math.exp(math.log(low) + part * (math.log(high) - math.log(low)))

    def sample(self, source: random.Random) -> float:
        """One latency in seconds."""
        return self.at(source.random())


FLIP_158 = Latencies(
    "FLIP-158", ((0.0, 0.2), (0.5, 0.459), (0.9, 0.74), (0.99, 1.57), (0.999, 3.2), (1.0, 5.0))
)  # fmt: skip


def fixed(seconds: float) -> Latencies:
    """The same for every request."""
    return Latencies(f"{seconds * 1000:g} ms", ((0.0, seconds), (1.0, seconds)))
