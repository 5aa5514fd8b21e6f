"""Decoders check how much memory a value, an index or a chain would take before they decode it."""

from __future__ import annotations

import io
import json
import random
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from typing import Any

import fastavro
import msgpack
import pytest

from statemgr.errors import CorruptError, InvalidError
from statemgr.model import codecs
from statemgr.model.codecs.schemas import single_objects
from statemgr.serdes import avro_serde, serde
from statemgr.serdes.avro import HEADER_SIZE
from statemgr.serdes.avro_weight import MAX_DEPTH

MIB = 1024 * 1024
NULLS = json.dumps(
    {"type": "record", "name": "N", "fields": [{"name": "x", "type": {"type": "array", "items": "null"}}]}
)
NODE = json.dumps(
    {"type": "record", "name": "Node", "fields": [{"name": "next", "type": ["null", "Node"], "default": None}]}
)
EMPTY = json.dumps({"type": "array", "items": {"type": "record", "name": "E", "fields": []}})


def peak_of(action: Callable[[], object]) -> int:
    """Return the peak memory use of an action, in bytes."""
    tracemalloc.start()
    try:
        action()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def zigzag(value: int) -> bytes:
    """Encode a number as an Avro long."""
    sink = io.BytesIO()
    fastavro.schemaless_writer(sink, "long", value)
    return sink.getvalue()


def header_of(schema: str) -> bytes:
    """Return the first bytes of every value of the schema."""
    parsed = json.loads(schema)
    value: Any = {"Node": {}, "N": {"x": []}}.get(parsed.get("name"), [])
    return avro_serde([schema]).serialize(value)[:10]


@pytest.mark.parametrize(
    ("schema", "body"),
    [
        (NULLS, zigzag(100_000_000) + b"\0"),
        (NULLS, (zigzag(1_000_000) * 100) + b"\0"),
        (NULLS, zigzag(-100_000_000) + zigzag(0) + b"\0"),
        (NULLS, zigzag((1 << 63) - 1)),
        (EMPTY, zigzag(50_000_000) + b"\0"),
        (NODE, b"\2" * 1_000_000 + b"\0"),
        (NODE, b"\2" * (MAX_DEPTH + 1) + b"\0"),
    ],
    ids=["nulls", "blocks", "negative", "endless", "empty records", "deep", "just too deep"],
)
def test_a_value_that_grows_is_refused_before_it_is_decoded(schema: str, body: bytes) -> None:
    """FAULT 59: items of zero bytes and a value nested a million deep raise CorruptError and take little memory."""
    chosen, data = avro_serde([schema]), header_of(schema) + body

    def read() -> None:
        with pytest.raises(CorruptError, match=r"memory|nested"):
            chosen.deserialize(data)

    assert peak_of(read) < 8 * MIB


def test_the_writers_schema_is_what_is_walked() -> None:
    """FAULT 59: the check includes fields that the newest schema leaves out, which the decoder skips item by item."""
    without = json.dumps({"type": "record", "name": "N", "fields": []})
    with pytest.raises(CorruptError, match="memory"):
        avro_serde([NULLS, without]).deserialize(header_of(NULLS) + zigzag(1 << 62) + b"\0")


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
    for data in (deep, b"\xdd\x00\x00\x10\x00" * 800, b"\xdc\xff\xff" * 900):

        def read(data: bytes = data) -> None:
            with pytest.raises(CorruptError):
                serde("msgpack").deserialize(data)

        assert peak_of(read) < 8 * MIB
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
import resource, sys
import psutil
from statemgr.errors import CorruptError
from statemgr.model import codecs
data = sys.stdin.buffer.read()
try:
    getattr(codecs, sys.argv[1])(b"x", "b")
except CorruptError:
    pass
most = psutil.Process().memory_info().vms + 96 * 1024 * 1024
resource.setrlimit(resource.RLIMIT_AS, (most, most))
try:
    getattr(codecs, sys.argv[1])(data, "b")
except CorruptError as error:
    print(error)
"""


def decoded_in_a_child(decoder: str, data: bytes) -> str:
    """Return the error that a decoder raises in a process with little memory."""
    command = [sys.executable, "-c", CHILD, decoder]
    child = subprocess.run(command, input=data, capture_output=True, check=True, timeout=600)
    return child.stdout.decode()


def test_an_index_that_grows_is_refused_before_it_is_decoded() -> None:
    """FAULT 59, FAULT 27: an index of nine megabytes that would take 800 MB is refused with 96 MiB left."""
    entry = zigzag(0) + zigzag(0) + zigzag(0)
    body = texts(6) + zigzag(1) + b"\0" + zigzag(3_000_000) + entry * 3_000_000 + b"\0"
    assert "far more memory" in decoded_in_a_child("decode_index", record("snapshot_index.v1", body))


def test_a_chain_that_grows_is_refused_before_it_is_decoded() -> None:
    """FAULT 59: the decoder refuses two million segments of five bytes, as it refuses such an index."""
    snapshot = texts(1) + zigzag(5) + bytes(16) + b"\0" + texts(1) + zigzag(0)
    entry = zigzag(0) + zigzag(1) + b"\0" + b"\2\0"
    body = texts(7) + zigzag(1) + snapshot + zigzag(2_000_000) + entry * 2_000_000 + b"\0\0"
    assert "far more memory" in decoded_in_a_child("decode_chain", record("segment_chain.v1", body))


def test_altered_records_never_take_much_memory() -> None:
    """FAULT 59: random bytes in a record of any kind raise an error and take a bounded amount of memory."""
    random_source = random.Random(59)
    for schema in ("snapshot_index.v1", "segment_chain.v1", "checkpoint_task.v2", "prepared_commit.v1"):
        for _ in range(100):
            data = record(schema, random_source.randbytes(random_source.choice((10, 200, 3000))))
            assert len(data) > HEADER_SIZE

            def read(data: bytes = data) -> None:
                for decode in (codecs.decode_index, codecs.decode_chain, codecs.decode_prepared):
                    with pytest.raises(CorruptError):
                        decode(data)  # type: ignore[operator]

            assert peak_of(read) < 24 * MIB
