"""Keys and values that are the same in every run: 16-byte keys in random order, 100 incompressible bytes each. Pure."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator

KEY_SIZE = 16
VALUE_SIZE = 100
RECORD_SIZE = KEY_SIZE + VALUE_SIZE
_CHUNK = 10_000
#: Bytes of the values in one list of :func:`batches` with its default size.
BATCH_BYTES = _CHUNK * VALUE_SIZE

Pair = tuple[bytes, bytes]


def key(number: int) -> bytes:
    """Return the key of record ``number``. Keys differ and have no order."""
    return hashlib.blake2b(b"%d" % number, digest_size=KEY_SIZE).digest()


def batches(
    count: int, *, start: int = 0, seed: int = 0, value_size: int = VALUE_SIZE, size: int = _CHUNK
) -> Iterator[list[Pair]]:
    """Yield ``count`` records from number ``start`` on, in lists of up to ``size``. Another seed gives other values."""
    for first in range(start, start + count, size):
        number = min(size, start + count - first)
        values = random.Random(seed << 40 | first).randbytes(number * value_size)
        yield [(key(first + i), values[i * value_size : (i + 1) * value_size]) for i in range(number)]


def updates(count: int, *, of: int, seed: int, value_size: int = VALUE_SIZE) -> list[Pair]:
    """Yield new values for ``count`` different records, chosen evenly among the first ``of``."""
    chosen = random.Random(seed)
    numbers = chosen.sample(range(of), min(count, of))
    values = chosen.randbytes(len(numbers) * value_size)
    return [(key(number), values[i * value_size : (i + 1) * value_size]) for i, number in enumerate(numbers)]
