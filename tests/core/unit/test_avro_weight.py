"""Decoders check how much memory a value, an index or a chain would take before they decode it."""

from __future__ import annotations

import io
import json
import pickle
import random
from typing import Any

import fastavro
import msgpack
import pytest

from statemgr.errors import CorruptError, InvalidError
from statemgr.model.codecs.schemas import single_objects
from statemgr.serdes import avro_serde, serde
from statemgr.serdes.avro import HEADER_SIZE, header_of
from statemgr.serdes.avro_weight import MAX_DEPTH
from tests.limited import run_limited

NULLS = json.dumps(
    {"type": "record", "name": "N", "fields": [{"name": "x", "type": {"type": "array", "items": "null"}}]}
)
NODE = json.dumps(
    {"type": "record", "name": "Node", "fields": [{"name": "next", "type": ["null", "Node"], "default": None}]}
)
EMPTY = json.dumps({"type": "array", "items": {"type": "record", "name": "E", "fields": []}})


def zigzag(value: int) -> bytes:
    """Encode a number as an Avro long."""
    sink = io.BytesIO()
    fastavro.schemaless_writer(sink, "long", value)
    return sink.getvalue()


#: A flat list of records, each of which has the one before as a field. Nothing refers to itself.
CHAIN = [{"type": "record", "name": "R0", "fields": [{"name": "x", "type": ["null", "int"]}]}] + [
    {"type": "record", "name": f"R{number}", "fields": [{"name": "x", "type": f"R{number - 1}"}]}
    for number in range(1, 2_000)
]  # fmt: skip
GROWING = {
    "nulls": (NULLS, zigzag(100_000_000) + b"\0"),
    "blocks": (NULLS, (zigzag(1_000_000) * 100) + b"\0"),
    "negative": (NULLS, zigzag(-100_000_000) + zigzag(0) + b"\0"),
    "endless": (NULLS, zigzag((1 << 63) - 1)),
    "empty records": (EMPTY, zigzag(50_000_000) + b"\0"),
    "deep": (NODE, b"\2" * 1_000_000 + b"\0"),
    "just too deep": (NODE, b"\2" * (MAX_DEPTH + 1) + b"\0"),
    "deep without recursion": (json.dumps(CHAIN), zigzag(len(CHAIN) - 1) + b"\0"),
}
#: Reads values with little memory: name → (schemas of Avro, or the name of a serde, and the bytes). Prints each error.
READ = """
import pickle
from statemgr.errors import CorruptError
from statemgr.serdes import avro_serde, serde
cases = {
    name: (serde(kind) if isinstance(kind, str) else avro_serde(kind), data)
    for name, (kind, data) in pickle.load(sys.stdin.buffer).items()
}
limit(64)
for name, (chosen, data) in cases.items():
    try:
        chosen.deserialize(data)
    except CorruptError as error:
        print(name, error, sep=": ", flush=True)
"""


def errors_of(cases: dict[str, tuple[list[str] | str, bytes]]) -> dict[str, str]:
    """Return the error of each value that a child with little memory cannot read."""
    lines = run_limited(READ, data=pickle.dumps(cases)).splitlines()
    return {name: error for name, _, error in (line.partition(": ") for line in lines)}


@pytest.mark.long
def test_a_value_that_grows_is_refused_before_it_is_decoded() -> None:
    """FAULT 59, J0.5: items of zero bytes and deep values raise CorruptError and take little memory."""
    found = errors_of(
        {name: ([schema], header_of(json.loads(schema)) + body) for name, (schema, body) in GROWING.items()}
    )
    assert [*found] == [*GROWING]
    assert all("memory" in error or "nested" in error for error in found.values())


WRITE = """
import json
from statemgr.errors import InvalidError, StatemgrError
from statemgr.serdes import avro_serde, serde
NODE = {"type": "record", "name": "Node", "fields": [{"name": "next", "type": ["null", "Node"], "default": None}]}
value, deep, itself = {"next": None}, [], {}
itself["next"] = itself
for _ in range(100_000):
    value, deep = {"next": value}, [deep]
limit(256)
for name, chosen, given in (
    ("avro", avro_serde([json.dumps(NODE)]), value), ("itself", avro_serde([json.dumps(NODE)]), itself),
    ("json", serde("json"), deep), ("msgpack", serde("msgpack"), deep),
):
    try:
        chosen.serialize(given)
    except InvalidError as error:
        print(name, flush=True)
for name, data in (("json", b"[" * 100_000 + b"]" * 100_000), ("msgpack", bytes([0x91]) * 100_000)):
    try:
        serde(name).deserialize(data)
    except StatemgrError as error:
        print("read", name, flush=True)
import os
os._exit(0)  # the values are freed level by level, too
"""


def test_a_value_that_is_nested_deeply_is_not_written() -> None:
    """J0.5: an encoder nests on its own stack, so a deep value ended the process."""
    assert run_limited(WRITE).splitlines() == ["avro", "itself", "json", "msgpack", "read json", "read msgpack"]


def test_the_writers_schema_is_what_is_walked() -> None:
    """FAULT 59: the check includes fields that the newest schema leaves out, which the decoder skips item by item."""
    without = json.dumps({"type": "record", "name": "N", "fields": []})
    data = header_of(json.loads(NULLS)) + zigzag(1 << 62) + b"\0"
    assert "memory" in errors_of({"nulls": ([NULLS, without], data)})["nulls"]


def test_a_skipped_text_ends_within_the_value() -> None:
    """J0.5: a field that the newest schema leaves out may be longer than the rest of the value."""
    without = json.dumps({"type": "record", "name": "N", "fields": []})
    old = json.dumps({"type": "record", "name": "N", "fields": [{"name": "s", "type": "string"}]})
    written, chosen = avro_serde([old]).serialize({"s": "abc"}), avro_serde([old, without])
    assert chosen.deserialize(written) == {}
    for damaged in (written[:-1], written[:10] + zigzag(1 << 40) + b"a", written + b"a"):
        with pytest.raises(CorruptError, match=r"end within|left after"):
            chosen.deserialize(damaged)


@pytest.mark.parametrize("schema", [NULLS, NODE])
def test_what_would_not_be_read_is_not_written(schema: str) -> None:
    """FAULT 59: writing has the same limit as reading, so that every value that is written can be read."""
    value: Any = {"next": None}
    for _ in range(MAX_DEPTH):
        value = {"next": value}
    chosen = avro_serde([schema])
    with pytest.raises(InvalidError):
        chosen.serialize({"x": [None] * 3_000_000} if schema == NULLS else value)


def test_normal_values_pass() -> None:
    """Values of every type, including nested and recursive ones, survive a round trip."""
    kinds: list[Any] = ["null", "boolean", "int", "long", "float", "double", "bytes", "string"]
    kinds += [{"type": "array", "items": "Node"}, {"type": "map", "values": ["null", "long"]}]
    kinds += [{"type": "fixed", "name": "F", "size": 3}, {"type": "enum", "name": "C", "symbols": ["A", "B"]}]
    fields = [{"name": "next", "type": ["null", "Node"]}]
    fields += [{"name": f"f{n}", "type": kind} for n, kind in enumerate(kinds)]
    chosen = avro_serde([json.dumps({"type": "record", "name": "Node", "fields": fields})])
    inner = [None, True, -5, 1 << 40, 0.5, 0.25, b"x" * 300, "ü" * 300, [], {"a": None, "b": 1 << 62}, b"abc", "B"]
    value = {"next": None} | {f"f{n}": item for n, item in enumerate(inner)}
    value = value | {"next": value, "f8": [value, value]}
    assert chosen.deserialize(chosen.serialize(value)) == value
    nulls = avro_serde([NULLS])
    assert nulls.deserialize(nulls.serialize({"x": [None] * 1000})) == {"x": [None] * 1000}


def test_an_array_is_as_long_as_its_bytes_in_messagepack() -> None:
    """FAULT 59: nested MessagePack arrays that claim more items than their bytes can hold take little memory."""
    deep = b"\xdd\x00\x0f\x00\x00" * 500 + b"\0" * 1_000_000
    claims = {"deep": deep, "32 bits": b"\xdd\x00\x00\x10\x00" * 800, "16 bits": b"\xdc\xff\xff" * 900}
    assert errors_of({name: ("msgpack", data) for name, data in claims.items()}).keys() == claims.keys()
    whole = [list(range(20_000)), b"\xdd" * 10]
    assert serde("msgpack").deserialize(msgpack.packb(whole)) == whole


def record(schema: str, body: bytes) -> bytes:
    """Return a record of a schema that is part of statemgr."""
    return single_objects(schema).header + body


def texts(count: int) -> bytes:
    """Encode a number of short texts."""
    return b"\2a" * count


#: Decodes its standard input with 96 MiB of memory to spare, and prints the error that this raises.
CHILD = """
from statemgr.errors import CorruptError
from statemgr.model import codecs
data = sys.stdin.buffer.read()
try:
    getattr(codecs, sys.argv[1])(b"x", "b")
except CorruptError:
    pass
limit()
try:
    getattr(codecs, sys.argv[1])(data, "b")
except CorruptError as error:
    print(error)
"""


def test_an_index_that_grows_is_refused_before_it_is_decoded() -> None:
    """FAULT 59, FAULT 27: an index of nine megabytes that would take 800 MB is refused with 96 MiB left."""
    entry = zigzag(0) + zigzag(0) + zigzag(0)
    body = texts(6) + zigzag(1) + b"\0" + zigzag(3_000_000) + entry * 3_000_000 + b"\0"
    assert "far more memory" in run_limited(CHILD, "decode_index", data=record("snapshot_index.v1", body))


@pytest.mark.long
def test_a_chain_that_grows_is_refused_before_it_is_decoded() -> None:
    """FAULT 59: the decoder refuses two million segments of five bytes, as it refuses such an index."""
    snapshot = texts(1) + zigzag(5) + bytes(16) + b"\0" + texts(1) + zigzag(0)
    entry = zigzag(0) + zigzag(1) + b"\0" + b"\2\0"
    body = texts(7) + zigzag(1) + snapshot + zigzag(2_000_000) + entry * 2_000_000 + b"\0\0"
    assert "far more memory" in run_limited(CHILD, "decode_chain", data=record("segment_chain.v1", body))


#: Decodes records with little memory, as each kind.
ALTERED = """
import pickle
from statemgr.errors import CorruptError
from statemgr.model import codecs
records = pickle.load(sys.stdin.buffer)
for data in (b"x", *records):
    for decode in (codecs.decode_index, codecs.decode_chain, codecs.decode_prepared):
        try:
            print(decode(data))
        except CorruptError:
            pass
    if data == b"x":  # the modules are loaded
        limit(24)
"""


def test_altered_records_never_take_much_memory() -> None:
    """FAULT 59: random bytes in a record of any kind raise an error and take a bounded amount of memory."""
    random_source = random.Random(59)
    records = [
        record(schema, random_source.randbytes(random_source.choice((10, 200, 3000))))
        for schema in ("snapshot_index.v1", "segment_chain.v1", "checkpoint_task.v3", "prepared_commit.v2")
        for _ in range(100)
    ]
    assert all(len(data) > HEADER_SIZE for data in records)
    assert run_limited(ALTERED, data=pickle.dumps(records)) == ""
