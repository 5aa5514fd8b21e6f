"""ArrowStore: arrays are written as the bytes that the serdes write, and merge agrees with a model row by row."""

from __future__ import annotations

import io
import json
import math
import random
import tomllib
import tracemalloc
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import fastavro
import pyarrow as pa
import pytest

from spark_integration import ArrowStore
from spark_integration.avro_rows import avro_rows
from spark_integration.reading.bulk import Cursor, avro_values
from statemgr.errors import CorruptError, InvalidError
from statemgr.serdes.avro import HEADER_SIZE, header_of
from tests.docs.blocks import blocks, run
from tests.open_stores import CommittedStore

TOTALS = {
    "type": "record",
    "name": "totals",
    "fields": [
        {"name": "total", "type": ["null", "long"], "default": None},
        {"name": "rows", "type": "long"},
        {"name": "least", "type": ["null", "double"], "default": None},
        {"name": "most", "type": ["null", "string"], "default": None},
        {"name": "tags", "type": {"type": "array", "items": "string"}},
    ],
}
MERGED = {
    "total": ("n", "sum"), "rows": ("n", "count"), "least": ("x", "min"), "most": ("s", "max"), "tags": ("s", "set"),
}  # fmt: skip
INPUT = pa.schema([("k", pa.string()), ("n", pa.int32()), ("x", pa.float64()), ("s", pa.string())])


def store(directory: Path, schema: Any = None, **settings: object) -> CommittedStore:
    """An open store with string keys, and Avro values if a schema is given."""
    values = {} if schema is None else {"value.serde": "avro", "value.avro.schemas": [json.dumps(schema)]}
    return CommittedStore(directory, track=False, settings={"key.serde": "string", **values, **settings})


@pytest.fixture
def totals(tmp_path: Path) -> Iterator[CommittedStore]:
    """A store for the results of MERGED."""
    made = store(tmp_path, TOTALS)
    yield made
    made.opened.close()


@pytest.mark.parametrize("serde", ["bytes", "string", "integer", "json", "avro"])
def test_what_is_put_is_read_back_by_array_and_by_key(tmp_path: Path, serde: str) -> None:
    """For each serde; absent keys are null, and deleted ones absent."""
    values = {
        "bytes": pa.array([b"\x00", b"v"]), "string": pa.array(["ä", ""]), "integer": pa.array([-(2**63), 7]),
        "json": pa.array(['"x"', "y"]),
    }.get(serde, pa.array([{"n": 1, "s": None}, {"n": None, "s": "x"}]))  # fmt: skip
    fields = [{"name": "n", "type": ["null", "long"]}, {"name": "s", "type": ["null", "string"]}]
    schema = {"type": "record", "name": "r", "fields": fields} if serde == "avro" else None
    made = store(tmp_path, schema, **({} if serde == "avro" else {"value.serde": serde}))
    arrow, keys = ArrowStore(made.store), pa.array(["a", "b"])
    arrow.put_many(keys, values)
    found = arrow.get_many(pa.array(["b", "absent", "a"]))
    texts = {"json": ['"\\"x\\""', '"y"']}.get(serde, values.to_pylist())
    assert found.to_pylist() == [texts[1], None, texts[0]]
    assert [made.store.get(key) for key in ("a", "b")] == values.to_pylist()
    arrow.delete_many(pa.array(["a", "absent"]))
    assert arrow.get_many(keys).is_valid().to_pylist() == [False, True]
    made.opened.close()


def test_integer_keys_sort_as_numbers(tmp_path: Path) -> None:
    """Any whole Arrow type is taken as a key, and the bytes are those of the serde."""
    made = store(tmp_path, **{"key.serde": "integer", "value.serde": "string"})
    arrow = ArrowStore(made.store)
    arrow.put_many(pa.array([5, -3, 0], pa.int16()), pa.array(["five", "minus three", "zero"]))
    assert list(made.store.range()) == [(-3, "minus three"), (0, "zero"), (5, "five")]
    assert arrow.get_many(pa.array([-3, 4])).to_pylist() == ["minus three", None]
    made.opened.close()


def model_of(rows: list[dict[str, Any]], state: dict[str, dict[str, Any]]) -> set[str]:
    """Merge rows into ``state`` one by one, as SQL does. Returns: their keys."""
    for row in rows:
        one = state.setdefault(row["k"], {"total": None, "rows": 0, "least": None, "most": None, "tags": []})
        if row["n"] is not None:
            one["total"] = (one["total"] or 0) + row["n"]
            one["rows"] += 1
        if row["x"] is not None:
            one["least"] = row["x"] if one["least"] is None else min(one["least"], row["x"])
        if row["s"] is not None:
            one["most"] = row["s"] if one["most"] is None else max(one["most"], row["s"])
            one["tags"] = sorted({*one["tags"], row["s"]})
    return {row["k"] for row in rows}


@pytest.mark.parametrize("seed", range(3))
def test_merge_agrees_with_a_row_by_row_model(totals: CommittedStore, seed: int) -> None:
    """Sum, count, least, greatest and set over batches with nulls, without rows, and of nulls only."""
    chance, arrow, state = random.Random(seed), ArrowStore(totals.store), dict[str, dict[str, Any]]()

    def some(*values: Any) -> Any:
        return chance.choice([None, *values])

    for size in (0, 1, 50, 0, 200, 200):
        rows = [
            {
                "k": f"k{chance.randrange(40)}",
                "n": some(-5, 0, 3, 2**31 - 1),
                "x": some(-math.inf, -0.5, 2.5),
                "s": some("", "a", "ä", "z"),
            }
            for _ in range(size)
        ]
        keys = model_of(rows, state)
        found = arrow.merge(pa.RecordBatch.from_pylist(rows, schema=INPUT), "k", **MERGED)
        assert found.schema.names == ["k", *MERGED]
        assert {row.pop("k"): row for row in found.to_pylist()} == {key: state[key] for key in keys}
    assert dict(totals.store.range()) == state


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"total": ("n", "avg")}, "merge has no function 'avg'"),
        ({"total": ("m", "sum")}, "the rows have no column 'm'"),
        ({"total": None}, "the field 'total' is not given"),
        ({"other": ("n", "sum")}, "the field 'other' is not a field of the store's values"),
        ({"total": ("s", "max")}, "the max of s is no int64"),
    ],
)
def test_merge_refuses_what_it_cannot_do(totals: CommittedStore, change: dict[str, Any], problem: str) -> None:
    """The message names the field or column, and nothing is written."""
    fields = {name: how for name, how in {**MERGED, **change}.items() if how is not None}
    rows = pa.RecordBatch.from_pylist([{"k": "a", "n": 1, "x": 1.0, "s": "x"}], schema=INPUT)
    with pytest.raises(InvalidError, match=problem):
        ArrowStore(totals.store).merge(rows, "k", **fields)
    assert dict(totals.store.range()) == {}


def test_a_sum_that_does_not_fit_is_refused(totals: CommittedStore) -> None:
    """It does not wrap around, and the old value stays."""
    arrow = ArrowStore(totals.store)
    schema = INPUT.set(1, pa.field("n", pa.int64()))
    rows = pa.RecordBatch.from_pylist([{"k": "a", "n": 2**63 - 1, "x": None, "s": None}], schema=schema)
    arrow.merge(rows, "k", **MERGED)
    with pytest.raises(InvalidError, match="the sum of n is no int64: overflow"):
        arrow.merge(rows, "k", **MERGED)
    assert totals.store.get("a") == {"total": 2**63 - 1, "rows": 1, "least": None, "most": None, "tags": []}


@pytest.mark.parametrize(("kind", "n"), [(pa.int64(), 2**63 - 1), (pa.int64(), -(2**63)), (pa.uint64(), 2**63)])
def test_a_sum_of_one_batch_that_does_not_fit_is_refused(totals: CommittedStore, kind: pa.DataType, n: int) -> None:
    """Arrow's own sum of a group wraps around."""
    rows = pa.table({"k": ["a", "a"], "n": pa.array([n, n], kind), "x": [1.0, 1.0], "s": ["", ""]})
    with pytest.raises(InvalidError, match="the sum of n is no int64"):
        ArrowStore(totals.store).merge(rows, "k", **MERGED)
    assert dict(totals.store.range()) == {}


@pytest.mark.parametrize(("kind", "large"), [("float", 3e38), ("double", 1.5e308)])
def test_a_sum_of_floats_that_becomes_infinite_is_refused(tmp_path: Path, kind: str, large: float) -> None:
    """In one batch, and in two. What is infinite in the rows stays so."""
    made = store(tmp_path, {"type": "record", "name": "r", "fields": [{"name": "f", "type": ["null", kind]}]})

    def merge(*values: float) -> list[Any]:
        rows = pa.table({"k": ["a"] * len(values), "v": values})
        return ArrowStore(made.store).merge(rows, "k", f=("v", "sum"))["f"].to_pylist()

    with pytest.raises(InvalidError, match="the sum of v is no"):
        merge(large, large)
    assert merge(large) == [pytest.approx(large)]
    with pytest.raises(InvalidError, match="the sum of v is no"):
        merge(large)
    assert merge(math.inf, 1.0) == [math.inf]
    two_keys = pa.table({"k": ["b", "b", "c"], "v": [large, large, math.inf]})
    with pytest.raises(InvalidError, match="the sum of v is no"):
        ArrowStore(made.store).merge(two_keys, "k", f=("v", "sum"))
    made.opened.close()


def test_a_number_that_does_not_fit_is_refused_whatever_is_added_to_it(tmp_path: Path) -> None:
    """A batch with the number alone is refused, so the same holds for a batch in which the sum would fit."""
    made = store(tmp_path, {"type": "record", "name": "r", "fields": [{"name": "f", "type": ["null", "int"]}]})
    with pytest.raises(InvalidError, match="the sum of v is no int32"):
        ArrowStore(made.store).merge(pa.table({"k": ["a"] * 2, "v": [3 * 10**9, -3 * 10**9]}), "k", f=("v", "sum"))
    made.opened.close()


def test_a_sum_of_large_numbers_that_fits_is_exact(totals: CommittedStore) -> None:
    """Also if a part of it does not fit."""
    rows = pa.table({"k": ["a"] * 3, "n": [2**63 - 1, 7, -9], "x": [1.0] * 3, "s": [""] * 3})
    assert ArrowStore(totals.store).merge(rows, "k", **MERGED)["total"].to_pylist() == [2**63 - 3]


@pytest.mark.parametrize(
    ("kind", "values", "least"),
    [
        ("boolean", pa.array([True, False, True]), False),
        (
            {"type": "long", "logicalType": "timestamp-micros"},
            pa.array([7, 5, 6], pa.timestamp("us", "Europe/Berlin")),
            datetime(1970, 1, 1, microsecond=5, tzinfo=UTC),
        ),
        ("string", pa.array(["c", "a", "b"]).dictionary_encode(), "a"),
    ],
)
def test_min_of_any_type_that_has_an_order(tmp_path: Path, kind: Any, values: pa.Array, least: Any) -> None:
    """Arrow compares some of these types only within a batch, and some nowhere."""
    fields = [{"name": "least", "type": ["null", kind]}]
    made = store(tmp_path, {"type": "record", "name": "r", "fields": fields})
    arrow, rows = ArrowStore(made.store), pa.table({"k": ["a"] * 3, "v": values})
    for part in (rows.slice(0, 1), rows.slice(1, 2), rows.slice(2, 1)):
        found = arrow.merge(part, "k", least=("v", "min"))
    assert found["least"].to_pylist() == [least]
    made.opened.close()


def test_sums_of_the_longest_decimals(tmp_path: Path) -> None:
    """Spark's sums of decimals have 38 digits."""
    kind = {"type": "bytes", "logicalType": "decimal", "precision": 38, "scale": 2}
    made = store(tmp_path, {"type": "record", "name": "r", "fields": [{"name": "total", "type": ["null", kind]}]})
    rows = pa.table({"k": ["a"], "v": pa.array([Decimal("0.05")], pa.decimal128(38, 2))})
    for _ in range(2):
        found = ArrowStore(made.store).merge(rows, "k", total=("v", "sum"))
    assert found["total"].to_pylist() == [Decimal("0.10")]
    made.opened.close()


def test_sums_of_any_column_are_exact_or_refused(tmp_path: Path) -> None:
    """J0.1: dictionaries of whole numbers and the longest decimals have wrapped around."""
    decimal = {"type": "bytes", "logicalType": "decimal", "precision": 38, "scale": 0}
    fields = [{"name": "n", "type": ["null", "long"]}, {"name": "d", "type": ["null", decimal]}]
    made = store(tmp_path, {"type": "record", "name": "r", "fields": fields})
    arrow, asked = ArrowStore(made.store), {"n": ("n", "sum"), "d": ("d", "sum")}
    numbers = pa.array([2**62] * 4 + [7]).dictionary_encode()
    with pytest.raises(InvalidError, match="the sum of n is no int64"):
        arrow.merge(pa.table({"k": ["a"] * 5, "n": numbers, "d": pa.nulls(5)}), "k", **asked)
    longest = pa.array([Decimal(10**38 - 1)] * 5, pa.decimal128(38, 0))
    with pytest.raises(InvalidError, match=r"the sum of d is no decimal128\(38, 0\)"):
        arrow.merge(pa.table({"k": ["a"] * 5, "n": pa.nulls(5), "d": longest}), "k", **asked)
    assert dict(made.store.range()) == {}
    made.opened.close()


@pytest.mark.parametrize("how", ["min", "max", "set"])
def test_a_merge_does_not_depend_on_where_a_batch_ends(tmp_path: Path, how: str) -> None:
    """J0.1: texts were compared as texts within a batch, and as numbers between batches."""
    kind = {"type": "array", "items": "long"} if how == "set" else "long"
    made = store(tmp_path, {"type": "record", "name": "r", "fields": [{"name": "f", "type": ["null", kind]}]})
    for values in (["10", "9"], ["10"], ["9"]):
        rows = pa.table({"k": ["a"] * len(values), "v": values})
        with pytest.raises(InvalidError, match=f"the {how} of v is no .*: it is string, not int64"):
            ArrowStore(made.store).merge(rows, "k", f=("v", how))
    assert dict(made.store.range()) == {}
    made.opened.close()


@pytest.mark.parametrize("how", ["sum", "count", "min", "max", "set"])
def test_a_column_of_nulls_has_no_values(tmp_path: Path, how: str) -> None:
    """J0.1: Spark's ``lit(None)`` makes a column of Arrow's type null, which killed the process."""
    kind = {"type": "array", "items": "long"} if how == "set" else "long"
    made = store(tmp_path, {"type": "record", "name": "r", "fields": [{"name": "f", "type": ["null", kind]}]})
    found = ArrowStore(made.store).merge(pa.table({"k": ["a"] * 3, "v": pa.nulls(3)}), "k", f=("v", how))
    assert found["f"].to_pylist() == [{"count": 0, "set": []}.get(how)]
    assert len(ArrowStore(made.store).merge(pa.table({"k": pa.nulls(0), "v": pa.nulls(0)}), "k", f=("v", how))) == 0
    made.opened.close()


def test_maps_are_written(tmp_path: Path) -> None:
    """J0.1: also the array that was read. A key that is there twice is refused."""
    schema = {"type": "record", "name": "r", "fields": [{"name": "m", "type": {"type": "map", "values": "long"}}]}
    made = store(tmp_path, schema)
    made.store.put("a", {"m": {"x": 1, "y": 2}})
    arrow = ArrowStore(made.store)
    arrow.put_many(pa.array(["b"]), arrow.get_many(pa.array(["a"])))
    assert made.store.get("b") == {"m": {"x": 1, "y": 2}}
    twice = pa.array([[("x", 1), ("x", 2)]], pa.map_(pa.string(), pa.int64()))
    with pytest.raises(InvalidError, match="a map has a key twice"):
        arrow.put_many(pa.array(["b"]), pa.record_batch({"m": twice}))
    with pytest.raises(InvalidError, match="a part of it has another type"):
        arrow.put_many(pa.array(["b"]), pa.array([{"m": {"x": 1.5}}], pa.struct([("m", pa.map_("string", "double"))])))
    made.opened.close()


@pytest.mark.parametrize(
    ("kind", "values", "problem"),
    [
        ("boolean", pa.array(["true"]), "it is string, not bool"),
        ("double", pa.array(["1.5"]), "it is string, not double"),
        ("long", pa.array([1], pa.timestamp("us", "UTC")), r"it is timestamp\[us, tz=UTC\], not int64"),
        ({"type": "int", "logicalType": "date"}, pa.array(["2024-02-29"]), "it is string, not date32"),
        ("float", pa.array([1e300]), "a number does not fit into float"),
        (
            {"type": "long", "logicalType": "timestamp-millis"},
            pa.array([-(2**63)], pa.timestamp("us", "UTC")),
            "would lose data",
        ),
        (
            {"type": "long", "logicalType": "timestamp-micros"},
            pa.array([1, None], pa.timestamp("ns", "UTC"))[:1],
            "would lose data",
        ),
        ({"type": "int", "logicalType": "date"}, pa.array([5], pa.int64()).view(pa.date64()), "would lose data"),
    ],
)
def test_columns_of_another_kind_are_refused(tmp_path: Path, kind: Any, values: pa.Array, problem: str) -> None:
    """J0.1: Arrow's casts make numbers of texts, infinity of a number, and a time in the future of one long ago."""
    made = store(tmp_path, {"type": "record", "name": "r", "fields": [{"name": "f", "type": kind}]})
    with pytest.raises(InvalidError, match=problem):
        ArrowStore(made.store).put_many(pa.array(["a"]), pa.record_batch({"f": values}))
    made.opened.close()


@pytest.mark.parametrize(("column", "how"), [(["x"], "sum"), ([[1]], "min"), ([{"a": 1}], "max"), ([[1]], "set")])
def test_merge_refuses_types_that_arrow_cannot_aggregate(totals: CommittedStore, column: list[Any], how: str) -> None:
    """With an error of statemgr, which names the column."""
    rows = pa.table({"k": ["a"], "n": [1], "x": [1.0], "s": ["x"], "odd": column})
    with pytest.raises(InvalidError, match=f"{how} of odd"):
        ArrowStore(totals.store).merge(rows, "k", **{**MERGED, "total": ("odd", how)})


def test_names_of_columns_do_not_meet_those_of_arrow(totals: CommittedStore) -> None:
    """The key may be named like an aggregate, and a name that is there twice is refused."""
    rows = pa.table({"n_sum": ["a"], "n": [1], "x": [1.0], "s": ["x"]})
    arrow = ArrowStore(totals.store)
    assert arrow.merge(rows, "n_sum", **MERGED).slice(0, 1).select(["n_sum", "total"]).to_pylist() == [
        {"n_sum": "a", "total": 1}
    ]
    twice = pa.Table.from_arrays([*rows.columns, rows["n"]], [*rows.schema.names, "n"])
    with pytest.raises(InvalidError, match="the rows have 2 columns 'n'"):
        arrow.merge(twice, "n_sum", **MERGED)


@pytest.mark.parametrize(
    ("serde", "keys"),
    [
        ("string", pa.array([5, 6])),
        ("string", pa.array([True, False])),
        ("integer", pa.array(["1", "01"])),
        ("integer", pa.array([0.0, -0.0])),
        ("integer", pa.array([datetime(2020, 1, 1, tzinfo=UTC)])),
    ],
)
def test_keys_of_another_type_are_refused(tmp_path: Path, serde: str, keys: pa.Array) -> None:
    """Arrow would convert them, and different keys could become one, of which the last would win."""
    made = store(tmp_path, **{"key.serde": serde, "value.serde": "integer"})
    arrow = ArrowStore(made.store)
    with pytest.raises(InvalidError, match="a key is"):
        arrow.put_many(keys, pa.array(range(len(keys)), pa.int64()))
    with pytest.raises(InvalidError, match="a key is"):
        arrow.get_many(keys)
    made.opened.close()


def test_long_texts_take_little_memory() -> None:
    """A few times their bytes, in both directions."""
    schema = {"type": "record", "name": "r", "fields": [{"name": "s", "type": ["null", "string"]}]}
    texts = pa.array([{"s": chr(97 + number) * 100_000} for number in range(20)] + [{"s": None}, {"s": ""}])
    tracemalloc.start()
    rows = avro_rows(schema, texts, header_of(schema))
    found = avro_values(schema, texts.type, Cursor.of(rows, HEADER_SIZE))
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert found == texts
    assert most < 6 * 20 * 100_000


def test_numbers_are_no_texts(tmp_path: Path) -> None:
    """As the serde of Avro refuses them."""
    made = store(tmp_path, {"type": "record", "name": "r", "fields": [{"name": "s", "type": "string"}]})
    with pytest.raises(InvalidError, match="it is int64, not string"):
        ArrowStore(made.store).put_many(pa.array(["a"]), pa.array([{"s": 1}]))
    made.opened.close()


def test_merge_takes_keys_from_dictionaries(totals: CommittedStore) -> None:
    """Also if the parts of the column have different dictionaries."""
    keys = pa.chunked_array([pa.array(part).dictionary_encode() for part in (["a"], ["b", "a"])])
    rows = pa.table({"k": keys, "n": [1, 2, 3], "x": [1.0] * 3, "s": [""] * 3})
    found = ArrowStore(totals.store).merge(rows, "k", **MERGED)
    assert dict(zip(found["k"].to_pylist(), found["total"].to_pylist(), strict=True)) == {"a": 4, "b": 2}


def test_wrong_arrays_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    """Nulls, other types, other lengths, and values that are no records."""
    schema = {"type": "record", "name": "r", "fields": [{"name": "n", "type": "long"}]}
    made = store(tmp_path, schema)
    arrow, one = ArrowStore(made.store), pa.array([{"n": 1}])
    with pytest.raises(InvalidError, match="a key is null"):
        arrow.put_many(pa.array([None], pa.string()), one)
    with pytest.raises(InvalidError, match="there are 2 keys and 1 values"):
        arrow.put_many(pa.array(["a", "b"]), one)
    with pytest.raises(InvalidError, match="a value is null"):
        arrow.put_many(pa.array(["a"]), pa.array([None], one.type))
    with pytest.raises(InvalidError, match="it is null, and the schema does not allow that"):
        arrow.put_many(pa.array(["a"]), pa.array([{"n": None}], one.type))
    with pytest.raises(InvalidError, match="it has no field 'n'"):
        arrow.put_many(pa.array(["a"]), pa.array([{"m": 1}]))
    with pytest.raises(InvalidError, match="it is double, not int64"):
        arrow.put_many(pa.array(["a"]), pa.array([{"n": 1.5}]))
    with pytest.raises(InvalidError, match="a key is no string: it is list"):
        arrow.get_many(pa.array([["a"]]))
    assert dict(made.store.range()) == {}
    made.opened.close()
    plain = store(tmp_path / "plain")
    with pytest.raises(InvalidError, match="only values that are records can be merged"):
        ArrowStore(plain.store).merge(pa.record_batch({"k": ["a"]}), "k")
    plain.opened.close()


def test_times_and_records_of_batches_are_values(tmp_path: Path) -> None:
    """A record batch is taken as records; times of another unit and zone are converted."""
    times = {"type": "long", "logicalType": "timestamp-micros"}
    fields = [{"name": "at", "type": ["null", times]}, {"name": "day", "type": {"type": "int", "logicalType": "date"}}]
    made = store(tmp_path, {"type": "record", "name": "r", "fields": fields})
    at = datetime(2024, 2, 29, 12, tzinfo=UTC)
    batch = pa.record_batch(
        {"at": pa.array([at, None], pa.timestamp("ms", "Asia/Tokyo")), "day": pa.array([at.date()] * 2, pa.date32())}
    )
    ArrowStore(made.store).put_many(pa.array(["a", "b"]), batch)
    assert made.store.get("a") == {"at": at, "day": at.date()}
    assert made.store.get("b") == {"at": None, "day": at.date()}
    assert ArrowStore(made.store).get_many(pa.array(["a"]))[0]["at"].as_py() == at + timedelta(0)
    made.opened.close()


@pytest.mark.parametrize("unit", ["us", "ns"])
def test_times_are_stored_exactly_or_refused(tmp_path: Path, unit: str) -> None:
    """J0.1: Spark's own times are microseconds, and nanoseconds come from elsewhere. A schema of milliseconds takes
    those that it can hold, in bulk as row by row."""
    fields = [{"name": "at", "type": {"type": "long", "logicalType": "timestamp-millis"}}]
    made = store(tmp_path, {"type": "record", "name": "r", "fields": fields})
    arrow, key = ArrowStore(made.store), pa.array(["bulk"])
    for micros in (-1501, -1, 999, 1001):
        at = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=micros)
        one = pa.record_batch({"at": pa.array([at], pa.timestamp(unit, "Europe/Berlin"))})
        with pytest.raises(InvalidError, match="would lose data"):
            arrow.put_many(key, one)
        with pytest.raises(InvalidError, match="would lose data"):
            arrow.merge(one.append_column("k", key), "k", at=("at", "max"))
        with pytest.raises(InvalidError, match="milliseconds"):
            made.store.put("row", {"at": at})
    for micros in (-2000, 0, 1000):
        at = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=micros)
        made.store.put("row", {"at": at})
        arrow.put_many(key, pa.record_batch({"at": pa.array([at], pa.timestamp(unit, "Europe/Berlin"))}))
        assert made.store.raw.get(b"bulk") == made.store.raw.get(b"row")
    made.opened.close()


def test_a_stored_time_that_has_no_microseconds_is_corrupt(tmp_path: Path) -> None:
    """J0.1: milliseconds of 64 bits, which another writer may have stored, wrap around as Arrow's microseconds."""
    fields = [{"name": "at", "type": {"type": "long", "logicalType": "timestamp-millis"}}]
    schema = {"type": "record", "name": "r", "fields": fields}
    made = store(tmp_path, schema)
    made.store.put("a", {"at": 0})
    header = made.store.raw.get(b"a")[:-1]
    for millis in (2**60, -(2**60)):
        body = io.BytesIO()
        fastavro.schemaless_writer(body, "long", millis)
        made.store.raw.put(b"a", header + body.getvalue())
        with pytest.raises(CorruptError):
            ArrowStore(made.store).get_many(pa.array(["a"]))
    made.opened.close()


def test_columns_of_tables_and_other_texts_are_keys(tmp_path: Path) -> None:
    """Chunked columns, with chunks, with one and without; large and dictionary-encoded text."""
    made = store(tmp_path, {"type": "record", "name": "r", "fields": [{"name": "n", "type": "long"}]})
    arrow = ArrowStore(made.store)
    table = pa.table(
        {"k": pa.chunked_array([["a"], ["b", "c"]]), "v": pa.chunked_array([[{"n": 1}, {"n": 2}], [{"n": 3}]])}
    )
    arrow.put_many(table["k"], table["v"])
    for kind in (pa.large_string(), pa.dictionary(pa.int32(), pa.string())):
        assert arrow.get_many(pa.array(["c", "a"]).cast(kind)).to_pylist() == [{"n": 3}, {"n": 1}]
    arrow.put_many(table["k"][:0], table["v"][:0])
    assert arrow.get_many(pa.chunked_array([], pa.string())).to_pylist() == []
    arrow.delete_many(table["k"][1:])
    assert dict(made.store.range()) == {"a": {"n": 1}}
    made.opened.close()


def test_the_aggregate_of_the_page(tmp_path: Path) -> None:
    """docs/spark.md: the function with the configuration that is next to it."""
    (settings,) = blocks("docs/spark.md", "### Aggregates without Python for each row", "toml")
    (program,) = blocks("docs/spark.md", "### Aggregates without Python for each row")
    found = tomllib.loads(settings)["stores"]["totals"]
    made = store(tmp_path, json.loads(found["value"]["avro"]["schemas"][0]))
    process = run(program, {})["totals"]
    batch = pa.record_batch({"customer": ["ann", "bob", "ann"], "amount": [1, 2, 3]})
    (first, second) = process(iter([batch, batch]), {"totals": made.store}, None)
    assert second.to_pylist() == [
        {"customer": "ann", "total": 8, "orders": 4, "largest": 3},
        {"customer": "bob", "total": 4, "orders": 2, "largest": 2},
    ]
    assert first.schema == second.schema
    made.opened.close()
