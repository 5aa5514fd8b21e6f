"""Where the grouping key is in the keys of a Spark processor's store, and what Spark hashes of it. Pure.

The store's keys (``spark_integration.processors``: ``states``, ``timers``) are these, where KEY is the grouping key::

    s NAME 00 01 KEY ...    state
    x TIME s ...            when state expires
    t TIME KEY, k KEY TIME  timers

TIME is 8 bytes. ``spark_integration.processors.keys`` defines the bytes of KEY. Each column is read from them as what
Spark's ``HashExpression`` hashes: a number from its lowest byte on, a decimal with more than 18 digits as
``BigInteger.toByteArray``, text and binary as they are, the elements of an array and the fields of a struct one after
the other, and nothing for null.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from statemgr.errors import ConfigError, CorruptRecord, InvalidError

#: The attachment that describes a processor's state.
RECORD = "processor-state"
#: Reads one column of a key from a place on: adds what is hashed to the list, and returns the place after it.
_Read = Callable[[bytes, int, list[bytes]], int]
_FORMAT = 1
_TIME = 8
_END = b"\x00\x01"
#: Spark's names of types whose values are whole numbers → the bytes in a key, and those that are hashed.
_WHOLE = {
    "byte": (1, 4),
    "short": (2, 4),
    "integer": (4, 4),
    "date": (4, 4),
    "long": (8, 8),
    "timestamp": (8, 8),
    "timestamp_ntz": (8, 8),
}
_FLOATS = {"float": 4, "double": 8}
_INTERVAL = re.compile(r"interval (day|hour|minute|second)( to (hour|minute|second))?\Z")
_DECIMAL = re.compile(r"decimal\((\d+),-?\d+\)\Z")
_DECIMAL_BYTES = 16
#: Spark hashes a decimal with more digits as bytes, not as a long.
_LONG_DIGITS = 18


def grouping_types(record: bytes) -> str:
    """The types of the grouping columns, as Spark's JSON in one list, by the attachment :data:`RECORD`.

    Raises: CorruptRecord, also for a format of a newer version.
    """
    try:
        found = json.loads(record)
        if found["format"] != _FORMAT:
            raise CorruptRecord(
                f"the record of a processor's state has format {found['format']}; only {_FORMAT} is known",
                hint="use the release that wrote the checkpoint, or a newer one",
            )
        return json.dumps([column["type"] for column in found["key"]["fields"]])
    except (KeyError, ValueError, TypeError) as error:
        raise CorruptRecord(f"the record of a processor's state cannot be read: {error}") from error


def hashed_parts(types: str) -> Callable[[Sequence[bytes]], tuple[list[list[bytes]], list[int]]]:
    """A function from keys of the store to what Spark hashes of their grouping keys, and which of these each key has.

    Args:
        types: from :func:`grouping_types`.

    Raises: ConfigError for a type that cannot be hashed here. The function raises InvalidError for a key of no known
        form.
    """
    columns = [_reader(kind) for kind in json.loads(types)]

    def of_keys(keys: Sequence[bytes]) -> tuple[list[list[bytes]], list[int]]:
        parts: list[list[bytes]] = []
        numbers: list[int] = []
        last: bytes | None = None
        for key in keys:
            try:
                start = at = _start(key)
                # the bytes of one grouping key never begin those of another
                if last is None or not key.startswith(last, start):
                    found: list[bytes] = []
                    for read in columns:
                        at = read(key, at, found)
                    if at > len(key):
                        raise ValueError("it ends too early")
                    last = key[start:at]
                    parts.append(found)
            except (IndexError, ValueError) as error:
                raise InvalidError(
                    f"the key {key[:40]!r} has no grouping key of the types {types}: {error}",
                    hint="only a processor's query may write to its store",
                ) from error
            numbers.append(len(parts) - 1)
        return parts, numbers

    return of_keys


def _start(key: bytes) -> int:
    """Where the grouping key begins."""
    form, at = key[:1], 0
    if form == b"k":
        return 1
    if form == b"t":
        return 1 + _TIME
    if form == b"x":
        form, at = key[1 + _TIME : 2 + _TIME], 1 + _TIME
    if form != b"s":
        raise ValueError("it has no known form")
    return key.index(_END, at) + len(_END)


def _reader(kind: Any) -> _Read:
    if isinstance(kind, dict) and kind.get("type") == "array":
        return _or_null(_array(_reader(kind["elementType"])))
    if isinstance(kind, dict) and kind.get("type") == "struct":
        return _or_null(_struct([_reader(column["type"]) for column in kind["fields"]]))
    name = kind if isinstance(kind, str) else json.dumps(kind)
    decimal = _DECIMAL.match(name)
    if name in _WHOLE or _INTERVAL.match(name):
        return _or_null(_whole(*_WHOLE.get(name, (8, 8))))
    if name in _FLOATS:
        return _or_null(_float(_FLOATS[name]))
    if decimal:
        return _or_null(_decimal(int(decimal[1]) > _LONG_DIGITS))
    if name in ("string", "binary"):
        return _or_null(_text)
    if name == "boolean":
        return _or_null(_boolean)
    raise ConfigError(
        f"the job groups by a column of type {name}, whose hash is not known",
        hint="start a job of another name with the new job.tasks, and read the input again",
    )


def _or_null(read: _Read) -> _Read:
    def reading(key: bytes, at: int, found: list[bytes]) -> int:
        if key[at] > 1:
            raise ValueError("it has other types")
        return read(key, at + 1, found) if key[at] else at + 1

    return reading


def _whole(size: int, hashed: int) -> _Read:
    sign = 1 << (8 * size - 1)

    def read(key: bytes, at: int, found: list[bytes]) -> int:
        number = int.from_bytes(key[at : at + size], "big") - sign
        found.append(number.to_bytes(hashed, "little", signed=True))
        return at + size

    return read


def _float(size: int) -> _Read:
    sign, ones = 1 << (8 * size - 1), (1 << 8 * size) - 1

    def read(key: bytes, at: int, found: list[bytes]) -> int:
        bits = int.from_bytes(key[at : at + size], "big")
        found.append((bits ^ sign if bits & sign else bits ^ ones).to_bytes(size, "little"))
        return at + size

    return read


def _decimal(large: bool) -> _Read:
    def read(key: bytes, at: int, found: list[bytes]) -> int:
        number = int.from_bytes(key[at : at + _DECIMAL_BYTES], "big") - (1 << (8 * _DECIMAL_BYTES - 1))
        size = (number if number >= 0 else ~number).bit_length() // 8 + 1
        found.append(number.to_bytes(size, "big", signed=True) if large else number.to_bytes(8, "little", signed=True))
        return at + _DECIMAL_BYTES

    return read


def _text(key: bytes, at: int, found: list[bytes]) -> int:
    end = key.index(_END, at)  # a zero of the text itself is 00 FF
    found.append(key[at:end].replace(b"\x00\xff", b"\x00"))
    return end + len(_END)


def _boolean(key: bytes, at: int, found: list[bytes]) -> int:
    found.append(key[at].to_bytes(4, "little"))
    return at + 1


def _array(read_element: _Read) -> _Read:
    def read(key: bytes, at: int, found: list[bytes]) -> int:
        while key[at]:
            at = read_element(key, at + 1, found)
        return at + 1

    return read


def _struct(fields: Sequence[_Read]) -> _Read:
    def read(key: bytes, at: int, found: list[bytes]) -> int:
        for read_field in fields:
            at = read_field(key, at, found)
        return at

    return read
