"""Decodes the state variables and the timers of a processor to Arrow columns with their own types. Pure.

Where they are in the store: ``processors/states.py`` and ``processors/timers.py``. Values stay in Spark's internal form
(a date is a number of days), which Arrow takes as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress

import numpy as np
import pyarrow as pa
from pyspark.sql.datasource import Filter
from pyspark.sql.types import LongType, StructField, StructType, TimestampType

from spark_integration.processors.keys import decode_key, encode_key
from spark_integration.processors.states import INT, variable_prefix
from spark_integration.processors.timers import BY_TIME, time_and_key
from spark_integration.processors.values import avro_schema, value_serde
from spark_integration.processors.variables import LIST, MAP, Record, Variable
from spark_integration.reading import bulk
from spark_integration.reading.avro_columns import AvroColumn, Version, resolution
from spark_integration.reading.columns import arrow_type
from spark_integration.reading.filters import Range, after, equal_to
from statemgr.errors import InvalidError

Pairs = Sequence[tuple[bytes, bytes]]


class VariableColumns:
    """A variable: the grouping key, the map key or list position, the value, and its expiry."""

    def __init__(self, record: Record, variable: Variable) -> None:
        self._key = record.key
        self._variable = variable
        self._prefix = variable_prefix(variable.name)
        fields = [StructField("key", record.key)]
        if variable.kind == MAP and variable.key is not None:
            fields.append(StructField("map_key", variable.key))
        if variable.kind == LIST:
            fields.append(StructField("position", LongType()))
        fields.append(StructField("value", variable.schema))
        if variable.ttl_ms is not None:
            fields.append(StructField("expires", TimestampType()))
        self.fields = fields
        self._values = _values_of(variable)

    def range(self, filters: Sequence[Filter]) -> Range:
        """Return the range of keys in the store that the query needs."""
        start = self._prefix + _leading(self._key, filters)
        return start, after(start)

    def arrays(self, pairs: Pairs) -> list[pa.Array]:
        """Decode the columns of some items of the store. Raises: CorruptError."""
        places, data = [place for place, _ in pairs], [value for _, value in pairs]
        try:
            keys, at = self._keys(places)
        except bulk.Unsupported:
            keys, at = self._keys_by_row(places)
        if self._variable.kind == LIST:
            elements = at != np.fromiter(map(len, places), np.int64, len(places))  # not the bounds of the list
            places, data = list(compress(places, elements)), list(compress(data, elements))
            keys, at = keys.filter(pa.array(elements)), at[elements]
        columns = [keys]
        if self._variable.kind == LIST:
            positions = [int.from_bytes(place[after_key:], "big") for place, after_key in zip(places, at, strict=True)]
            columns.append(pa.array(positions, pa.int64()))
        elif self._variable.key is not None:
            columns.append(self._map_keys(self._variable.key, places, at))
        expires = []
        if self._variable.ttl_ms is not None:
            cursor = bulk.Cursor.of(data)
            millis = cursor.big_endian(INT, cursor.all()).view(np.int64)
            expires = [_times(millis, cursor.all())]
        skip = 0 if self._variable.ttl_ms is None else INT
        return [*columns, self._values.decode(data, skip), *expires]

    def _keys(self, places: Sequence[bytes]) -> tuple[pa.Array, bulk.Ints]:
        """Return the grouping keys, and where each one ends in its place."""
        cursor = bulk.Cursor.of(places, len(self._prefix))
        begins = cursor.at - len(self._prefix)
        keys = bulk.key_columns(self._key, arrow_type(self._key), cursor)
        return keys, cursor.at - begins

    def _keys_by_row(self, places: Sequence[bytes]) -> tuple[pa.Array, bulk.Ints]:
        found = [decode_key(self._key, place, len(self._prefix)) for place in places]
        keys = pa.array([key for key, _ in found], arrow_type(self._key))
        return keys, np.array([at for _, at in found], np.int64)

    def _map_keys(self, schema: StructType, places: Sequence[bytes], at: bulk.Ints) -> pa.Array:
        cursor = bulk.Cursor.of(places)
        cursor.at = cursor.at + at
        try:
            found = bulk.key_columns(schema, arrow_type(schema), cursor)
            cursor.at_end()
        except bulk.Unsupported:
            keys = [decode_key(schema, place, start)[0] for place, start in zip(places, at, strict=True)]
            return pa.array(keys, arrow_type(schema))
        return found


class TimerColumns:
    """The timers: the grouping key and the expiry of each one."""

    def __init__(self, record: Record) -> None:
        self._key = record.key
        self.fields = [StructField("key", record.key), StructField("expires", TimestampType())]

    def range(self, filters: Sequence[Filter]) -> Range:
        """Return all timers, because they are in the order of time."""
        return BY_TIME, after(BY_TIME)

    def arrays(self, pairs: Pairs) -> list[pa.Array]:
        """Decode the columns of some items of the store. Raises: CorruptError."""
        cursor = bulk.Cursor.of([place for place, _ in pairs], len(BY_TIME))
        millis = cursor.big_endian(INT, cursor.all()).view(np.int64) ^ np.int64(-(1 << 63))
        try:
            keys = bulk.key_columns(self._key, arrow_type(self._key), cursor)
        except bulk.Unsupported:
            keys = pa.array([decode_key(self._key, time_and_key(at)[1])[0] for at, _ in pairs], arrow_type(self._key))
        return [keys, _times(millis, cursor.all())]


def _times(millis: bulk.Ints, mask: bulk.Mask) -> pa.Array:
    """Return epoch milliseconds as times. For a time that Arrow lacks, such as "never", this is its last or first."""
    return bulk.numbers(np.clip(millis, -bulk.MILLIS, bulk.MILLIS) * 1000, arrow_type(TimestampType()), mask)


def _values_of(variable: Variable) -> AvroColumn:
    arrow = arrow_type(variable.schema)
    deserialize = value_serde(variable.versions).deserialize
    versions = []
    for written in variable.versions:
        resolve = resolution(written, variable.schema, arrow)
        versions.append(Version(avro_schema(written), arrow_type(written), resolve))
    return AvroColumn(versions, arrow, lambda data: pa.array([deserialize(one) for one in data], arrow))


def _leading(key: StructType, filters: Sequence[Filter]) -> bytes:
    """Return the bytes of the leading grouping columns whose value the filters determine."""
    found = b""
    for field in key.fields:
        value = equal_to(filters, ("key", field.name))
        if value is None:
            break
        try:
            found += encode_key(StructType([field]), [field.dataType.toInternal(value)])
        except (InvalidError, TypeError, AttributeError):  # a value of another type
            break
    return found
