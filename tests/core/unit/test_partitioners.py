"""Partitioners: the hashes of many keys at once equal those of Kafka and of Spark."""

from __future__ import annotations

import random
import struct
import zlib

import pytest

from statemgr.errors import ConfigError, InvalidError
from statemgr.model.keys.partitioners import (
    PRODUCERS,
    candidates,
    crc32,
    is_by_input,
    murmur2,
    recorded_name,
    spark_hash,
)
from statemgr.serdes import SERDES

SIGN = 0x80000000


def one_murmur2(key: bytes) -> int:
    """Return Kafka's murmur2 of one key, computed step by step, without the sign bit."""
    m, mask = 0x5BD1E995, 0xFFFFFFFF
    h = 0x9747B28C ^ len(key)
    for at in range(0, len(key) - len(key) % 4, 4):
        k = int.from_bytes(key[at : at + 4], "little") * m & mask
        k = (k ^ k >> 24) * m & mask
        h = h * m & mask ^ k
    rest = key[len(key) - len(key) % 4 :]
    if rest:
        h = (h ^ int.from_bytes(rest, "little")) * m & mask
    h = (h ^ h >> 13) * m & mask
    return (h ^ h >> 15) & 0x7FFFFFFF


def one_spark_hash(key: bytes) -> int:
    """Return Spark's ``Murmur3_x86_32.hashUnsafeBytes`` of one key with the seed 42, as a signed number."""
    mask = 0xFFFFFFFF

    def mixed(h: int, k: int) -> int:
        k = k * 0xCC9E2D51 & mask
        k = (k << 15 | k >> 17) & mask
        h ^= k * 0x1B873593 & mask
        h = (h << 13 | h >> 19) & mask
        return h * 5 + 0xE6546B64 & mask

    h, whole = 42, len(key) - len(key) % 4
    for at in range(0, whole, 4):
        h = mixed(h, int.from_bytes(key[at : at + 4], "little"))
    for byte in key[whole:]:
        h = mixed(h, (byte - 256 if byte > 127 else byte) & mask)
    h ^= len(key)
    h = (h ^ h >> 16) * 0x85EBCA6B & mask
    h = (h ^ h >> 13) * 0xC2B2AE35 & mask
    h ^= h >> 16
    return h - (1 << 32) if h & SIGN else h


def test_the_vectors_of_kafka() -> None:
    """murmur2 agrees with Kafka's own ``UtilsTest``, without the sign bit."""
    known = {
        b"21": -973932308,
        b"foobar": -790332482,
        b"a-little-bit-long-string": -985981536,
        b"a-little-bit-longer-string": -1486304829,
        b"lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8": -58897971,
        b"abc": 479470107,
    }
    assert murmur2(list(known)) == [number & 0x7FFFFFFF for number in known.values()]


def test_the_vectors_of_spark() -> None:
    """The hashes agree with the documentation of ``pyspark.sql.functions.hash`` and with Spark 4.2."""
    assert spark_hash([b"ABC", b"Spark", "é€𝄞z".encode()]) == [-757602832, 228093765, 1770618892]
    integers = candidates("spark-hash(bigint)", "integer")["spark-hash(bigint)"]
    assert integers([SERDES["integer"].serialize(n) for n in (0, 1, -1)]) == [-1670924195, -1712319331, -939490007]
    integers = candidates("spark-hash(int)", "integer")["spark-hash(int)"]
    assert integers([SERDES["integer"].serialize(n) for n in (0, 1, -1)]) == [933211791, -559580957, -1604776387]


@pytest.mark.parametrize("count", [1, 2, 777])
def test_many_keys_at_once(count: int) -> None:
    """Keys of equal or different lengths hash as they do one by one, and one lane does not affect its neighbour."""
    source = random.Random(count)
    for lengths in (range(24), range(17, 18), range(4, 5), range(0, 1)):
        keys = [source.randbytes(source.choice(lengths)) for _ in range(count)]
        keys += [b"\xff" * length for length in lengths]
        assert murmur2(keys) == list(map(one_murmur2, keys))
        assert spark_hash(keys) == list(map(one_spark_hash, keys))
        assert crc32(keys) == list(map(zlib.crc32, keys))


def test_which_partitioners_are_possible() -> None:
    """The recorded partitioner and the serde of the keys decide which ones are possible. Others are refused."""
    assert tuple(candidates("kafka-partition", "json")) == PRODUCERS
    assert list(candidates("kafka-partition(quix-int-crc32)", "json")) == ["quix-int-crc32"]
    assert list(candidates("kafka-partition(quix-int-crc32)", "json", "murmur2")) == ["murmur2"]
    assert list(candidates("kafka-partition", "bytes", "crc32")) == ["crc32"]
    assert list(candidates("kafka-murmur2", "bytes")) == ["murmur2"]
    assert list(candidates("spark-hash(string)", "string")) == ["spark-hash(string)"]
    for recorded, serde in [
        ("spark-hash(string)", "json"),
        ("spark-hash(bigint)", "bytes"),
        ("spark-hash(string,bigint)", "bytes"),
        ("spark-hash(double)", "integer"),
        ("by-moon", "bytes"),
        ("kafka-partition(by-moon)", "bytes"),
    ]:
        with pytest.raises(ConfigError, match="cannot be found in keys"):
            candidates(recorded, serde)


def test_keys_of_quix_streams() -> None:
    """The message's key ends at the separator, or is the complete key without one. Two separators are ambiguous."""
    found = candidates("kafka-partition", "bytes")
    keys, of_messages = [b'orders-1|"rows"', b"|1", b"orders-1"], [b"orders-1", b"", b"orders-1"]
    assert found["quix-murmur2"](keys) == murmur2(of_messages)
    assert found["quix-crc32"](keys) == crc32(of_messages)
    with pytest.raises(InvalidError, match="does not show where the key of its message ends"):
        found["quix-murmur2"]([*keys, b'a|b|"rows"'])


#: Deserializer → keys as Quix Streams writes them, and the bytes of their messages.
QUIX_KEYS = {
    "str": {b'"key-1"|"rows"': b"key-1", b'"a|b"|"x|y"': b"a|b", '"é"|1'.encode(): "é".encode(), b'"\\n\\""|x': b'\n"'},
    "int": {b'5|"rows"': b"\0\0\0\5", b'-1|"a|b"': b"\xff" * 4},
    "double": {b'1.5|"rows"': struct.pack(">d", 1.5), b"1e22|x": struct.pack(">d", 1e22)},
    "json": {b'{"a":[1,"b|c"]}|"rows"': b'{"a": [1, "b|c"]}', '"é"|"x|y"'.encode(): b'"\\u00e9"', b"7|x": b"7"},
}


@pytest.mark.parametrize("kind", sorted(QUIX_KEYS))
def test_keys_that_a_deserializer_of_quix_streams_has_read(kind: str) -> None:
    """The key of the message is found in its JSON, whatever follows it. A key of another form is the message's own, and
    one that cannot be of the form is refused."""
    found = candidates("kafka-partition", "bytes")
    keys = {**QUIX_KEYS[kind], b"own": b"own", b"\0\xff|": b"\0\xff|"}
    assert found[f"quix-{kind}-murmur2"](list(keys)) == murmur2(list(keys.values()))
    assert found[f"quix-{kind}-crc32"](list(keys)) == crc32(list(keys.values()))
    if kind == "int":
        for wrong in (b"1.5|x", b"3000000000|x"):
            with pytest.raises(InvalidError, match="does not begin with the key of a message"):
                found["quix-int-murmur2"]([wrong])


def test_what_an_adoption_records() -> None:
    """A recorded name tells how the producers of the input choose a partition, and that tasks are partitions."""
    for name in (*PRODUCERS, None):
        assert is_by_input(recorded_name(name))
    assert recorded_name(None) == "kafka-partition"
    assert not any(map(is_by_input, ("kafka-murmur2", "spark-hash(string)", "kafka-partition(by-moon)")))
