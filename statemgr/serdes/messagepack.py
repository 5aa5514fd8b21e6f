"""MessagePack, with the entries of maps in the order of their keys: equal values have equal bytes. Pure.

Tuples come back as lists; integers have at most 64 bits. Source: the MessagePack specification.
"""

from __future__ import annotations

from typing import Any

import msgpack

from statemgr.errors import CorruptError, InvalidError
from statemgr.serdes.serde import Serde


def _serialize(value: Any) -> bytes:
    try:
        packed: bytes = msgpack.packb(_ordered(value), use_bin_type=True)
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise InvalidError(f"a value does not fit into MessagePack: {error}") from error
    return packed


def _ordered(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _ordered(value[key]) for key in sorted(value)}
    if isinstance(value, list | tuple):
        return [_ordered(item) for item in value]
    return value


def _deserialize(data: bytes) -> Any:
    try:
        return msgpack.unpackb(data, raw=False, strict_map_key=False)
    except Exception as error:  # arbitrary bytes; whatever the parser raises means the same
        raise CorruptError(
            f"a value is no MessagePack: {type(error).__name__}: {error}",
            hint="is the serde the one it was written with?",
        ) from error


MESSAGEPACK = Serde(_serialize, _deserialize)
