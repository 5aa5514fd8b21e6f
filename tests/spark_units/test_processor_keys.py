"""Keys of a processor's store: a rescale finds the grouping key in each. Spark's hashes are in ``tests/spark``."""

from __future__ import annotations

import json

import pytest
from pyspark.sql.types import ArrayType, LongType, StringType, StructField, StructType

from spark_integration.processors import timers
from spark_integration.processors.keys import encode_key
from spark_integration.processors.states import variable_prefix
from spark_integration.processors.variables import RECORD, Record
from statemgr.errors import ConfigError, CorruptRecord, InvalidError
from statemgr.model.keys import processor_keys
from statemgr.model.keys.partitioners import candidates
from statemgr.model.keys.processor_keys import grouping_types, hashed_parts

KEY = StructType([StructField("a", StringType()), StructField("b", ArrayType(LongType()))])
TYPES = json.dumps([field["type"] for field in KEY.jsonValue()["fields"]])
RECORDED = "spark-hash(string,array<bigint>)"


def forms(values: tuple[object, ...]) -> list[bytes]:
    """Return the keys of every form that a store may have for one grouping key, with zero bytes everywhere."""
    key, time = encode_key(KEY, values), b"\x80\x00\x01\x00\x01s\x00\x01"
    state = variable_prefix("na\x00\x01me") + key
    plain = [state, state + bytes(8), state + encode_key(KEY, ("\x00", None))]
    return [*plain, *(b"x" + time + place for place in plain), timers.BY_TIME + time + key, b"k" + key + time]


def test_the_grouping_key_is_found_in_every_form() -> None:
    """The key is found even next to another grouping key that looks like its beginning."""
    values = [(None, None), ("", []), ("a", [1]), ("a\x00", [1, None]), ("a\x00\x01", None), ("é\x00", [256])]
    parts = [
        [], [b""], [b"a", b"\x01" + bytes(7)], [b"a\x00", b"\x01" + bytes(7)], [b"a\x00\x01"],
        ["é\x00".encode(), b"\x00\x01" + bytes(6)],
    ]  # fmt: skip
    of_keys, hashes = hashed_parts(TYPES), candidates(RECORDED, "bytes", None, TYPES)[RECORDED]
    for some, expected in zip(values, parts, strict=True):
        found, numbers = of_keys(forms(some))
        assert [found[number] for number in numbers] == [expected] * 8
    mixed = sorted(key for some in values for key in forms(some))
    alone = {key: hashes([key])[0] for key in mixed}
    assert hashes(mixed) == [alone[key] for key in mixed]
    assert len(set(alone.values())) == len(values)
    assert hashes([]) == []


@pytest.mark.parametrize(
    "key", [b"", b"s", b"z\x01\x00\x01", b"sname\x00\x01", b"sname\x00\x01\x02", b"x" + bytes(8) + b"t\x00\x01\x00\x00"]
)
def test_keys_that_no_processor_wrote(key: bytes) -> None:
    """Such keys stop a rescale and are never assigned to a task."""
    with pytest.raises(InvalidError, match="has no grouping key of the types"):
        hashed_parts(TYPES)([key])


def test_a_number_that_is_cut_off() -> None:
    """The remaining bytes look like a smaller number, but the key is refused."""
    with pytest.raises(InvalidError, match="ends too early"):
        hashed_parts('["long"]')([b"sname\x00\x01\x01" + bytes(7)])


def test_a_type_without_a_known_hash() -> None:
    """The error names the type."""
    with pytest.raises(ConfigError, match="a column of type variant"):
        candidates("spark-hash(variant)", "bytes", None, '["variant"]')


def test_what_the_attachment_says() -> None:
    """The attachment of the integration is read. Damaged attachments and those of a newer release are refused."""
    assert processor_keys.RECORD == RECORD
    assert grouping_types(Record(KEY, "visits", "none", {}).to_bytes()) == TYPES
    for data in (b"", b"[]", b"{}", b'{"format": 1}', b'{"format": 2}'):
        with pytest.raises(CorruptRecord):
            grouping_types(data)
