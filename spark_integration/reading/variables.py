"""The state variables and the timers of a processor, as Arrow columns with their own types. Pure.

Where they are in the store: ``processors/states.py`` and ``processors/timers.py``. Values stay in Spark's internal form
(a date is a number of days), which Arrow takes as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import Filter
from pyspark.sql.types import LongType, StructField, StructType, TimestampType

from spark_integration.processors.keys import decode_key, encode_key
from spark_integration.processors.states import variable_prefix
from spark_integration.processors.timers import BY_TIME, time_and_key
from spark_integration.processors.values import value_serde
from spark_integration.processors.variables import LIST, MAP, Record, Variable
from spark_integration.reading.columns import arrow_type
from spark_integration.reading.filters import Range, after, equal_to
from statemgr.errors import InvalidError

_INT = 8
Pairs = Sequence[tuple[bytes, bytes]]


class VariableColumns:
    """A variable: the grouping key, the key of a map or the position in a list, the value, and when it expires."""

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

    def range(self, filters: Sequence[Filter]) -> Range:
        """The keys of the store that the query needs."""
        start = self._prefix + _leading(self._key, filters)
        return start, after(start)

    def arrays(self, pairs: Pairs) -> list[pa.Array]:
        """The columns of some items of the store. Raises: CorruptError."""
        serde, ttl = value_serde(self._variable.versions), self._variable.ttl_ms is not None
        keys: list[Any] = []
        parts: list[Any] = []
        values: list[Any] = []
        expiries: list[int] = []
        for place, data in pairs:
            key, at = decode_key(self._key, place, len(self._prefix))
            if self._variable.kind == LIST:
                if at == len(place):
                    continue  # the list's bounds
                parts.append(int.from_bytes(place[at:], "big"))
            elif self._variable.key is not None:
                parts.append(decode_key(self._variable.key, place, at)[0])
            keys.append(key)
            values.append(serde.deserialize(data[_INT:] if ttl else data))
            if ttl:
                expiries.append(int.from_bytes(data[:_INT], "big") * 1000)
        columns = [keys, *([parts] if len(self.fields) - ttl == 3 else []), values, *([expiries] if ttl else [])]
        return [
            pa.array(column, arrow_type(field.dataType)) for column, field in zip(columns, self.fields, strict=True)
        ]


class TimerColumns:
    """The timers: the grouping key, and when each expires."""

    def __init__(self, record: Record) -> None:
        self._key = record.key
        self.fields = [StructField("key", record.key), StructField("expires", TimestampType())]

    def range(self, filters: Sequence[Filter]) -> Range:
        """All timers: they are in the order of time."""
        return BY_TIME, after(BY_TIME)

    def arrays(self, pairs: Pairs) -> list[pa.Array]:
        """The columns of some items of the store. Raises: CorruptError."""
        found = [time_and_key(place) for place, _ in pairs]
        keys = [decode_key(self._key, key)[0] for _, key in found]
        return [
            pa.array(keys, arrow_type(self._key)),
            pa.array([time_ms * 1000 for time_ms, _ in found], arrow_type(TimestampType())),
        ]


def _leading(key: StructType, filters: Sequence[Filter]) -> bytes:
    """The bytes of the first grouping columns, as far as filters give each a value."""
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
