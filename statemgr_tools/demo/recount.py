"""The other side of the comparison: the input counted again, without Kafka, Spark, state or the demo's own sums.

It parses the rows itself and adds integers scaled by a power of ten, so that an error in :mod:`measures` shows.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from decimal import Decimal

from statemgr_tools.demo.dataset import Dataset
from statemgr_tools.demo.measures import factors_of

_NUMBER = re.compile(r"([+-]?)(?=\.?\d)(\d*)(?:\.(\d*))?(?:[eE]([+-]?)0*(\d{1,4}))?\Z", re.ASCII)
_SCALE = 60


@dataclass
class Count:
    """The totals of one key's rows. Sums are integers in units of 10 to the power of -60."""

    rows: int = 0
    unparsable: int = 0
    missing: list[int] = field(default_factory=list)
    sums: list[int] = field(default_factory=list)
    largest: list[int | None] = field(default_factory=list)

    def plain(self) -> tuple[object, ...]:
        """Return a form for comparisons: sums and largest values as exact decimals."""
        return (
            self.rows,
            self.unparsable,
            tuple(self.missing),
            tuple(_decimal(value) for value in self.sums),
            tuple(None if value is None else _decimal(value) for value in self.largest),
        )


def recount(dataset: Dataset, measures: Sequence[str]) -> dict[bytes, Count]:
    """Return key → its count. A missing key counts under ``b""``."""
    factors = [factors_of(measure) for measure in measures]
    counts: dict[bytes, Count] = {}
    with dataset.open() as lines:
        reader = csv.DictReader(lines)
        width = len(reader.fieldnames or ())
        for row in reader:
            malformed = None in row or None in row.values() or len(row) != width
            key = "" if malformed or row[dataset.key] == "NA" else row[dataset.key]
            name = key.encode("utf-8", "surrogateescape")
            count = counts.get(name)
            if count is None:
                n = len(factors)
                count = counts[name] = Count(0, 0, [0] * n, [0] * n, [None] * n)
            count.rows += 1
            values = None if malformed else [_value([row[f] for f in columns]) for columns in factors]
            if values is None or "bad" in values:
                count.unparsable += 1
                continue
            for i, value in enumerate(values):
                if value is None:
                    count.missing[i] += 1
                elif isinstance(value, int):
                    count.sums[i] += value
                    top = count.largest[i]
                    count.largest[i] = value if top is None or value > top else top
    return counts


def _value(texts: Sequence[str]) -> int | str | None:
    digits, exponent = 1, 0
    for text in map(str.strip, texts):
        if text in ("", "NA"):
            return None
        match = _NUMBER.match(text)
        if match is None:
            return "bad"
        sign, whole, part, of_power, power = match.groups(default="")
        factor, shift = _integer(sign + whole + part), int(of_power + (power or "0")) - len(part)
        digits, exponent = digits * factor, exponent + shift
        if _scaled(factor, shift) is None or _scaled(digits, exponent) is None:
            return "bad"
    return _scaled(digits, exponent)


def _scaled(digits: int, exponent: int) -> int | None:
    """Return the number in units of 10 to the power of -60, or None if it has too many digits."""
    if _SCALE + exponent < 0:
        return None
    scaled: int = digits * 10 ** (_SCALE + exponent)
    return scaled if abs(scaled) < 10 ** (2 * _SCALE) else None


def _integer(text: str) -> int:
    # int() rejects very many digits
    return int(text) if len(text) < 4000 else int(Decimal(text))


def _decimal(value: int) -> Decimal:
    # from text, since arithmetic would round
    return Decimal(f"{value}E-{_SCALE}")
