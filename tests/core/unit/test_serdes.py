"""Serdes: values survive a round trip, integers keep their order, and new schemas read old Avro values."""

from __future__ import annotations

import gc
import json
import struct
from collections.abc import Iterator
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from typing import Any
from uuid import UUID

import fastavro
import msgpack
import pytest
from fastavro.write import LOGICAL_WRITERS

from statemgr.errors import ConfigError, CorruptError, InvalidError
from statemgr.serdes import Serde, avro_serde, serde

FIRST = json.dumps(
    {"type": "record", "name": "Total", "fields": [{"name": "count", "type": "int"}, {"name": "old", "type": "string"}]}
)
SECOND = json.dumps(
    {
        "type": "record",
        "name": "Total",
        "fields": [{"name": "count", "type": "long"}, {"name": "note", "type": ["null", "string"], "default": None}],
    }
)


@pytest.fixture
def no_collection() -> Iterator[None]:
    """Disable garbage collection in this test.

    With Python 3.11, a collection may start at the deepest level of recursion, while a deeply nested value is parsed.
    The finalizers of objects from other tests then fail with RecursionError.
    """
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("bytes", b"\x00\xff"),
        ("string", "ü€😀"),
        ("integer", -(1 << 63)),
        ("integer", (1 << 63) - 1),
        ("json", {"b": [1, None, "ü"], "a": 1.5}),
        ("msgpack", {"b": [1, None, "ü", b"\x00"], "a": 1.5, 7: True}["b"]),
        ("msgpack", {"b": b"\xff", "a": [1 << 63, -1]}),
        ("msgpack", {7: "x", 3: "y"}),
        ("msgpack", msgpack.ExtType(5, b"x")),
        ("msgpack", {msgpack.ExtType(5, b"x"): [msgpack.ExtType(6, b"y")]}),
    ],
)
def test_what_was_written_is_read(name: str, value: Any) -> None:
    """A value comes back equal and with its own type."""
    chosen = serde(name)
    found = chosen.deserialize(chosen.serialize(value))
    assert found == value
    assert type(found) is type(value)


def test_integers_sort_as_numbers() -> None:
    """The bytes of integers have the same order as the numbers."""
    numbers = [-(1 << 63), -256, -1, 0, 1, 255, 256, (1 << 63) - 1]
    written = [serde("integer").serialize(number) for number in numbers]
    assert written == sorted(written)


@pytest.mark.parametrize("name", ["json", "msgpack"])
def test_equal_maps_have_equal_bytes(name: str) -> None:
    """Equal maps have equal bytes at every depth, whatever the order of their keys, so a map can be a key."""
    one = serde(name).serialize({"a": 1, "b": [{"x": 1, "y": 2}]})
    other = serde(name).serialize({"b": [{"y": 2, "x": 1}], "a": 1})
    assert one == other


@pytest.mark.parametrize("value", [object(), 1 << 70, {1: 1, "a": 1}, {(1, 2): "x"}, [{"a": {(): 1}}]])
def test_what_does_not_fit_into_messagepack(value: object) -> None:
    """A value that MessagePack cannot represent is refused."""
    with pytest.raises(InvalidError, match="MessagePack"):
        serde("msgpack").serialize(value)


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\x92\x01", b"\x01\x02"])
def test_bytes_that_are_no_messagepack(data: bytes) -> None:
    """Bytes that are cut, too long or empty raise an error with a hint."""
    with pytest.raises(CorruptError, match="serde"):
        serde("msgpack").deserialize(data)


def nested(depth: int) -> Any:
    """Return a list in a list in a list …"""
    value: Any = []
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("string", b"bytes"), ("string", None), ("string", 5), ("string", "\ud800"),
        ("integer", 1 << 63), ("integer", -(1 << 63) - 1), ("integer", 10**5000), ("integer", "5"), ("integer", 1.5),
        ("integer", None), ("json", float("nan")), ("json", float("inf")), ("json", "\udfff"), ("json", b"x"),
        ("json", {1: 1, "a": 2}), ("json", 10**5000), ("json", nested(100_000)), ("msgpack", "\ud800"),
        ("msgpack", nested(100_000)),
    ],
    ids=lambda _: "odd",
)  # fmt: skip
@pytest.mark.usefixtures("no_collection")
def test_a_value_without_a_form_is_refused(name: str, value: Any) -> None:
    """A serde refuses a value that it cannot write with a short InvalidError, without the value."""
    with pytest.raises(InvalidError) as caught:
        serde(name).serialize(value)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("string", b"\xff"), ("string", b"\xed\xa0\x80"), ("string", b"\xc3"),
        ("integer", b""), ("integer", bytes(7)), ("integer", bytes(9)),
        ("json", b""), ("json", b"\xff"), ("json", b"NaN"), ("json", b"[-Infinity]"), ("json", b"{"), ("json", b"1 2"),
        ("json", b"[" * 100_000), ("json", b"9" * 5000), ("msgpack", b"\x91" * 100_000), ("msgpack", b"\xa1\xff"),
    ],
    ids=lambda _: "odd",
)  # fmt: skip
@pytest.mark.usefixtures("no_collection")
def test_bytes_that_a_serde_cannot_read(name: str, data: bytes) -> None:
    """Bytes that are of another serde, cut, too deeply nested or not UTF-8 raise CorruptError with a hint."""
    with pytest.raises(CorruptError, match="serde"):
        serde(name).deserialize(data)


def test_any_pair_of_callables() -> None:
    """A pair of callables works as a serde, and a Serde is used unchanged."""
    pair = serde((lambda value: value.encode("latin-1"), lambda data: data.decode("latin-1")))
    assert pair.deserialize(pair.serialize("é")) == "é"
    own = Serde(bytes, bytes)
    assert serde(own) is own


@pytest.mark.parametrize("name", ["strnig", "avro"])
def test_unknown_names(name: str) -> None:
    """The error for an unknown name, or for Avro without schemas, says what to do."""
    with pytest.raises(ConfigError, match=r"pair of callables|avro_serde"):
        serde(name)


@pytest.mark.parametrize("which", [(str,), (str, "x"), [str, str], 5, str])
def test_what_is_no_serde(which: Any) -> None:
    """Anything but a name, a pair of callables or a Serde is a configuration error."""
    with pytest.raises(ConfigError, match="serde"):
        serde(which)


# --- Avro ----------------------------------------------------------------------------------------------------------


def test_avro_values_are_single_objects() -> None:
    """The bytes are the mark, the writer's fingerprint and the body of the Avro specification."""
    data = avro_serde([FIRST]).serialize({"count": 3, "old": "x"})
    text = fastavro.schema.to_parsing_canonical_form(json.loads(FIRST))
    assert data[:2] == b"\xc3\x01"
    assert data[2:10] == struct.pack("<Q", rabin(text.encode()))
    assert data[10:] == b"\x06\x02x"


def rabin(data: bytes) -> int:
    """Compute CRC-64-AVRO as in the specification."""
    empty = 0xC15D213AA4D7A795
    result = empty
    for byte in data:
        entry = (result ^ byte) & 0xFF
        for _ in range(8):
            entry = (entry >> 1) ^ (empty if entry & 1 else 0)
        result = (result >> 8) ^ entry
    return result


def test_avro_values_evolve() -> None:
    """An older value is read as the newest type: widened, without removed fields and with defaults for new ones."""
    old = avro_serde([FIRST]).serialize({"count": 3, "old": "x"})
    evolved = avro_serde([FIRST, SECOND])
    assert evolved.deserialize(old) == {"count": 3, "note": None}
    new = evolved.serialize({"count": 1 << 40, "note": "y"})
    assert evolved.deserialize(new) == {"count": 1 << 40, "note": "y"}


def test_avro_value_of_an_unknown_schema() -> None:
    """A value whose writer's schema is not listed raises an error that names the key to look at."""
    data = avro_serde([SECOND]).serialize({"count": 3})
    with pytest.raises(CorruptError, match=r"unknown fingerprint .*value\.avro\.schemas"):
        avro_serde([FIRST]).deserialize(data)


def test_avro_evolution_without_a_default() -> None:
    """A new field without a default cannot be read from an older value, and the error says so."""
    third = SECOND.replace(', "default": null', "")
    assert third != SECOND
    old = avro_serde([FIRST]).serialize({"count": 3, "old": "x"})
    with pytest.raises(CorruptError, match="default"):
        avro_serde([FIRST, third]).deserialize(old)


def record(*fields: dict[str, Any]) -> dict[str, Any]:
    """The schema of a record with a whole number, and these fields."""
    return {"type": "record", "name": "R", "fields": [{"name": "n", "type": "int"}, *fields]}


STRINGS = {"type": "array", "items": "string"}
TIMESTAMP = {"type": "long", "logicalType": "timestamp-millis"}
DATE = {"type": "int", "logicalType": "date"}
DECIMAL = {"type": "bytes", "logicalType": "decimal", "precision": 6, "scale": 2}


@pytest.mark.parametrize("form", ["record", "map", "union"])
def test_each_avro_value_has_its_own_default(form: str) -> None:
    """A list or a map that is a default belongs to one value: what is added to it appears nowhere else."""
    fields = [{"name": name, "type": {"type": "map", "values": STRINGS}, "default": {"x": []}} for name in ("a", "b")]
    old, new = (
        json.dumps({"record": of, "map": {"type": "map", "values": of}, "union": ["null", of]}[form])
        for of in (record(), record(*fields))
    )
    values = {"k": {"n": 1}, "l": {"n": 1}} if form == "map" else {"n": 1}
    data, evolved = avro_serde([old]).serialize(values), avro_serde([old, new])
    first, second = evolved.deserialize(data), evolved.deserialize(data)
    untouched = [first["l"], *second.values()] if form == "map" else [second]
    changed = first["k"] if form == "map" else first
    changed["a"]["x"].append("y")
    changed["a"]["z"] = []
    assert all(one == {"n": 1, "a": {"x": []}, "b": {"x": []}} for one in [*untouched, {**changed, "a": {"x": []}}])


@pytest.mark.parametrize("form", ["record", "array"])
@pytest.mark.parametrize(
    ("kind", "default", "value"),
    [
        ("bytes", "\xff", b"\xff"),
        (["null", "bytes"], None, None),
        (["bytes", "null"], "\xff", b"\xff"),
        (["null", DATE], 1, date(1970, 1, 2)),
        (["null", "long", "bytes"], None, None),
        ({"type": "fixed", "name": "F", "size": 2}, "\xff\x00", b"\xff\x00"),
        (DECIMAL, "\x01", Decimal("0.01")),
        ({**DECIMAL, "type": "fixed", "name": "F", "size": 3}, "\x00\x00\x01", Decimal("0.01")),
        (DATE, 1, date(1970, 1, 2)),
        (TIMESTAMP, 0, datetime(1970, 1, 1, tzinfo=UTC)),
        ({"type": "string", "logicalType": "uuid"}, str(UUID(int=5)), UUID(int=5)),
    ],
)
def test_avro_defaults_are_values_of_their_type(kind: Any, default: Any, value: Any, form: str) -> None:
    """A default is JSON in a schema, and the value that it stands for in what is read: it can be written again, and is
    what a value without the field is written with."""

    def of(one: Any) -> str:
        return json.dumps(one if form == "record" else {"type": "array", "items": one})

    wrap = (lambda one: one) if form == "record" else lambda one: [one]
    old, new = of(record()), of(record({"name": "x", "type": kind, "default": default}))
    evolved = avro_serde([old, new])
    read = evolved.deserialize(avro_serde([old]).serialize(wrap({"n": 1})))
    assert read == wrap({"n": 1, "x": value})
    assert type(read[0]["x"] if form == "array" else read["x"]) is type(value)
    assert evolved.deserialize(evolved.serialize(read)) == read
    assert evolved.deserialize(evolved.serialize(wrap({"n": 1}))) == read


U = {"type": "record", "name": "U", "fields": [{"name": "m", "type": "int", "default": 7}]}
V = {"type": "record", "name": "V", "fields": [{"name": "n", "type": "int"}]}


@pytest.mark.parametrize(
    ("kind", "default"),
    [
        (["null", U, V], {"n": 1}),
        ([U, {"type": "map", "values": "int"}], {"x": 1}),
        ({"type": "array", "items": [U, V]}, [{"n": 1}, {"m": 2}]),
        ([{**U, "fields": [{"name": "m", "type": DATE}]}, V], {"n": 1}),
        (["null", "bytes", "string"], "unknown"),
        (["null", DECIMAL, "string"], "unknown"),
        ([{"type": "fixed", "name": "F", "size": 5}, "string"], "hello"),
        ([DATE, "long"], 3_000_000_000),
    ],
)
def test_an_avro_default_that_could_be_of_several_types(kind: Any, default: Any) -> None:
    """It stays as the schema has it: read as another type of the union, it would be stored as another value."""
    old, new = json.dumps(record()), json.dumps(record({"name": "x", "type": kind, "default": default}))
    evolved = avro_serde([old, new])
    for data in (avro_serde([old]).serialize({"n": 1}), evolved.serialize({"n": 1})):
        read = evolved.deserialize(data)
        assert read == {"n": 1, "x": default}
        assert type(read["x"]) is type(default)


@pytest.mark.parametrize(
    ("kind", "default"),
    [
        ("bytes", "€"),
        ({"type": "fixed", "name": "F", "size": 2}, "abc"),
        ({"type": "string", "logicalType": "uuid"}, ""),
        ([{"type": "string", "logicalType": "uuid"}, "null"], "unknown"),
        (TIMESTAMP, (1 << 63) - 1),
        (TIMESTAMP, -1 << 63),
        (DATE, (1 << 31) - 1),
        ({"type": "int", "logicalType": "time-millis"}, 86_400_000),
        ({"type": "int", "logicalType": "time-millis"}, -1),
        (DECIMAL, "unknown"),
        ({"type": "bytes", "logicalType": "decimal"}, "\x01"),
    ],
)
def test_an_avro_default_that_is_no_value_of_its_type(kind: Any, default: Any) -> None:
    """It stays as the schema has it: "never" may be the largest time. Values that give the field can be written."""
    field = {"name": "x", "type": kind, "default": default}
    old, new = json.dumps(record()), json.dumps(record(field, {"name": "y", "type": "int", "default": 0}))
    evolved = avro_serde([old, json.dumps(record(field)), new])
    read = evolved.deserialize(avro_serde([old]).serialize({"n": 1}))
    assert read == {"n": 1, "x": default, "y": 0}
    assert type(read["x"]) is type(default)


@pytest.mark.parametrize("change", ["cut", "longer", "other mark", "empty"])
def test_avro_bytes_that_are_altered(change: str) -> None:
    """Bytes that are not exactly one value raise CorruptError."""
    data = avro_serde([FIRST]).serialize({"count": 3, "old": "xyz"})
    altered = {"cut": data[:-1], "longer": data + b"\x00", "other mark": b"\xc3\x02" + data[2:], "empty": b""}[change]
    with pytest.raises(CorruptError):
        avro_serde([FIRST]).deserialize(altered)


@pytest.mark.parametrize("value", [{"count": "three", "old": "x"}, {"old": "x"}, 3])
def test_values_that_do_not_fit_their_schema(value: object) -> None:
    """A value of another type, or without a field, is refused."""
    with pytest.raises(InvalidError, match="schema"):
        avro_serde([FIRST]).serialize(value)


#: A record with one field of its own, for unions.
ONE_LONG = {"type": "record", "name": "S", "fields": [{"name": "y", "type": "long"}]}
ODD_DECIMALS = [Decimal(text) for text in ("1.234", "12345", "1E30000000", "0E30000000", "NaN", "Infinity")]
EAST = timezone(timedelta(hours=3))
NOON = datetime(2026, 11, 27, 12, tzinfo=UTC)
MICROS = NOON + timedelta(microseconds=1)


@pytest.mark.parametrize(
    ("kind", "plain", "odd"),
    [
        ("long", [5, 5.0, True], [1.99, "5", None]),
        ("int", [-(1 << 31)], [1 << 31]),
        (TIMESTAMP, [NOON, NOON.astimezone(EAST), 5, 5.0], [1.5, Decimal("1.99"), MICROS, NOON.replace(tzinfo=None)]),
        ({"type": "long", "logicalType": "timestamp-micros"}, [MICROS], [MICROS.replace(tzinfo=None)]),
        ({"type": "long", "logicalType": "local-timestamp-micros"}, [MICROS.replace(tzinfo=None)], [MICROS]),
        (
            {"type": "long", "logicalType": "local-timestamp-millis"},
            [NOON.replace(tzinfo=None)],
            [NOON, MICROS.replace(tzinfo=None)],
        ),
        (DATE, [date(2026, 11, 27), "2026-11-27", 5], [NOON, NOON.replace(tzinfo=None), 1.5, Decimal("1.99")]),
        (
            {"type": "int", "logicalType": "time-millis"},
            [time(12, 0, 0, 5000)],
            [time(12, 0, 0, 5), time(12, tzinfo=EAST)],
        ),
        ({"type": "long", "logicalType": "time-micros"}, [time(12, 0, 0, 5)], [time(12, tzinfo=EAST)]),
        (DECIMAL, [Decimal("-1234.56"), Decimal("1E3"), Decimal(0)], ODD_DECIMALS),
        ({**DECIMAL, "type": "fixed", "name": "F", "size": 4}, [Decimal("-1234.56"), Decimal("1E3")], ODD_DECIMALS),
        (["null", DATE, TIMESTAMP], [date(2026, 11, 27), ("long", NOON)], [NOON]),
        (["string", TIMESTAMP], ["x", NOON], [MICROS]),
        (["string", DECIMAL], ["x", Decimal(1)], ODD_DECIMALS),
        ({"type": "long", "logicalType": "other"}, [5], [1.99]),
        ({"type": "boolean", "logicalType": "other"}, [True], ["no"]),
        ({"type": "array", "logicalType": "other", "items": "long"}, [[1]], [[1.99]]),
        ({**ONE_LONG, "logicalType": "other"}, [{"y": 1}], [{"y": 1.99}, {"y": 1, "z": 1}]),
        (DECIMAL, [], [b"ab", bytearray(b"ab"), 5, 1.5, "1.5"]),
        (["null", {**DECIMAL, "type": "fixed", "name": "F", "size": 3}], [None, Decimal(1)], [b"abc", 5]),
        ([DECIMAL, "long", "string"], [5, "5", Decimal(5)], [b"ab", ("bytes", b"ab")]),
        ([DATE, "string"], [date(2026, 11, 27), ("string", "x"), ("string", "2026-11-27")], ["x", "2026-11-27"]),
        ([DATE, TIMESTAMP, "null"], ["2026-11-27", 5, NOON.date(), ("long", NOON), None], [NOON]),
        (["string", DATE], ["2026-11-27", date(2026, 11, 27), ("int", date(2026, 11, 27)), 5], []),
        ([DATE, "long"], [date(2026, 11, 27), ("long", 5), ("int", 5)], [5]),
        ([TIMESTAMP, "double"], [NOON, 1.5, ("double", 5)], [5]),
        ("boolean", [False, 1], ["no", None, 5]),
        (["null", "float"], [None, ("null", None), 0.5, 3e38, float("inf")], [1e300]),
        ({"type": "array", "items": "string"}, [["ab"]], ["ab", {"a": "b"}]),
        ({"type": "map", "values": "long"}, [{"a": 1}], [{"a": 1.5}]),
        (["null", "R"], [{"x": None}, {"-type": "R"}], [{"y": 1}, {"x": {"y": 1}}]),
        ("double", [1, 1 << 60, float("nan"), 1e300], [(1 << 60) + 1]),
        (["double", "long"], [1, ("long", (1 << 60) + 1)], [(1 << 60) + 1]),
        (["long", "double"], [(1 << 60) + 1, 0.1], [1 << 2000]),
        (["null", "float", "string"], [None, 0.5, "a"], [1e300, (1 << 24) + 1]),
        (["float", "double"], [1e300, 0.1], [("float", 1e300)]),
        ("double", ["NaN"], []),
        ([{"type": "array", "items": "string"}, "bytes"], [b"ab", ["a"]], ["ab"]),
        ({**DECIMAL, "precision": 2, "scale": 2}, [Decimal(0), Decimal("0.00"), Decimal("0.25")], [Decimal(1)]),
        ({**DECIMAL, "precision": 4, "scale": 2}, [Decimal("0E+3")], [Decimal("0E+3000000"), Decimal("NaN")]),
        ([{"type": "array", "items": "long"}, "bytes"], [[1], ("bytes", b"ab")], [b"ab", [1.5]]),
        ([{"type": "fixed", "name": "F", "size": 2}, {"type": "array", "items": "long"}], [b"ab", [1]], [b"abc"]),
        (
            ["null", "R", ONE_LONG],
            [{"y": 1}, ("S", {"y": 1}), {"x": None}],
            [{"z": 1}, {"x": None, "y": 1}, {"y": 1.5}],
        ),
        ([ONE_LONG, {"type": "map", "values": "long"}], [{"y": 1}, {"z": 1}], [{"z": 1.5}, ("S", {"z": 1})]),
    ],
)
def test_values_that_would_be_stored_as_others_are_refused(kind: Any, plain: list[Any], odd: list[Any]) -> None:
    """A fraction, any object as a boolean, a float that becomes infinite, a large number that loses digits, a time that
    loses microseconds or its zone, a field that the schema lacks: the writer of Avro takes them all, and stores
    something else."""
    check_values(kind, plain, odd)


def test_times_of_pandas_keep_their_nanoseconds_or_are_refused() -> None:
    """A time of pandas is a ``datetime`` that may have nanoseconds; one of NumPy would be stored as its number."""
    time, number = pytest.importorskip("pandas").Timestamp, pytest.importorskip("numpy").datetime64
    micros = {"type": "long", "logicalType": "timestamp-micros"}
    odd = [time("2026-11-27T12:00:00.000001001", tz="UTC"), number(5, "ns"), number(5, "ms")]
    check_values(micros, [time("2026-11-27T12:00:00.000001", tz="UTC")], odd)


def check_values(kind: Any, plain: list[Any], odd: list[Any]) -> None:
    """A field of this type takes each plain value, and none of the odd ones."""
    field = {"name": "x", "type": kind, **({"default": None} if "null" in kind else {})}
    chosen = avro_serde([json.dumps({"type": "record", "name": "R", "fields": [field]})])
    for value in plain:
        assert chosen.serialize({"x": value})
    for value in odd:
        with pytest.raises(InvalidError, match="schema"):
            chosen.serialize({"x": value})


@pytest.mark.parametrize("of", [{"type": "bytes"}, {"type": "fixed", "name": "F", "size": 4}])
@pytest.mark.parametrize("text", ["0.00", "-0.01", "-1.28", "1.28", "-9999.99"])
def test_decimals_are_stored_as_they_are(of: dict[str, Any], text: str) -> None:
    """A decimal comes back equal."""
    chosen = avro_serde([json.dumps({**DECIMAL, **of})])
    assert chosen.deserialize(chosen.serialize(Decimal(text))) == Decimal(text)


@pytest.mark.parametrize("text", ["-0", "-0.00", "-0E+2"])
def test_a_zero_with_a_sign_in_a_fixed_decimal(text: str) -> None:
    """fastavro would store -2 of the smallest units, so it is refused. A decimal of bytes takes it."""
    fixed = avro_serde([json.dumps({**DECIMAL, "type": "fixed", "name": "F", "size": 4})])
    with pytest.raises(InvalidError, match=r"the value .*abs"):
        fixed.serialize(Decimal(text))
    assert fixed.deserialize(fixed.serialize(abs(Decimal(text)))) == 0
    plain = avro_serde([json.dumps(DECIMAL)])
    assert plain.deserialize(plain.serialize(Decimal(text))) == 0


def test_the_writers_of_fastavro_stay_its_own() -> None:
    """An application may use fastavro, too: importing statemgr changes nothing there."""
    assert LOGICAL_WRITERS["fixed-decimal"].__module__.startswith("fastavro.")


MILLIS_AND_MICROS = [TIMESTAMP, {"type": "long", "logicalType": "timestamp-micros"}]


@pytest.mark.parametrize("kind", [["null", DATE, "int"], MILLIS_AND_MICROS, [STRINGS, {**STRINGS, "items": "int"}]])
def test_unions_with_two_members_of_one_type_are_refused(kind: list[Any]) -> None:
    """Avro forbids such a union: a value for one member would be cut to what the other one holds. A version that was
    written before may have one, and the error says how to go on."""
    schema = json.dumps(record({"name": "x", "type": kind}))
    with pytest.raises(ConfigError, match=r"R\.x is a union .* which Avro forbids .*append a version"):
        avro_serde([schema])
    assert avro_serde([schema, json.dumps(record())]).serialize({"n": 1})


@pytest.mark.parametrize(
    ("kind", "logical", "odd", "plain"),
    [
        ("string", "uuid", "not-a-uuid", UUID(int=5)),
        ("int", "date", 1 << 30, date(2026, 11, 27)),
        ("int", "time-millis", 1 << 30, time(15, 2)),
        ("long", "timestamp-millis", 1 << 62, datetime(2026, 11, 27, tzinfo=UTC)),
    ],
)
def test_logical_values_that_could_not_be_read_are_refused(kind: str, logical: str, odd: object, plain: object) -> None:
    """A value that its logical type cannot represent is refused when it is written."""
    field = {"name": "x", "type": ["null", {"type": kind, "logicalType": logical}]}
    chosen = avro_serde([json.dumps({"type": "record", "name": "R", "fields": [field]})])
    assert chosen.deserialize(chosen.serialize({"x": plain})) == {"x": plain}
    with pytest.raises(InvalidError, match="schema"):
        chosen.serialize({"x": odd})


@pytest.mark.parametrize("schemas", [[], ["{"], ['"nothing"'], ['{"type": "record"}'], [FIRST, "null"]])
def test_schemas_that_are_none(schemas: list[str]) -> None:
    """An invalid schema is a configuration error."""
    with pytest.raises(ConfigError, match="schema"):
        avro_serde(schemas)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({"type": "bytes", "logicalType": "decimal", "precision": 9, "scale": 2}, {"precision": 12, "scale": 4}),
        ({"type": "bytes", "logicalType": "decimal", "precision": 9, "scale": 2}, {"precision": 11}),
        ({"type": "long", "logicalType": "timestamp-millis"}, {"logicalType": "timestamp-micros"}),
    ],
)
def test_schemas_that_differ_in_what_values_do_not_name(old: dict[str, Any], new: dict[str, Any]) -> None:
    """Values name no logical types and scales, so two schemas that differ in them are refused. A precision may grow."""
    first, second, third = (
        json.dumps({"type": "record", "name": "R", "fields": [{"name": "x", "type": ["null", of]}]})
        for of in (old, {**old, "precision": 12}, {**old, **new})
    )
    assert avro_serde([first, second]).serialize({"x": None})
    with pytest.raises(ConfigError, match="scale"):
        avro_serde([first, second, third])
