"""Values of state variables as Avro single objects, derived from their Spark schema. Pure.

Every field is a union with null whose default is null, so fields can be added and removed. Values are in Spark's
internal form: a date is Avro's int, a timestamp its long. A map is an array of entries, because keys of Avro's maps are
text. A record is named after its place in the schema. A name that Avro does not allow is written as ``_x_`` and the
hexadecimal digits of its UTF-8 bytes.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Sequence
from decimal import ROUND_HALF_UP, Context, Decimal
from typing import TYPE_CHECKING, Any

from spark_integration.output_schema import types_in
from statemgr.errors import InvalidError
from statemgr.serdes import avro_serde

if TYPE_CHECKING:
    from pyspark.sql.types import DataType, StructType

    from statemgr import Serde

_NAME = re.compile(r"(?!_x_)[A-Za-z_][A-Za-z0-9_]*\Z")
#: Spark's types without parts → Avro's types.
_PLAIN = {
    "NullType": "null",
    "BooleanType": "boolean",
    "ByteType": "int",
    "ShortType": "int",
    "IntegerType": "int",
    "LongType": "long",
    "FloatType": "float",
    "DoubleType": "double",
    "StringType": "string",
    "BinaryType": "bytes",
    "DateType": "int",
    "TimestampType": "long",
    "TimestampNTZType": "long",
    "DayTimeIntervalType": "long",
}
#: Spark's decimals have up to 38 digits, but Python's default is 28.
_DIGITS = Context(prec=38)
_SMALL = {"ByteType": 8, "ShortType": 16}
#: The least number that 32 bits round to infinity.
_TOO_LARGE = 2.0**128 - 2.0**103
#: Avro's promotions between Spark's types, from the written type to the types that can be read instead. Not from bytes
#: to a text: they may not be UTF-8.
_ORDER = ("ByteType", "ShortType", "IntegerType", "LongType", "FloatType", "DoubleType")
_PROMOTIONS = {
    **{written: set(_ORDER[i + 1 :]) for i, written in enumerate(_ORDER)},
    "StringType": {"BinaryType"},
}
_Convert = Callable[[Any], Any]


def check_value_types(schema: StructType, what: str) -> None:
    """Check the types of values.

    Raises: InvalidError that names the first type that cannot be a value, or the first of two fields of one name.
    """
    _avro(schema, what)
    for at, kind in (("", schema), *types_in(schema)):
        names = kind.names if type(kind).__name__ == "StructType" else []  # type: ignore[attr-defined]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            field = f"{at}.{twice}" if at else twice
            raise InvalidError(f"{what} has two fields of one name", hint="rename one of them", field=field)


def to_internal(schema: StructType, row: Any, what: str) -> Any:
    """Return a row in Spark's internal form. Raises: InvalidError if it does not have the types of the schema."""
    try:
        if row is None:
            raise TypeError("it is None")
        _check_fields(schema, row)
        return schema.toInternal(row)
    except (AttributeError, TypeError, ValueError, OverflowError) as error:
        raise InvalidError(
            f"a {what} does not have the types {schema.simpleString()}: {error}", hint="pass the declared types"
        ) from error


def _check_fields(kind: Any, value: Any) -> None:
    """Check that structs have no other fields than the declared ones, which PySpark would leave out.

    Raises: ValueError.
    """
    name = type(kind).__name__
    if value is None or not kind.needConversion():
        return
    if name == "StructType" and isinstance(value, dict):
        if unknown := [key for key in value if key not in kind.names]:
            raise ValueError(f"there is no field {unknown[0]!r}")
        value = [value.get(key) for key in kind.names]
    if name == "StructType" and isinstance(value, tuple | list):
        if len(value) != len(kind.fields):
            raise ValueError(f"{len(kind.fields)} fields are required while {len(value)} values are provided")
        for field, item in zip(kind.fields, value, strict=True):
            _check_fields(field.dataType, item)
    elif name == "ArrayType":
        for item in value:
            _check_fields(kind.elementType, item)
    elif name == "MapType":
        for key, item in value.items():
            _check_fields(kind.keyType, key)
            _check_fields(kind.valueType, item)


def is_nullable(kind: DataType) -> bool:
    """Whether every field, element and value within a type may be null."""
    name = type(kind).__name__
    if name == "StructType":
        return all(field.nullable and is_nullable(field.dataType) for field in kind.fields)  # type: ignore[attr-defined]
    if name == "ArrayType":
        return kind.containsNull and is_nullable(kind.elementType)  # type: ignore[attr-defined]
    if name == "MapType":
        return kind.valueContainsNull and is_nullable(kind.valueType)  # type: ignore[attr-defined]
    return True


def value_serde(versions: Sequence[StructType]) -> Serde:
    """Return a serde between Spark's internal form of a struct (a tuple) and bytes.

    Args:
        versions: every schema that the variable has had, oldest first. The serde writes the last one.
    """
    from statemgr import Serde

    schema = versions[-1]
    avro = avro_serde([json.dumps(avro_schema(version)) for version in versions])
    pack, unpack = _converters(schema)

    def serialize(value: Any) -> bytes:
        if len(value) != len(schema.fields):
            raise InvalidError(f"{len(schema.fields)} fields are required while {len(value)} values are provided")
        try:
            packed = pack(value)
        except (TypeError, ValueError, ArithmeticError, AttributeError) as error:
            raise InvalidError(f"a value does not have the types {schema.simpleString()}: {error}") from error
        return avro.serialize(packed)

    return Serde(serialize, lambda data: unpack(avro.deserialize(data)), "spark-state")


def avro_schema(version: StructType) -> Any:
    """Return the Avro schema of values that this version of a variable's schema wrote."""
    return _avro(version, "state")


def unreadable(written: DataType, read: DataType, path: str = "") -> str | None:
    """Return the first place where ``read`` cannot resolve what ``written`` wrote, by Avro's rules; None if it can."""
    old, new = type(written).__name__, type(read).__name__
    if new in _PROMOTIONS.get(old, ()):
        return None
    if old == new == "StructType":
        fields = {field.name: field for field in written.fields}  # type: ignore[attr-defined]
        for field in read.fields:  # type: ignore[attr-defined]
            at, before = f"{path}.{field.name}" if path else field.name, fields.get(field.name)
            if before is None:
                reason = None if field.nullable else _not_null(at)
            else:
                reason = _unreadable_part(before.dataType, before.nullable, field.dataType, field.nullable, at)
            if reason is not None:
                return reason
        return None
    if old == new == "ArrayType":
        return _unreadable_part(
            written.elementType,  # type: ignore[attr-defined]
            written.containsNull,  # type: ignore[attr-defined]
            read.elementType,  # type: ignore[attr-defined]
            read.containsNull,  # type: ignore[attr-defined]
            f"{path}.element",
        )
    if old == new == "MapType":
        return unreadable(written.keyType, read.keyType, f"{path}.key") or _unreadable_part(  # type: ignore[attr-defined]
            written.valueType,  # type: ignore[attr-defined]
            written.valueContainsNull,  # type: ignore[attr-defined]
            read.valueType,  # type: ignore[attr-defined]
            read.valueContainsNull,  # type: ignore[attr-defined]
            f"{path}.value",
        )
    if written.simpleString() == read.simpleString():
        return None
    return f"{path or 'the value'} was {written.simpleString()} and is {read.simpleString()}"


def _unreadable_part(written: DataType, had_null: bool, read: DataType, has_null: bool, at: str) -> str | None:
    return _not_null(at) if had_null and not has_null else unreadable(written, read, at)


def _not_null(at: str) -> str:
    return f"{at} is declared NOT NULL now, and may be null in them"


def as_bytes(value: Any) -> bytes:
    """Return a binary value. Raises: TypeError for anything else: ``bytes(5)`` would be five zeros."""
    if not isinstance(value, bytes | bytearray | memoryview):
        raise TypeError(f"{value!r} is not binary")
    return bytes(value)


def _avro(kind: DataType, path: str) -> Any:
    """Return the Avro type. Raises: InvalidError for a type that has none."""
    name = type(kind).__name__
    if name in _PLAIN:
        return _PLAIN[name]
    if name == "DecimalType":
        return {"type": "bytes", "logicalType": "decimal", "precision": kind.precision, "scale": kind.scale}  # type: ignore[attr-defined]
    if name == "StructType":
        named = [(_name(field.name), field.dataType) for field in kind.fields]  # type: ignore[attr-defined]
        fields = [{"name": at, "type": _nullable(part, f"{path}.{at}"), "default": None} for at, part in named]
        return {"type": "record", "name": path, "fields": fields}
    if name == "ArrayType":
        return {"type": "array", "items": _nullable(kind.elementType, f"{path}._e")}  # type: ignore[attr-defined]
    if name == "MapType":
        entry = [
            {"name": "key", "type": _nullable(kind.keyType, f"{path}._k"), "default": None},  # type: ignore[attr-defined]
            {"name": "value", "type": _nullable(kind.valueType, f"{path}._v"), "default": None},  # type: ignore[attr-defined]
        ]
        return {"type": "array", "items": {"type": "record", "name": f"{path}._entry", "fields": entry}}
    raise InvalidError(
        f"a state variable has a value of type {kind.simpleString()}, which cannot be stored",
        hint="declare another type and convert the values",
        at=path,
    )


def _nullable(kind: DataType, path: str) -> Any:
    avro = _avro(kind, path)
    return avro if avro == "null" else ["null", avro]


def _name(name: str) -> str:
    return name if _NAME.match(name) else "_x_" + name.encode().hex()


def _converters(kind: DataType) -> tuple[_Convert, _Convert]:
    """Return converters from Spark's internal form to Avro's input, and back. Neither is called with None."""
    name = type(kind).__name__
    if name == "StructType":
        fields = kind.fields  # type: ignore[attr-defined]
        parts = [(_name(field.name), *_optional(field.dataType, nullable=field.nullable)) for field in fields]
        return (
            lambda value: {at: pack(item) for (at, pack, _), item in zip(parts, value, strict=True)},
            lambda record: tuple(unpack(record[at]) for at, _, unpack in parts),
        )
    if name == "ArrayType":
        pack, unpack = _optional(kind.elementType, nullable=kind.containsNull)  # type: ignore[attr-defined]
        return lambda value: [pack(item) for item in value], lambda items: [unpack(item) for item in items]
    if name == "MapType":
        pack_key, unpack_key = _optional(kind.keyType)  # type: ignore[attr-defined]
        pack_value, unpack_value = _optional(kind.valueType, nullable=kind.valueContainsNull)  # type: ignore[attr-defined]
        return (
            lambda value: [{"key": pack_key(k), "value": pack_value(v)} for k, v in value.items()],
            lambda items: {unpack_key(item["key"]): unpack_value(item["value"]) for item in items},
        )
    if name == "DecimalType":
        quantum = Decimal(1).scaleb(-kind.scale)  # type: ignore[attr-defined]
        return lambda value: Decimal(value).quantize(quantum, ROUND_HALF_UP, _DIGITS), _same
    if name == "BinaryType":
        return as_bytes, _same
    if name == "FloatType":
        return _single, _same
    if name == "NullType":
        return _no_value, _same
    if name in _SMALL:
        return _within(_SMALL[name]), _same
    return _same, _same


def _optional(kind: DataType, *, nullable: bool = True) -> tuple[_Convert, _Convert]:
    pack, unpack = _converters(kind)

    def required(value: Any) -> Any:
        if value is None:
            raise ValueError("null where it is declared NOT NULL")
        return pack(value)

    optional = pack if pack is _same else lambda value: None if value is None else pack(value)
    return (
        optional if nullable else required,
        unpack if unpack is _same else lambda value: None if value is None else unpack(value),
    )


def _same(value: Any) -> Any:
    return value


def _no_value(value: Any) -> Any:
    raise ValueError(f"{value!r} where only null can be")


def _single(value: Any) -> Any:
    if _TOO_LARGE <= abs(value) < math.inf:
        raise ValueError(f"{value} does not fit into a float of 32 bits")
    return value


def _within(bits: int) -> _Convert:
    end = 1 << (bits - 1)

    def check(value: Any) -> Any:
        if not -end <= value < end:
            raise ValueError(f"{value} does not fit into {bits} bits")
        return value

    return check
