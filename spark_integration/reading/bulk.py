"""Decodes many keys or values at once, from bytes into Arrow columns, without an object for each row. Pure.

One array of bytes holds all values of a batch, and a cursor has the position of each row in it. A few NumPy operations
decode a field for all rows, and also advance the cursor. Formats: ``processors/keys.py``, and Avro's
binary encoding (Apache Avro specification, "Binary encoding").
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from spark_integration.processors.keys import DECIMAL_BYTES, WHOLE
from statemgr.errors import CorruptError

Ints = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]
#: Bytes after the last row, so that no number of a damaged row is read beyond the end of the array.
_PAD = 16
#: Bytes of a text, on average, from which each text is copied alone: a number for each byte would take too much memory.
LONG = 64
_VARINT = 10
_LOGICAL_PLAIN = ("date", "timestamp-micros", "local-timestamp-micros")
#: The last time that Arrow has in microseconds, in epoch milliseconds; it is in the year 294247.
MILLIS = np.iinfo(np.int64).max // 1000
_LOGICAL_MILLIS = ("timestamp-millis", "local-timestamp-millis")


class Unsupported(Exception):
    """The batch contains something that must be decoded row by row."""


class Cursor:
    """A position in each of some rows. ``ends`` are the ends of the rows."""

    def __init__(self, data: npt.NDArray[np.uint8], at: Ints, ends: Ints) -> None:
        self.data = data
        self.at = at
        self.ends = ends

    @classmethod
    def of(cls, rows: Sequence[bytes], skip: int = 0) -> Cursor:
        """Return a cursor at byte ``skip`` of each row. Raises: CorruptError if a row has fewer bytes."""
        lengths = np.fromiter(map(len, rows), np.int64, len(rows))
        ends = np.cumsum(lengths)
        data = np.frombuffer(b"".join(rows) + bytes(_PAD), np.uint8)
        cursor = cls(data, ends - lengths + skip, ends)
        cursor._check()
        return cursor

    def __len__(self) -> int:
        return len(self.at)

    def all(self) -> Mask:
        """A mask with every row."""
        return np.ones(len(self), np.bool_)

    def rows(self, kept: Mask) -> Cursor:
        """Return a cursor for some of the rows."""
        return Cursor(self.data, self.at[kept], self.ends[kept])

    def begin_with(self, prefix: bytes) -> Mask:
        """Return which rows have these bytes here, at most 16."""
        there = self.data[self.at[:, None] + np.arange(len(prefix))] == np.frombuffer(prefix, np.uint8)
        found: Mask = there.all(axis=1) & (self.ends - self.at >= len(prefix))
        return found

    def skip(self, count: int) -> None:
        self.at = self.at + count
        self._check()

    def byte(self, mask: Mask) -> npt.NDArray[np.uint8]:
        """Read the byte in each row of ``mask``. Other rows give 0."""
        found: npt.NDArray[np.uint8] = np.where(mask, self.data[self.at], np.uint8(0))
        self.at = self.at + mask
        return found

    def fixed(self, size: int, mask: Mask) -> npt.NDArray[np.uint8]:
        """Read ``size`` bytes of each row of ``mask``, as an array of rows. The bytes of other rows have no meaning."""
        if len(self) and int(self.at.max()) + size > len(self.data):
            raise _early()
        found: npt.NDArray[np.uint8] = self.data[self.at[:, None] + np.arange(size)]
        self.at = self.at + size * mask
        return found

    def big_endian(self, size: int, mask: Mask) -> npt.NDArray[np.uint64]:
        """Read an unsigned number of ``size`` bytes."""
        found = np.ascontiguousarray(self.fixed(size, mask))
        return found.view(f">u{size}")[:, 0].astype(np.uint64)

    def varint(self, mask: Mask) -> Ints:
        """Read an Avro int or long. Rows outside ``mask`` give 0."""
        found = np.zeros(len(self), np.uint64)
        more = mask
        for step in range(_VARINT):
            part = self.data[self.at]
            found |= np.where(more, (part & 0x7F).astype(np.uint64) << np.uint64(7 * step), np.uint64(0))
            self.at = self.at + more
            more = more & (part >= 0x80)
            if not more.any():
                break
        else:
            raise _early()
        self._check()
        return (found >> np.uint64(1)).view(np.int64) ^ -(found & np.uint64(1)).view(np.int64)

    def slices(self, lengths: Ints, arrow: pa.DataType, mask: Mask) -> pa.Array:
        """Read text or binary: the next bytes of each row. ``lengths`` is 0 for rows outside ``mask``."""
        if len(lengths) and (int(lengths.min()) < 0 or bool((self.at + lengths > self.ends).any())):
            raise _early()
        offsets = np.zeros(len(self) + 1, np.int64)
        np.cumsum(lengths, out=offsets[1:])
        if int(offsets[-1]) > LONG * len(self):
            starts = zip(self.at.tolist(), lengths.tolist(), strict=True)
            taken = np.concatenate([self.data[start : start + length] for start, length in starts])
        else:
            taken = self.data[np.repeat(self.at - offsets[:-1], lengths) + np.arange(int(offsets[-1]))]
        self.at = self.at + lengths
        if int(offsets[-1]) > np.iinfo(np.int32).max:
            raise Unsupported
        buffers = [bitmap(mask), pa.py_buffer(offsets.astype(np.int32)), pa.py_buffer(taken)]
        found = pa.Array.from_buffers(arrow, len(self), buffers)
        if pa.types.is_string(arrow):
            _valid(found)
        return found

    def at_end(self) -> None:
        """Check the end of the rows. Raises: CorruptError unless every row ends here."""
        if bool((self.at != self.ends).any()):
            raise _early()

    def _check(self) -> None:
        if bool((self.at > self.ends).any()):
            raise _early()


def bitmap(mask: Mask) -> pa.Buffer | None:
    """Return Arrow's validity bitmap, or None if every row is valid."""
    return None if bool(mask.all()) else pa.py_buffer(np.packbits(mask, bitorder="little"))


def numbers(values: npt.NDArray[Any], arrow: pa.DataType, mask: Mask) -> pa.Array:
    """Return numbers as a column whose values have the same width in memory, or a narrower one.

    Raises: CorruptError if a number does not fit.
    """
    width = np.dtype(f"{'f' if values.dtype.kind == 'f' else 'i'}{arrow.bit_width // 8}")
    narrow = values if values.dtype == width else values.astype(width)
    if values.dtype.kind == "i" and narrow is not values and bool(((narrow != values) & mask).any()):
        raise CorruptError("a stored number is larger than its type", hint="use the serde that wrote it")
    return pa.Array.from_buffers(arrow, len(narrow), [bitmap(mask), pa.py_buffer(np.ascontiguousarray(narrow))])


def structs(children: Sequence[pa.Array], arrow: pa.StructType, mask: Mask) -> pa.Array:
    """Return a struct of columns, null outside ``mask``."""
    # the children may have no columns at all, and then give no length
    return pa.Array.from_buffers(arrow, len(mask), [bitmap(mask)], children=list(children))


# --- keys ------------------------------------------------------------------------------------------------------------


def key_columns(schema: Any, arrow: pa.StructType, cursor: Cursor) -> pa.Array:
    """Return a grouping key, or a key of a map, in each row. Raises: CorruptError, Unsupported."""
    everywhere = cursor.all()
    try:
        fields = [_key(f.dataType, a.type, cursor, everywhere) for f, a in zip(schema, arrow, strict=True)]
    except IndexError:
        raise _early() from None
    return structs(fields, arrow, everywhere)


def _key(kind: Any, arrow: pa.DataType, cursor: Cursor, within: Mask) -> pa.Array:
    name = type(kind).__name__
    mask = within & (cursor.byte(within) != 0)
    if name in WHOLE:
        size = WHOLE[name]
        found = cursor.big_endian(size, mask).view(np.int64) - np.int64(1 << (8 * size - 1) if size < 8 else 0)
        if size == 8:
            found = found ^ np.int64(-(1 << 63))
        result = numbers(found, arrow, mask)
    elif name in ("FloatType", "DoubleType"):
        size = 4 if name == "FloatType" else 8
        bits = cursor.big_endian(size, mask).astype(f"u{size}")
        sign = bits.dtype.type(1 << (8 * size - 1))
        result = numbers(np.where(bits & sign, bits ^ sign, ~bits).view(f"f{size}"), arrow, mask)
    elif name == "BooleanType":
        result = pa.array(cursor.byte(mask) != 0, arrow, mask=~mask)
    elif name == "DecimalType":
        unscaled = cursor.fixed(DECIMAL_BYTES, mask)[:, ::-1].copy()
        unscaled[:, -1] ^= 0x80
        result = pa.Array.from_buffers(arrow, len(cursor), [bitmap(mask), pa.py_buffer(unscaled)])
    elif name in ("StringType", "BinaryType"):
        result = _key_text(arrow, cursor, mask)
    elif name == "StructType":
        result = structs(
            [_key(f.dataType, a.type, cursor, mask) for f, a in zip(kind, arrow, strict=True)], arrow, mask
        )
    else:
        raise Unsupported
    cursor._check()
    return result


def _key_text(arrow: pa.DataType, cursor: Cursor, mask: Mask) -> pa.Array:
    """Read text or binary up to ``00 01``. An ``FF`` follows every other ``00`` in it."""
    zeros = np.flatnonzero(cursor.data[:-1] == 0)
    ends = zeros[cursor.data[zeros + 1] == 1]
    which = np.searchsorted(ends, cursor.at)
    if bool((mask & (which >= len(ends))).any()):
        raise _early()
    end = np.where(mask, ends[np.minimum(which, max(len(ends) - 1, 0))] if len(ends) else 0, cursor.at)
    if bool((np.searchsorted(zeros, end) != np.searchsorted(zeros, cursor.at)).any()):
        raise Unsupported  # a text with a zero byte
    found = cursor.slices(end - cursor.at, arrow, mask)
    cursor.at = cursor.at + 2 * mask
    return found


# --- Avro ------------------------------------------------------------------------------------------------------------


def avro_values(schema: Any, arrow: pa.DataType, cursor: Cursor) -> pa.Array:
    """Read a value of an Avro schema in each row, with nothing after it. Raises: CorruptError, Unsupported."""
    try:
        found = _avro(schema, arrow, cursor, cursor.all())
    except IndexError:
        raise _early() from None
    if bool((cursor.at != cursor.ends).any()):
        raise _early()
    return found


def _avro(schema: Any, arrow: pa.DataType, cursor: Cursor, within: Mask) -> pa.Array:
    if isinstance(schema, list):
        others = [member for member in schema if member != "null"]
        if len(others) != 1 or len(schema) > 2:
            raise Unsupported
        branch = cursor.varint(within)
        if bool(((branch < 0) | (branch >= len(schema))).any()):
            raise _early()
        return _avro(others[0], arrow, cursor, within & (branch == schema.index(others[0])))
    if isinstance(schema, str):
        return _plain(schema, arrow, cursor, within)
    name, logical = schema["type"], schema.get("logicalType")
    if logical == "decimal":
        return _decimal(schema, arrow, cursor, within)
    if logical in _LOGICAL_MILLIS:
        millis = cursor.varint(within)
        if bool(((millis > MILLIS) | (millis < -MILLIS)).any()):
            raise _early()  # as microseconds, it would wrap around
        return numbers(millis * 1000, arrow, within)
    if logical is not None and logical not in _LOGICAL_PLAIN:
        raise Unsupported
    if name == "record":
        fields = [field["type"] for field in schema["fields"]]
        columns = [_avro(field, of.type, cursor, within) for field, of in zip(fields, arrow, strict=True)]
        return structs(columns, arrow, within)
    if isinstance(name, str) and name in ("array", "map", "enum", "fixed"):
        raise Unsupported
    return _avro(name, arrow, cursor, within)


def _plain(name: str, arrow: pa.DataType, cursor: Cursor, within: Mask) -> pa.Array:
    if name in ("int", "long"):
        return numbers(cursor.varint(within), arrow, within)
    if name in ("string", "bytes"):
        return cursor.slices(cursor.varint(within), arrow, within)
    if name == "boolean":
        return pa.array(cursor.byte(within) != 0, arrow, mask=~within)
    if name in ("float", "double"):
        size = 4 if name == "float" else 8
        found = np.ascontiguousarray(cursor.fixed(size, within)).view(f"<f{size}")[:, 0]
        return numbers(found, arrow, within)
    if name == "null":
        return pa.nulls(len(cursor), arrow)
    raise Unsupported  # a type by its name


def _decimal(schema: Any, arrow: pa.DataType, cursor: Cursor, within: Mask) -> pa.Array:
    if schema["type"] != "bytes":
        raise Unsupported
    lengths = cursor.varint(within)
    if len(lengths) and (int(lengths.min()) < 0 or bool((cursor.at + lengths > cursor.ends).any())):
        raise _early()
    if len(lengths) and int(lengths.max()) > DECIMAL_BYTES:
        raise Unsupported
    last = cursor.at + lengths - 1
    places = np.arange(DECIMAL_BYTES)
    found = cursor.data[np.maximum(last[:, None] - places, 0)]
    first = np.where(lengths > 0, cursor.data[np.minimum(cursor.at, len(cursor.data) - 1)], 0)
    sign = np.where(first >= 0x80, 0xFF, 0).astype(np.uint8)
    unscaled = np.where(places < lengths[:, None], found, sign[:, None])
    cursor.at = cursor.at + lengths
    return pa.Array.from_buffers(arrow, len(cursor), [bitmap(within), pa.py_buffer(np.ascontiguousarray(unscaled))])


def _valid(found: pa.Array) -> None:
    try:
        found.validate(full=True)
    except pa.ArrowInvalid as error:
        raise CorruptError(f"the serde does not read what the store has: {error}",
                           hint="use the serde that wrote it") from None  # fmt: skip


def _early() -> CorruptError:
    return CorruptError("a stored key or value is damaged, or has another type", hint="use the serde that wrote it")
