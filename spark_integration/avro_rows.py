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

from spark_integration.arrow_types import converted, plain
from spark_integration.reading.bulk import LONG, Ints, Mask, Unsupported

Bytes = npt.NDArray[np.uint8]
_ARROW = {
    "int": pa.int32(), "long": pa.int64(), "float": pa.float32(), "double": pa.float64(), "boolean": pa.bool_(),
    "string": pa.string(), "bytes": pa.binary(),
}  # fmt: skip
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
    column = plain(column)
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
        column = converted(column, _LOGICAL[logical])
        column = column.view(pa.int32() if logical == "date" else pa.int64())
    if name == "record":
        if not pa.types.is_struct(column.type):
            raise ValueError(f"it is {column.type}, not a struct")
        for field in schema["fields"]:
            if column.type.get_field_index(field["name"]) < 0:
                raise ValueError(f"it has no field {field['name']!r}")
            yield from _parts(field["type"], pc.struct_field(column, field["name"]), within)
    elif name not in _ARROW:
        raise Unsupported
    else:
        yield from _leaf(name, converted(column, _ARROW[name]), within)


def _leaf(name: str, column: pa.Array, within: Mask) -> Iterator[_Part]:
    if name in ("int", "long"):
        yield _varints(_filled(column, 0), within)
    elif name in ("string", "bytes"):
        yield from _texts(column, within)
    elif name == "boolean":
        yield _fixed(_filled(column, False).astype(np.uint8)[:, None], within)
    else:
        numbers = _filled(column, 0.0)
        numbers = numbers.astype(numbers.dtype.newbyteorder("<"))
        yield _fixed(np.ascontiguousarray(numbers).view(np.uint8).reshape(len(column), numbers.itemsize), within)


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


def _valid(column: pa.Array) -> Mask:
    found: Mask = column.is_valid().to_numpy(zero_copy_only=False)
    return found


def _filled(column: pa.Array, null: Any) -> npt.NDArray[Any]:
    found: npt.NDArray[Any] = column.fill_null(null).to_numpy(zero_copy_only=False)
    return found
