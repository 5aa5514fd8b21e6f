"""output_topic: which records a topic takes, as its settings say it."""

from __future__ import annotations

from typing import Any

import pytest

from statemgr.errors import InvalidError
from statemgr.model.commit import ProducedRecord
from statemgr.model.output_topic import OutputTopic
from statemgr.model.record_size import size_of_batch

NOW = 1_700_000_000_000
SETTINGS = {
    "cleanup.policy": "delete",
    "max.message.bytes": "100",
    "message.timestamp.type": "CreateTime",
    "message.timestamp.after.max.ms": "1000",
    "message.timestamp.before.max.ms": "2000",
}
APPENDED = {"message.timestamp.type": "LogAppendTime"}
COMPACTED = {"cleanup.policy": "compact,delete"}


@pytest.mark.parametrize(
    ("settings", "given", "problem"),
    [
        ({}, {}, None),
        ({}, {"partition": -1}, None),
        ({}, {"partition": 3}, None),
        ({}, {"partition": 4}, "no partition 4"),
        ({}, {"key": None}, None),
        (COMPACTED, {}, None),
        (COMPACTED, {"key": None}, "without a key"),
        ({}, {"value": bytes(31)}, None),
        ({}, {"value": bytes(32)}, "a record of 101 bytes is larger than the 100"),
        ({}, {"value": bytes(20), "headers": (("name", b"123456"),)}, "a record of 101 bytes is larger than the 100"),
        ({}, {"timestamp_ms": NOW + 1000}, None),
        ({}, {"timestamp_ms": NOW + 1001}, "is 1001 ms after the present time"),
        ({}, {"timestamp_ms": NOW - 2000}, None),
        ({}, {"timestamp_ms": NOW - 2001}, "is 2001 ms before the present time"),
        (APPENDED, {"timestamp_ms": 1}, None),
    ],
)
def test_what_a_topic_takes(settings: dict[str, str], given: dict[str, Any], problem: str | None) -> None:
    """J1.9: each limit is the broker's, and the error names the topic and the way out."""
    topic = OutputTopic(4, SETTINGS | settings)
    record = ProducedRecord(**{"topic": "out", "key": b"k", "value": b"v"} | given)
    if problem is None:
        topic.check(record, NOW)
        return
    with pytest.raises(InvalidError, match=problem) as refused:
        topic.check(record, NOW)
    assert refused.value.where["topic"] == "out"
    assert refused.value.hint


def test_what_is_not_known_is_not_refused() -> None:
    """J1.9: a broker that does not show a setting, or a producer that compresses, decides at the commit."""
    record = ProducedRecord("out", None, bytes(200), timestamp_ms=1)
    OutputTopic(1, {}).check(record, NOW)
    OutputTopic(1, {"max.message.bytes": "100"}, compressed=True).check(record, NOW)


@pytest.mark.parametrize(
    ("size", "more"), [(0, 69), (56, 69), (57, 70), (63, 70), (64, 71), (8183, 71), (8184, 72), (8192, 73)]
)
def test_the_size_of_a_batch(size: int, more: int) -> None:
    """Lengths below 64 and 8,192 take one byte and two, and a null as much as an empty value."""
    assert size_of_batch(b"k", bytes(size)) == size + more
    assert size_of_batch(b"k", None) == size_of_batch(b"k", b"")
