"""The broker in memory gives the answers of a real broker: both get the same calls of confluent_kafka's clients."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from confluent_kafka import OFFSET_BEGINNING, OFFSET_END, IsolationLevel
from confluent_kafka.admin import OffsetSpec  # type: ignore[attr-defined]
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from statemgr.testing.clock import ControlledClock
from statemgr.testing.memory_kafka import MemoryBroker
from statemgr_tools.dev.kafka import KafkaBroker
from tests.kafka_jobs import EAGER
from tests.kafka_sides import Sides, sides
from tests.owners import STRICT, forgotten
from tests.servers import KafkaServer

TOPICS = ("x", "y")
#: Two producers with the ID a, one with the ID b.
OWNERS = ("a1", "a2", "b1")
#: Explicit times are later than those that clients and brokers give during a run. Brokers refuse what is over an hour
#: later than now.
LATER_MS = int(time.time() * 1000) + 55 * 60_000
GIVEN = ("given", b"")
ISOLATIONS = ("read_committed", "read_uncommitted")
LEVELS = (IsolationLevel.READ_COMMITTED, IsolationLevel.READ_UNCOMMITTED)

owners, topics, partitions = st.sampled_from(OWNERS), st.sampled_from(TOPICS), st.integers(0, 1)
#: Of a partition that may not exist.
places = st.tuples(st.sampled_from([*TOPICS, "never"]), st.integers(0, 2))
offsets = st.integers(0, 12) | st.sampled_from([OFFSET_BEGINNING, OFFSET_END])
configs = st.sampled_from(
    [
        {},
        {},
        {"cleanup.policy": "compact"},
        {"message.timestamp.type": "LogAppendTime"},
        {"max.message.bytes": "1000"},
        {"cleanup.policy": "junk"},
        {"no.such.setting": "1"},
        {"retention.ms": "soon"},
    ]
)
changes = st.sampled_from(
    [
        ("retention.ms", "1000000000"),
        ("retention.ms", None),
        ("cleanup.policy", "compact,delete"),
        ("message.timestamp.type", "LogAppendTime"),
        ("max.message.bytes", "junk"),
        ("no.such.setting", "1"),
    ]
)
records = st.fixed_dictionaries(
    {
        "key": st.sampled_from([b"k", b"k", b"other", "text", None]),
        "value": st.sampled_from([b"v", b"v", b"w", None, "text", b"large" * 300]),
        "headers": st.sampled_from([[], [("one", b"1"), ("none", None)]]),
    }
)
#: None; a given time; one that brokers refuse.
times = st.sampled_from([None] * 10 + [LATER_MS, LATER_MS + 1, LATER_MS + 2, LATER_MS + 86_400_000])
PRODUCES = [
    st.tuples(st.just("produce"), owners, st.sampled_from("xxxy"), partitions, records, times) for _ in range(5)
]
WHOLE = [
    st.tuples(
        st.just("transact"),
        owners,
        partitions,
        st.lists(records, min_size=1, max_size=3),
        st.sampled_from(["commit", "abort"]),
    )
    for _ in range(5)
]
CHANGES = [
    st.tuples(st.just("create"), topics, st.integers(0, 2), configs),
    st.tuples(st.just("delete"), topics),
    st.tuples(st.just("produce"), st.just("plain"), topics, partitions, records, times),
    st.tuples(st.just("delete_records"), topics, partitions, st.integers(-2, 12)),
    st.tuples(st.just("drop"), owners),
    st.tuples(st.just("poll"), owners),
    st.tuples(st.just("init"), owners),
]
TRANSACTIONS = [st.tuples(st.just(call), owners) for call in ["begin"] * 4 + ["commit"] * 2 + ["abort"]]
QUESTIONS = [
    st.tuples(st.just("read"), st.sampled_from(ISOLATIONS), topics, partitions, offsets),
    st.tuples(st.just("read"), st.sampled_from(ISOLATIONS), topics, partitions, st.just(OFFSET_BEGINNING)),
    st.tuples(st.just("watermarks"), st.sampled_from(ISOLATIONS), topics, partitions),
    st.tuples(st.just("describe"), topics | st.just("bad name!")),
    st.tuples(st.just("listed"), topics | st.just("bad name!")),
    st.tuples(st.just("configs"), topics),
    st.tuples(st.just("alter"), topics, changes),
    st.tuples(st.just("offsets"), st.sampled_from(LEVELS), st.sampled_from([0, 1]), st.lists(places, max_size=3)),
    st.tuples(
        st.just("alter_group"), st.sampled_from("gh"), topics, st.integers(0, 2), st.integers(0, 9), st.booleans()
    ),
    st.tuples(
        st.just("group"), st.sampled_from("gh"), st.none() | st.lists(places, min_size=1, max_size=3, unique=True)
    ),
]
STEPS = st.lists(st.one_of(*PRODUCES, *TRANSACTIONS, *WHOLE, *CHANGES, *QUESTIONS), min_size=20, max_size=50)
EXAMPLES = max(int(os.environ.get("STATEMGR_TEST_EXAMPLES", "20")) // 10, 3)


class History:
    """Runs steps on both sides, and knows which partitions exist."""

    def __init__(self, pair: Sides) -> None:
        self._pair = pair
        self._partitions: dict[str, int] = {}

    def run(self, steps: list[tuple[Any, ...]]) -> None:
        """Run steps. After each change, both sides have the same first, last stable and last offsets."""
        both = self._pair.both
        both("create", "x", 2, {})
        self._partitions["x"] = 2
        for owner in OWNERS:
            both("init", owner)
        for step in steps:
            call, *arguments = step
            self._step(call, arguments)
            if call in ("produce", "transact", "init", "commit", "abort", "create", "delete", "delete_records"):
                self._pair.same("bounds", self._places())
        for topic, partition in self._places():
            for isolation in ISOLATIONS:
                self._pair.same("read", isolation, topic, partition, OFFSET_BEGINNING)

    def _places(self) -> list[tuple[str, int]]:
        return [(topic, number) for topic, count in self._partitions.items() for number in range(count)]

    def _step(self, call: str, arguments: list[Any]) -> None:
        pair = self._pair
        match call, arguments:
            case "create", [topic, count, config]:
                if pair.both("create", topic, count, config) is None:
                    self._partitions[topic] = count
            case "delete", [topic]:
                for owner in OWNERS:  # an open transaction of a deleted topic has a test of its own
                    pair.drop(owner)
                    pair.both("init", owner)
                pair.both("delete", topic)
                self._partitions.pop(topic, None)
            case "produce", [owner, topic, partition, record, at_ms]:
                if topic in self._partitions:  # a real client waits for a topic that does not exist
                    pair.both("produce", owner, topic, partition, at_ms, *_with_time(record, at_ms))
            case "transact", [owner, partition, written, end]:
                for one, *more in [
                    ("begin",),
                    *(("produce", "x", partition, None, record) for record in written),
                    (end,),
                ]:
                    if one != "produce" or "x" in self._partitions:
                        pair.both(one, owner, *more)
            case "delete_records", [topic, partition, offset]:
                pair.both("delete_records", topic, partition, offset)
            case "drop", [owner]:
                pair.drop(owner)
                pair.both("init", owner)
            case "read", [_, topic, partition, _] if partition < self._partitions.get(topic, 0):
                pair.same("read", *arguments)
            case "alter", [topic, (setting, value)]:
                pair.both("alter", topic, setting, value)
                pair.same("configs", topic)
            case "offsets", [level, spec, asked]:
                pair.same("offsets", level, (OffsetSpec.earliest(), OffsetSpec.latest())[spec], asked)
                pair.same("offsets", level, LATER_MS + spec, asked)
            case "alter_group", [group, topic, partition, offset, is_long]:
                pair.both("alter_group", group, topic, partition, offset, "n" * 5000 if is_long else None)
            case (("init" | "begin" | "commit" | "abort" | "poll"), [owner]):
                pair.both(call, owner)
            case "watermarks", [_, topic, partition] if partition < self._partitions.get(topic, 0):
                pair.same("watermarks", *arguments)  # of a deleted topic a client may have an older answer
            case (("describe" | "listed" | "configs" | "group"), _):
                pair.same(call, *arguments)


def _with_time(record: dict[str, Any], at_ms: int | None) -> list[dict[str, Any]]:
    return [record if at_ms is None else {**record, "headers": [*record["headers"], GIVEN]}]


@pytest.fixture(scope="module")
def pair(kafka: KafkaServer) -> Iterator[Sides]:
    """The run's broker and a broker in memory."""
    with sides(kafka.bootstrap_servers, kafka.fresh_name()) as made:
        yield made


@pytest.mark.property
# the message of a failure has the whole history; to shrink it takes minutes on a real broker
@settings(
    max_examples=EXAMPLES,
    deadline=None,
    print_blob=True,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
@given(steps=STEPS)
def test_both_give_the_same_answers(kafka: KafkaServer, pair: Sides, steps: list[tuple[Any, ...]]) -> None:
    """After any history of calls, both sides have the same records, offsets and errors."""
    pair.renew(kafka.fresh_name("sides"))
    History(pair).run(steps)


# --- histories that a random one meets seldom, or that need time ------------------------------------------------------


def send(pair: Sides, owner: str, key: bytes | None = b"k", value: bytes | None = b"v", partition: int = 0) -> Any:
    """Produce a record to the topic x on both sides."""
    return pair.both("produce", owner, "x", partition, None, {"key": key, "value": value})


def opened(pair: Sides, *inits: str) -> None:
    """Make the topic x with two partitions, and transactional producers."""
    pair.both("create", "x", 2, {})
    for owner in inits:
        pair.both("init", owner)


def settled(pair: Sides) -> None:
    """Both sides have the same offsets and records."""
    pair.same("bounds", [("x", 0), ("x", 1)])
    for partition in (0, 1):
        for isolation in ISOLATIONS:
            pair.same("read", isolation, "x", partition, OFFSET_BEGINNING)


def transact(pair: Sides, owner: str, *values: bytes, end: str = "commit") -> None:
    """A whole transaction on both sides."""
    pair.both("begin", owner)
    for value in values:
        send(pair, owner, value=value)
    pair.both(end, owner)
    pair.same("bounds", [("x", 0)])


LONG = pytest.mark.long
#: What a test calls after the first error of a producer.
AFTER = ["produce", "commit", "abort", "begin", "init", "poll", "poll"]


def use(pair: Sides, owner: str, *calls: str, partition: int = 0) -> None:
    """Call a producer in several ways, whatever it answers."""
    for call in calls:
        if call == "produce":
            send(pair, owner, partition=partition)
        else:
            pair.both(call, owner)


@pytest.mark.parametrize(
    "first", ["produce", "commit", *(pytest.param(call, marks=LONG) for call in ("abort", "begin"))]
)
@pytest.mark.parametrize("state", [pytest.param(state, marks=LONG) for state in ("idle", "begun")] + ["sent"])
def test_a_fenced_producer(kafka: KafkaServer, pair: Sides, state: str, first: str) -> None:
    """Whatever a fenced producer does first and next, it gets the same errors, and the newer one works."""
    pair.renew(kafka.fresh_name("sides"))
    opened(pair, "a1")
    if state != "idle":
        pair.both("begin", "a1")
    if state == "sent":
        send(pair, "a1")
    pair.both("init", "a2")
    use(pair, "a1", first, *AFTER)
    transact(pair, "a2", b"newer")
    use(pair, "a1", *AFTER, partition=1)
    settled(pair)


@pytest.mark.parametrize(
    ("topic", "record", "at_ms"),
    [
        ({"cleanup.policy": "compact"}, {"key": None, "value": b"v"}, None),
        ({"max.message.bytes": "1000"}, {"key": b"k", "value": b"v" * 2000}, None),
        ({}, {"key": b"k", "value": b"v"}, LATER_MS + 86_400_000),
        ({}, {"key": b"k", "value": b"v" * 1_000_001}, None),
    ],
    ids=["no-key", "large", "future", "too-large-for-the-client"],
)
@pytest.mark.parametrize("owner", [pytest.param("plain", marks=LONG), "a1"])
def test_a_refused_record(
    kafka: KafkaServer, pair: Sides, topic: dict[str, str], record: dict[str, Any], at_ms: int | None, owner: str
) -> None:
    """A record that the client or the broker refuses ends the transaction with the same errors."""
    pair.renew(kafka.fresh_name("sides"))
    pair.both("create", "x", 2, topic)
    if owner != "plain":
        use(pair, owner, "init", "begin", "produce")
    pair.both("produce", owner, "x", 0, at_ms, record)
    if owner != "plain":
        use(pair, owner, "produce", "begin", "init", "commit", "commit", "abort", "abort", "begin")
    settled(pair)


def test_partitions_and_names_that_do_not_exist(kafka: KafkaServer, pair: Sides) -> None:
    """A producer and a consumer get the same errors about a partition or a name that cannot be."""
    pair.renew(kafka.fresh_name("sides"))
    opened(pair, "a1")
    for owner in ("plain", "a1"):
        if owner != "plain":
            pair.both("begin", owner)
        pair.both("produce", owner, "x", 2, None, {"key": b"k", "value": b"v"})
    use(pair, "a1", "commit", "abort", "begin")
    for topic in ("x", "never", "bad name!"):
        for call in ("describe", "listed", "configs"):
            pair.same(call, topic)
        if topic != "bad name!":  # the client asks for it again until its time is over
            pair.same("watermarks", "read_committed", topic, 2)
        pair.both("create", topic, 1, {})
        pair.both("delete", topic)


@pytest.mark.parametrize("then", [[], ["produce"]], ids=["", "produce"])
@pytest.mark.parametrize("again", [True, pytest.param(False, marks=LONG)])
def test_an_open_transaction_of_a_topic_that_is_deleted(
    kafka: KafkaServer, pair: Sides, then: list[str], again: bool
) -> None:
    """It can be committed. A topic of the same name gets its marker, and is another topic for the consumers."""
    pair.renew(kafka.fresh_name("sides"))
    opened(pair, "a1")
    transact(pair, "a1", b"old", b"old")
    pair.both("begin", "a1")
    send(pair, "a1", value=b"open")
    pair.both("delete", "x")
    if again:
        opened(pair)
        use(pair, "a1", *then)
    pair.both("commit", "a1")
    if not again:
        opened(pair)
    pair.same("describe", "x")
    # a marker that is the first entry of a producer makes the broker expect sequence number 0, which librdkafka does
    # not send: such a producer is of no more use, and the broker in memory does not show that
    owner = "a2" if again and not then else "a1"
    if owner == "a2":
        pair.both("init", owner)
    transact(pair, owner, b"new")
    settled(pair)


def test_consumers_of_a_topic_that_is_created_again(kafka: KafkaServer, pair: Sides) -> None:
    """A consumer goes on at its offset in the new topic, or gets an error once if that has no such offset."""
    pair.renew(kafka.fresh_name("sides"))
    opened(pair, "a1")
    transact(pair, "a1", b"0", b"1", b"2")
    pair.both("follow", "at-end", "x", 0, OFFSET_BEGINNING)
    pair.same("received", "at-end")
    pair.both("follow", "at-begin", "x", 1, OFFSET_BEGINNING)
    pair.same("received", "at-begin")
    pair.both("delete", "x")
    pair.same("received", "at-end")
    opened(pair)
    for partition in (0, 1):
        pair.both("begin", "a1")
        send(pair, "a1", value=b"new", partition=partition)
        pair.both("commit", "a1")
    pair.same("received", "at-end")
    pair.same("received", "at-begin")


TIMEOUT_MS = 5000


@pytest.mark.long
def test_a_transaction_that_times_out(own_kafka: Callable[..., KafkaBroker]) -> None:
    """The broker aborts it and fences its producer, whichever call comes next. One without a record has not begun."""
    clock = ControlledClock(time.time_ns() // 1_000_000)
    with sides(own_kafka(**STRICT).bootstrap_servers, "sides", MemoryBroker(clock)) as pair:
        pair.timeout_ms = TIMEOUT_MS
        owners = {"a1": "commit", "b1": "abort", "c1": "produce", "d1": "produce", "e1": "begin"}
        opened(pair, *owners, "f1")
        for owner in owners:
            use(pair, owner, "begin", "produce")
        pair.both("begin", "f1")
        assert pair.broker.expire_transactions() == []
        clock.advance(TIMEOUT_MS / 1000 + 0.001)
        assert sorted(pair.broker.expire_transactions()) == sorted(pair.memory.name(owner[0]) for owner in owners)
        settled(pair)
        for owner, first in owners.items():
            use(pair, owner, first, *AFTER, partition=int(owner == "d1"))
        use(pair, "f1", "produce", "commit")
        pair.both("init", "a2")
        transact(pair, "a2", b"newer")
        settled(pair)


@pytest.mark.long
def test_forgotten_ids(forgetful: KafkaServer) -> None:
    """The next transaction of a producer whose ID was forgotten fails. After an abort it goes on, unless another
    producer has the ID."""
    with sides(forgetful.bootstrap_servers, forgetful.fresh_name("sides")) as pair:
        owners = ("a1", "b1", "c1", "d1", "e1")
        opened(pair, *owners)
        for owner in ("a1", "c1", "d1"):
            transact(pair, owner, b"before")
        pair.both("begin", "e1")
        forgotten(forgetful, *(pair.real.name(owner[0]) for owner in owners))
        assert sorted(pair.broker.forget_ids()) == sorted(pair.memory.name(owner[0]) for owner in owners)
        pair.both("init", "d2")
        use(pair, "a1", "begin", "produce", "produce", "begin", "commit", "init", "abort")
        use(pair, "b1", "begin", "produce", "abort")
        use(pair, "c1", "begin", "commit", "begin", "abort")
        use(pair, "d1", "begin", "produce", "commit", "abort", *AFTER)
        use(pair, "e1", "commit", "begin", "produce", "abort")
        for owner in ("a1", "b1", "c1", "d2", "e1"):
            transact(pair, owner, b"after")
        settled(pair)


@pytest.mark.parametrize("retention_ms", [100, pytest.param(86_400_000, marks=LONG)])
def test_compaction(kafka: KafkaServer, retention_ms: int) -> None:
    """The newest record of each key stays at its offset, aborted records go, and deletes go after a while."""
    clock = ControlledClock(time.time_ns() // 1_000_000)
    with sides(kafka.bootstrap_servers, kafka.fresh_name("sides"), MemoryBroker(clock)) as pair:
        pair.both("create", "x", 2, {**EAGER, "delete.retention.ms": str(retention_ms)})
        for owner in ("a1", "b1"):
            pair.both("init", owner)
        transact(pair, "a1", b"1", b"2")
        transact(pair, "a1", b"aborted", end="abort")
        pair.both("begin", "b1")
        for key, value in [(b"gone", b"1"), (b"gone", None), (b"kept", b"1"), (b"never", None), (b"kept", b"2")]:
            send(pair, "plain", key, value)
            send(pair, "b1", key, b"late" if value else None)
        pair.both("commit", "b1")
        pair.same("bounds", [("x", 0)])
        before = pair.memory.read("read_uncommitted", "x", 0, OFFSET_BEGINNING)[0][-1][2]
        for _ in range(20):
            # the cleaner leaves the newest segment alone, which is closed when it is older than segment.ms
            time.sleep(0.6)
            send(pair, "plain", b"filler")
            clock.advance(0.6)
            pair.broker.compact(pair.memory.name("x"), 0)
            found = [
                [one for one in side.read("read_uncommitted", "x", 0, OFFSET_BEGINNING)[0] if one[2] < before]
                for side in (pair.memory, pair.real)
            ]
            deletes = any(value is None for *_, value, _, _, _ in found[0])
            if found[0] == found[1] and deletes == (retention_ms > 1000):
                return
        pytest.fail(f"in memory: {found[0]}\non the real broker: {found[1]}")
