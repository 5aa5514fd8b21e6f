"""Serdes of keys with times: the windows and sessions of stores that another stream processor wrote. Pure.

The bytes of such a key are the key of the application, and then two numbers. They sort by the key, then by the start,
so the windows of one key that begin within a range of time are one range of the store. Keys have any length. So that
none is taken for the beginning of another one, each zero byte in a key is written as ``00 FF``, and ``00 01`` ends the
key (source: the encoding of byte strings in ordered keys of CockroachDB, ``pkg/util/encoding``). Times are written like
the serde ``integer``.
"""

from __future__ import annotations

import re
from operator import index
from typing import Any, NamedTuple

from statemgr.errors import CorruptError, InvalidError
from statemgr.serdes.serde import Serde

_END = b"\x00\x01"
_TIME_BYTES = 8
_SIGN = 1 << 63
_NAME = re.compile(r"([a-z-]+)(?:\((\w+)\))?")


class WindowKey(NamedTuple):
    """A window of a key. ``start_ms``: its start, in epoch milliseconds; ``sequence``: counts entries of one key with
    the same time in stores that keep duplicates, and is 0 in others."""

    key: Any
    start_ms: int
    sequence: int = 0


class SessionKey(NamedTuple):
    """A session of a key: the times of its first and of its last row, in epoch milliseconds."""

    key: Any
    start_ms: int
    end_ms: int = 0


class QuixKey(NamedTuple):
    """A window of a key in a store of Quix Streams: its start and its end, in epoch milliseconds. In a store of rows by
    time, the time of a row, and a counter. ``start_ms`` and ``end_ms`` are -1 in the entry that has the newest time of
    the key's rows."""

    key: Any
    start_ms: int
    end_ms: int = 0


class _Form(NamedTuple):
    """A kind of key. ``last_bytes``: the bytes of its last number; ``sign``: what is added to it."""

    make: type[WindowKey | SessionKey | QuixKey]
    last_bytes: int
    sign: int


_FORMS = {
    "kafka-streams-window": _Form(WindowKey, 4, 0),
    "kafka-streams-session": _Form(SessionKey, _TIME_BYTES, _SIGN),
    "quix-window": _Form(QuixKey, _TIME_BYTES, _SIGN),
    "quix-timestamp": _Form(QuixKey, _TIME_BYTES, _SIGN),
}


def parts_of(name: str) -> tuple[str, str] | None:
    """The kind of key and the serde of the keys inside, by the name of a serde; None for another serde."""
    found = _NAME.fullmatch(name)
    return (found[1], found[2] or "bytes") if found is not None and found[1] in _FORMS else None


def field_names(kind: str) -> tuple[str, ...]:
    """The names of the parts of a key."""
    return _FORMS[kind].make._fields


def windowed(kind: str, inner: Serde[Any]) -> Serde[Any]:
    """The serde of :class:`WindowKey`, :class:`SessionKey` or :class:`QuixKey`.

    Args:
        kind: one of :data:`statemgr.config.keys.WINDOW_SERDES`.
        inner: the serde of the keys inside.
    """
    make, size, sign = _FORMS[kind]

    def serialize(given: tuple[Any, int, int]) -> bytes:
        try:
            key, start, last = make(*given)
            numbers = _numbers(kind, start, last)
        except (TypeError, OverflowError) as error:
            raise InvalidError(f"the serde {kind} takes a key, its start and a number: {error}") from None
        return prefix_of(inner.serialize(key)) + numbers

    def deserialize(data: bytes) -> tuple[Any, int, int]:
        end = _end(data)
        if len(data) != end + _TIME_BYTES + size:
            raise CorruptError(
                f"a key of the serde {kind} has {_TIME_BYTES + size} bytes after the key inside, not {len(data) - end}",
                hint="use the serde that wrote it",
            )
        start, last = data[end : end + _TIME_BYTES], data[end + _TIME_BYTES :]
        key = inner.deserialize(inner_key(data))
        return make(key, int.from_bytes(start, "big") - _SIGN, int.from_bytes(last, "big") - sign)

    return Serde(serialize, deserialize, kind if inner.name == "bytes" else f"{kind}({inner.label})")


def window_bytes(kind: str, key: bytes, start_ms: int, last: int) -> bytes:
    """The bytes of a key whose parts are known."""
    return prefix_of(key) + _numbers(kind, start_ms, last)


def inner_key(data: bytes) -> bytes:
    """The bytes of the key inside. Raises: CorruptError."""
    return data[: _end(data) - len(_END)].replace(b"\x00\xff", b"\x00")


def prefix_of(key: bytes) -> bytes:
    """What the bytes of all windows of a key begin with, by the bytes of the key inside."""
    return key.replace(b"\x00", b"\x00\xff") + _END


def _end(data: bytes) -> int:
    """The place after the key inside."""
    found = data.find(_END)
    if found < 0:
        raise CorruptError(
            "a key with times does not show where the key inside ends", hint="use the serde that wrote it"
        )
    return found + len(_END)


def _numbers(kind: str, start_ms: int, last: int) -> bytes:
    _, size, sign = _FORMS[kind]
    return (index(start_ms) + _SIGN).to_bytes(_TIME_BYTES, "big") + (index(last) + sign).to_bytes(size, "big")
