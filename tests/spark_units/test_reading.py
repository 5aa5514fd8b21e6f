"""Decoding in bulk gives the same columns as decoding row by row, for every type, and finds damaged bytes."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from datetime import date
from decimal import Decimal
from typing import Any

import fastavro
import numpy as np
import pyarrow as pa
import pytest
from pyspark.sql.types import StructType

from spark_integration.processors.keys import decode_key, encode_key
from spark_integration.processors.states import variable_prefix
from spark_integration.processors.timers import BY_TIME
from spark_integration.processors.values import value_serde
from spark_integration.processors.variables import LIST, MAP, VALUE, Record, Variable
from spark_integration.reading import bulk, sources
from spark_integration.reading.columns import arrow_type, key_column, value_column
from spark_integration.reading.variables import TimerColumns, VariableColumns
from statemgr import JobConfig
from statemgr.errors import CorruptError
from statemgr.flows.state_diff import KeyChange

PLAIN = {
    "byte": [-128, 127, 0],
    "short": [-32768, 32767, -1],
    "integer": [-(2**31), 2**31 - 1, 300],
    "long": [-(2**63), 2**63 - 1, -300],
    "date": [-(2**31), 2**31 - 1, 19_000],
    "timestamp": [-(2**63), 2**63 - 1, 1_700_000_000_000_000],
    "timestamp_ntz": [-1, 1_700_000_000_000_000],
    "interval day to second": [-86_400_000_000, 5],
    "float": [float("-inf"), -1.5, 0.0, 2.5],
    "double": [-1e308, 0.0, 1e-300, float("inf")],
    "boolean": [True, False],
    "decimal(9,2)": [Decimal("-1234567.89"), Decimal("0.01"), Decimal("0.00")],
    "decimal(38,10)": [Decimal("-123456789012345678.0123456789"), Decimal("1E-10")],
    "string": ["", "ä" * 300, "plain", "😀"],
    "binary": [b"", b"\xff\x01\x02", b"x" * 200],
}


def struct_of(*types: str) -> StructType:
    """Return fields ``f0``, ``f1``, … of Spark's types."""
    json_types = {"interval day to second": "interval day to second"}
    fields = [
        {"name": f"f{i}", "type": json_types.get(kind, kind), "nullable": True, "metadata": {}}
        for i, kind in enumerate(types)
    ]
    return StructType.fromJson({"type": "struct", "fields": fields})


def nested() -> StructType:
    """Return every plain type, and a struct of every plain type."""
    inner = struct_of(*PLAIN)
    outer = struct_of(*PLAIN)
    return StructType([*outer.fields, type(outer.fields[0])("nested", inner, True)])


def some_rows(count: int, *, seed: int = 1) -> list[tuple[Any, ...]]:
    """Return rows of :func:`nested`, with some values and some nested structs null."""
    chosen = random.Random(seed)

    def fields() -> tuple[Any, ...]:
        return tuple(None if chosen.random() < 0.2 else chosen.choice(values) for values in PLAIN.values())

    return [(*fields(), None if chosen.random() < 0.3 else fields()) for _ in range(count)]


def test_keys_of_every_type() -> None:
    """Decoding all keys at once gives the same result as one after the other."""
    schema = nested()
    encoded = [encode_key(schema, row) for row in some_rows(300)]
    cursor = bulk.Cursor.of([b"pre" + key + b"tail" for key in encoded], 3)

    found = bulk.key_columns(schema, arrow_type(schema), cursor)

    expected = pa.array([decode_key(schema, key)[0] for key in encoded], arrow_type(schema))
    found.validate(full=True)
    assert found.equals(expected)
    assert (cursor.ends - cursor.at == 4).all()


def test_values_of_every_type() -> None:
    """Decoding all values at once gives the same result as one after the other, with and without a TTL."""
    schema = nested()
    serde = value_serde((schema,))
    data = [serde.serialize(row) for row in some_rows(300)]
    for ttl_ms, expiry in ((None, b""), (5, (7).to_bytes(8, "big"))):
        columns = variable(VALUE, (schema,), ttl_ms=ttl_ms)
        found = columns.arrays([(place("a"), expiry + one) for one in data])

        expected = pa.array([serde.deserialize(one) for one in data], arrow_type(schema))
        found[1].validate(full=True)
        assert found[1].equals(expected)
        if ttl_ms:
            assert set(found[2].cast(pa.int64()).to_pylist()) == {7000}


KEY = struct_of("string")


def place(key: str | None) -> bytes:
    """Return the prefix of a variable's keys for a grouping key."""
    return variable_prefix("v") + encode_key(KEY, (key,))


def variable(
    kind: str, versions: Sequence[StructType], key: StructType | None = None, ttl_ms: int | None = None
) -> VariableColumns:
    """Return the columns of a variable."""
    made = Variable("v", kind, tuple(versions), key, ttl_ms)
    return VariableColumns(Record(KEY, "s", "none", {"v": made}), made)


def test_lists_maps_and_timers() -> None:
    """Their keys follow the grouping key. A list's bounds are not an element, and timers may be before 1970."""
    schema = struct_of("long")
    data = value_serde((schema,)).serialize((5,))
    items = [(place("a"), bytes(16))] + [(place("a") + i.to_bytes(8, "big"), data) for i in (0, 7, 2**40)]
    keys, positions, values = variable(LIST, (schema,)).arrays([*items, (place(None), bytes(16))])
    assert keys.to_pylist() == [{"f0": "a"}] * 3
    assert (positions.to_pylist(), values.to_pylist()) == ([0, 7, 2**40], [{"f0": 5}] * 3)

    by = struct_of("date", "string")
    entries = [(place(k) + encode_key(by, (day, "x")), data) for k, day in (("a", 1), (None, None))]
    keys, map_keys, _ = variable(MAP, (schema,), by).arrays(entries)
    assert keys.to_pylist() == [{"f0": "a"}, {"f0": None}]
    assert map_keys.to_pylist() == [{"f0": date(1970, 1, 2), "f1": "x"}, {"f0": None, "f1": "x"}]

    timers = [(BY_TIME + (ms + (1 << 63)).to_bytes(8, "big") + encode_key(KEY, ("a",)), b"") for ms in (-5, 9)]
    keys, times = TimerColumns(Record(KEY, "s", "none", {})).arrays(timers)
    assert times.cast(pa.int64()).to_pylist() == [-5000, 9000]
    assert keys.to_pylist() == [{"f0": "a"}] * 2
    assert [len(one) for one in variable(LIST, (schema,)).arrays([(place("a"), bytes(16))])] == [0, 0, 0]


def test_times_that_arrow_lacks() -> None:
    """A timer or an expiry for "never" is read as the last time that Arrow has, and the earliest timer as the first."""
    last = 9_223_372_036_854_775_000  # in the year 294247
    key = encode_key(KEY, ("a",))
    timers = [(BY_TIME + (ms + (1 << 63)).to_bytes(8, "big") + key, b"") for ms in (-(2**63), 2**63 - 1)]
    _, times = TimerColumns(Record(KEY, "s", "none", {})).arrays(timers)
    assert times.cast(pa.int64()).to_pylist() == [-last, last]
    schema = struct_of("long")
    data = (2**63 - 1).to_bytes(8, "big") + value_serde((schema,)).serialize((5,))
    assert variable(VALUE, (schema,), ttl_ms=5).arrays([(place("a"), data)])[2].cast(pa.int64()).to_pylist() == [last]


def test_values_of_older_schemas() -> None:
    """Added, removed and widened fields, even in a struct, give the same columns as row by row, in the same order."""

    def version(inner: Sequence[str], *types: str) -> StructType:
        plain = struct_of(*types)
        return StructType([*plain.fields, type(plain.fields[0])("inner", struct_of(*inner), True)])

    versions = (
        version(["byte"], "integer", "string", "float"),
        version(["long", "date"], "long", "binary", "double", "string"),
        version(["double", "date"], "double", "binary", "double"),
    )
    written: list[bytes] = []
    for i in range(60):
        inner = [(i,), (2**60 + i, i), (i / 3, None)][i % 3]
        row = [(i, f"t{i}", i / 4), (2**61 + i, b"b%d" % i, None, "gone"), (None, None, i / 7)][i % 3]
        until = i % 3 + 1
        row = (*row, None if i % 5 == 0 else inner)
        written.append(value_serde(versions[:until]).serialize(row))

    found = variable(VALUE, versions).arrays([(place("a"), one) for one in written])[1]

    serde = value_serde(versions)
    found.validate(full=True)
    assert found.equals(pa.array([serde.deserialize(one) for one in written], arrow_type(versions[-1])))


def test_what_is_decoded_row_by_row() -> None:
    """Text with zero bytes, arrays in keys and values, and values of older schemas are decoded correctly."""
    old, new = struct_of("integer"), struct_of("long", "string")
    data = [value_serde((old,)).serialize((4,)), value_serde((old, new)).serialize((5, "x"))]
    keys, values = variable(VALUE, (old, new)).arrays([(place("a\x00b"), data[0]), (place("\x00"), data[1])])
    assert keys.to_pylist() == [{"f0": "a\x00b"}, {"f0": "\x00"}]
    assert values.to_pylist() == [{"f0": 4, "f1": None}, {"f0": 5, "f1": "x"}]

    array: Any = {"type": "array", "elementType": "string", "containsNull": True}
    lists = StructType.fromJson(
        {"type": "struct", "fields": [{"name": "f0", "type": array, "nullable": True, "metadata": {}}]}
    )
    value = value_serde((lists,)).serialize((["a", None],))
    zero = encode_key(lists, (["\x00", None],))
    keys, map_keys, values = variable(MAP, (lists,), lists).arrays([(place("a") + zero, value)])
    assert keys.to_pylist() == [{"f0": "a"}]
    assert (map_keys.to_pylist(), values.to_pylist()) == ([{"f0": ["\x00", None]}], [{"f0": ["a", None]}])
    timer = BY_TIME + bytes(8) + encode_key(KEY, ("a\x00",))
    assert TimerColumns(Record(KEY, "s", "none", {})).arrays([(timer, b"")])[0].to_pylist() == [{"f0": "a\x00"}]


def keys_of(rows: Sequence[bytes]) -> None:
    """Decode keys of :func:`nested` up to their ends."""
    cursor = bulk.Cursor.of(rows)
    bulk.key_columns(nested(), arrow_type(nested()), cursor)
    cursor.at_end()


def test_damaged_bytes_are_noticed() -> None:
    """Errors are found in a row that is cut anywhere or too long, even between two intact rows, in text that is not
    UTF-8, and in a number that is too large for its type."""
    schema = nested()
    (row,) = some_rows(1, seed=3)
    row = tuple(values[0] for values in PLAIN.values()) + (row[:-1],)
    key, value = encode_key(schema, row), value_serde((schema,)).serialize(row)
    for at in range(len(key)):
        with pytest.raises((CorruptError, bulk.Unsupported)):
            keys_of([key, key[:at], key])
    columns = variable(VALUE, (schema,))
    for damaged in [value[:at] for at in range(len(value))] + [value + b"\x00"]:
        with pytest.raises(CorruptError):
            columns.arrays([(place("a"), one) for one in (value, damaged, value)])
    text = variable(VALUE, (struct_of("string"),))
    good = value_serde((struct_of("string"),)).serialize(("abc",))
    with pytest.raises(CorruptError):
        text.arrays([(place("a"), good.replace(b"abc", b"\xff\xfe\xfd"))])
    wide, narrow = (value_serde((struct_of(kind),)) for kind in ("long", "integer"))
    header = narrow.serialize((1,))[:10]
    with pytest.raises(CorruptError):
        variable(VALUE, (struct_of("integer"),)).arrays([(place("a"), header + wide.serialize((2**40,))[10:])])


AVRO: dict[str, tuple[Any, Any]] = {
    "record": (
        {
            "type": "record",
            "name": "r",
            "fields": [
                {"name": "n", "type": "long"},
                {"name": "at", "type": {"type": "long", "logicalType": "timestamp-millis"}},
                {"name": "micros", "type": [{"type": "long", "logicalType": "local-timestamp-micros"}, "null"]},
                {"name": "text", "type": ["null", {"type": "string"}]},
                {"name": "nothing", "type": ["null", {"type": "bytes", "logicalType": "decimal", "precision": 5}]},
            ],
        },
        lambda i: {
            "n": i,
            "at": i,
            "micros": None if i % 3 else i,
            "text": "é" * i if i % 2 else None,
            "nothing": None,
        },
    ),
    "enum": ({"type": "enum", "name": "e", "symbols": ["A", "B"]}, lambda i: "AB"[i % 2]),
    "double": ("double", float),
    "list": ({"type": "array", "items": "int"}, lambda i: [i] * (i % 3)),
}


@pytest.mark.parametrize("name", AVRO)
def test_an_applications_own_avro(name: str) -> None:
    """A store's own Avro schema may be of any type. A missing value is null."""
    schema, value = AVRO[name]
    config = JobConfig.from_mapping(
        {
            "job.name": "j",
            "kafka.bootstrap.servers": "localhost:1",
            "task.backup.factories": ["kafka-changelog"],
            "stores.s.value.serde": "avro",
            "stores.s.value.avro.schemas": [json.dumps(schema)],
        }
    )
    column = value_column(config.stores["s"])
    data: list[bytes | None] = [column.serialize(value(i)) for i in range(40)]
    data[7] = None

    found = column.decode(data)

    read = fastavro.parse_schema(schema)
    assert read is not None
    expected = pa.array([None if i == 7 else value(i) for i in range(40)])
    if name != "record":
        assert found.to_pylist() == expected.to_pylist()
        return
    assert found.field("n").to_pylist()[:7] == list(range(7))
    assert found.field("at").cast(pa.int64()).to_pylist()[:7] == [1000 * i for i in range(7)]
    assert found.field("micros").cast(pa.int64()).to_pylist()[:7] == [0, None, None, 3, None, None, 6]
    assert found.field("text").to_pylist()[:4] == [None, "é", None, "ééé"]
    assert (found[7].as_py(), found.null_count) == (None, 1)
    assert np.array(found.field("nothing").is_null()).all()


@pytest.mark.parametrize(
    ("name", "key", "kind"),
    [
        ("kafka-streams-window", b"a\0b", "struct<key:binary,start_ms:bigint,sequence:bigint>"),
        ("kafka-streams-session(string)", "ann", "struct<key:string,start_ms:bigint,end_ms:bigint>"),
        ("kafka-streams-window(integer)", -7, "struct<key:bigint,start_ms:bigint,sequence:bigint>"),
    ],
)
def test_keys_with_times_are_structs(name: str, key: object, kind: str) -> None:
    """A query sees the parts of a key with their types. Absent keys are null."""
    config = JobConfig.from_mapping({"job.name": "job", "stores.hits.key.serde": name})
    column = key_column(config.stores["hits"])
    assert column.kind.simpleString() == kind
    found = column.decode([column.serialize((key, 60_000, 3)), None, column.serialize((key, -1, 0))])
    assert found.type == arrow_type(column.kind)
    names = column.kind.fieldNames()
    assert found.to_pylist() == [
        dict(zip(names, (key, 60_000, 3), strict=True)),
        None,
        dict(zip(names, (key, -1, 0), strict=True)),
    ]
    with pytest.raises(CorruptError):
        column.decode([b"plain"])


def test_a_batch_of_large_changes_is_short() -> None:
    """A Python worker has little memory, and Arrow's arrays end at 2 GiB."""
    large = [KeyChange(b"%06d" % number, bytes(1_000_000), bytes(500_000)) for number in range(40)]
    small = [KeyChange(b"%06d" % number, None, b"value") for number in range(15_000)]
    parts = list(sources._parts(iter([*large, *small])))
    assert [change for part in parts for change in part] == [*large, *small]
    assert [len(part) for part in parts] == [12, 12, 12, 10_000, 5_004]
