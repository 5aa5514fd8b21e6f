"""The demo's state per key: the number of rows, and for each measure the missing values, the sum and the maximum. Pure.

A measure is a column, or a product of columns (``Quantity*UnitPrice``). Arithmetic is decimal and exact: rounding is an
error.
"""

from __future__ import annotations

import decimal
import json
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal

from statemgr.errors import InvalidError

#: Texts that stand for no value.
MISSING = frozenset({"", "NA"})

#: Values have at most this many digits before the decimal point and after it, so products and sums stay exact.
LIMIT = 60
#: The digits of an exponent, without the zeros that it begins with.
_EXPONENT_DIGITS = 4

#: Arithmetic in which rounding is an error.
EXACT = decimal.Context(prec=1000, traps=[decimal.Inexact, decimal.InvalidOperation, decimal.Overflow])


@dataclass(frozen=True, slots=True)
class Measure:
    """A measure. ``name`` is as the user wrote it, ``columns`` are positions in the rows on the topic."""

    name: str
    columns: tuple[int, ...]

    def value(self, row: Sequence[str]) -> Decimal | None:
        """Return the row's value, or None if it is missing. Raises: ValueError if it is not a number."""
        product = Decimal(1)
        for column in self.columns:
            text = row[column].strip()
            if text in MISSING:
                return None
            product = _limited(EXACT.multiply(product, number(text)))
        return product


def number(text: str) -> Decimal:
    """Parse a decimal number within the limits. Raises: ValueError for any other text."""
    if "_" in text or not text.isascii():
        raise ValueError(text)  # a number in Python, but not in a table
    if len(text.lower().partition("e")[2].lstrip("+-0")) > _EXPONENT_DIGITS:
        raise ValueError(text)
    try:
        value = Decimal(text)
    except decimal.InvalidOperation:
        raise ValueError(text) from None
    return _limited(value)


def _limited(value: Decimal) -> Decimal:
    exponent = value.as_tuple().exponent
    if not isinstance(exponent, int) or exponent < -LIMIT or value.copy_abs() >= 10**LIMIT:
        raise ValueError(value)
    return value


def factors_of(name: str) -> list[str]:
    """Return the columns whose product a measure is, without spaces around the asterisks."""
    return [factor.strip() for factor in name.split("*")]


def measures_of(names: Sequence[str]) -> tuple[list[str], list[Measure]]:
    """Return the columns that measures need, each once, and the measures over them. Raises: InvalidError."""
    columns: list[str] = []
    measures = []
    for name in names:
        factors = factors_of(name)
        if not all(factors):
            raise InvalidError(f"{name!r} is not a column or a product of columns", hint="such as Quantity*UnitPrice")
        for factor in factors:
            if factor not in columns:
                columns.append(factor)
        measures.append(Measure(name, tuple(columns.index(factor) for factor in factors)))
    return columns, measures


class Tally:
    """Counts and sums over some rows. The measures do not include ``unparsable`` rows."""

    __slots__ = ("largest", "missing", "rows", "sums", "unparsable")

    def __init__(self, measures: int) -> None:
        self.rows = 0
        self.unparsable = 0
        self.missing = [0] * measures
        self.sums = [Decimal(0)] * measures
        self.largest: list[Decimal | None] = [None] * measures

    def add_row(self, row: Sequence[str] | None, measures: Sequence[Measure]) -> None:
        """Count one row. None is a malformed row."""
        self.rows += 1
        try:
            if row is None:
                raise ValueError
            values = [measure.value(row) for measure in measures]
        except (ValueError, decimal.DecimalException):
            self.unparsable += 1
            return
        for i, value in enumerate(values):
            self._add(i, int(value is None), value, value)

    def add(self, other: Tally) -> None:
        """Add the counts of another tally."""
        self.rows += other.rows
        self.unparsable += other.unparsable
        for i, missing in enumerate(other.missing):
            self._add(i, missing, other.sums[i], other.largest[i])

    def _add(self, i: int, missing: int, value: Decimal | None, largest: Decimal | None) -> None:
        self.missing[i] += missing
        if value is not None:
            self.sums[i] = EXACT.add(self.sums[i], value)
        known = self.largest[i]
        if largest is not None and (known is None or largest > known):
            self.largest[i] = largest

    def to_json(self) -> str:
        """Encode as JSON with decimals as text, so that they stay exact."""
        return json.dumps(
            [
                self.rows,
                self.unparsable,
                self.missing,
                [str(value) for value in self.sums],
                [None if value is None else str(value) for value in self.largest],
            ],
            separators=(",", ":"),
        )

    @classmethod
    def from_json(cls, text: str | bytes) -> Tally:
        """Decode the output of :meth:`to_json`."""
        rows, unparsable, missing, sums, largest = json.loads(text)
        tally = cls(len(missing))
        tally.rows, tally.unparsable, tally.missing = rows, unparsable, missing
        tally.sums = [Decimal(value) for value in sums]
        tally.largest = [None if value is None else Decimal(value) for value in largest]
        return tally
