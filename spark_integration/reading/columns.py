"""Decodes bytes of a store to Arrow columns by the store's serdes. Pure.

| serde | column |
|---|---|
| ``bytes`` | binary |
| ``string`` | string |
| ``integer`` | bigint |
| ``json`` | string: the JSON text |
| ``msgpack`` | string: the value as JSON text |
| ``kafka-streams-window`` and others with times | a struct: the key inside, and two bigints |
| ``avro`` | the schema's type; string with JSON text if Spark has no such type (a union of several types, recursion) |
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    DataType,
    DateType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampNTZType,
    TimestampType,
)

from spark_integration.reading.avro_columns import AvroColumn, Version
from statemgr.config import StoreConfig
from statemgr.errors import CorruptError
from statemgr.serdes import Serde, key_serde, value_serde
from statemgr.serdes import serde as named_serde
from statemgr.serdes.windows import field_names, inner_key, parts_of

#: Bytes, or None where a key is absent → an Arrow array.
Decode = Callable[[Sequence[bytes | None]], pa.Array]
_PLAIN: dict[str, DataType] = {
    "boolean": BooleanType(),
    "int": IntegerType(),
    "long": LongType(),
    "float": FloatType(),
    "double": DoubleType(),
    "bytes": BinaryType(),
    "string": StringType(),
    "fixed": BinaryType(),
    "enum": StringType(),
}
_LOGICAL: dict[str, DataType] = {
    "date": DateType(),
    "timestamp-millis": TimestampType(),
    "timestamp-micros": TimestampType(),
    "local-timestamp-millis": TimestampNTZType(),
    "local-timestamp-micros": TimestampNTZType(),
}
_SIGN = np.uint64(1 << 63)


@dataclass(frozen=True)
class Column:
    """A column of keys or of values. ``ordered``: its bytes sort in the order in which Spark sorts the values."""

    kind: DataType
    decode: Decode
    serialize: Callable[[Any], bytes]
    ordered: bool


def key_column(store: StoreConfig) -> Column:
    """Return the column of a store's keys."""
    serde, parts = key_serde(store), parts_of(store.key_serde)
    if parts is None:
        return _column(store.key_serde, serde.serialize, serde.deserialize)
    kind, inner = parts[0], named_serde(parts[1])
    return _with_times(kind, _column(parts[1], inner.serialize, inner.deserialize), serde)


def value_column(store: StoreConfig) -> Column:
    """Return the column of a store's values. Raises: ConfigError if its Avro schemas cannot be read."""
    serde = value_serde(store)
    if store.value_serde != "avro":
        return _column(store.value_serde, serde.serialize, serde.deserialize)
    kind = avro_type(json.loads(store.avro_schemas[-1]))
    if kind is None:
        return Column(StringType(), _texts(serde.deserialize), serde.serialize, ordered=False)
    arrow, schema = arrow_type(kind), json.loads(store.avro_schemas[-1])
    column = AvroColumn([Version(schema, arrow)], arrow, _converted(serde.deserialize, arrow))

    return Column(kind, _with_nulls(column.decode), serde.serialize, ordered=False)


def arrow_type(kind: DataType) -> pa.DataType:
    """Return the Arrow type in which Spark expects a type from a data source."""
    from pyspark.sql.pandas.types import to_arrow_type

    return to_arrow_type(kind, timezone="UTC")


def avro_type(schema: Any) -> DataType | None:
    """Return Spark's type for an Avro schema, as ``fastavro`` reads its values. None if Spark has no such type."""
    if isinstance(schema, list):
        members = [member for member in schema if member != "null"]
        return avro_type(members[0]) if len(members) == 1 else None
    if isinstance(schema, str):
        return _PLAIN.get(schema)
    name, logical = schema["type"], schema.get("logicalType")
    if logical == "decimal":
        return DecimalType(schema["precision"], schema.get("scale", 0)) if schema["precision"] <= 38 else None
    if logical is not None:
        return _LOGICAL.get(logical)
    if name == "record":
        fields = [(field["name"], avro_type(field["type"])) for field in schema["fields"]]
        if any(kind is None for _, kind in fields):
            return None
        return StructType([StructField(at, kind, True) for at, kind in fields if kind is not None])
    if name in ("array", "map"):
        item = avro_type(schema["items" if name == "array" else "values"])
        if item is None:
            return None
        return ArrayType(item) if name == "array" else MapType(StringType(), item)
    return avro_type(name) if not isinstance(name, str) else _PLAIN.get(name)


def _column(name: str, serialize: Callable[[Any], bytes], deserialize: Callable[[bytes], Any]) -> Column:
    if name == "bytes":
        return Column(BinaryType(), lambda data: pa.array(list(data), pa.binary()), bytes, ordered=True)
    if name == "string":
        return Column(StringType(), _utf8, serialize, ordered=True)
    if name == "integer":
        return Column(LongType(), _integers, serialize, ordered=True)
    decode = _utf8 if name == "json" else _texts(deserialize)
    return Column(StringType(), decode, serialize, ordered=False)


def _with_times(kind: str, inner: Column, serde: Serde[Any]) -> Column:
    """The column of keys with times."""
    names = field_names(kind)
    fields = [StructField(name, of, True) for name, of in zip(names, (inner.kind, LongType(), LongType()), strict=True)]

    def decode(data: Sequence[bytes]) -> pa.Array:
        numbers = [serde.deserialize(one)[1:] for one in data]
        columns = [pa.array([pair[at] for pair in numbers], pa.int64()) for at in (0, 1)]
        return pa.StructArray.from_arrays([inner.decode([inner_key(one) for one in data]), *columns], list(names))

    return Column(StructType(fields), _with_nulls(decode), serde.serialize, ordered=False)


def _with_nulls(decode: Callable[[Sequence[bytes]], pa.Array]) -> Decode:
    """Decode the bytes that are there, and put a null in the place of the others."""

    def decode_all(data: Sequence[bytes | None]) -> pa.Array:
        there = [one for one in data if one is not None]
        found = decode(there)
        if len(there) == len(data):
            return found
        places = iter(range(len(there)))
        return found.take(pa.array([None if one is None else next(places) for one in data], pa.int64()))

    return decode_all


def _utf8(data: Sequence[bytes | None]) -> pa.Array:
    try:
        return pa.array(list(data), pa.string())  # a tuple takes twenty times as long
    except pa.ArrowInvalid as error:
        raise _unreadable(error) from None


def _integers(data: Sequence[bytes | None]) -> pa.Array:
    absent = np.fromiter((one is None for one in data), bool, len(data)) if None in data else None
    rows: Sequence[bytes] = [bytes(8) if one is None else one for one in data]
    if not set(map(len, rows)) <= {8}:
        raise _unreadable("an integer is 8 bytes")
    numbers = (np.frombuffer(b"".join(rows), ">u8").astype(np.uint64) ^ _SIGN).view(np.int64)
    return pa.array(numbers, mask=absent)


def _converted(deserialize: Callable[[bytes], Any], arrow: pa.DataType) -> Decode:
    def decode(data: Sequence[bytes | None]) -> pa.Array:
        values = [None if one is None else deserialize(one) for one in data]
        try:
            return pa.array(values, arrow)
        except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
            raise _unreadable(error) from None

    return decode


def _texts(deserialize: Callable[[bytes], Any]) -> Decode:
    def decode(data: Sequence[bytes | None]) -> pa.Array:
        texts = [None if one is None else _json(deserialize(one)) for one in data]
        return pa.array(texts, pa.string())

    return decode


def _json(value: Any) -> str:
    return json.dumps(_plain(value), ensure_ascii=False, separators=(",", ":"))


def _plain(value: Any) -> Any:
    """Return a value that JSON can hold. Bytes become base64; keys and everything else that JSON lacks become text."""
    if isinstance(value, dict):
        return {str(_plain(key)): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    return value if value is None or isinstance(value, str | int | float) else str(value)


def _unreadable(why: object) -> CorruptError:
    return CorruptError(f"the serde does not read what the store has: {why}", hint="use the serde that wrote it")
