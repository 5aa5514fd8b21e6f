"""Serdes: between a store's bytes and an application's values. Pure, but that schemas may be in files.

``bytes``, ``string`` (UTF-8), ``integer`` (8 bytes, big-endian, sign bit flipped so that byte order is number order),
``json`` (compact, sorted keys), ``msgpack`` and, for values, ``avro``; or any pair of callables.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from statemgr.config import StoreConfig
from statemgr.errors import ConfigError, CorruptError
from statemgr.serdes.avro import avro_serde
from statemgr.serdes.serde import Serde

__all__ = ["SERDES", "Serde", "SerdeLike", "avro_serde", "key_serde", "serde", "value_serde"]

#: A name, a Serde, or a pair of callables (value → bytes, bytes → value).
SerdeLike = str | Serde | tuple[Callable[[Any], bytes], Callable[[bytes], Any]]

_SIGN = 1 << 63


def _integer(value: int) -> bytes:
    return (value + _SIGN).to_bytes(8, "big")


def _from_integer(data: bytes) -> int:
    if len(data) != 8:
        raise CorruptError(f"an integer is 8 bytes, not {len(data)}", hint="is the serde the one it was written with?")
    return int.from_bytes(data, "big") - _SIGN


def _same(data: bytes) -> bytes:
    return data


SERDES = {
    "bytes": Serde(_same, _same),
    "string": Serde(lambda value: value.encode(), lambda data: data.decode()),
    "integer": Serde(_integer, _from_integer),
    "json": Serde(
        lambda value: json.dumps(value, separators=(",", ":"), sort_keys=True, ensure_ascii=False).encode(),
        json.loads,
    ),
}


def serde(which: SerdeLike) -> Serde:
    """The serde for a name, a pair of callables, or a Serde. Raises: ConfigError for an unknown name, and for avro."""
    if isinstance(which, Serde):
        return which
    if isinstance(which, tuple):
        return Serde(*which)
    if which == "msgpack":
        # loaded by those who use it
        from statemgr.serdes.messagepack import MESSAGEPACK

        return MESSAGEPACK
    if which == "avro":
        raise ConfigError("the serde avro needs schemas", hint="configure it, or pass avro_serde(schemas)")
    if which not in SERDES:
        hint = f"one of {', '.join(SERDES)}, msgpack, avro, or a pair of callables"
        raise ConfigError(f"unknown serde {which!r}", hint=hint)
    return SERDES[which]


def key_serde(store: StoreConfig) -> Serde:
    """The configured serde of a store's keys."""
    return serde(store.key_serde)


def value_serde(store: StoreConfig) -> Serde:
    """The configured serde of a store's values. Raises: ConfigError when its schemas cannot be read."""
    return avro_serde(store.avro_schemas()) if store.value_serde == "avro" else serde(store.value_serde)
