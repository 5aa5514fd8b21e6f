"""Avro values that are encoded in bulk have the bytes that the serde gives, row by row."""

from __future__ import annotations

import json
from datetime import UTC, date, datetime
from typing import Any

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from spark_integration.avro_rows import avro_rows
from spark_integration.reading.columns import arrow_type, avro_type
from statemgr.serdes import avro_serde
from statemgr.serdes.avro import header_of

LONG, TEXT = (-(2**63), 2**63 - 1), st.text(st.characters(exclude_categories=["Cs"]), max_size=300)
TYPES: dict[str, tuple[Any, st.SearchStrategy[Any]]] = {
    "int": ("int", st.integers(-(2**31), 2**31 - 1)),
    "long": ("long", st.integers(*LONG)),
    "float": ("float", st.floats(width=32, allow_nan=False)),
    "double": ("double", st.floats(allow_nan=False)),
    "boolean": ("boolean", st.booleans()),
    "string": ("string", TEXT),
    "bytes": ("bytes", st.binary(max_size=300)),
    "day": ({"type": "int", "logicalType": "date"}, st.dates(date(1000, 1, 1), date(3000, 1, 1))),
    "time": (
        {"type": "long", "logicalType": "timestamp-micros"},
        st.datetimes(datetime(1000, 1, 1), datetime(3000, 1, 1), timezones=st.just(UTC)),  # noqa: DTZ001
    ),
}


@st.composite
def records(draw: st.DrawFn) -> tuple[Any, list[dict[str, Any]]]:
    """A flat record's schema and some values. Fields may be nullable, with null first or last, or nested."""
    names = draw(st.lists(st.sampled_from(sorted(TYPES)), min_size=1, max_size=5))
    fields, values = [], dict[str, st.SearchStrategy[Any]]()
    for number, name in enumerate(names):
        kind, strategy = TYPES[name]
        null = draw(st.sampled_from(["never", "first", "last"]))
        fields.append(
            {"name": f"f{number}", "type": {"never": kind, "first": ["null", kind], "last": [kind, "null"]}[null]}
        )
        values[f"f{number}"] = strategy if null == "never" else st.none() | strategy
    strategy = st.fixed_dictionaries(values)
    if draw(st.booleans()):
        inner = {"type": "record", "name": "inner", "fields": fields}
        fields = [{"name": "i", "type": ["null", inner]}]
        strategy = st.fixed_dictionaries({"i": st.none() | strategy})
    return {"type": "record", "name": "r", "fields": fields}, draw(st.lists(strategy, max_size=20))


@given(records())
def test_bulk_encoding_gives_the_bytes_of_the_serde(record: tuple[Any, list[dict[str, Any]]]) -> None:
    """Every flat type, with and without null, as a field of a record and of a record in a record."""
    schema, values = record
    kind = avro_type(schema)
    assert kind is not None
    column = pa.array(values, arrow_type(kind))
    serialize = avro_serde([json.dumps(schema)]).serialize
    expected = [serialize(value) for value in column.to_pylist()]
    assert avro_rows(schema, column, header_of(schema)) == expected
    some = pa.concat_arrays([column, column]).slice(len(column) // 2)
    assert avro_rows(schema, some, header_of(schema)) == (expected * 2)[len(column) // 2 :]
