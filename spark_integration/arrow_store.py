"""A store whose keys and values are Arrow arrays, so that a process function needs no Python code for each row."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from spark_integration.avro_rows import avro_rows, is_text
from spark_integration.reading import columns
from spark_integration.reading.bulk import Unsupported
from statemgr import Store
from statemgr.errors import InvalidError
from statemgr.serdes.avro import header_of

#: A column, as a record batch or a table has it.
Column: TypeAlias = pa.Array | pa.ChunkedArray
#: What :meth:`ArrowStore.merge` can do with a column → Arrow's aggregation of the rows of a key.
FUNCTIONS = {"sum": "sum", "count": "count", "min": "min", "max": "max", "set": "distinct"}
_SIGN = np.uint64(1 << 63)


class ArrowStore:
    """The keys and values of a store as Arrow arrays, by the serdes of the store's configuration.

    The key serdes ``string``, ``bytes`` and ``integer`` have the Arrow types string, binary and int64. The value serde
    ``avro`` has the type of its newest schema: a record is a struct. These are read and written in bulk; so are
    Avro's numbers, booleans, texts, dates and times, also with null. Other types work, but take an object per row.

    Args:
        store: a store of the attempt, as the process function gets it.
    """

    def __init__(self, store: Store[Any, Any]) -> None:
        self._store = store.raw
        self._config = store.config
        self._keys = columns.key_column(store.config)
        self._values = columns.value_column(store.config)
        self._schema = json.loads(store.config.avro_schemas()[-1]) if store.config.value_serde == "avro" else None
        self._header = header_of(self._schema) if self._schema is not None else b""
        self.key_type: pa.DataType = columns.arrow_type(self._keys.kind)
        self.value_type: pa.DataType = columns.arrow_type(self._values.kind)

    def get_many(self, keys: Column) -> pa.Array:
        """The values of many keys, in their order; null for an absent key. Raises: InvalidError, LocalStateLost."""
        return self._values.decode(self._store.get_many(self._key_bytes(keys)))

    def put_many(self, keys: Column, values: Column | pa.RecordBatch) -> None:
        """Set many keys, all or none of them. Of a key that is there twice, the last value counts.

        Args:
            values: one for each key. The columns of a record batch are the fields of a record.

        Raises: InvalidError for a null, another type, or another number of values than keys; DiskFull.
        """
        if isinstance(values, pa.RecordBatch):
            values = values.to_struct_array()
        if len(values) != len(keys):
            raise self._wrong(f"there are {len(keys)} keys and {len(values)} values")
        self._store.put_many(list(zip(self._key_bytes(keys), self._value_bytes(_one(values)), strict=True)))

    def delete_many(self, keys: Column) -> None:
        """Remove many keys, all or none of them. An absent key is no error."""
        self._store.delete_many(self._key_bytes(keys))

    def merge(self, rows: pa.RecordBatch | pa.Table, key: str, /, **fields: tuple[str, str]) -> pa.RecordBatch:
        """Add rows to the aggregates that the store has for their keys.

        Nulls do not count, as in SQL: a sum of nulls only is null. For ``min`` and ``max``, NaN counts only if nothing
        else is there.

        Args:
            rows: the input.
            key: the column of ``rows`` with the keys.
            fields: for each field of the values, a column of ``rows`` and a function: ``sum``, ``count``, ``min``,
                ``max`` or ``set`` (the different values, in their order).

        Returns: the keys in ``rows``, each once, and the new values: the column ``key``, and a column for each field.
        Raises: InvalidError for an unknown column or function, a null key, or a sum that does not fit its type.
        """
        self._check(rows, key, fields)
        keys, aggregates = self._grouped(rows, key, fields)
        before = self.get_many(keys)
        merged = []
        for field, new in zip(self.value_type, aggregates, strict=True):
            column, how = fields[field.name]
            try:
                merged.append(_COMBINED[how](pc.struct_field(before, field.name), new.cast(field.type)))
            except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
                raise self._wrong(f"the {how} of {column} is no {field.type}: {error}", field=field.name) from error
        names = [field.name for field in self.value_type]
        self.put_many(keys, pa.StructArray.from_arrays(merged, names))
        kind = rows.schema.field(key).type
        found = keys.cast(kind.value_type if pa.types.is_dictionary(kind) else kind)
        return pa.RecordBatch.from_arrays([found, *merged], [key, *names])

    # --- inside ----------------------------------------------------------------------------------------------------

    def _grouped(
        self, rows: pa.RecordBatch | pa.Table, key: str, fields: Mapping[str, tuple[str, str]]
    ) -> tuple[pa.Array, list[pa.Array]]:
        """The keys in ``rows``, each once, and the aggregates of their rows, in the order of the values' fields."""
        # keys that are the same bytes must be the same group, and names of the caller must not meet those of Arrow
        columns = {"key": self._typed(_one(rows[key]), self.key_type, "key")}
        wanted = [fields[field.name] for field in self.value_type]
        for number, (column, how) in enumerate(wanted):
            columns[str(number)] = _summable(rows[column]) if how == "sum" else _plain(rows[column])
        functions = [(str(number), FUNCTIONS[how]) for number, (_, how) in enumerate(wanted)]
        try:
            grouped = pa.table(columns).group_by("key", use_threads=False).aggregate(functions)
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
            asked = ", ".join(sorted(f"{how} of {column} ({rows[column].type})" for column, how in fields.values()))
            raise self._wrong(f"Arrow cannot group by {key} ({rows[key].type}), or has no {asked}: {error}") from error
        return _one(grouped["key"]), [_one(grouped[f"{at}_{function}"]) for at, function in functions]

    def _check(self, rows: pa.RecordBatch | pa.Table, key: str, fields: Mapping[str, tuple[str, str]]) -> None:
        if not pa.types.is_struct(self.value_type):
            raise self._wrong(
                "only values that are records can be merged",
                hint="set value.serde = 'avro', and a record in value.avro.schemas",
            )
        names = [field.name for field in self.value_type]
        for name in sorted({*names} ^ {*fields}):
            problem = "is not a field of the store's values" if name in fields else "is not given"
            raise self._wrong(f"the field {name!r} {problem}", hint=f"merge needs {', '.join(names)}")
        for _, how in fields.values():
            if how not in FUNCTIONS:
                raise self._wrong(f"merge has no function {how!r}", hint=f"choose one of {', '.join(FUNCTIONS)}")
        for column in (*(column for column, _ in fields.values()), key):
            if (count := rows.schema.names.count(column)) != 1:
                raise self._wrong(f"the rows have {'no column' if count == 0 else f'{count} columns'} {column!r}")

    def _key_bytes(self, keys: Column) -> list[bytes]:
        return self._bytes(_one(keys), self._keys, self.key_type, "key")

    def _value_bytes(self, values: pa.Array) -> list[bytes]:
        if self._schema is None:
            return self._bytes(values, self._values, self.value_type, "value")
        if values.null_count:
            raise self._wrong("a value is null", hint="delete_many removes keys")
        try:
            return avro_rows(self._schema, values, self._header)
        except Unsupported:
            return [self._values.serialize(value) for value in values.to_pylist()]
        except (ValueError, pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
            raise self._wrong(f"a value does not fit its Avro schema: {error}") from error

    def _bytes(self, array: pa.Array, column: columns.Column, arrow: pa.DataType, what: str) -> list[bytes]:
        array = self._typed(array, arrow, what)
        if not self._is_bulk(what):
            return [column.serialize(value) for value in array.to_pylist()]
        if not pa.types.is_integer(arrow):
            found: list[bytes] = array.cast(pa.binary()).to_pylist()
            return found
        data = (array.to_numpy().view(np.uint64) ^ _SIGN).astype(">u8").tobytes()
        return [data[at : at + 8] for at in range(0, len(data), 8)]

    def _is_bulk(self, what: str) -> bool:
        name = self._config.key_serde if what == "key" else self._config.value_serde
        return name in ("bytes", "string", "integer")

    def _typed(self, array: pa.Array, arrow: pa.DataType, what: str) -> pa.Array:
        """The keys or values with the Arrow type of their serde, if they are written in bulk."""
        array = _plain(array)
        if array.null_count:
            raise self._wrong(f"a {what} is null", hint="replace it, for example with fill_null")
        if not self._is_bulk(what):
            return array
        problem = f"a {what} is {array.type}, and the serde takes {arrow}"
        # Arrow would also make texts of numbers, and numbers of texts: several keys could become one
        is_same = pa.types.is_integer if pa.types.is_integer(arrow) else is_text
        if len(array) and not is_same(array.type):
            raise self._wrong(problem)
        try:
            return array.cast(arrow)
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
            raise self._wrong(f"{problem}: {error}") from error

    def _wrong(self, problem: str, hint: str | None = None, **where: object) -> InvalidError:
        return InvalidError(problem, hint=hint, store=self._config.name, **where)


def _one(column: Column) -> pa.Array:
    if not isinstance(column, pa.ChunkedArray):
        return column
    found = column.combine_chunks()
    return pa.array([], column.type) if isinstance(found, pa.ChunkedArray) else found


def _plain(column: Column) -> Column:
    """The values of a dictionary's numbers, which Arrow cannot group or compare."""
    return column.cast(column.type.value_type) if pa.types.is_dictionary(column.type) else column


def _summable(column: Column) -> Column:
    """The same numbers, of a type in which Arrow's sum of them, which is not checked, cannot wrap around."""
    if not pa.types.is_integer(column.type):
        return _plain(column)
    limits = [abs(limit) for limit in pc.min_max(column).as_py().values() if limit is not None]
    fits = max(limits, default=0) * len(column) < 1 << 63
    return column if fits else column.cast(pa.decimal128(20))


def _sum(before: pa.Array, new: pa.Array) -> pa.Array:
    of = before.type
    # the sum of two decimals has one more digit than they have
    wide = pa.decimal256(of.precision, of.scale) if pa.types.is_decimal(of) else of
    return pc.coalesce(pc.add_checked(before.cast(wide), new.cast(wide)).cast(of), before, new)


def _least(before: pa.Array, new: pa.Array) -> pa.Array:
    return _ordered(pc.min_element_wise, before, new)


def _greatest(before: pa.Array, new: pa.Array) -> pa.Array:
    return _ordered(pc.max_element_wise, before, new)


def _ordered(choose: Callable[[pa.Array, pa.Array], pa.Array], before: pa.Array, new: pa.Array) -> pa.Array:
    """Arrow compares no booleans here and no times with a zone, but the numbers that they are in memory."""
    of = before.type
    if not pa.types.is_boolean(of) and not pa.types.is_timestamp(of):
        return choose(before, new)
    number = pa.int8() if pa.types.is_boolean(of) else pa.int64()
    return choose(before.cast(number), new.cast(number)).cast(of)


def _union(before: pa.Array, new: pa.Array) -> pa.Array:
    """The items of both lists in each row, each once and in their order."""
    both = (before, new)
    rows = pa.concat_arrays([pc.list_parent_indices(lists) for lists in both])
    items = pa.concat_arrays([pc.list_flatten(lists) for lists in both])
    pairs = pa.table({"row": rows, "item": items}).filter(items.is_valid()).group_by(["row", "item"]).aggregate([])
    pairs = pairs.sort_by([("row", "ascending"), ("item", "ascending")])
    counts = np.bincount(_one(pairs["row"]).to_numpy(), minlength=len(before))
    offsets = np.concatenate([[0], np.cumsum(counts)])
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), _one(pairs["item"])).cast(before.type)


_COMBINED: Mapping[str, Callable[[pa.Array, pa.Array], pa.Array]] = {
    "sum": _sum,
    "count": _sum,
    "min": _least,
    "max": _greatest,
    "set": _union,
}
