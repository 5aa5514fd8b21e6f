"""Kinds of stores of Quix Streams: what a record becomes, and which records show which kind.

tests/operations/adopt/test_quix.py reads what Quix Streams itself writes.
"""

from __future__ import annotations

import pytest

from statemgr.errors import InvalidError
from statemgr.model.keys.partitioners import candidates, crc32, murmur2
from statemgr.operations.adopt.origins import OldRecord, Skip
from statemgr.operations.adopt.origins.quix_kinds import KINDS
from statemgr.serdes import QuixKey, serde

NOW = 1_795_580_512_272
INDEXES = ("__expiration-index__", "__deletion-index__", "__value-deletion-index__")


def record(family: str, key: bytes, value: bytes | None = b"1", *, stamped: bool = False) -> OldRecord:
    """Return a record of a column family."""
    headers = [("__column_family__", family.encode())]
    return OldRecord(key, value, headers + [("__ttl_stamped__", b"\1")] * stamped, 7)


def times(prefix: bytes, one: int, other: int) -> bytes:
    """Return a key as Quix Streams writes it."""
    numbers = one.to_bytes(8, "big") + b"|" + other.to_bytes(8, "big")
    return prefix + b"|" + numbers if prefix else numbers


def made(kind: str, given: OldRecord) -> object:
    """Return what a record becomes."""
    decode = KINDS[kind].decoder
    assert decode is not None
    return decode({})(given)


def read(kind: str, given: OldRecord) -> object:
    """Return the same as the new job reads it."""
    found = made(kind, given)
    assert not isinstance(found, Skip)
    return serde(KINDS[kind].key_serde).deserialize(found[0]), found[1]


def test_windows() -> None:
    """A window, also of a key that has separators or is empty, a deleted one, and the newest time of a key."""
    for prefix in (b"ann", b'"a|b"', b"", b"a\0\1"):
        for value in (b"5", None):
            found = read("windows", record("default", times(prefix, NOW, NOW + 10), value))
            assert found == (QuixKey(prefix, NOW, NOW + 10), value)
    newest = record("__latest-timestamps__", b"a|b|__latest_timestamp__", b"17")
    assert read("windows", newest) == (QuixKey(b"a|b", -1, -1), b"17")
    assert made("windows", record("__latest-timestamps__", b"__latest_timestamp__")) is Skip.BOOKKEEPING
    for family in INDEXES:
        assert made("windows", record(family, b"ann|x")) is Skip.BOOKKEEPING
    for wrong in (b"ann", b"ann|" + bytes(17), times(b"ann", 1 << 62, 1 << 63)):
        with pytest.raises(InvalidError, match="does not end with two times"):
            made("windows", record("default", wrong))
    with pytest.raises(InvalidError, match="'__other__', which this kind"):
        made("windows", record("__other__", b"ann"))


def test_rows_with_times() -> None:
    """Rows that windows collect, and rows of a store by time."""
    assert read("rows", record("__values__", times(b"ann", NOW, 3))) == (QuixKey(b"ann", NOW, 3), b"1")
    assert made("rows", record("default", times(b"ann", NOW, NOW + 1))) is Skip.BOOKKEEPING
    assert read("timestamped", record("default", times(b"ann", NOW, 0))) == (QuixKey(b"ann", NOW, 0), b"1")
    assert made("timestamped", record("__min-eligible-timestamps__", b"ann|x")) is Skip.BOOKKEEPING


def test_values_keep_their_expiry_in_a_store_with_a_ttl() -> None:
    """Each value begins with its expiry, or with one that never comes."""
    decode = KINDS["plain"].with_expiry
    assert decode is not None
    stamp = NOW.to_bytes(8, "big")
    assert decode({})(record("default", b"key", stamp + b"v", stamped=True)) == (b"key", stamp + b"v")
    assert decode({})(record("default", b"key", b"v")) == (b"key", b"\xff" * 8 + b"v")
    assert decode({})(record("default", b"key", None, stamped=True)) == (b"key", None)


SHOWN = {
    "plain": [record("default", b'ann|"rows"')],
    "windows": [record("default", times(b"ann", 5, 15)), record("__latest-timestamps__", b"ann|__latest_timestamp__")],
    "timestamped": [record("default", times(b"ann", 5, 0)), record("__min-eligible-timestamps__", b"ann|x")],
    "windows rows": [
        record("default", times(b"ann", 5, 15)),
        record("__latest-timestamps__", b"ann|__latest_timestamp__"),
        record("__values__", times(b"ann", 7, 1)),
        record("__global-counter__", b"__global_counter__"),
    ],
    "": [record("default", b'ann|"metadata"'), record("__values__", times(b"ann", 7, 1))],
}


@pytest.mark.parametrize("names", sorted(SHOWN))
def test_which_kinds_records_show(names: str) -> None:
    """The column families prove the kind, whatever the order of the records. What no kind explains, the kind of plain
    keys refuses by name."""
    for records in (SHOWN[names], SHOWN[names][::-1]):
        found = []
        for name, kind in KINDS.items():
            told = [kind.looks(one) for one in records] if kind.looks is not None else []
            if True in told and False not in told:
                found.append(name)
        assert found == [name for name in names.split() if name != "plain"]
    if not names:
        with pytest.raises(InvalidError, match="'__values__', which this kind"):
            made("plain", SHOWN[names][-1])


def test_the_task_of_a_window_is_that_of_its_message() -> None:
    """A rescale finds the key of the message in the JSON that Quix Streams has made of it."""
    keys = [serde("quix-window").serialize((prefix, NOW, NOW)) for prefix in (b'"a|b"', b"own", '"é"'.encode())]
    found = candidates("kafka-partition", "quix-window(json)")["quix-str-murmur2"]
    assert found(keys) == murmur2([b"a|b", b"own", "é".encode()])
    assert candidates("kafka-partition", "quix-window")["quix-crc32"]([keys[0]]) == crc32([b'"a|b"'])
