"""Turns filters on the key and on the task into the range of keys and the tasks that a query needs. Pure.

Spark applies every filter again, so a range may be too wide, but never too narrow.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

from pyspark.sql.datasource import (
    EqualNullSafe,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    LessThan,
    LessThanOrEqual,
    StringStartsWith,
)

from statemgr.errors import InvalidError

#: First key, and first key after the range. None means no limit.
Range = tuple[bytes | None, bytes | None]


def key_range(filters: Iterable[Filter], path: Sequence[str], to_bytes: Callable[[Any], bytes]) -> Range:
    """Return the range of keys that match the filters on the column ``path``. ``to_bytes`` must preserve the order."""
    start: bytes | None = None
    end: bytes | None = None
    for one in filters:
        low, high = _bounds(one, to_bytes) if getattr(one, "attribute", None) == tuple(path) else (None, None)
        if low is not None:
            start = low if start is None else max(start, low)
        if high is not None:
            end = high if end is None else min(end, high)
    return start, end


def equal_to(filters: Iterable[Filter], path: Sequence[str]) -> Any | None:
    """Return the value that a column must have, or None if no filter determines it."""
    return next(
        (one.value for one in filters if isinstance(one, EqualTo | EqualNullSafe) and one.attribute == tuple(path)),
        None,
    )


def among(filters: Iterable[Filter], path: Sequence[str]) -> Collection[Any] | None:
    """Return the values that a column may have, or None if no filter limits them."""
    found: set[Any] | None = None
    for one in filters:
        if getattr(one, "attribute", None) == tuple(path) and isinstance(one, EqualTo | EqualNullSafe | In):
            values = set(one.value) if isinstance(one, In) else {one.value}
            found = values if found is None else found & values
    return found


def after(prefix: bytes) -> bytes | None:
    """Return the first key after all keys that begin with ``prefix``, or None if there is none."""
    kept = prefix.rstrip(b"\xff")
    return kept[:-1] + bytes([kept[-1] + 1]) if kept else None


def _bounds(one: Filter, to_bytes: Callable[[Any], bytes]) -> Range:
    try:
        if isinstance(one, In):
            values = [to_bytes(value) for value in one.value if value is not None]
            return (min(values), max(values) + b"\x00") if values else (None, None)
        value = getattr(one, "value", None)
        if value is None:
            return None, None
        if isinstance(one, EqualTo | EqualNullSafe):
            return to_bytes(value), to_bytes(value) + b"\x00"
        if isinstance(one, GreaterThan | GreaterThanOrEqual):
            return to_bytes(value), None
        if isinstance(one, LessThan | LessThanOrEqual):
            return None, to_bytes(value) + b"\x00"
        if isinstance(one, StringStartsWith):
            return to_bytes(value), after(to_bytes(value))
    except (InvalidError, TypeError):  # a value of another type
        pass
    return None, None
