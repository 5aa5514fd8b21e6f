"""Which task has a key: the hashes of partitioners, for many keys at once. Pure.

========================  ===========================================================================================
``murmur2``               Kafka's Java clients and Kafka Streams: ``toPositive(murmur2(key))`` (``Utils.murmur2``)
``crc32``                 librdkafka's ``consistent``: CRC-32 of the key, unsigned
``quix-murmur2``,         the same of the message's key alone, in a store that Quix Streams wrote; with ``str-``,
``quix-crc32``            ``int-``, ``double-`` or ``json-`` after ``quix-`` for a deserializer of the messages' keys
                          (:mod:`statemgr.model.keys.quix_keys`)
``spark-hash(<types>)``   Spark's ``hash`` of columns: Murmur3 (``Murmur3_x86_32``) with the seed 42, signed; the hash
                          of a column is the seed for the next one
========================  ===========================================================================================

A key belongs to the task whose number is the hash modulo the number of tasks. A hash is computed for all keys of one
length together: a large integer has one key's 32 bits in each of its lanes of 64 bits, so that one operation on the
integer is applied to all keys. A lane has room for the product of two such numbers.
"""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache

from statemgr.errors import ConfigError
from statemgr.model.keys.processor_keys import hashed_parts
from statemgr.model.keys.quix_keys import FORMS, message_keys
from statemgr.serdes.windows import inner_key, parts_of

#: Keys → their hashes, in the same order.
Hashes = Callable[[Sequence[bytes]], Sequence[int]]
#: Consumer loops record this: the task is the partition of the input, which the producers' partitioner chooses.
BY_INPUT_PARTITION = "kafka-partition"
#: Begins the names for stores of Quix Streams.
QUIX = "quix-"
HASHES = ("murmur2", "crc32")
#: What producers may use, by name: a hash of the store's keys, or of the messages' keys in them. The simplest first.
PRODUCERS = (*HASHES, *(f"{QUIX}{form}{name}" for form in FORMS for name in HASHES))
_MURMUR2_SEED, _MURMUR2_M = 0x9747B28C, 0x5BD1E995
_SPARK_SEED = 42
_RECORDED = re.compile(re.escape(BY_INPUT_PARTITION) + rf"\(({'|'.join(PRODUCERS)})\)\Z")
_SPARK = re.compile(r"spark-hash\((\w+)\)\Z")
_BITS_31 = 0x7FFFFFFF
_BITS_32 = 0xFFFFFFFF
_SIGN = 1 << 63


def candidates(
    recorded: str, key_serde: str, chosen: str | None = None, grouping: str | None = None
) -> Mapping[str, Hashes]:
    """The hashes that may have spread a store's keys, by name.

    Args:
        recorded: the partitioner in the job's checkpoints.
        key_serde: the label of the serde of the store's keys.
        chosen: the only one of :data:`PRODUCERS` to consider, for a job that records the input's partitions.
        grouping: the types of the grouping columns, if a Spark processor wrote the store
            (:mod:`statemgr.model.keys.processor_keys`).

    Raises: ConfigError if there is none.
    """
    if grouping is not None:
        return {recorded: _of_grouping_keys(grouping)}
    if is_by_input(recorded) or recorded == "kafka-murmur2":
        known = _RECORDED.match(recorded)
        given = chosen or (known[1] if known else None)
        names = [given] if given else list(PRODUCERS) if is_by_input(recorded) else ["murmur2"]
        return {name: _hashes_of(name, key_serde) for name in names}
    spark = _SPARK.match(recorded)
    kind = spark[1] if spark else ""
    if kind in ("string", "binary") and key_serde in ("bytes", "string"):
        return {recorded: spark_hash}
    if kind in _SPARK_INTEGERS and key_serde == "integer":
        return {recorded: _SPARK_INTEGERS[kind]}
    raise ConfigError(
        f"the keys of the partitioner {recorded!r} cannot be found in keys of the serde {key_serde!r}",
        hint="a job can be rescaled if its state has the same keys as its input: spread by one column of text, bytes "
        "or whole numbers on Spark, with the serde bytes, string or integer, or written by a Spark processor; "
        "otherwise start a new job (a new job.id)",
    )


def murmur2(keys: Sequence[bytes]) -> list[int]:
    """Kafka's murmur2, without its sign bit."""
    return _by_length(keys, _murmur2)


def crc32(keys: Sequence[bytes]) -> list[int]:
    """CRC-32, unsigned."""
    return list(map(zlib.crc32, keys))


def spark_hash(keys: Sequence[bytes]) -> list[int]:
    """Spark's hash of text (UTF-8) or bytes, signed."""
    return _by_length(keys, _murmur3)


def hash_of(producers: str) -> str:
    """The hash that one of :data:`PRODUCERS` makes of the messages' keys."""
    return producers.rpartition("-")[2]


def recorded_name(producers: str | None) -> str:
    """What checkpoints of a consumer loop record, if its state shows what the producers of its input use; or None."""
    return BY_INPUT_PARTITION if producers is None else f"{BY_INPUT_PARTITION}({producers})"


def is_by_input(recorded: str) -> bool:
    """Whether a task is the partition of its input."""
    return recorded == BY_INPUT_PARTITION or _RECORDED.match(recorded) is not None


def message_keys_of(producers: str, key_serde: str) -> Callable[[Sequence[bytes]], Sequence[bytes]]:
    """Keys of a store → the keys of their messages, by one of :data:`PRODUCERS`.

    The result raises InvalidError for a key that does not show it.
    """
    form = producers.removeprefix(QUIX).removesuffix(hash_of(producers)) if producers.startswith(QUIX) else None
    if parts_of(key_serde) is None:
        return message_keys(form) if form is not None else lambda keys: keys
    of_inner = message_keys(form or "", exact=True)
    return lambda keys: of_inner([inner_key(key) for key in keys])


def message_hashes(producers: str) -> Hashes:
    """The keys of messages → their hashes, by one of :data:`PRODUCERS`."""
    return _BY_NAME[hash_of(producers)]


def _hashes_of(producers: str, key_serde: str) -> Hashes:
    hashes, of_messages = message_hashes(producers), message_keys_of(producers, key_serde)
    return lambda keys: hashes(of_messages(keys))


def _of_grouping_keys(types: str) -> Hashes:
    """Spark's hash of the grouping columns in the keys of a processor's store."""
    parts_of = hashed_parts(types)

    def hashes(keys: Sequence[bytes]) -> list[int]:
        parts, numbers = parts_of(keys)
        return list(map(_chained(parts).__getitem__, numbers))

    return hashes


def _chained(rows: Sequence[Sequence[bytes]]) -> list[int]:
    """Murmur3 of the parts of each row: the hash of a part is the seed for the next one."""
    found = [_SPARK_SEED] * len(rows)
    for column in range(max(map(len, rows), default=0)):
        places: dict[int, list[int]] = {}
        for place, row in enumerate(rows):
            if column < len(row):
                places.setdefault(len(row[column]), []).append(place)
        for length, at in places.items():
            seeds = struct.pack(f"<{len(at)}Q", *(found[place] & _BITS_32 for place in at))
            data = b"".join(rows[place][column] for place in at)
            for place, number in zip(at, _murmur3(data, length, len(at), int.from_bytes(seeds, "little")), strict=True):
                found[place] = number
    return found


def _by_length(keys: Sequence[bytes], of_lanes: Callable[[bytes, int, int], Sequence[int]]) -> list[int]:
    lengths = list(map(len, keys))
    different = set(lengths)
    if len(different) == 1:
        return list(of_lanes(b"".join(keys), lengths[0], len(keys)))
    found = [0] * len(keys)
    places: dict[int, list[int]] = {length: [] for length in different}
    for place, length in enumerate(lengths):
        places[length].append(place)
    for length, at in places.items():
        some = of_lanes(b"".join(map(keys.__getitem__, at)), length, len(at))
        for place, number in zip(at, some, strict=True):
            found[place] = number
    return found


# --- lanes -------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=256)
def _all(number: int, count: int) -> int:
    """The same number in each of ``count`` lanes."""
    return int.from_bytes(struct.pack("<Q", number) * count, "little")


def _word(data: bytes, length: int, count: int, at: int, size: int) -> int:
    """``size`` bytes of each key, from its byte ``at`` on, as little-endian numbers in lanes."""
    lanes = bytearray(8 * count)
    for byte in range(size):
        lanes[byte::8] = data[at + byte :: length]
    return int.from_bytes(lanes, "little")


def _numbers(lanes: int, count: int) -> Sequence[int]:
    return struct.unpack(f"<{count}Q", lanes.to_bytes(8 * count, "little"))


def _murmur2(data: bytes, length: int, count: int) -> Sequence[int]:
    mask, m = _all(_BITS_32, count), _MURMUR2_M
    found = _all(_MURMUR2_SEED ^ length, count)
    whole = length - length % 4
    for at in range(0, whole, 4):
        word = _word(data, length, count, at, 4) * m & mask
        word = (word ^ (word >> 24 & mask)) * m & mask
        found = (found * m & mask) ^ word
    if length % 4:
        found = (found ^ _word(data, length, count, whole, length % 4)) * m & mask
    found = (found ^ (found >> 13 & mask)) * m & mask
    found ^= found >> 15 & mask
    return _numbers(found & _all(_BITS_31, count), count)


def _murmur3(data: bytes, length: int, count: int, seeds: int | None = None) -> Sequence[int]:
    """Spark's ``hashUnsafeBytes``, which mixes in each byte after the last whole word as a signed number.

    ``seeds``: one in each lane; None for Spark's own.
    """
    mask = _all(_BITS_32, count)

    def rotated(lanes: int, bits: int) -> int:
        return (lanes << bits | lanes >> 32 - bits) & mask

    def mixed(found: int, word: int) -> int:
        word = rotated(word * 0xCC9E2D51 & mask, 15) * 0x1B873593 & mask
        return rotated(found ^ word, 13) * 5 + _all(0xE6546B64, count) & mask

    found = _all(_SPARK_SEED, count) if seeds is None else seeds
    whole = length - length % 4
    for at in range(0, whole, 4):
        found = mixed(found, _word(data, length, count, at, 4))
    for at in range(whole, length):
        byte = _word(data, length, count, at, 1)
        found = mixed(found, byte | (byte >> 7 & _all(1, count)) * 0xFFFFFF00)
    found ^= _all(length, count)
    found = (found ^ (found >> 16 & mask)) * 0x85EBCA6B & mask
    found = (found ^ (found >> 13 & mask)) * 0xC2B2AE35 & mask
    found ^= found >> 16 & mask
    return [number - ((number & 0x80000000) << 1) for number in _numbers(found, count)]


def _spark_integers(size: int) -> Hashes:
    """Spark hashes a whole number like its bytes, the lowest first. The serde writes 8 bytes, the highest first."""

    def hashes(keys: Sequence[bytes]) -> list[int]:
        numbers = (int.from_bytes(key, "big") - _SIGN for key in keys)
        return list(
            _murmur3(b"".join(number.to_bytes(8, "little", signed=True)[:size] for number in numbers), size, len(keys))
        )

    return hashes


_BY_NAME: Mapping[str, Hashes] = {"murmur2": murmur2, "crc32": crc32}
_SPARK_INTEGERS: Mapping[str, Hashes] = {
    "tinyint": _spark_integers(4),
    "smallint": _spark_integers(4),
    "int": _spark_integers(4),
    "date": _spark_integers(4),
    "bigint": _spark_integers(8),
}
