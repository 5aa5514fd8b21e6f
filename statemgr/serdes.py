"""Serdes: between a store's bytes and an application's values. Pure.

``bytes``, ``string`` (UTF-8), ``integer`` (8 bytes, big-endian, sign bit flipped so that byte order is number order)
and ``json`` (compact, sorted keys), or any pair of callables.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from statemgr.errors import ConfigError, CorruptError


@dataclass(frozen=True, slots=True)
class Serde:
    """A pair of callables: value → bytes and bytes → value."""

    serialize: Callable[[Any], bytes]
    deserialize: Callable[[bytes], Any]


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


def serde(which: str | Serde | tuple[Callable[[Any], bytes], Callable[[bytes], Any]]) -> Serde:
    """The serde for a name, a pair of callables, or a Serde. Raises: ConfigError for an unknown name."""
    if isinstance(which, Serde):
        return which
    if isinstance(which, tuple):
        return Serde(*which)
    if which not in SERDES:
        raise ConfigError(f"unknown serde {which!r}", hint=f"one of {', '.join(SERDES)}, or a pair of callables")
    return SERDES[which]
