"""Encodes an Arrow column as Avro values, without an object for each row. Pure.

Each part of a value (a branch of a union, a number, the bytes of a text) has a length in every row, and writes itself
into one array of bytes at the places where it begins. Format: Avro's binary encoding (Apache Avro specification,
"Binary encoding"). The opposite is ``reading/bulk.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from spark_integration.reading.bulk import LONG, Ints, Mask, Unsupported

Bytes = npt.NDArray[np.uint8]
_INT32 = 1 << 31
#: Logical types whose values are the number in memory, and the Arrow type that has this number.
_LOGICAL = {
    "date": pa.date32(),
    "timestamp-micros": pa.timestamp("us", "UTC"),
    "timestamp-millis": pa.timestamp("ms", "UTC"),
    "local-timestamp-micros": pa.timestamp("us"),
    "local-timestamp-millis": pa.timestamp("ms"),
}


@dataclass(frozen=True, slots=True)
class _Part:
    """``lengths``: bytes in each row. ``write`` gets the array, and where the part begins in each row."""

    lengths: Ints
    write: Callable[[Bytes, Ints], None]


def avro_rows(schema: Any, column: pa.Array, header: bytes) -> list[bytes]:
    """One value for each row, after ``header``.

    Raises: Unsupported for a type that is encoded row by row; ValueError for a value that does not fit the schema.
    """
    parts = list(_parts(schema, column, np.ones(len(column), np.bool_)))
    lengths = np.full(len(column), len(header), np.int64)
    for part in parts:
        lengths += part.lengths
    ends = np.cumsum(lengths)
    at = ends - lengths
    out = np.empty(int(ends[-1]) if len(ends) else 0, np.uint8)
    out[at[:, None] + np.arange(len(header))] = np.frombuffer(header, np.uint8)
    place = at + len(header)
    for part in parts:
        part.write(out, place)
        place = place + part.lengths
    data, limits = out.tobytes(), ends.tolist()
    return [data[start:end] for start, end in zip([0, *limits], limits, strict=False)]


def _parts(schema: Any, column: pa.Array, within: Mask) -> Iterator[_Part]:
    """The parts of the rows of ``within``. Other rows have none."""
    if isinstance(schema, list):
        if len(schema) != 2 or "null" not in schema or schema[0] == schema[1]:
            raise Unsupported
        null = schema.index("null")
        there = within & _valid(column)
        yield _varints(np.where(there, 1 - null, null), within)
        yield from _parts(schema[1 - null], column, there)
        return
    if schema == "null":
        raise Unsupported
    if bool((within & ~_valid(column)).any()):
        raise ValueError("it is null, and the schema does not allow that")
    name = schema["type"] if isinstance(schema, dict) else schema
    logical = schema.get("logicalType") if isinstance(schema, dict) else None
    if logical is not None:
        if logical not in _LOGICAL:
            raise Unsupported
        column = _of_unit(column, _LOGICAL[logical])
    if name == "record":
        if not pa.types.is_struct(column.type):
            raise ValueError(f"it is {column.type}, not a struct")
        for field in schema["fields"]:
            if column.type.get_field_index(field["name"]) < 0:
                raise ValueError(f"it has no field {field['name']!r}")
            yield from _parts(field["type"], pc.struct_field(column, field["name"]), within)
    elif name in ("int", "long"):
        yield _varints(_whole(column, name), within)
    elif name in ("string", "bytes"):
        if not is_text(column.type) and bool(within.any()):
            raise ValueError(f"it is {column.type}, not {name}")
        yield from _texts(column.cast(pa.string() if name == "string" else pa.binary()), within)
    elif name == "boolean":
        values = _filled(column.cast(pa.bool_()), False).astype(np.uint8)
        yield _fixed(values[:, None], within)
    elif name in ("float", "double"):
        size = 4 if name == "float" else 8
        numbers = _filled(column.cast(pa.float32() if size == 4 else pa.float64()), 0.0).astype(f"<f{size}")
        yield _fixed(np.ascontiguousarray(numbers).view(np.uint8).reshape(-1, size), within)
    else:
        raise Unsupported


def _of_unit(column: pa.Array, arrow: pa.DataType) -> pa.Array:
    """Dates or times of a logical type. A finer unit is cut off, as ``fastavro`` does. Spark has microseconds."""
    if pa.types.is_timestamp(arrow) and pa.types.is_timestamp(column.type):
        column = pc.floor_temporal(column, unit="millisecond" if arrow.unit == "ms" else "microsecond")
    return column.cast(arrow)


def _whole(column: pa.Array, name: str) -> Ints:
    if pa.types.is_date32(column.type):
        column = column.view(pa.int32())
    elif pa.types.is_timestamp(column.type):
        column = column.view(pa.int64())
    if not pa.types.is_integer(column.type):
        raise ValueError(f"it is {column.type}, not a whole number")
    found: Ints = _filled(column.cast(pa.int64()), 0)
    if name == "int" and bool(((found < -_INT32) | (found >= _INT32)).any()):
        raise ValueError("a number does not fit into 32 bits")
    return found


def _varints(values: Ints, within: Mask) -> _Part:
    zigzag = (values.astype(np.int64) << 1 ^ values.astype(np.int64) >> 63).view(np.uint64)
    groups = np.ones(len(values), np.int64)
    for group in range(1, 10):
        groups += zigzag >= np.uint64(1) << np.uint64(7 * group)

    def write(out: Bytes, at: Ints) -> None:
        rows = np.flatnonzero(within)
        step = 0
        while len(rows):
            more = groups[rows] > step + 1
            seven = (zigzag[rows] >> np.uint64(7 * step)).astype(np.uint8) & np.uint8(0x7F)
            out[at[rows] + step] = seven | (more.astype(np.uint8) << np.uint8(7))
            rows, step = rows[more], step + 1

    return _Part(np.where(within, groups, 0), write)


def _fixed(values: Bytes, within: Mask) -> _Part:
    """The same number of bytes in each row."""
    size = values.shape[1]

    def write(out: Bytes, at: Ints) -> None:
        out[at[within][:, None] + np.arange(size)] = values[within]

    return _Part(within * np.int64(size), write)


def _texts(column: pa.Array, within: Mask) -> Iterator[_Part]:
    _, offsets_buffer, data_buffer = column.buffers()
    first, count = column.offset, len(column)
    offsets = np.frombuffer(offsets_buffer, np.int32)[first : first + count + 1].astype(np.int64)
    data = np.frombuffer(data_buffer or b"", np.uint8)
    lengths = np.where(within, np.diff(offsets), 0)
    yield _varints(lengths, within)

    def write(out: Bytes, at: Ints) -> None:
        if int(lengths.sum()) > LONG * count:
            for begin, start, length in zip(at.tolist(), offsets.tolist(), lengths.tolist(), strict=False):
                out[begin : begin + length] = data[start : start + length]
            return
        within_row = np.arange(int(lengths.sum())) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        out[np.repeat(at, lengths) + within_row] = data[np.repeat(offsets[:-1], lengths) + within_row]

    yield _Part(lengths, write)


def is_text(kind: pa.DataType) -> bool:
    """Whether a type has texts or bytes. Arrow would also write numbers and dates as texts."""
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    checks = ("string", "large_string", "string_view", "binary", "large_binary", "binary_view", "fixed_size_binary")
    return any(getattr(pa.types, f"is_{check}")(kind) for check in checks)


def _valid(column: pa.Array) -> Mask:
    found: Mask = column.is_valid().to_numpy(zero_copy_only=False)
    return found


def _filled(column: pa.Array, null: Any) -> npt.NDArray[Any]:
    found: npt.NDArray[Any] = column.fill_null(null).to_numpy(zero_copy_only=False)
    return found
