"""Avro single objects as a column, decoded in bulk by the schema that wrote each one, or row by row. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from spark_integration.reading import bulk
from statemgr.errors import CorruptError
from statemgr.serdes.avro import header_of

if TYPE_CHECKING:
    from pyspark.sql.types import DataType

Resolve = Callable[[pa.Array], pa.Array]


@dataclass(frozen=True)
class Version:
    """A schema that may have written values. ``resolve``: its column → a column of the newest schema."""

    schema: Any
    arrow: pa.DataType
    resolve: Resolve = lambda column: column


class AvroColumn:
    """Decodes values of several versions of a schema.

    Args:
        versions: oldest first. Values of other schemas are decoded row by row.
        by_row: a function that decodes values one after the other.
    """

    def __init__(
        self, versions: Sequence[Version], arrow: pa.DataType, by_row: Callable[[Sequence[bytes]], pa.Array]
    ) -> None:
        self._versions = [(header_of(version.schema), version) for version in reversed(versions)]
        self._arrow = arrow
        self._by_row = by_row

    def decode(self, data: Sequence[bytes], skip: int = 0) -> pa.Array:
        """Return the column. ``skip``: number of bytes before each value. Raises: CorruptError."""
        if not data:
            return pa.array([], self._arrow)
        cursor = bulk.Cursor.of(data, skip)
        left, parts, places = cursor.all(), list[pa.Array](), list[bulk.Ints]()
        for header, version in self._versions:
            chosen = left & cursor.begin_with(header)
            if not chosen.any():
                continue
            rows = cursor.rows(chosen)
            rows.skip(len(header))
            try:
                parts.append(version.resolve(bulk.avro_values(version.schema, version.arrow, rows)))
            except bulk.Unsupported:
                continue
            places.append(np.flatnonzero(chosen))
            left &= ~chosen
        if left.any():
            places.append(np.flatnonzero(left))
            parts.append(self._by_row([data[row][skip:] for row in places[-1]]))
        if len(parts) == 1:
            return parts[0]
        order = np.empty(len(data), np.int64)
        order[np.concatenate(places)] = np.arange(len(data))
        return pa.concat_arrays(parts).take(pa.array(order))


def resolution(written: DataType, read: DataType, arrow: pa.DataType) -> Resolve:
    """Return a function from a column of Spark's type ``written`` to one of the type ``read``, by Avro's rules.

    ``arrow`` is the Arrow type of ``read``. The types belong to versions of a state variable, which
    ``processors/values.py`` has checked.
    """
    if written.simpleString() == read.simpleString():
        return lambda column: column
    if type(written).__name__ == type(read).__name__ == "StructType":
        old = {field.name: (at, field.dataType) for at, field in enumerate(written.fields)}  # type: ignore[attr-defined]
        fields: list[tuple[int, Resolve] | None] = []
        for field, target in zip(read.fields, arrow, strict=True):  # type: ignore[attr-defined]
            at, kind = old.get(field.name, (-1, None))
            fields.append(None if kind is None else (at, resolution(kind, field.dataType, target.type)))

        def resolve(column: pa.Array) -> pa.Array:
            children = [
                pa.nulls(len(column), target.type) if of is None else of[1](column.field(of[0]))
                for of, target in zip(fields, arrow, strict=True)
            ]
            return bulk.structs(children, arrow, column.is_valid().to_numpy(zero_copy_only=False))

        return resolve
    return lambda column: _promoted(column, arrow)


def _promoted(column: pa.Array, arrow: pa.DataType) -> pa.Array:
    try:
        if pa.types.is_floating(arrow):
            return column.cast(pa.float64(), safe=False).cast(arrow, safe=False)
        return column.cast(arrow)
    except pa.ArrowInvalid as error:
        raise CorruptError(
            f"a stored value cannot be read with the newest schema: {error}", hint="use the serde that wrote it"
        ) from None
