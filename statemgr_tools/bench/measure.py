"""Measures variants in turn, round after round, and summarises the samples."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

#: Measures one variant in round ``number``. Returns seconds, or several numbers by name.
Sample = Mapping[str, float]
Variant = Callable[[int], float | Sample]
Report = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Series:
    """The samples of one variant, one for each round."""

    samples: Sequence[Sample]

    def median(self, name: str = "seconds") -> float:
        """Return the median over the rounds. Raises: KeyError for a number that was not measured."""
        return statistics.median(sample[name] for sample in self.samples)

    def largest(self, name: str) -> float:
        """Return the largest value over the rounds."""
        return max(sample[name] for sample in self.samples)


def interleaved(
    variants: Mapping[str, Variant],
    rounds: int,
    report: Report = lambda what: None,
    *,
    warm_up: int = 0,
    rotate: bool = True,
) -> dict[str, Series]:
    """Measure every variant once per round. The first variant changes each round, so that drift affects all equally.

    Args:
        variants: name → the function that measures it.
        rounds: the number of rounds, at least 1.
        report: called with name and round before each measurement.
        warm_up: rounds before the first whose numbers are dropped.
        rotate: false if one variant needs what another one leaves behind.
    """
    samples: dict[str, list[Sample]] = {name: [] for name in variants}
    names = list(variants)
    for number in range(-warm_up, rounds):
        shift = number % len(names) if rotate else 0
        for name in names[shift:] + names[:shift]:
            report(f"{name}, {'warming up' if number < 0 else f'round {number + 1} of {rounds}'}")
            gc.collect()
            measured = variants[name](number)
            if number >= 0:
                samples[name].append({"seconds": measured} if isinstance(measured, float) else measured)
    return {name: Series(found) for name, found in samples.items()}


def seconds(action: Callable[[], object]) -> float:
    """Return the seconds that a call takes."""
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value below which ``share`` (0 to 1) of the values are, interpolated between neighbours.

    Raises: ValueError for no values, or a share outside of 0 to 1.
    """
    if not values or not 0 <= share <= 1:
        raise ValueError("a percentile needs values, and a share from 0 to 1")
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)
