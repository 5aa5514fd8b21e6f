"""A store whose keys and values are Arrow arrays, so that a process function needs no Python code for each row."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from fastavro.schema import parse_schema
from fastavro.validation import validate

from spark_integration.aggregates import AGGREGATES, check_finite
from spark_integration.arrow_types import Column, converted, plain
from spark_integration.avro_rows import avro_rows
from spark_integration.reading import columns
from spark_integration.reading.bulk import Unsupported
from statemgr import Store
from statemgr.errors import InvalidError
from statemgr.serdes.avro import header_of

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
        self._schema = json.loads(store.config.avro_schemas[-1]) if store.config.value_serde == "avro" else None
        self._parsed: Any = parse_schema(self._schema, named_schemas={}) if self._schema is not None else None
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
        values = plain(values)
        if len(values) != len(keys):
            raise self._wrong(f"there are {len(keys)} keys and {len(values)} values")
        self._store.put_many(list(zip(self._key_bytes(keys), self._value_bytes(_one(values)), strict=True)))

    def delete_many(self, keys: Column) -> None:
        """Remove many keys, all or none of them. An absent key is no error."""
        self._store.delete_many(self._key_bytes(keys))

    def merge(self, rows: pa.RecordBatch | pa.Table, key: str, /, **fields: tuple[str, str]) -> pa.RecordBatch:
        """Add rows to the aggregates that the store has for their keys.

        Nulls do not count, as in SQL: a sum of nulls only is null. For ``min`` and ``max``, NaN counts only if nothing
        else is there. A column is converted to the type of its field before it is aggregated, and
        :data:`spark_integration.aggregates.AGGREGATES` has the kinds of fields and columns that a function takes.

        Args:
            rows: the input.
            key: the column of ``rows`` with the keys.
            fields: for each field of the values, a column of ``rows`` and a function: ``sum``, ``count``, ``min``,
                ``max`` or ``set`` (the different values, in their order).

        Returns: the keys in ``rows``, each once, and the new values: the column ``key``, and a column for each field.
        Raises: InvalidError for an unknown column or function, a null key, a column of a kind that the field does not
            take, or a value or sum that does not fit the field's type. Nothing is stored then.
        """
        self._check(rows, key, fields)
        keys, aggregates = self._grouped(rows, key, fields)
        before = self.get_many(keys)
        merged = []
        for field, new in zip(self.value_type, aggregates, strict=True):
            column, how = fields[field.name]
            with self._refused(f"the {how} of {column} is no {field.type}", field=field.name):
                merged.append(AGGREGATES[how].combine(pc.struct_field(before, field.name), new).cast(field.type))
        names = [field.name for field in self.value_type]
        self.put_many(keys, pa.StructArray.from_arrays(merged, names))
        kind = plain(rows[key][:0]).type
        found = keys if pa.types.is_null(kind) else keys.cast(kind)
        return pa.RecordBatch.from_arrays([found, *merged], [key, *names])

    # --- inside ----------------------------------------------------------------------------------------------------

    def _grouped(
        self, rows: pa.RecordBatch | pa.Table, key: str, fields: Mapping[str, tuple[str, str]]
    ) -> tuple[pa.Array, list[pa.Array]]:
        """The keys in ``rows``, each once, and the aggregates of their rows, in the order of the values' fields."""
        # keys that are the same bytes must be the same group, and names of the caller must not meet those of Arrow
        columns = {"key": self._typed(_one(rows[key]), self.key_type, "key")}
        functions = []
        for number, field in enumerate(self.value_type):
            column, how = fields[field.name]
            with self._refused(f"the {how} of {column} is no {field.type}", field=field.name):
                columns[str(number)] = AGGREGATES[how].prepared(plain(rows[column]), field.type)
            functions.append((str(number), AGGREGATES[how].function))
        with self._refused(f"Arrow cannot group by {key} ({rows[key].type})"):
            grouped = pa.table(columns).group_by("key", use_threads=False).aggregate(functions)
            found = [_one(grouped[f"{at}_{function}"]) for at, function in functions]
        for field, sums, (at, function) in zip(self.value_type, found, functions, strict=True):
            if function == "sum" and pa.types.is_floating(sums.type):
                with self._refused(f"the sum of {fields[field.name][0]} is no {field.type}", field=field.name):
                    # of each key, in the same order
                    rows_of = pa.table({"key": columns["key"], "infinite": pc.is_inf(columns[at])})
                    infinite = rows_of.group_by("key", use_threads=False).aggregate([("infinite", "any")])
                    check_finite(sums, _one(infinite["infinite_any"]))
        return _one(grouped["key"]), found

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
            if how not in AGGREGATES:
                raise self._wrong(f"merge has no function {how!r}", hint=f"choose one of {', '.join(AGGREGATES)}")
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
            with self._refused("a value does not fit its Avro schema"):
                return avro_rows(self._schema, values, self._header)
        except Unsupported:
            return [self._values.serialize(self._checked(value)) for value in self._objects(values)]

    def _bytes(self, array: pa.Array, column: columns.Column, arrow: pa.DataType, what: str) -> list[bytes]:
        array = self._typed(array, arrow, what)
        if not self._is_bulk(what):
            return [column.serialize(value) for value in self._objects(array)]
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
        array = plain(array)
        if array.null_count:
            raise self._wrong(f"a {what} is null", hint="replace it, for example with fill_null")
        if not self._is_bulk(what):
            return array
        with self._refused(f"a {what} is no {arrow}"):
            return converted(array, arrow)

    def _objects(self, array: pa.Array) -> list[Any]:
        try:
            found: list[Any] = array.to_pylist(maps_as_pydicts="strict")
        except (KeyError, ValueError) as error:
            raise self._wrong("a map has a key twice, or a record a field") from error
        return found

    def _checked(self, value: Any) -> Any:
        """The value, if its parts have the types of the schema. The serde alone makes 1 of True."""
        try:
            fits = validate(value, self._parsed, raise_errors=False)
        except Exception:  # an arbitrary value; whatever the library raises means the same
            fits = False
        if not fits:
            raise self._wrong("a value does not fit its Avro schema: a part of it has another type")
        return value

    @contextmanager
    def _refused(self, problem: str, **where: Any) -> Iterator[None]:
        """Raises: InvalidError in place of Arrow's errors, and of those of the conversions."""
        try:
            yield
        except (ValueError, pa.ArrowException) as error:
            raise self._wrong(f"{problem}: {error}", **where) from error

    def _wrong(self, problem: str, hint: str | None = None, **where: object) -> InvalidError:
        return InvalidError(problem, hint=hint, store=self._config.name, **where)


def _one(column: Column) -> pa.Array:
    return column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
