"""MessagePack with the entries of maps in the order of their keys, so that equal values have equal bytes. Pure.

Tuples are read as lists. Integers have at most 64 bits. Source: the MessagePack specification.
"""

from __future__ import annotations

from typing import Any

import msgpack

from statemgr.errors import CorruptError, InvalidError
from statemgr.serdes.serde import Serde

#: Values of up to this many bytes take little memory, whatever sizes they claim.
_SMALL = 1024
_LONG_ARRAYS = (b"\xdc", b"\xdd")


def _serialize(value: Any) -> bytes:
    try:
        packed: bytes = msgpack.packb(_ordered(value), use_bin_type=True)
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise InvalidError(f"a value cannot be written as MessagePack: {error}") from error
    return packed


def _ordered(value: Any) -> Any:
    if isinstance(value, dict):
        if any(_is_list(key) for key in value):
            raise TypeError("a key of a map is a list")
        return {key: _ordered(value[key]) for key in sorted(value)}
    if _is_list(value):
        return [_ordered(item) for item in value]
    return value


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple) and not isinstance(value, msgpack.ExtType)


def _deserialize(data: bytes) -> Any:
    try:
        if len(data) > _SMALL and any(mark in data for mark in _LONG_ARRAYS):
            _check_counts(data)
        return msgpack.unpackb(data, raw=False, strict_map_key=False)
    except Exception as error:  # arbitrary bytes; whatever the parser raises means the same
        raise CorruptError(
            f"a value is not MessagePack: {type(error).__name__}: {error}",
            hint="use the serde that wrote it",
        ) from error


def _check_counts(data: bytes) -> None:
    """Read the bytes without making any object: they must be complete. The parser allocates room for as many items as
    an array claims, at every level. Raises: OutOfData and the parser's other errors."""
    unpacker = msgpack.Unpacker(max_buffer_size=len(data), raw=True)
    unpacker.feed(data)
    unpacker.skip()


MESSAGEPACK = Serde(_serialize, _deserialize, "msgpack")
