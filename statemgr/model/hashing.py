"""The content hash, XXH3-128: contents with the same hash count as the same. Also buffers to hash from. Pure.

It detects accidents, not forgery: whoever can write to the checkpoint topic decides what a checkpoint names.
"""

from __future__ import annotations

import mmap
from typing import Protocol

import xxhash

#: Bytes of a digest.
HASH_SIZE = 16


class Hasher(Protocol):
    """An incremental hash."""

    def update(self, data: bytes | bytearray | memoryview, /) -> None:
        """Feed the next piece of content."""

    def digest(self) -> bytes:
        """The 16-byte digest of what was fed so far (canonical, big-endian form)."""


def hasher() -> Hasher:
    """A new incremental hash."""
    return xxhash.xxh3_128()


def content_hash(data: bytes | bytearray | memoryview) -> bytes:
    """The 16-byte digest of ``data``."""
    return xxhash.xxh3_128_digest(data)


def checksum(data: bytes) -> bytes:
    """XXH3-64 of a small record, 8 bytes, canonical (big-endian) form."""
    return xxhash.xxh3_64_digest(data)


def read_buffer(size: int) -> memoryview:
    """A buffer to read into, at the beginning of a page.

    A large ``bytearray`` begins 16 bytes into a page, and x86 processors copy several times slower to such a place.
    """
    return memoryview(mmap.mmap(-1, size))
