"""Timers of a task in its store, by time and by grouping key.

::

    t TIME KEY    in the order of time, to find the expired ones
    k KEY TIME    to list those of a grouping key

TIME is 8 bytes, epoch milliseconds with the sign bit flipped. KEY is the bytes of the grouping key (``keys.py``).
"""

from __future__ import annotations

import operator
from collections.abc import Iterator

from statemgr import Store

BY_TIME, _BY_KEY = b"t", b"k"
_SIGN = 1 << 63
#: The last time that a timer or an expiry can have, in epoch milliseconds.
LAST_MS = _SIGN - 1


def register(store: Store, key: bytes, time_ms: int) -> None:
    """Add a timer. Adding an existing one changes nothing."""
    store.put_many([(BY_TIME + _bytes(time_ms) + key, b""), (_BY_KEY + key + _bytes(time_ms), b"")])


def delete(store: Store, key: bytes, time_ms: int) -> None:
    """Remove a timer; an absent one is no error."""
    store.delete_many([BY_TIME + _bytes(time_ms) + key, _BY_KEY + key + _bytes(time_ms)])


def of_key(store: Store, key: bytes) -> Iterator[int]:
    """Return the times of a grouping key's timers, ascending, as of now."""
    found = store.prefix(_BY_KEY + key)

    def read() -> Iterator[int]:
        with found as items:
            for place, _ in items:
                yield int.from_bytes(place[-8:], "big") - _SIGN

    return read()


def expired(store: Store, until_ms: int) -> Iterator[tuple[bytes, int]]:
    """Yield the timers up to and including ``until_ms``: grouping key and time, in the order of time, as of now."""
    found = store.range(BY_TIME, BY_TIME + _bytes(until_ms + 1))

    def read() -> Iterator[tuple[bytes, int]]:
        with found as items:
            for place, _ in items:
                time_ms, key = time_and_key(place)
                yield key, time_ms

    return read()


def first(store: Store) -> int | None:
    """Return the time of the earliest timer, in epoch milliseconds."""
    with store.prefix(BY_TIME) as items:
        return next((time_and_key(place)[0] for place, _ in items), None)


def time_and_key(place: bytes) -> tuple[int, bytes]:
    """Return the time and the grouping key of an entry in the order of time."""
    return int.from_bytes(place[1:9], "big") - _SIGN, place[9:]


def _bytes(time_ms: int) -> bytes:
    return (operator.index(time_ms) + _SIGN).to_bytes(8, "big")  # NumPy's integers overflow
