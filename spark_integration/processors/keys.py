"""Bytes of grouping keys and of the keys of map state, which sort as the values do. Pure.

A rescale reads the same bytes: :mod:`statemgr.model.keys.processor_keys`.

Equal keys always have equal bytes. The bytes of a key are never a prefix of those of another key of the same types.
Values are in Spark's internal form (``StructType.toInternal``: a date is a number of days, a timestamp a number of
microseconds).

One field: ``00`` for null, else ``01`` and the value. Numbers are big-endian in the type's width with the sign bit
flipped. A negative float has all its bits flipped. A decimal is its unscaled value in 16 bytes. Text and binary end
with ``00 01``, and each ``00`` in them is ``00 FF``. Each element of an array is ``01`` and a field; ``00`` ends the
array. A struct is its fields.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from decimal import Context, Decimal
from typing import TYPE_CHECKING, Any

from spark_integration.processors.values import as_bytes
from statemgr.errors import CorruptError, InvalidError

if TYPE_CHECKING:
    from pyspark.sql.types import DataType, StructType

#: Spark's types with a whole number as internal form → its bytes.
WHOLE = {
    "ByteType": 1,
    "ShortType": 2,
    "IntegerType": 4,
    "LongType": 8,
    "DateType": 4,
    "TimestampType": 8,
    "TimestampNTZType": 8,
    "DayTimeIntervalType": 8,
}
_FLOATS = {"FloatType": (">f", 4), "DoubleType": (">d", 8)}
DECIMAL_BYTES = 16
#: More digits than any of Spark's decimals. Python's default would round from 29 digits on.
_DIGITS = Context(prec=100)
_NULL, _VALUE, _END = b"\x00", b"\x01", b"\x00\x01"


def check_key_types(schema: StructType, what: str) -> None:
    """Check the types of a key. Raises: InvalidError that names the first field whose type cannot be part of a key."""
    for field in schema.fields:
        if not _can_be_key(field.dataType):
            raise InvalidError(
                f"{what} has a column of type {field.dataType.simpleString()}, which cannot be part of a key",
                hint="cast it to string or binary",
                column=field.name,
            )


def encode_key(schema: StructType, values: Sequence[Any]) -> bytes:
    """Return the bytes of a key. ``values``: one for each field, in Spark's internal form. Raises: InvalidError."""
    out = bytearray()
    try:
        for field, value in zip(schema.fields, values, strict=True):
            _encode(out, field.dataType, value)
    except (TypeError, ValueError, OverflowError, AttributeError, ArithmeticError) as error:
        raise InvalidError(
            f"a key does not have the types {schema.simpleString()}: {error}", hint="pass the declared types"
        ) from error
    return bytes(out)


def decode_key(schema: StructType, data: bytes, at: int = 0) -> tuple[tuple[Any, ...], int]:
    """Return the internal values of a key whose bytes start at ``at``, and where they end. Raises: CorruptError."""
    values = []
    try:
        for field in schema.fields:
            value, at = _decode(field.dataType, data, at)
            values.append(value)
    except (IndexError, ValueError, struct.error) as error:
        raise CorruptError(f"the bytes of a key are not of the types {schema.simpleString()}: {error}") from error
    return tuple(values), at


def _can_be_key(kind: DataType) -> bool:
    name = type(kind).__name__
    if name == "StringType":
        return kind.simpleString() == "string"  # with a collation, equal texts have different bytes
    if name == "ArrayType":
        return _can_be_key(kind.elementType)  # type: ignore[attr-defined]
    if name == "StructType":
        return all(_can_be_key(field.dataType) for field in kind.fields)  # type: ignore[attr-defined]
    return name in WHOLE or name in _FLOATS or name in ("BooleanType", "BinaryType", "DecimalType")


def _encode(out: bytearray, kind: DataType, value: Any) -> None:
    if value is None:
        out += _NULL
        return
    out += _VALUE
    name = type(kind).__name__
    if name in WHOLE:
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{value!r} is not a whole number")
        size = WHOLE[name]
        out += (value + (1 << (8 * size - 1))).to_bytes(size, "big")
    elif name in _FLOATS:
        form, size = _FLOATS[name]
        number = float(value)
        number = float("nan") if number != number else number + 0.0  # a single NaN, and no negative zero
        bits = int.from_bytes(struct.pack(form, number), "big")
        sign = 1 << (8 * size - 1)
        out += (~bits & (2 * sign - 1) if bits & sign else bits | sign).to_bytes(size, "big")
    elif name == "StringType":
        out += _escaped(value.encode())
    elif name == "BinaryType":
        out += _escaped(as_bytes(value))
    elif name == "BooleanType":
        if not isinstance(value, bool):
            raise TypeError(f"{value!r} is not a boolean")
        out.append(value)
    elif name == "DecimalType":
        unscaled = Decimal(value).scaleb(kind.scale, _DIGITS)  # type: ignore[attr-defined]
        if unscaled != int(unscaled):
            raise ValueError(f"{value} has more digits than {kind.simpleString()}")
        out += (int(unscaled) + (1 << (8 * DECIMAL_BYTES - 1))).to_bytes(DECIMAL_BYTES, "big")
    elif name == "ArrayType":
        for item in value:
            out += _VALUE
            _encode(out, kind.elementType, item)  # type: ignore[attr-defined]
        out += _NULL
    else:
        for field, item in zip(kind.fields, value, strict=True):  # type: ignore[attr-defined]
            _encode(out, field.dataType, item)


def _decode(kind: DataType, data: bytes, at: int) -> tuple[Any, int]:
    if data[at] == 0:
        return None, at + 1
    at += 1
    name = type(kind).__name__
    if name in WHOLE:
        size = WHOLE[name]
        return _number(data, at, size) - (1 << (8 * size - 1)), at + size
    if name in _FLOATS:
        form, size = _FLOATS[name]
        bits, sign = _number(data, at, size), 1 << (8 * size - 1)
        bits = bits ^ sign if bits & sign else ~bits & (2 * sign - 1)
        return struct.unpack(form, bits.to_bytes(size, "big"))[0], at + size
    if name in ("StringType", "BinaryType"):
        end = at
        while data[end] or data[end + 1] != 1:
            end += 1 if data[end] else 2
        plain = data[at:end].replace(b"\x00\xff", b"\x00")
        return plain.decode() if name == "StringType" else plain, end + len(_END)
    if name == "BooleanType":
        return bool(data[at]), at + 1
    if name == "DecimalType":
        unscaled = _number(data, at, DECIMAL_BYTES) - (1 << (8 * DECIMAL_BYTES - 1))
        digits = tuple(int(digit) for digit in str(abs(unscaled)))
        return Decimal((int(unscaled < 0), digits, -kind.scale)), at + DECIMAL_BYTES  # type: ignore[attr-defined]
    items = []
    if name == "ArrayType":
        while data[at]:
            item, at = _decode(kind.elementType, data, at + 1)  # type: ignore[attr-defined]
            items.append(item)
        return items, at + 1
    for field in kind.fields:  # type: ignore[attr-defined]
        item, at = _decode(field.dataType, data, at)
        items.append(item)
    return tuple(items), at


def _number(data: bytes, at: int, size: int) -> int:
    if len(data) < at + size:
        raise IndexError("they end too early")
    return int.from_bytes(data[at : at + size], "big")


def _escaped(plain: bytes) -> bytes:
    return plain.replace(b"\x00", b"\x00\xff") + _END
