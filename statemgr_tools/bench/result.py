"""One line of the table, and whether it reaches its target. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any, Literal

#: The reference of a line that has none.
NOT_AVAILABLE = "reference not available"


@dataclass(frozen=True, slots=True)
class Target:
    """A limit for a line's ``ratio``, or for its ``value`` (in the line's unit) if there is no reference."""

    side: Literal["at least", "at most"]
    bound: float
    of: Literal["ratio", "value"] = "ratio"

    def __str__(self) -> str:
        sign = "≥" if self.side == "at least" else "≤"
        return f"{sign} {self.bound:g}" + ("×" if self.of == "ratio" else "")

    def reached(self, measured: float) -> bool:
        """Whether the value is within the limit."""
        return measured >= self.bound if self.side == "at least" else measured <= self.bound

    def miss(self, measured: float) -> float:
        """Return the share of the limit by which the value misses it; 0 if it is reached."""
        if self.reached(measured):
            return 0.0
        return abs(measured - self.bound) / self.bound if self.bound else math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One line: ``value`` in ``unit``, compared with ``reference``, which had ``reference_value``.

    ``ratio`` is value / reference_value, or the median of the rounds' ratios; ``spread`` then has the smallest and the
    largest of them. ``target`` is the bound as text, and ``reached`` is None if there is no target, or if the reference
    was not available.
    """

    case: str
    value: float
    unit: str
    reference: str = ""
    reference_value: float | None = None
    ratio: float | None = None
    spread: tuple[float, float] | None = None
    target: str | None = None
    reached: bool | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the fields for JSON. Numbers have four significant digits."""
        fields = asdict(self)
        return {
            name: _rounded(value)
            if isinstance(value, float)
            else [_rounded(one) for one in value]
            if isinstance(value, tuple)
            else value
            for name, value in fields.items()
        }


@dataclass(frozen=True, slots=True)
class Line:
    """A result, and the share by which it missed its target."""

    result: Result
    miss: float = 0.0


def compared(
    case: str, value: float, unit: str, reference: str, reference_value: float | None, target: Target | None = None
) -> Line:
    """Make a line with a reference. If the reference is not available (None), the line says so and has no verdict."""
    if reference_value is None:
        text = f"{reference}: {NOT_AVAILABLE}"
        return Line(Result(case=case, value=value, unit=unit, reference=text, target=str(target) if target else None))
    ratio = value / reference_value if reference_value else math.inf
    return _line(case, value, unit, reference, reference_value, ratio, target)


def of_rounds(
    case: str,
    unit: str,
    reference: str,
    rounds: Sequence[tuple[float, float]],
    target: Target | None = None,
) -> Line:
    """Make a line from the value and the reference of each round: the medians, and the median of the ratios."""
    value, of_reference = (median(one) for one in zip(*rounds, strict=True))
    ratios = sorted(ours / theirs for ours, theirs in rounds)
    line = _line(case, value, unit, reference, of_reference, median(ratios), target)
    return Line(replace(line.result, spread=(ratios[0], ratios[-1])), line.miss)


def alone(case: str, value: float, unit: str, what: str, target: Target | None = None) -> Line:
    """Make a line without a reference. ``what`` was measured, and the target limits the value itself."""
    return _line(case, value, unit, what, None, None, target)


def _line(
    case: str,
    value: float,
    unit: str,
    reference: str,
    reference_value: float | None,
    ratio: float | None,
    target: Target | None,
) -> Line:
    measured = None if target is None else value if target.of == "value" else ratio
    result = Result(
        case=case,
        value=value,
        unit=unit,
        reference=reference,
        reference_value=reference_value,
        ratio=ratio,
        target=str(target) if target else None,
        reached=None if target is None or measured is None else target.reached(measured),
    )
    return Line(result, target.miss(measured) if target is not None and measured is not None else 0.0)


def _rounded(value: float) -> float | None:
    """Round a number; None for infinity, which JSON does not have."""
    return float(f"{value:.4g}") if math.isfinite(value) else None
