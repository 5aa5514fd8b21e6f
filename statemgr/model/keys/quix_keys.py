"""The key of a message in the keys of stores that Quix Streams wrote. Pure.

Quix Streams 3.28.1 begins a key with the key of the message, as the topic's ``key_deserializer`` has read it: bytes as
they are, anything else as JSON (``quixstreams.state.base.transaction.as_state``, ``quixstreams.utils.json``). A ``|``
and the application's own key follow. Producers partition by the bytes of the message:

===========  =========================================================================================
name         the message has
===========  =========================================================================================
``""``       the same bytes: ``bytes``, and ``json`` of producers that write it as Quix Streams does
``str-``     the text in UTF-8: ``str``
``int-``     4 bytes, big-endian: ``int`` (``confluent_kafka.serialization.IntegerSerializer``)
``double-``  8 bytes, big-endian: ``double`` (``DoubleSerializer``)
``json-``    JSON as Python's ``json.dumps`` writes it: ``json``
===========  =========================================================================================

A key of another form, such as one without a ``|``, is the message's own: the new job has written it.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from statemgr.errors import InvalidError

_SEPARATOR = b"|"
_STRING = re.compile(rb'"(?:[^"\\]|\\.)*"', re.DOTALL)
_NUMBER = re.compile(rb"-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?")
_DECODER = json.JSONDecoder()


class _Form(NamedTuple):
    """How a key begins. ``end``: where the message's key ends in a key, None if nowhere; ``message``: the bytes of the
    message, for the bytes up to there."""

    end: Callable[[bytes], int | None]
    message: Callable[[bytes], bytes]


def _end_of_bytes(key: bytes) -> int | None:
    """Raises: InvalidError for a key with several separators, because each of them may end the message's key."""
    if key.count(_SEPARATOR) > 1:
        raise InvalidError(
            f"the key {key[:40]!r} does not show where the key of its message ends",
            hint="a store of Quix Streams can be rescaled if neither its keys nor those of its input have a `|`",
        )
    end = key.find(_SEPARATOR)
    return None if end < 0 else end


def _end_of(pattern: re.Pattern[bytes]) -> Callable[[bytes], int | None]:
    def end(key: bytes) -> int | None:
        found = pattern.match(key)
        return found.end() if found is not None and key.startswith(_SEPARATOR, found.end()) else None

    return end


def _end_of_json(key: bytes) -> int | None:
    text = key.decode(errors="surrogateescape")
    try:
        _, end = _DECODER.raw_decode(text)
    except (ValueError, RecursionError):
        return None
    return len(text[:end].encode(errors="surrogateescape")) if text.startswith("|", end) else None


def _text(prefix: bytes) -> bytes:
    return prefix[1:-1] if b"\\" not in prefix else str(json.loads(prefix)).encode()


#: By name, in the order in which they are tried.
FORMS: Mapping[str, _Form] = {
    "": _Form(_end_of_bytes, lambda prefix: prefix),
    "str-": _Form(_end_of(_STRING), _text),
    "int-": _Form(_end_of(_NUMBER), lambda prefix: int(prefix).to_bytes(4, "big", signed=True)),
    "double-": _Form(_end_of(_NUMBER), lambda prefix: struct.pack(">d", float(prefix))),
    "json-": _Form(_end_of_json, lambda prefix: json.dumps(json.loads(prefix)).encode()),
}


def message_keys(name: str, *, exact: bool = False) -> Callable[[Sequence[bytes]], Sequence[bytes]]:
    """Keys of a store → the keys of their messages, by one of :data:`FORMS`.

    The result raises InvalidError for a key that cannot be of the form.

    Args:
        exact: the keys have only the part before the separator.
    """
    form = FORMS[name]

    def end_of(key: bytes) -> int | None:
        if not exact:
            return form.end(key)
        return len(key) if not name or form.end(key + _SEPARATOR) == len(key) else None

    def of_keys(keys: Sequence[bytes]) -> list[bytes]:
        found = []
        for key in keys:
            end = end_of(key)
            try:
                found.append(key if end is None else form.message(key[:end]))
            except (ValueError, OverflowError) as error:
                raise InvalidError(f"the key {key[:40]!r} does not begin with the key of a message: {error}") from None
        return found

    return of_keys
