"""JobTester: the real loop, commits and restores on a broker and a blob store in memory."""

from __future__ import annotations

import logging
import math
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import pytest
from confluent_kafka import Message

from statemgr import JobConfig, Task
from statemgr.blobs import open_blob_store
from statemgr.engine import pending_commit
from statemgr.errors import (
    AccessDenied,
    ConfigError,
    CorruptRecord,
    InvalidError,
    MissingState,
    PermissionNeeded,
    StatemgrError,
)
from statemgr.kafka.metadata import TopicMetadata
from statemgr.local.machine import SystemClock
from statemgr.ports import list_blobs
from statemgr.testing import JobTester, OutputRecord
from statemgr.testing.memory_clients import MemoryGroupConsumer
from tests.docs.blocks import blocks

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "examples" / "consumer-loop"
CONFIG: dict[str, object] = {
    "job.name": "orders",
    "job.tasks": 2,
    "task.inputs": ["orders"],
    "task.outputs": ["out"],
    "task.backup.factories": ["kafka-changelog", "blob-store"],
    "stores.totals.key.serde": "bytes",
    "stores.totals.value.serde": "bytes",
}
ZERO, ONE = "Partition 0", "Partition 1"


def append(task: Task, message: Message) -> None:
    """Append each value to the state of its key, and produce the new state."""
    key, value = message.key() or b"", message.value() or b""
    if value == b"poison":
        raise ValueError("poison")
    totals = task.store("totals")
    totals.put(key, (totals.get(key) or b"") + value)
    task.produce("out", key, totals.get(key))


@pytest.fixture
def tester() -> Iterator[JobTester]:
    """A member with two tasks."""
    with JobTester(CONFIG, append) as tester:
        yield tester


def state(tester: JobTester, task: str = ZERO) -> dict[bytes, bytes]:
    """Return the content of a task's store."""
    return dict(tester.store("totals", task=task).range())


def test_what_was_sent_is_processed(tester: JobTester) -> None:
    """`send` returns after the task of the partition has processed the message. Messages keep their order."""
    offsets = [tester.send("orders", "a", value, partition=1) for value in ("1", "2", "3")]
    assert offsets == [0, 1, 2]
    assert state(tester, ONE) == {b"a": b"123"}
    assert state(tester, ZERO) == {}


@pytest.mark.parametrize(
    ("serde", "value"),
    [("json", {"amount": 3}), ("json", "text"), ("integer", -5), ("string", "ä"), ("msgpack", [1.5])],
)
def test_values_are_sent_with_the_serdes_of_the_input(serde: str, value: object) -> None:
    """J2.11: as the test driver of Kafka Streams does. Bytes are sent as they are: so a message can be damaged."""
    seen: list[tuple[object, object]] = []
    config = {**CONFIG, "task.input.key.serde": "integer", "task.input.value.serde": serde}
    with JobTester(config, lambda _, message: seen.append((message.key(), message.value()))) as tester:
        tester.send("orders", 7, value)
        tester.send("orders", 7, None)
        assert seen == [(7, value), (7, None)]
        with pytest.raises(InvalidError):
            tester.send("orders", "seven", value)
        with pytest.raises(CorruptRecord):
            tester.send("orders", b"seven", value)


def test_the_schemas_of_a_store_are_read_once(tmp_path: Path) -> None:
    """An application asks for its store with each message. A schema file that is removed meanwhile ends no job."""
    path = tmp_path / "total.json"
    path.write_text('["int"]')
    avro = {"stores.totals.value.serde": "avro", "stores.totals.value.avro.schemas": f"${{file:{path}}}"}

    def count(task: Task, message: Message) -> None:
        totals = task.store("totals")
        totals.put(message.key(), (totals.get(message.key()) or 0) + 1)

    with JobTester({**CONFIG, **avro}, count) as tester:
        tester.send("orders", "a", partition=0)
        path.unlink()
        tester.send("orders", "a", partition=0)
        assert state(tester) == {b"a": 2}


def test_serdes_that_are_given_to_the_tester_are_used() -> None:
    """J2.11: in place of those of the configuration. Without any, a value that is not text or bytes is refused."""
    seen: list[object] = []
    with JobTester(CONFIG, lambda _, message: seen.append(message.value()), value_serde="json") as tester:
        tester.send("orders", "a", [1, None])
    assert seen == [[1, None]]
    with JobTester(CONFIG, append) as tester, pytest.raises(InvalidError, match="the value is dict") as error:
        tester.send("orders", "a", {"amount": 3})
    assert error.value.hint == "set task.input.key.serde or task.input.value.serde, or pass a serde to the tester"


@pytest.mark.parametrize("in_batches", [False, True])
def test_a_task_has_the_clock_of_the_tester(in_batches: bool) -> None:
    """J2.11: code of timers sees the time that the test sets, and the newest timestamp of the input."""
    seen: list[tuple[int, int | None]] = []

    def look(task: Task, _: object = None) -> None:
        seen.append((task.now_ms(), task.newest_input_ms()))

    def opened(task: Task) -> None:
        look(task)
        task.every(60, look)

    given = {"process_batch": look} if in_batches else {"process": look}
    with JobTester({**CONFIG, "job.tasks": 1}, on_open=opened, start_ms=1_000_000, **given) as tester:  # type: ignore[arg-type]
        tester.send("orders", "a", "1", timestamp_ms=5_000)
        tester.send("orders", "a", "2", timestamp_ms=4_000)
        tester.advance(seconds=60)
        tester.send("orders", "a", "3")
    start, later = 1_000_000, 1_060_000
    assert seen == [(start, None), (start, 5_000), (start, 5_000), (later, 5_000), (later, later)]


def test_a_key_chooses_one_partition(tester: JobTester) -> None:
    """Records with the same key go to the same partition, and different keys reach both tasks."""
    for key in "abcdefgh" * 2:
        tester.send("orders", key, "x")
    found = [state(tester, task) for task in (ZERO, ONE)]
    assert all(found)
    assert {key: value for one in found for key, value in one.items()} == {bytes([c]): b"xx" for c in b"abcdefgh"}
    assert sum(map(len, found)) == 8


def test_output_and_checkpoint_come_with_the_commit(tester: JobTester) -> None:
    """The transaction of a commit publishes both, and nothing is visible before it."""
    tester.send("orders", "a", "1", partition=0)
    assert tester.output("out") == []
    assert tester.checkpoint(ZERO) is None
    tester.commit()
    assert [(record.key, record.value) for record in tester.output("out")] == [(b"a", b"1")]
    checkpoint = tester.checkpoint(ZERO)
    assert checkpoint is not None
    assert checkpoint.input_offsets == {"orders-0": 1}
    assert tester.checkpoint(ONE) is None


def test_the_clock_makes_a_commit_due(tester: JobTester) -> None:
    """A commit begins when task.commit.ms (one minute) has passed. Time stamps change only with the clock."""
    before = tester.now_ms
    tester.send("orders", "a", "1", partition=0)
    tester.advance(seconds=1)
    assert tester.output("out") == []
    tester.advance(seconds=60)
    assert [record.timestamp_ms for record in tester.output("out")] == [before]
    assert tester.now_ms - before == 61_000


@pytest.mark.parametrize("backend", ["kafka-changelog", "blob-store", None])
@pytest.mark.parametrize("lose_disk", [True, False])
def test_a_crash_loses_what_was_not_published(tester: JobTester, backend: str | None, lose_disk: bool) -> None:
    """The state returns to the checkpoint. Later input is processed again, with one output for each message."""
    tester.send("orders", "a", "1", partition=0)
    tester.commit()
    tester.send("orders", "a", "2", partition=0)
    tester.crash(lose_disk=lose_disk)
    tester.send("orders", "a", "3", partition=0)  # the job does not run, so nothing processes this message
    tester.restore(backend)
    assert state(tester) == {b"a": b"123"}
    tester.commit()
    assert [record.value for record in tester.output("out")] == [b"1", b"12", b"123"]


def test_a_restore_reads_the_named_backend(tester: JobTester) -> None:
    """Without its blobs the state cannot be restored from the blob store, but still from the changelog."""
    tester.send("orders", "a", "1", partition=0)
    tester.commit()
    tester.crash()
    blobs = open_blob_store(tester.config, SystemClock())
    for info in list_blobs(blobs, "orders/"):
        blobs.delete(info.blob_id)
    blobs.close()
    # a small index is in the checkpoint itself, but the files that it names are deleted
    with pytest.raises(StatemgrError) as missing:
        tester.restore("blob-store")
    assert missing.value.exit_status == 4
    tester.restore("kafka-changelog")
    assert state(tester) == {b"a": b"1"}


def test_changed_backends_are_committed_without_input(tester: JobTester) -> None:
    """A step of a migration, and one back: each task with a checkpoint commits once, also if it gets no message."""
    tester.send("orders", "a", "1", partition=0)
    tester.commit()
    for backup in (["blob-store"], ["blob-store", "kafka-changelog"]):
        tester.stop()
        tester.restore(settings={"task.backup.factories": backup, "task.restore.factories": ["blob-store"]})
        tester.advance(seconds=60)
        made = tester.checkpoint(ZERO)
        assert made is not None
        assert made.backup_factories["totals"] == tuple(backup)
        assert set(made.state_checkpoint_markers) == set(backup)
        tester.advance(seconds=60)
        assert tester.checkpoint(ZERO) == made, "only once"
    assert tester.checkpoint(ONE) is None
    assert state(tester) == {b"a": b"1"}


def test_a_commit_that_fails_raises(tester: JobTester, monkeypatch: pytest.MonkeyPatch) -> None:
    """The call that moves the clock to a commit raises its error, although the loop already waits for input when the
    commit ends."""
    waits = threading.Event()
    prepare, rests = Task._prepare, MemoryGroupConsumer.rests

    def prepare_late(self: Task, *args: Any) -> Any:
        waits.wait()
        return prepare(self, *args)

    def tell(self: MemoryGroupConsumer) -> bool:
        if found := rests(self):
            waits.set()
        return found

    tester.send("orders", "a", "1", partition=0)
    tester._task(ZERO).produce("nowhere", b"a", b"x")
    monkeypatch.setattr(Task, "_prepare", prepare_late)
    monkeypatch.setattr(MemoryGroupConsumer, "rests", tell)
    with pytest.raises(MissingState, match="nowhere"):
        tester.advance(seconds=60)
    tester.restore()
    assert tester.checkpoint(ZERO) is None


def test_a_clean_stop_commits(tester: JobTester) -> None:
    """A clean stop, as after SIGTERM, commits first."""
    tester.send("orders", "a", "1", partition=0)
    tester.stop()
    assert [record.value for record in tester.output("out")] == [b"1"]
    tester.restore()
    assert state(tester) == {b"a": b"1"}


def test_members_share_the_tasks(tester: JobTester) -> None:
    """A task that moves is committed, restored by the other member, and continues there. It can move back."""
    tester.send("orders", "a", "1", partition=1)
    tester.rebalance(members=2)
    assert (tester.owner(ZERO), tester.owner(ONE)) == (0, 1)
    tester.send("orders", "a", "2", partition=1)
    tester.send("orders", "b", "1", partition=0)
    assert state(tester, ONE) == {b"a": b"12"}
    tester.rebalance(members=1)
    assert tester.owner(ONE) == 0
    assert (state(tester, ZERO), state(tester, ONE)) == ({b"b": b"1"}, {b"a": b"12"})


def test_a_new_member_has_an_empty_disk() -> None:
    """A member that joins after another one has left restores its task from a backend."""
    opened: list[tuple[str, str]] = []

    def note(task: Task) -> None:
        opened.append((task.name, task.restored[0].factory))

    with JobTester(CONFIG, append, on_open=note, members=2) as tester:
        tester.send("orders", "a", "1", partition=1)
        tester.commit()
        tester.rebalance(members=1)
        opened.clear()
        tester.rebalance(members=2)
        assert tester.owner(ONE) == 1
        assert dict(opened)[ONE] == "kafka-changelog"  # the members open their tasks in any order
        assert state(tester, ONE) == {b"a": b"1"}


def test_more_members_than_tasks(tester: JobTester) -> None:
    """The third member has no task, and a crash of all members does no harm."""
    tester.rebalance(members=3)
    tester.send("orders", "a", "1", partition=1)
    tester.crash()
    tester.restore()
    assert state(tester, ONE) == {b"a": b"1"}


def test_members_crash_at_once(tester: JobTester, monkeypatch: pytest.MonkeyPatch) -> None:
    """No member acts while others are already dead: it would give its tasks up, with a commit."""
    tester.rebalance(members=2)
    for partition in range(2):
        tester.send("orders", "a", "1", partition=partition)
    kill, could_act = MemoryGroupConsumer.kill, []

    def take_a_turn(changed: threading.Condition) -> None:
        if could_act_now := changed.acquire(blocking=False):
            changed.release()
        could_act.append(could_act_now)

    def watched(self: MemoryGroupConsumer, error: BaseException) -> None:
        kill(self, error)
        other = threading.Thread(target=take_a_turn, args=[self._broker.changed])
        other.start()
        other.join()

    monkeypatch.setattr(MemoryGroupConsumer, "kill", watched)
    tester.crash()
    assert could_act == [False, False]
    assert tester.output("out") == []


def test_batches_are_one_call(tester: JobTester) -> None:
    """Messages that arrive while the job is stopped come in batches, each message once and in order."""
    batches: list[list[bytes]] = []

    def process_batch(task: Task, messages: Sequence[Message]) -> None:
        batches.append([message.value() or b"" for message in messages])
        for message in messages:
            append(task, message)

    tester.stop()
    for number in range(20):
        tester.send("orders", "a", str(number % 10), partition=0)
    tester.restore(process_batch=process_batch)
    assert state(tester) == {b"a": b"0123456789" * 2}
    assert len(batches) < 20
    assert b"".join(value for batch in batches for value in batch) == b"0123456789" * 2


def test_the_clock_runs_timers() -> None:
    """A timer runs when it is due, even after a crash, and the commit includes what it wrote."""

    def on_open(task: Task) -> None:
        def tick(task: Task) -> None:
            totals = task.store("totals")
            totals.put(b"ticks", (totals.get(b"ticks") or b"") + b"x")

        task.every(600, tick)

    with JobTester({**CONFIG, "job.tasks": 1}, append, on_open=on_open) as tester:
        tester.advance(seconds=500)
        assert tester.store("totals").get(b"ticks") is None
        tester.advance(seconds=101)
        assert tester.store("totals").get(b"ticks") == b"x"
        tester.commit()
        tester.crash()
        tester.restore("blob-store")
        tester.advance(seconds=601)
        assert tester.store("totals").get(b"ticks") == b"xx"


def test_what_on_open_writes_is_committed() -> None:
    """Whatever ``on_open`` returns."""

    def on_open(task: Task) -> Any:
        task.store("totals").put(b"opened", b"x")
        return False

    with JobTester({**CONFIG, "job.tasks": 1}, append, on_open=on_open) as tester:
        tester.commit()
        assert tester.checkpoint() is not None


def test_what_ran_nothing_is_not_processed() -> None:
    """A function that returns a coroutine or a generator has run nothing, in a timer as well."""

    async def wait(*_: object) -> None:
        pass

    def timer(task: Task) -> None:
        task.every(1, wait)

    refused = pytest.raises(InvalidError, match="runs none of its code")
    with JobTester(CONFIG, lambda *_: wait()) as tester, refused:
        tester.send("orders", "a", "1")
    with JobTester(CONFIG, process_batch=lambda *_: (each for each in "a")) as tester, refused:
        tester.send("orders", "a", "1")
    with JobTester(CONFIG, append, on_open=timer) as tester, refused:
        tester.advance(seconds=2)


def test_an_error_ends_the_job(tester: JobTester) -> None:
    """The call raises the error of the process function. A corrected function continues from the checkpoint."""
    tester.send("orders", "a", "1", partition=0)
    tester.commit()
    with pytest.raises(ValueError, match="poison"):
        tester.send("orders", "a", "poison", partition=0)
    with pytest.raises(InvalidError, match="does not run"):
        state(tester)

    def skip(task: Task, message: Message) -> None:
        if message.value() != b"poison":
            append(task, message)

    tester.restore(process=skip)
    tester.send("orders", "a", "2", partition=0)
    assert state(tester) == {b"a": b"12"}


@pytest.mark.parametrize("before", ["", "1"])
def test_a_commit_of_ones_own_keeps_the_position_in_the_input(before: str) -> None:
    """A commit that leaves out the task's input is refused, even the first one: after a crash, the message would count
    twice."""

    def process(task: Task, message: Message) -> None:
        append(task, message)
        task.commit({"orders-0": (message.offset() or 0) + 1} if message.value() == b"1" else {})

    with JobTester({**CONFIG, "job.tasks": 1}, process) as tester:
        for value in before:
            tester.send("orders", "a", value)
        with pytest.raises(InvalidError, match="leave out orders-0"):
            tester.send("orders", "a", "2")
        tester.restore(process=append)
        assert state(tester) == {b"a": before.encode() + b"2"}


def test_misuse_is_refused_with_a_hint(tester: JobTester) -> None:
    """Each mistake raises a typed error that says what to do, and the job goes on."""

    def anything(value: object) -> Any:
        return value

    mistakes = {
        "is not an input topic": lambda: tester.send("other", "a", "1"),
        "has no partition 2": lambda: tester.send("orders", "a", "1", partition=2),
        "several tasks": lambda: tester.store("totals"),
        "no task 'Partition 2'": lambda: tester.store("totals", task="Partition 2"),
        "the job is running": tester.restore,
        "cannot move by -1 s": lambda: tester.advance(seconds=-1),
        "cannot move by nan s": lambda: tester.advance(seconds=math.nan),
        "cannot move by inf s": lambda: tester.advance(seconds=math.inf),
        "cannot move by '1' s": lambda: tester.advance(seconds=anything("1")),
        "no partition '0'": lambda: tester.send("orders", "a", "1", partition=anything("0")),
        "timestamp is 'x'": lambda: tester.send("orders", "a", "1", timestamp_ms=anything("x")),
        "timestamp is 9223372036854775808": lambda: tester.send("orders", "a", "1", timestamp_ms=2**63),
        r"headers are \['trace'\]": lambda: tester.send("orders", "a", "1", headers=anything({"trace": b"1"})),
        "no topic ordesr": lambda: tester.output("ordesr"),
        "0 members": lambda: tester.rebalance(members=0),
    }
    for text, mistake in mistakes.items():
        with pytest.raises(InvalidError, match=text) as refused:
            mistake()
        assert refused.value.hint, text
    with pytest.raises(ConfigError, match="no store 'other'"):
        tester.store("other", task=ZERO)
    tester.send("orders", "a", "1")
    tester.crash()
    stopped = [tester.crash, tester.commit, tester.stop, lambda: tester.rebalance(members=2), lambda: state(tester)]
    for call in stopped:
        with pytest.raises(InvalidError, match="does not run"):
            call()
    with pytest.raises(InvalidError, match="no backup in other"):
        tester.restore("other")


def test_it_works_only_in_its_block() -> None:
    """Before and after the block every call is refused. A job without input topics is refused from the start."""
    tester = JobTester(CONFIG, append)
    with pytest.raises(InvalidError, match="is not open"):
        tester.send("orders", "a", "1")
    with tester:
        pass
    with pytest.raises(InvalidError, match="is not open"):
        tester.commit()
    with pytest.raises(InvalidError, match="a new tester for each block"), tester:
        pass
    with pytest.raises(InvalidError, match=r"task\.inputs"):
        JobTester({**CONFIG, "task.inputs": []}, append)


def test_output_is_refused_as_by_a_broker() -> None:
    """Text is encoded. A record that is too large, a wrong topic and what the producer does not take end the job."""
    ways: dict[bytes, Callable[[Task], None]] = {
        b"text": lambda task: task.produce("out", "é", "é", headers=[("a", "é")]),  # type: ignore[arg-type,list-item]
        b"large": lambda task: task.produce("out", b"a", b"x" * 1_000_000),
        b"letters": lambda task: task.produce("out", b"a", cast("Any", "é" * 500_000)),
        b"half": lambda task: task.produce("out", b"a", cast("Any", "\ud800")),
        b"half of a name": lambda task: task.produce("out", b"a", b"", headers=[("\ud800", b"")]),
        b"topic": lambda task: task.produce("no such topic!", b"a", b"x"),
        b"no topic": lambda task: task.produce(cast("Any", None), b"a", b"x"),
        b"empty topic": lambda task: task.produce("", b"a", b"x"),
        b"bytes as topic": lambda task: task.produce(cast("Any", b"out"), b"a", b"x"),
        b"headers": lambda task: task.produce("out", b"a", b"x", headers={"a": b"x"}),  # type: ignore[arg-type]
        b"name": lambda task: task.produce("out", b"a", b"x", headers=[(cast("Any", b"a"), b"x")]),
        b"lists": lambda task: task.produce("out", b"a", b"x", headers=[["a", b"x"]]),  # type: ignore[list-item]
        b"key": lambda task: task.produce("out", cast("Any", 5), b"x"),
        b"value": lambda task: task.produce("out", b"a", cast("Any", ["x"])),
        b"mutable": lambda task: task.produce("out", b"a", cast("Any", bytearray(b"x"))),
        b"header": lambda task: task.produce("out", b"a", b"x", headers=[("a", cast("Any", 5))]),
        b"bool": lambda task: task.produce("out", b"a", b"x", partition=True),
        b"partition": lambda task: task.produce("out", b"a", b"x", partition=cast("Any", "0")),
        b"number": lambda task: task.produce("out", b"a", b"x", partition=1 << 31),
        b"negative time": lambda task: task.produce("out", b"a", b"x", timestamp_ms=-1),
        b"no time": lambda task: task.produce("out", b"a", b"x", timestamp_ms=0),
        b"nanoseconds": lambda task: task.produce("out", b"a", b"x", timestamp_ms=1_700_000_000 * 10**9),
        b"half a time": lambda task: task.produce("out", b"a", b"x", timestamp_ms=cast("Any", 1.5)),
        b"a truth": lambda task: task.produce("out", b"a", b"x", timestamp_ms=True),
    }

    def process(task: Task, message: Message) -> None:
        ways[message.value() or b""](task)

    def run(value: str, **settings: object) -> list[OutputRecord]:
        with JobTester({**CONFIG, **settings}, process) as tester:
            tester.send("orders", "a", value, partition=0)
            tester.commit()
            return tester.output("out")

    (text,) = run("text")
    assert (text.key, text.value, text.headers) == ("é".encode(), "é".encode(), (("a", "é".encode()),))
    for odd in ("large", "letters"):
        with pytest.raises(InvalidError, match="a record of 1000001 bytes is larger than the 999964") as large:
            run(odd)
        assert (large.value.where["topic"], large.value.where["input"]) == ("out", "orders-0 offset 0")
        assert "offset" not in large.value.where
    for odd in ("half", "half of a name"):
        with pytest.raises(InvalidError, match="surrogate"):
            run(odd)
    for odd in ("no topic", "empty topic", "bytes as topic"):
        with pytest.raises(TypeError, match="a topic must be its name"):
            run(odd)
    with pytest.raises(InvalidError, match="Invalid topic"):
        run("topic")
    for odd in ("headers", "name"):
        with pytest.raises(TypeError, match="topic out must be a list of"):
            run(odd)
    for odd in ("negative time", "no time", "nanoseconds"):
        with pytest.raises(InvalidError, match="not in the years from 1970 to 9999") as time_error:
            run(odd)
        assert (time_error.value.where["topic"], time_error.value.where["input"]) == ("out", "orders-0 offset 0")
    for odd in ("half a time", "a truth"):
        with pytest.raises(TypeError, match="a timestamp for the topic out must be a whole number"):
            run(odd)
    (listed,) = run("lists")
    assert listed.headers == (("a", b"x"),)
    for odd in ("key", "value", "mutable", "header", "bool", "partition", "number"):
        with pytest.raises(TypeError, match="the topic out must be"):
            run(odd)
    assert len(run("large", **{"kafka.message.max.bytes": 3_000_000})) == 1
    with pytest.raises(MissingState, match="does not exist") as error:
        run("text", **{"task.outputs": []})
    assert error.value.where["topic"] == "out"
    assert len(run("text", **{"task.outputs": "out,more"})) == 1


@pytest.mark.parametrize("in_batches", [False, True])
def test_output_has_the_timestamp_of_its_input(in_batches: bool) -> None:
    """Output has the timestamp of the message, or the newest one of the batch, unless it is given another. Output of a
    timer, and of a message without a timestamp, has the time at which the commit sends it."""

    def send(task: Task, what: bytes, **given: int) -> None:
        task.produce("out", what, b"", partition=0, **given)

    def process(task: Task, given: Any) -> None:
        send(task, b"of a message")
        send(task, b"given", timestamp_ms=7_000)

    def opened(task: Task) -> None:
        send(task, b"of on_open")
        task.every(60, lambda task: send(task, b"of a timer"))

    functions: dict[str, Any] = {"process_batch": process} if in_batches else {"process": process}
    config = {**CONFIG, "job.tasks": 1, "task.commit.ms": 3_600_000}
    with JobTester(config, on_open=opened, start_ms=1_000_000, **functions) as tester:
        tester.commit()
        tester.send("orders", "a", "1", timestamp_ms=5_000)
        tester.send("orders", "a", "2", timestamp_ms=4_000)
        tester.send("orders", "a", "3", timestamp_ms=-1)
        tester.send("orders", "a", "4", timestamp_ms=6_000)
        tester.advance(seconds=60)
        tester.advance(seconds=30)
        tester.commit()
        found = [(record.key, record.timestamp_ms) for record in tester.output("out")]
    now = 1_090_000
    expected = [(b"of on_open", 1_000_000)]
    for at in (5_000, 4_000, now, 6_000):
        expected += [(b"of a message", at), (b"given", 7_000)]
    assert found == [*expected, (b"of a timer", now)]


def test_the_newest_timestamp_of_a_batch() -> None:
    """Of several messages in a batch, the newest counts, wherever it is."""
    sizes: list[int] = []

    def process(task: Task, batch: Sequence[Message]) -> None:
        sizes.append(len(batch))
        task.produce("out", b"k", b"")

    config = {**CONFIG, "job.tasks": 1}
    with JobTester(config, process_batch=process, start_ms=1_000_000) as tester:
        tester.crash()
        for at in (5_000, 9_000, 4_000):
            tester.send("orders", "a", "1", timestamp_ms=at)
        tester.restore()
        tester.commit()
        assert sizes == [3]
        assert [record.timestamp_ms for record in tester.output("out")] == [9_000]


def test_a_topic_that_may_not_be_described(monkeypatch: pytest.MonkeyPatch) -> None:
    """J1.9: without the right to read the settings of an output topic, the loop runs, and the broker decides."""

    def settings(metadata: TopicMetadata, topics: Sequence[str]) -> dict[str, dict[str, str]]:
        if "out" in topics:
            asked.append(topics)
            raise AccessDenied("reading topics' settings")
        return real(metadata, topics)

    real, asked = TopicMetadata.settings, list[Sequence[str]]()
    monkeypatch.setattr(TopicMetadata, "settings", settings)
    with JobTester({**CONFIG, "job.tasks": 1}, append) as tester:
        tester.send("orders", "a", "1")
        tester.commit()
        assert [record.value for record in tester.output("out")] == [b"1"]
    assert asked


def test_much_output_is_committed_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """A task with more output than may wait for a commit gets on: commits begin early, and the task waits for them."""
    monkeypatch.setattr(pending_commit, "BUDGET", 10_000)
    with JobTester({**CONFIG, "job.tasks": 1}, append) as tester:
        for number in range(20):
            tester.send("orders", f"{number}", "x" * 1000)
        assert len(tester.output("out")) >= 10
        tester.commit()
        assert len(tester.output("out")) == 20


def test_new_topics_come_with_a_restore() -> None:
    """A start with more input and output topics finds them, as after a deploy."""
    with JobTester({**CONFIG, "job.tasks": 1}, append) as tester:
        tester.send("orders", "a", "1")
        tester.stop()
        tester.restore(settings={"task.inputs": ["orders", "returns"], "task.outputs": ["out", "more"]})
        tester.send("returns", "a", "2")
        tester.commit()
        assert state(tester) == {b"a": b"12"}


def test_a_new_serde_of_the_input_comes_with_a_restore() -> None:
    """What is sent after the start is written with the serde with which the job reads it."""
    seen: list[Any] = []
    serde = "task.input.value.serde"
    with JobTester({**CONFIG, serde: "string"}, lambda task, message: seen.append(message.value())) as tester:
        tester.send("orders", "a", "1")
        tester.stop()
        tester.restore(settings={serde: "json"})
        tester.send("orders", "a", {"n": 2})
    assert seen == ["1", {"n": 2}]


def test_the_servers_of_a_configuration_are_not_touched() -> None:
    """A production configuration works unchanged, but its servers and directories are not used."""
    given = {
        **CONFIG,
        "kafka.bootstrap.servers": "127.0.0.1:1",
        "kafka.security.protocol": "SASL_SSL",
        "blob.store.uri": "s3://bucket/prefix",
        "blob.store.s3.endpoint": "http://127.0.0.1:1",
        "state.dir": "/nowhere/at/all",
    }
    with JobTester(JobConfig.from_mapping(given), append) as tester:
        tester.send("orders", "a", "1", partition=0)
        tester.commit()
        assert state(tester) == {b"a": b"1"}


@pytest.mark.parametrize(
    "production",
    [
        {"task.shutdown.ms": "10 min", "kafka.consumer.max.poll.interval.ms": 900_000},
        {"blob.store.uri": "s3://bucket/prefix", "blob.store.s3": {"sse.algorithm": "AES256"}},
        {"task.topics.message.timestamp.difference.max.ms": 1, "task.topics.confluent.tier.enable": True},
        {"kafka.producer.message.max.bytes": "${env:STATEMGR_TEST_NOT_SET}"},
        {"task.shutdown.ms": "10 min", "kafka.consumer.max.poll.interval.ms": "${env:STATEMGR_TEST_NOT_SET}"},
    ],
)
@pytest.mark.parametrize("loaded", [True, False])
def test_settings_that_belong_to_other_servers(production: dict[str, object], loaded: bool) -> None:
    """What a production configuration sets for its own servers contradicts nothing, and needs no variables."""
    given: dict[str, object] = {**CONFIG, "kafka.bootstrap.servers": "127.0.0.1:1", "blob.store.uri": "file:///x"}
    given |= production
    with JobTester(JobConfig.from_mapping(given) if loaded else given, append) as tester:
        tester.send("orders", "a", "1", partition=0)
        tester.commit()
        tester.stop()
        tester.restore(settings=production)
        assert state(tester) == {b"a": b"1"}


def test_a_blob_store_that_is_not_installed() -> None:
    """It is replaced, so a mapping may name one that is installed only in production."""
    other = {"blob.store.uri": "hdfs://nameservice/state"}
    with JobTester({**CONFIG, **other}, append) as tester:
        tester.send("orders", "a", "1", partition=0)
        tester.stop()
        tester.restore("blob-store", settings=other)
        assert state(tester) == {b"a": b"1"}


def test_a_start_may_have_permissions(tester: JobTester) -> None:
    """A new store needs one in a test as in production, and only once."""
    tester.send("orders", "a", "1", partition=0)
    tester.stop()
    more = {"stores.more.value.serde": "bytes"}
    with pytest.raises(PermissionNeeded, match="more"):
        tester.restore(settings=more)
    tester.restore(settings=more, allow_new_stores=True)
    tester.send("orders", "a", "2", partition=0)
    tester.stop()
    tester.restore()
    assert state(tester) == {b"a": b"12"}


def test_a_store_without_a_backup_is_empty_after_a_restore() -> None:
    """The named backend restores all other stores."""
    with JobTester({**CONFIG, "stores.scratch.backup.factories": []}, append) as tester:
        tester.send("orders", "a", "1", partition=0)
        tester.store("scratch", task=ZERO).put(b"a", b"1")
        tester.commit()
        tester.stop()
        tester.restore("blob-store")
        assert state(tester) == {b"a": b"1"}
        assert tester.store("scratch", task=ZERO).get(b"a") is None


def test_the_example_passes_and_the_page_shows_it() -> None:
    """`pytest examples/consumer-loop` passes, as examples/README.md says, and docs/testing.md quotes both files."""
    program, tests = blocks("docs/testing.md", "# Testing a job")
    assert program in (EXAMPLE / "totals.py").read_text()
    assert (EXAMPLE / "test_totals.py").read_text().endswith(tests)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "examples/consumer-loop"]
    began = time.monotonic()
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert "4 passed" in done.stdout, f"{done.stdout}{done.stderr} after {time.monotonic() - began:.0f} s"


def test_offsets_of_topics_that_are_no_input_any_more(caplog: pytest.LogCaptureFixture) -> None:
    """A topic leaves task.inputs. Its offset stays as long as a retained checkpoint was made while it was an input, so
    that a correction loses nothing. Then it leaves the records, and the log says so."""
    caplog.set_level(logging.INFO)
    both = {**CONFIG, "job.tasks": 1, "task.inputs": ["orders", "old"], "task.checkpoint.retained": 2}
    with JobTester(both, append) as tester:
        for topic in ("orders", "old", "old"):
            tester.send(topic, "a", "1")
        tester.stop()
        tester._given = JobConfig.from_mapping({**tester._given.to_mapping(), "task.inputs": ["orders"]})
        tester.restore()
        found = []
        for _ in range(3):
            tester.send("orders", "a", "1")
            tester.commit()
            checkpoint = tester.checkpoint(ZERO)
            assert checkpoint is not None
            found.append(dict(checkpoint.input_offsets))
        assert found == [{"orders-0": 2, "old-0": 2}, {"orders-0": 3, "old-0": 2}, {"orders-0": 4}]
        assert "drops the offsets of old-0" in caplog.text
        assert set(checkpoint.input_topic_ids) == {"orders"}
