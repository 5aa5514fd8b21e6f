"""Formats of other stream processors: names of topics, and records, as their sources describe them.

What the real ones write is read in tests/integration/test_adopt_*.py.
"""

from __future__ import annotations

import json
import struct

import pytest

from statemgr.errors import InvalidError
from statemgr.model.origins import ORIGINS, OldRecord, Skip

QUIX, STREAMS, RAW = ORIGINS["quix"], ORIGINS["kafka-streams"], ORIGINS["raw"]


def record(value: bytes | None, **headers: bytes | None) -> OldRecord:
    """A record with some of Quix Streams' headers."""
    names = {"family": "__column_family__", "processed": "__processed_tp_offsets__", "stamped": "__ttl_stamped__"}
    return OldRecord(b"key", value, [(names[name], given) for name, given in headers.items()], 7)


@pytest.mark.parametrize(
    ("topic", "store"),
    [
        ("changelog__group--orders--default", "orders"),
        ("changelog__group--orders--totals", "totals"),
        ("changelog__group--orders.eu--default", "orders_eu"),
        ("changelog__group-2--orders--default", None),
        ("repartition__group--orders--by-key", None),
    ],
)
def test_names_of_quix_streams(topic: str, store: str | None) -> None:
    """The consumer group must be the whole one, and the default store takes the name of its stream."""
    assert QUIX.store(topic, "group") == store
    assert QUIX.is_internal(topic, "group") == topic.startswith("repartition")


def test_values_of_quix_streams_lose_their_expiry() -> None:
    """The header decides, record by record, and a delete has none."""
    decode = QUIX.decoder("topic", {})
    assert decode is not None
    stamped = struct.pack(">Q", 2**64 - 1) + b"value"
    assert decode(record(stamped, family=b"default", stamped=b"\x01")) == (b"key", b"value")
    assert decode(record(stamped, family=b"default")) == (b"key", stamped)
    assert decode(record(None, family=b"default", stamped=b"\x01")) == (b"key", None)
    assert decode(record(b"\0\0\0\2", family=b"__ttl_system__")) is Skip.BOOKKEEPING
    with pytest.raises(InvalidError, match="too short"):
        decode(record(b"1234567", family=b"default", stamped=b"\x01"))


def test_uncommitted_changes_of_quix_streams() -> None:
    """A change counts if the offsets of all topics that it was made from are committed; older versions wrote none."""
    decode = QUIX.decoder("topic", {"a": 10, "b": 5})
    assert decode is not None
    for processed, counts in [
        ({"a": 9}, True),
        ({"a": 10}, False),
        ({"a": 9, "b": 4}, True),
        ({"a": 9, "b": 5}, False),
        ({"never-committed": 0}, False),
        (None, True),
        ({}, True),
    ]:
        header = json.dumps(processed).encode()
        made = decode(record(b"v", family=b"default", processed=header))
        assert made == ((b"key", b"v") if counts else Skip.UNCOMMITTED)
    assert decode(record(b"v", family=b"default")) == (b"key", b"v")
    for wrong in (b"no json", b"[1]", b'{"a": "x"}', b'{"a": null}'):
        with pytest.raises(InvalidError, match="not a JSON object of offsets"):
            decode(record(b"v", family=b"default", processed=wrong))


def test_other_records_than_those_of_quix_streams() -> None:
    """A column family of windows, or none at all, is refused."""
    decode = QUIX.decoder("topic", {})
    assert decode is not None
    with pytest.raises(InvalidError, match="__latest-timestamps__"):
        decode(record(b"v", family=b"__latest-timestamps__"))
    with pytest.raises(InvalidError, match="not one of Quix Streams"):
        decode(record(b"v"))


@pytest.mark.parametrize(
    ("topic", "store"),
    [
        ("app-totals-changelog", "totals"),
        ("app-KSTREAM-AGGREGATE-STATE-STORE-0000000003-changelog", "KSTREAM-AGGREGATE-STATE-STORE-0000000003"),
        ("app-changelog", None),
        ("other-totals-changelog", None),
        ("app-by-key-repartition", None),
    ],
)
def test_names_of_kafka_streams(topic: str, store: str | None) -> None:
    """``<application.id>-<store>-changelog``."""
    assert STREAMS.store(topic, "app") == store
    assert STREAMS.is_internal(topic, "app") == topic.endswith("-repartition")
    assert STREAMS.decoder(topic, {}) is None


@pytest.mark.parametrize(
    ("store", "settings", "why"),
    [
        ("totals", {"cleanup.policy": "compact", "min.compaction.lag.ms": "0"}, None),
        ("totals", {"cleanup.policy": "compact", "min.compaction.lag.ms": "14400000"}, None),
        ("totals", {"cleanup.policy": "compact,delete"}, "windows or sessions"),
        ("totals", {"cleanup.policy": "compact", "min.compaction.lag.ms": "86400000"}, "versioned store"),
        ("KTABLE-SUPPRESS-STATE-STORE-0000000005", {"cleanup.policy": "compact"}, "suppressed results"),
        ("KSTREAM-OUTERSHARED-0000000004-store", {"cleanup.policy": "compact"}, "outer join"),
        ("KTABLE-FK-JOIN-SUBSCRIPTION-STATE-STORE-0000000010", {"cleanup.policy": "compact"}, "foreign-key join"),
    ],
)
def test_kinds_of_stores_of_kafka_streams(store: str, settings: dict[str, str], why: str | None) -> None:
    """The settings and the name of the topic tell the kinds apart, and a kind that cannot be adopted is named."""
    problem = STREAMS.problem(f"app-{store}-changelog", settings)
    assert (problem is None) == (why is None)
    assert why is None or why in str(problem)


def test_raw_topics_must_keep_their_keys() -> None:
    """A topic whose keys Kafka deletes by itself is no changelog."""
    assert RAW.problem("topic", {"cleanup.policy": "compact"}) is None
    assert "compact,delete" in str(RAW.problem("topic", {"cleanup.policy": "compact,delete"}))
    assert RAW.store("topic", "job") is None
