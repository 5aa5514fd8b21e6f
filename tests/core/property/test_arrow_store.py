"""ArrowStore agrees with a model in plain Python, for random schemas, columns of any Arrow type, and batches."""

from __future__ import annotations

import json
import math
import struct
import tempfile
from collections.abc import Callable
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from spark_integration import ArrowStore
from statemgr.errors import InvalidError
from tests.open_stores import CommittedStore

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class Refused(Exception):
    """The model does not store this."""


def ints(bits: int, *, signed: bool = True) -> st.SearchStrategy[int]:
    """Whole numbers, often those at the limits."""
    low, high = (-(1 << bits - 1), (1 << bits - 1) - 1) if signed else (0, (1 << bits) - 1)
    return st.sampled_from([low, high, high // 2 + 1, 7]) | st.integers(low, high)


def decimals(precision: int, scale: int) -> st.SearchStrategy[Decimal]:
    """Decimals, often with the most digits."""
    most = 10**precision - 1
    return (st.sampled_from([most, -most, 25]) | st.integers(-most, most)).map(lambda number: point(number, scale))


FLOATS = st.sampled_from([-2.5, -0.0, 0.0, 0.5, 1000.0, math.inf, math.nan])
TEXTS = st.sampled_from(["", "9", "10", "ä", "\U0001f600", "\uffff"])
BINARY = st.sampled_from([b"", b"10", b"\xff", "ä".encode()])
MICROS = st.integers(-(10**15), 10**15)


def moment(micros: int) -> datetime:
    """The time of a number of microseconds."""
    return EPOCH + timedelta(microseconds=micros)


#: Arrow types → kind, values as Arrow takes them, and from those to the model's.
COLUMNS: list[tuple[pa.DataType, str, st.SearchStrategy[Any], Callable[[Any], Any]]] = [
    *((kind, "integer", ints(kind.bit_width), int) for kind in (pa.int8(), pa.int16(), pa.int32(), pa.int64())),
    *((kind, "integer", ints(kind.bit_width, signed=False), int) for kind in (pa.uint8(), pa.uint64())),
    (pa.float16(), "float", FLOATS, float),
    (pa.float32(), "float", FLOATS, float),
    (pa.float64(), "float", FLOATS | st.sampled_from([1e300, -3e38, 3e38]), float),
    (pa.decimal128(38, 2), "decimal", decimals(38, 2), Decimal),
    (pa.decimal128(5, 0), "decimal", decimals(5, 0), Decimal),
    (pa.decimal256(60, 3), "decimal", decimals(60, 3), Decimal),
    (pa.bool_(), "boolean", st.booleans(), bool),
    *((kind, "text", TEXTS, str) for kind in (pa.string(), pa.large_string(), pa.string_view())),
    *((kind, "binary", BINARY, bytes) for kind in (pa.binary(), pa.large_binary(), pa.binary_view())),
    (pa.binary(2), "binary", st.sampled_from([b"ab", b"\xff\0"]), bytes),
    (pa.date32(), "date", st.dates(), lambda value: value),
    (pa.timestamp("us", "UTC"), "time", MICROS, moment),
    (pa.timestamp("ns", "Europe/Berlin"), "time", MICROS.map((1000).__mul__), lambda nanos: moment(nanos // 1000)),
    (pa.timestamp("s", "UTC"), "time", st.integers(-(10**9), 10**9), lambda seconds: moment(seconds * 10**6)),
    (pa.timestamp("us"), "local time", MICROS, lambda micros: moment(micros).replace(tzinfo=None)),
    (pa.null(), "null", st.none(), lambda value: value),
    (pa.time64("us"), "other", st.integers(0, 10**9), int),
    (pa.duration("s"), "other", st.integers(0, 10**9), int),
    (pa.list_(pa.int64()), "other", st.lists(ints(64), max_size=2), list),
    (pa.struct([("a", pa.int8())]), "other", st.fixed_dictionaries({"a": ints(8)}), dict),
]
#: Avro types → kind, and the kinds of columns that they take.
FIELDS: list[tuple[Any, str, set[str]]] = [
    ("boolean", "boolean", {"boolean"}),
    ("int", "integer", {"integer"}),
    ("long", "integer", {"integer"}),
    ("float", "float", {"float", "integer"}),
    ("double", "float", {"float", "integer"}),
    ("string", "text", {"text", "binary"}),
    ("bytes", "binary", {"text", "binary"}),
    ({"type": "int", "logicalType": "date"}, "date", {"date"}),
    ({"type": "long", "logicalType": "timestamp-micros"}, "time", {"time"}),
    ({"type": "long", "logicalType": "local-timestamp-micros"}, "local time", {"local time"}),
    ({"type": "bytes", "logicalType": "decimal", "precision": 38, "scale": 2}, "decimal", {"decimal", "integer"}),
    ({"type": "bytes", "logicalType": "decimal", "precision": 9, "scale": 0}, "decimal", {"decimal", "integer"}),
]
FUNCTIONS = ["sum", "count", "min", "max", "set"]


def fitting(avro: Any, value: Any) -> Any:
    """A value as a field of this type has it. Raises: Refused."""
    kind = avro if isinstance(avro, str) else avro["type"]
    try:
        if kind in ("int", "long") and isinstance(value, int) and not isinstance(value, bool):
            bits = 31 if kind == "int" else 63
            if not -(1 << bits) <= value < 1 << bits:
                raise Refused
        elif kind in ("float", "double"):
            if isinstance(value, int) and abs(value) > 1 << (24 if kind == "float" else 53):
                raise Refused
            return struct.unpack("<f", struct.pack("<f", value))[0] if kind == "float" else float(value)
        elif kind == "string":
            return value if isinstance(value, str) else value.decode()
        elif isinstance(avro, dict) and avro["logicalType"] == "decimal":
            unscaled = scaled(value, avro["scale"])
            if abs(unscaled) >= 10 ** avro["precision"]:
                raise Refused
            return point(unscaled, avro["scale"])
        elif kind == "bytes":
            return value.encode() if isinstance(value, str) else value
    except (OverflowError, UnicodeDecodeError):
        raise Refused from None
    return value


def point(unscaled: int, scale: int) -> Decimal:
    """The decimal with this number of digits after the point. Decimal's own arithmetic would round it."""
    return Decimal((unscaled < 0, tuple(map(int, str(abs(unscaled)))), -scale))


def scaled(value: int | Decimal, scale: int) -> int:
    """The number without its point. Raises: Refused if digits would be lost."""
    sign, digits, exponent = Decimal(value).as_tuple()
    shift = int(exponent) + scale
    whole = int("".join(map(str, digits))) * (-1 if sign else 1)
    if shift < 0 and whole % 10**-shift:
        raise Refused
    return whole * 10**shift if shift >= 0 else whole // 10**-shift


def ordered(values: list[Any]) -> list[Any]:
    """Each value once, in their order, NaN last."""
    numbers = {value for value in values if value == value}
    return sorted(numbers) + ([math.nan] if len(values) > sum(value == value for value in values) else [])


def added(how: str, avro: Any, before: Any, values: list[Any]) -> Any:
    """The aggregate of a field after some more values. Raises: Refused."""
    if how == "count":
        return fitting(avro, (before or 0) + len(values))
    if how == "set":
        return ordered([*(before or []), *(fitting(avro, value) for value in values)])
    if how == "sum":
        parts = [fitting(avro, value) for value in values]
        parts = parts if before is None else [before, *parts]
        if not parts:
            return None
        if isinstance(avro, dict):
            return fitting(avro, point(sum(scaled(part, avro["scale"]) for part in parts), avro["scale"]))
        return fitting(avro, sum(parts))
    choose = min if how == "min" else max
    every = [fitting(avro, value) for value in values] + ([] if before is None else [before])
    return choose([value for value in every if value == value] or every, default=None)


def same(found: Any, expected: Any) -> bool:
    """Whether two values are the same. A sum of floats may round."""
    if isinstance(expected, list):
        return len(found) == len(expected) and all(map(same, found, expected))
    if isinstance(expected, float) and isinstance(found, float):
        return math.isclose(found, expected, rel_tol=1e-6) or (math.isnan(found) and math.isnan(expected))
    return bool(found == expected)


def encoded(column: pa.Array, how: str) -> pa.Array | pa.ChunkedArray:
    """The same column in another form, where Arrow has it."""
    try:
        if how == "dictionary":
            return column.dictionary_encode()
        if how == "runs":
            return pa.compute.run_end_encode(column)
    except pa.ArrowNotImplementedError:
        return column
    if how == "parts":
        return pa.chunked_array([column.slice(0, len(column) // 2), column.slice(len(column) // 2)])
    return column


@st.composite
def merges(draw: st.DrawFn) -> tuple[list[Any], list[tuple[pa.Table, list[str], list[list[Any]]]]]:
    """Fields (function, type), and batches: a table, its keys, and its values as the model has them."""
    fields = draw(st.lists(st.tuples(st.sampled_from(FUNCTIONS), st.sampled_from(FIELDS)), min_size=1, max_size=3))
    batches = []
    for _ in range(draw(st.integers(1, 3))):
        size = draw(st.sampled_from([0, 1, 2, 5]))
        keys = draw(st.lists(st.sampled_from("abc"), min_size=size, max_size=size))
        forms = st.sampled_from(["plain", "dictionary", "runs", "parts"])
        columns = {"k": encoded(pa.array(keys, pa.string()), draw(forms))}
        model = []
        for number, (how, (_, _, takes)) in enumerate(fields):
            likely = [one for one in COLUMNS if one[1] in takes or one[1] == "null" or how == "count"]
            arrow, kind, values, to_model = draw(st.sampled_from(likely * 3 + COLUMNS))
            found = draw(st.lists(st.none() | values, min_size=size, max_size=size))
            columns[f"c{number}"] = encoded(pa.array(found, arrow), draw(forms))
            model.append([kind, [None if value is None else to_model(value) for value in found]])
        batches.append((pa.table(columns), keys, model))
    return fields, batches


def merged(fields: list[Any], state: dict[str, list[Any]], keys: list[str], columns: list[Any]) -> dict[str, list[Any]]:
    """The state after a batch. Raises: Refused."""
    after = dict(state)
    for (how, (_, field, takes)), (kind, _) in zip(fields, columns, strict=True):
        allowed = {"sum": {"integer", "float", "decimal"}, "count": {"integer"}}.get(how)
        if allowed is not None and field not in allowed:
            raise Refused
        if how != "count" and kind != "null" and kind not in takes:
            raise Refused
    for key in sorted({*keys}):
        before = state.get(key, [None] * len(fields))
        after[key] = [
            added(how, avro, was, [v for at, v in zip(keys, values, strict=True) if at == key and v is not None])
            for (how, (avro, _, _)), was, (_, values) in zip(fields, before, columns, strict=True)
        ]
    return after


def opened(directory: str, schema: Any) -> CommittedStore:
    """A store of records."""
    settings = {"key.serde": "string", "value.serde": "avro", "value.avro.schemas": [json.dumps(schema)]}
    return CommittedStore(Path(directory), track=False, settings=settings)


@given(merges())
def test_merge_agrees_with_a_model(case: tuple[list[Any], list[Any]]) -> None:
    """The same sums, counts, extremes and sets, or a refusal that leaves the state as it was; and no crash."""
    fields, batches = case
    types = [{"type": "array", "items": avro} if how == "set" else avro for how, (avro, _, _) in fields]
    schema = {"type": "record", "name": "r", "fields": [
        {"name": f"f{number}", "type": ["null", avro]} for number, avro in enumerate(types)
    ]}  # fmt: skip
    asked = {f"f{number}": (f"c{number}", how) for number, (how, _) in enumerate(fields)}
    state: dict[str, list[Any]] = {}
    with tempfile.TemporaryDirectory() as directory:
        made = opened(directory, schema)
        arrow = ArrowStore(made.store)
        for table, keys, columns in batches:
            try:
                state = merged(fields, state, keys, columns)
            except Refused:
                try:
                    found = arrow.merge(table, "k", **asked)
                except InvalidError:
                    continue
                raise AssertionError(f"the model refuses this: {found}") from None
            result = arrow.merge(table, "k", **asked)
            assert sorted(result["k"].to_pylist()) == sorted({*keys})
        found = dict(made.store.range())
        made.opened.close()
    assert found.keys() == state.keys()
    for key, values in state.items():
        assert same(list(found[key].values()), values), (key, found[key], values)


@st.composite
def nested(draw: st.DrawFn) -> tuple[Any, list[Any]]:
    """A record with maps, lists and records in each other, and some values."""
    names = iter(range(1000))

    def kind(depth: int) -> tuple[Any, st.SearchStrategy[Any]]:
        leaves = ["long", "string", "decimal", "fixed", "enum", "day"]
        which = draw(st.sampled_from(leaves + (["map", "map", "array", "record"] * 2 if depth else [])))
        if which in ("map", "array"):
            inner, values = kind(depth - 1)
            if which == "array":
                return {"type": "array", "items": inner}, st.lists(values, max_size=3)
            return {"type": "map", "values": inner}, st.dictionaries(TEXTS, values, max_size=3)
        if which == "record":
            inner, values = kind(depth - 1)
            schema = {"type": "record", "name": f"r{next(names)}", "fields": [{"name": "x", "type": ["null", inner]}]}
            return schema, st.fixed_dictionaries({"x": st.none() | values})
        return {
            "long": ("long", ints(64)),
            "string": ("string", TEXTS),
            "decimal": (
                {"type": "bytes", "logicalType": "decimal", "precision": 9, "scale": 2},
                decimals(9, 2),
            ),
            "fixed": ({"type": "fixed", "name": f"f{next(names)}", "size": 2}, st.binary(min_size=2, max_size=2)),
            "enum": ({"type": "enum", "name": f"e{next(names)}", "symbols": ["A", "B"]}, st.sampled_from("AB")),
            "day": ({"type": "int", "logicalType": "date"}, st.dates(date(1000, 1, 1), date(3000, 1, 1))),
        }[which]

    inner, values = kind(3)
    schema = {"type": "record", "name": "top", "fields": [{"name": "v", "type": inner}]}
    return schema, draw(st.lists(st.fixed_dictionaries({"v": values}), max_size=4))


@given(nested())
def test_what_is_read_can_be_written(case: tuple[Any, list[Any]]) -> None:
    """The array that ``get_many`` returns gives the bytes that the serde wrote, also with maps and lists."""
    schema, values = case
    with tempfile.TemporaryDirectory() as directory:
        made = opened(directory, schema)
        keys = [f"k{number}" for number in range(len(values))]
        for key, value in zip(keys, values, strict=True):
            made.store.put(key, value)
        arrow = ArrowStore(made.store)
        found = arrow.get_many(pa.array(keys, pa.string()))
        copies = pa.array([f"copy-{key}" for key in keys], pa.string())
        arrow.put_many(copies, found)
        assert [made.store.get(key) for key in copies.to_pylist()] == values
        made.opened.close()
