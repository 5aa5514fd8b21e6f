"""The bytes of a store with a time to live (``stores.<name>.ttl.ms``). Pure.

Each stored value begins with its expiry: 8 bytes, big-endian, epoch milliseconds. The entry is gone once the clock has
reached it. A checkpoint says so after the name of the store's value serde (``json with TTL``), so a reader needs no
configuration to know.
"""

from __future__ import annotations

from statemgr.errors import CorruptError

_BYTES = 8


def expiry_bytes(at_ms: int) -> bytes:
    """A time as what a value begins with. The bytes of a later time are larger."""
    return at_ms.to_bytes(_BYTES, "big")


def live(stored: bytes | None, now: bytes) -> bytes | None:
    """The value without its expiry; None if it is absent or has expired.

    Args:
        now: :func:`expiry_bytes` of the time.

    Raises: CorruptError if the stored bytes have no expiry.
    """
    if stored is None:
        return None
    if len(stored) < _BYTES:
        raise CorruptError(
            f"a value of a store with a TTL has {len(stored)} bytes, and its expiry alone has {_BYTES}",
            hint="only tasks of the job may write to the store and its changelog",
        )
    return stored[_BYTES:] if stored[:_BYTES] > now else None


def without_expiry(stored: bytes | None) -> bytes | None:
    """The value without its expiry, even if it has expired. Raises: CorruptError."""
    return live(stored, b"")
