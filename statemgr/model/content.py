"""The content hash of a store: the number of keys, and the sum modulo 2**128 of one hash for each key and value. Pure.

The sum does not depend on the order of the pairs, so parts of a store can be hashed apart and added. The hash of a pair
is XXH3-128 of the key followed by the value, with the key's length as the seed: no other pair has the same input. Like
:mod:`statemgr.model.hashing` it detects accidents, not forgery.

A changelog has several records of a key, and only the newest counts. :func:`rows` turns each record into 32 bytes: the
hash of its key, which stands for the key, and the hash of the pair, or zeros for a delete. :func:`split` splits rows by
the key's hash, so that all rows of a key are in one part, and :func:`newest` adds up the last row of each key.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import compress, islice
from operator import add
from typing import TypeVar

import xxhash

V = TypeVar("V")
ROW_SIZE = 32
#: The parts that :func:`split` makes.
WAYS = 16
#: The levels at which :func:`split` can split: each takes another byte of the key's hash.
LEVELS = 16
_ROW = struct.Struct("16s16s")
_DELETED = bytes(16)
_MODULUS = 1 << 128
#: Pairs that are hashed together: few enough for the processor's caches.
_BATCH = 500
#: For each part, a table that maps a byte of the key's hash to 1 if the part takes it.
_TAKES = [bytes(byte >> 4 == part for byte in range(256)) for part in range(WAYS)]


@dataclass(frozen=True, slots=True)
class Content:
    """How many keys a store has, and the sum of the hashes of its pairs."""

    keys: int = 0
    total: int = 0

    def __add__(self, other: Content) -> Content:
        return Content(self.keys + other.keys, (self.total + other.total) % _MODULUS)

    def __sub__(self, other: Content) -> Content:
        """The content without pairs that it has. A difference of two contents may be negative."""
        return Content(self.keys - other.keys, (self.total - other.total) % _MODULUS)

    @property
    def hash(self) -> str:
        """The sum as 32 hexadecimal digits."""
        return f"{self.total:032x}"


def of_pairs(pairs: Iterator[tuple[bytes, bytes]]) -> Content:
    """The content of pairs with different keys."""
    content = Content()
    while batch := list(islice(pairs, _BATCH)):
        content += of_batch(*columns(batch))
    return content


def columns(pairs: Sequence[tuple[bytes, V]]) -> tuple[list[bytes], list[V]]:
    """The keys of pairs, and their values.

    ``zip(*pairs)`` costs three times as much: it makes an iterator for each pair, and so the garbage collector runs.
    """
    return [key for key, _ in pairs], [value for _, value in pairs]


def of_batch(keys: Sequence[bytes], values: Sequence[bytes]) -> Content:
    """The content of different keys and their values."""
    total = sum(map(xxhash.xxh3_128_intdigest, map(add, keys, values), map(len, keys)))
    return Content(len(keys), total % _MODULUS)


def differing(scans: Sequence[Iterator[tuple[bytes, bytes]]]) -> Iterator[tuple[bytes, tuple[bytes | None, ...]]]:
    """The keys that do not have the same value in all scans, in key order, and their values (None: no such key).

    Each scan must be in key order. One pair of each is in memory.
    """
    heads = [next(scan, None) for scan in scans]
    while keys := [head[0] for head in heads if head is not None]:
        if heads.count(heads[0]) == len(heads):
            heads = [next(scan, None) for scan in scans]
            continue
        key = min(keys)
        here = [head is not None and head[0] == key for head in heads]
        values = tuple(head[1] if is_here and head else None for head, is_here in zip(heads, here, strict=True))
        heads = [next(scan, None) if is_here else head for scan, head, is_here in zip(scans, heads, here, strict=True)]
        if len(set(values)) > 1:
            yield key, values


def rows(records: Sequence[tuple[bytes, bytes | None]]) -> list[bytes]:
    """One row for each record, in order. A value of None is a delete."""
    if not records:
        return []
    keys, values = columns(records)
    hashes: Iterable[bytes]
    if None in values:
        hashes = (
            _DELETED if value is None else xxhash.xxh3_128_digest(key + value, len(key)) for key, value in records
        )
    else:
        hashes = map(xxhash.xxh3_128_digest, map(add, keys, values), map(len, keys))
    return list(map(add, map(xxhash.xxh3_128_digest, keys), hashes))


def split(some: Sequence[bytes], level: int) -> list[bytes]:
    """Rows as ``WAYS`` parts, each in the order of the rows. Rows of one key are always in the same part."""
    chosen = b"".join(some)[level::ROW_SIZE]
    return [b"".join(compress(some, chosen.translate(takes))) for takes in _TAKES]


def unpacked(data: bytes) -> list[bytes]:
    """The rows of joined rows."""
    return [data[start : start + ROW_SIZE] for start in range(0, len(data), ROW_SIZE)]


def newest(parts: Iterable[bytes], most: int | None = None) -> Content | None:
    """The content of joined rows, oldest first: only the last row of each key counts, and a delete adds nothing.

    None if there are more than ``most`` keys.
    """
    last: dict[bytes, bytes] = {}
    for part in parts:
        last.update(_ROW.iter_unpack(part))
        if most is not None and len(last) > most:
            return None
    hashes = list(last.values())
    total = sum(map(int.from_bytes, hashes))
    return Content(len(hashes) - hashes.count(_DELETED), total % _MODULUS)
