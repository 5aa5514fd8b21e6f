"""A stateful processor on a real store, without a Spark session: expiry, timers, lists, schemas and refusals."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import date
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyspark.errors import PySparkRuntimeError
from pyspark.sql.streaming import StatefulProcessor
from pyspark.sql.streaming.state import GroupStateTimeout
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    DataType,
    DateType,
    DayTimeIntervalType,
    DecimalType,
    FloatType,
    IntegerType,
    LongType,
    MapType,
    NullType,
    Row,
    StringType,
    StructField,
    StructType,
    TimestampNTZType,
    TimestampType,
)

from spark_integration.context import StateContext
from spark_integration.processors import timers
from spark_integration.processors.group_state import GroupFunction
from spark_integration.processors.groups import EventTime, Form, in_time
from spark_integration.processors.handle import Discovery
from spark_integration.processors.initial import IS_INPUT
from spark_integration.processors.keys import decode_key, encode_key
from spark_integration.processors.program import ProcessorProgram
from spark_integration.processors.run import ProcessorRun
from spark_integration.processors.values import value_serde
from spark_integration.processors.variables import Record
from spark_integration.processors.watermarks import timed
from spark_integration.processors.yielded import newer
from statemgr.errors import CorruptRecord, InvalidError
from tests.open_stores import TASK, CommittedStore

KEY = StructType([StructField("id", StringType())])
NUMBER = StructType([StructField("n", LongType())])
OUT = StructType([StructField("id", StringType()), StructField("seen", StringType())])
FORM = Form(pandas=False, timezone="UTC", safe=False, rows_per_frame=100)
NEVER_MS = 2**63 - 1
Act = Callable[[Any, list[int]], Any]


class Scripted(StatefulProcessor):
    """A processor that uses the given declaration, and calls ``act`` for each key with the numbers of its rows."""

    def __init__(self, declare: Callable[[Any], None], act: Act) -> None:
        self.declare, self.act = declare, act
        self.expired: list[int] = []
        self.closed = 0

    def init(self, handle: Any) -> None:
        self.handle = handle
        self.states = self.declare(handle)

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Row]:  # noqa: N802, N803
        yield Row(id=key[0], seen=repr(self.act(self, [row.n for row in rows])))

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Row]:  # noqa: N802, N803
        self.expired.append(expiredTimerInfo.getExpiryTimeInMs())
        yield Row(id=key[0], seen=f"fired {expiredTimerInfo.getExpiryTimeInMs()}")

    def close(self) -> None:
        self.closed += 1


class Task:
    """A task with one store, which runs batches of a processor and commits each."""

    def __init__(self, directory: Path) -> None:
        self.job = CommittedStore(directory, track=True, settings={})
        self.record = Record(KEY, "visits", "processingtime", {})

    def batch(
        self,
        processor: StatefulProcessor,
        rows: list[tuple[str | None, int]],
        time_ms: int,
        mode: str = "processingtime",
        watermark_ms: int | None = None,
    ) -> list[tuple[Any, ...]]:
        """Run a batch of sorted rows at a given time, commit it and return the output."""
        discovery = Discovery(mode)
        processor.init(discovery)
        declared = discovery.found()
        self.record = Record.from_bytes(self.record.with_declared(declared).to_bytes())
        visible = declared.visible(self.record)
        run = ProcessorRun(processor, "totals", KEY, OUT, mode, FORM, None, visible, declared.parsed)
        context = StateContext(TASK, 1, time_ms, watermark_ms, "a")
        arrow = pa.RecordBatch.from_pydict({"id": [i for i, _ in rows], "n": [n for _, n in rows]})
        found = [
            tuple(row.values())
            for b in run(iter([arrow]), {"totals": self.job.store}, context)
            for row in b.to_pylist()
        ]
        self.job.publish(self.job.freeze())
        self.job.reopen()
        return found


@pytest.fixture
def task(tmp_path: Path) -> Iterator[Task]:
    """A task with an empty store."""
    found = Task(tmp_path)
    yield found
    found.job.close()


def value(ttl: int | None = None) -> Callable[[Any], Any]:
    """Return a function that declares a value state."""
    return lambda handle: handle.getValueState("value", NUMBER, ttl)


def test_a_value_expires_with_the_batch_whose_time_reaches_its_ttl(task: Task) -> None:
    """An update renews the TTL. Expired values are invisible, and their deletes reach the changelog."""

    def act(processor: Any, numbers: list[int]) -> Any:
        before = processor.states.get()
        if numbers[0]:
            processor.states.update((numbers[0],))
        return before

    processor = Scripted(value(ttl=100), act)
    assert task.batch(processor, [("a", 1), ("b", 2)], 1000) == [("a", "None"), ("b", "None")]
    assert task.batch(processor, [("a", 3)], 1050) == [("a", "(1,)")]
    assert task.batch(processor, [("a", 0), ("b", 0)], 1099) == [("a", "(3,)"), ("b", "(2,)")]
    assert task.batch(processor, [("b", 0)], 1100) == [("b", "None")]
    assert len(task.job.changelog) == 2  # the value of a, and its entry in the index
    assert task.batch(processor, [("a", 0)], 1150) == [("a", "None")]
    assert task.job.changelog == {}


def test_a_cleared_value_leaves_nothing(task: Task) -> None:
    """A cleared value also leaves no entry in the index of expiry times."""

    def act(processor: Any, numbers: list[int]) -> Any:
        processor.states.update((1,))
        processor.states.clear()
        return processor.states.exists()

    assert task.batch(Scripted(value(ttl=100), act), [("a", 1)], 1000) == [("a", "False")]
    assert task.job.changelog == {}


def test_elements_of_a_list_expire_one_by_one(task: Task) -> None:
    """New elements follow the remaining ones, and a list without elements leaves nothing in the store."""

    def act(processor: Any, numbers: list[int]) -> Any:
        processor.states.appendList([(n,) for n in numbers if n]) if any(numbers) else None
        return [n for (n,) in processor.states.get()], processor.states.exists()

    processor = Scripted(lambda handle: handle.getListState("list", NUMBER, 100), act)
    assert task.batch(processor, [("a", 1), ("a", 2)], 1000) == [("a", "([1, 2], True)")]
    assert task.batch(processor, [("a", 3)], 1050) == [("a", "([1, 2, 3], True)")]
    assert task.batch(processor, [("a", 0)], 1100) == [("a", "([3], True)")]
    assert task.batch(processor, [("a", 4)], 1120) == [("a", "([3, 4], True)")]
    assert task.batch(processor, [("b", 0)], 1300) == [("b", "([], False)")]
    assert task.job.changelog == {}


def test_a_list_that_init_does_not_declare_any_more_expires(task: Task) -> None:
    """Its bounds expire with its elements, so a version that declares it again appends to an empty list."""

    def act(processor: Any, numbers: list[int]) -> Any:
        return processor.states.appendValue((1,))

    declare = lambda handle: handle.getListState("list", NUMBER, 100)  # noqa: E731
    task.batch(Scripted(declare, act), [("a", 1)], 1000)
    task.batch(Scripted(value(), lambda *_: None), [("a", 1)], 1100)
    assert task.job.changelog == {}


def test_a_long_list_is_read_replaced_and_cleared(task: Task) -> None:
    """A list may have more elements than one read returns."""

    def act(processor: Any, numbers: list[int]) -> Any:
        if numbers == [0]:
            processor.states.clear()
        elif len(numbers) == 1:
            processor.states.put([(numbers[0],)])
        else:
            processor.states.appendList([(n,) for n in numbers])
        return sum(n for (n,) in processor.states.get())

    processor = Scripted(lambda handle: handle.getListState("list", NUMBER), act)
    rows = [("a", n) for n in range(2500)]
    assert task.batch(processor, rows, 1000) == [("a", str(sum(range(2500))))]
    assert task.batch(processor, [("a", 7)], 1000) == [("a", "7")]
    assert len(task.job.changelog) == 2
    assert task.batch(processor, [("a", 0)], 1000) == [("a", "0")]
    assert task.job.changelog == {}


@pytest.mark.parametrize("wrong", [("text",), (b"x" * 1000,)])
@pytest.mark.parametrize("ttl", [None, 100])
def test_a_refused_value_changes_nothing(task: Task, ttl: int | None, wrong: tuple[Any, ...]) -> None:
    """A processor may go on after a value of a wrong type, or one that is too large: what it had is there still, and
    expires at its time."""
    data = StructType([StructField("b", BinaryType())])

    def declare(handle: Any) -> Any:
        mapped = handle.getMapState("m", data, data, ttl)
        return handle.getValueState("v", data, ttl), handle.getListState("l", data, ttl), mapped

    def act(processor: Any, numbers: list[int]) -> Any:
        one, several, mapped = processor.states
        if numbers == [1]:
            one.update((b"v",))
            several.put([(b"1",), (b"2",), (b"3",)])
            several.put([(b"4",), (b"5",)])
            mapped.updateValue((b"k",), (b"m",))
        elif numbers == [2]:
            for refused in (
                lambda: one.update(wrong),
                lambda: several.put([(b"6",), wrong]),
                lambda: several.appendList([(b"6",), wrong]),
                lambda: mapped.updateValue((b"k",), wrong),
            ):
                with pytest.raises(InvalidError):
                    refused()
        return one.get(), list(several.get()), list(mapped.values())

    for number in (1, 2, 3):
        task.job.opened.content.limit(500, "")
        found = task.batch(Scripted(declare, act), [("a", number)], number)
        assert found == [("a", repr(((b"v",), [(b"4",), (b"5",)], [(b"m",)])))]
    if ttl is not None:
        task.batch(Scripted(declare, act), [("b", 3)], 101)
        assert task.job.changelog == {}


@pytest.mark.parametrize("length", [3, 2500])
@pytest.mark.parametrize("change", ["clear", "put", "append"])
def test_a_list_that_changes_while_it_is_read(task: Task, length: int, change: str) -> None:
    """An iteration shows the list as of ``get``, however long it is, and closes what it reads from at its end."""

    def act(processor: Any, numbers: list[int]) -> Any:
        state = processor.states
        state.appendList([(n,) for n in range(length)])
        found, begun, dropped = state.get(), state.get(), state.get()
        seen = [next(begun)]
        match change:
            case "clear":
                state.clear()
            case "put":
                state.put([(-1,)] * length)
            case "append":
                state.appendValue((-1,))
        del dropped
        expected = [(n,) for n in range(length)]
        return list(found) == expected and seen + list(begun) == expected

    processor = Scripted(lambda handle: handle.getListState("list", NUMBER), act)
    assert task.batch(processor, [("a", 0)], 1000) == [("a", "True")]


def test_entries_of_a_map_expire_one_by_one(task: Task) -> None:
    """Each entry expires after its own update, and keys are in order."""

    def act(processor: Any, numbers: list[int]) -> Any:
        for n in numbers:
            if n:
                processor.states.updateValue((n,), (n * 10,))
        return [(tuple(k), tuple(v)) for k, v in processor.states.iterator()], processor.states.exists()

    processor = Scripted(lambda handle: handle.getMapState("map", NUMBER, NUMBER, 100), act)
    assert task.batch(processor, [("a", 5), ("a", -3)], 1000) == [("a", "([((-3,), (-30,)), ((5,), (50,))], True)")]
    assert task.batch(processor, [("a", 5)], 1050) == [("a", "([((-3,), (-30,)), ((5,), (50,))], True)")]
    assert task.batch(processor, [("a", 0)], 1100) == [("a", "([((5,), (50,))], True)")]
    assert task.batch(processor, [("a", 0)], 1150) == [("a", "([], False)")]
    assert task.job.changelog == {}


@pytest.mark.parametrize("ttl", [None, 1_000_000])
def test_what_is_read_ahead_is_what_was_written(task: Task, ttl: int | None) -> None:
    """Reads ahead return what was written, for many keys, in any order of reads and writes, and in a timer."""
    picks = random.Random(5)
    model: dict[str, tuple[int | None, list[int]]] = {}

    def declare(handle: Any) -> Any:
        return handle.getValueState("value", NUMBER, ttl), handle.getListState("list", NUMBER, ttl)

    def act(processor: Any, numbers: list[int]) -> Any:
        number, listed = processor.states
        key = f"{numbers[0] % 1000:03}"
        seen: list[Any] = []
        expected: list[Any] = []
        for step in range(4):
            value, items = model.get(key, (None, []))
            match picks.choice(["get", "update", "clear", "append", "put", "empty"]):
                case "get":
                    found = number.get()
                    seen.append((found and found[0], [n for (n,) in listed.get()]))
                    expected.append((value, items))
                case "update":
                    value = step
                    number.update((value,))
                case "clear":
                    value = None
                    number.clear()
                case "append":
                    items = [*items, step]
                    listed.appendValue((step,))
                case "put":
                    items = [step, step]
                    listed.put([(step,), (step,)])
                case "empty":
                    items = []
                    listed.clear()
            model[key] = value, items
        processor.handle.registerTimer(5000)
        return seen == expected

    class Timed(Scripted):
        def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Row]:  # noqa: N802, N803
            number, listed = self.states
            found = number.get()
            same = (found and found[0], [n for (n,) in listed.get()]) == model[key[0]]
            number.update((7,))
            yield Row(id=key[0], seen=repr(same and number.get() == (7,)))

    rows = [(f"{key:03}", key) for key in range(700)]
    for time_ms in (1000, 2000, 5000):
        assert {seen for _, seen in task.batch(Timed(declare, act), rows, time_ms)} == {"True"}


def test_timers_fire_in_the_order_of_time_at_or_after_it(task: Task) -> None:
    """A timer fires once, for the key that registered it. Deleted timers do not fire and leave nothing behind."""

    def act(processor: Any, numbers: list[int]) -> Any:
        for n in numbers:
            processor.handle.registerTimer(n) if n > 0 else processor.handle.deleteTimer(-n)
        return list(processor.handle.listTimers())

    processor = Scripted(lambda handle: None, act)
    rows: list[tuple[str | None, int]] = [(None, 1100), ("a", 1200), ("a", 1050), ("a", 1000)]
    assert task.batch(processor, rows, 1000) == [(None, "[1100]"), ("a", "[1000, 1050, 1200]"), ("a", "fired 1000")]
    assert task.batch(processor, [("b", 5000)], 1150) == [("b", "[5000]"), ("a", "fired 1050"), (None, "fired 1100")]
    assert task.batch(processor, [("a", -1200), ("b", -5000)], 9000) == [("a", "[]"), ("b", "[]")]
    assert task.job.changelog == {}
    assert processor.closed == 3


def test_a_watermark_after_the_year_9999(task: Task) -> None:
    """Timers up to it fire, although Python has no time for it."""
    far_ms = 1_700_000_000_000_000  # microseconds that were taken for milliseconds
    task.record = Record(KEY, "visits", "eventtime", {})
    processor = Scripted(lambda handle: None, lambda p, numbers: p.handle.registerTimer(far_ms))
    assert task.batch(processor, [("a", 1)], 1000, "eventtime", far_ms - 1) == [("a", "None")]
    found = task.batch(processor, [("b", 1)], 1000, "eventtime", far_ms)
    assert found == [("b", "None"), ("a", f"fired {far_ms}"), ("b", f"fired {far_ms}")]


def test_the_time_of_a_timer_is_any_integer(task: Task) -> None:
    """NumPy's integers are times of timers, as on Spark. A fraction is refused."""

    def act(processor: Any, numbers: list[int]) -> Any:
        processor.handle.registerTimer(np.int64(5000))
        processor.handle.registerTimer(np.int64(6000))
        processor.handle.deleteTimer(np.int64(6000))
        with pytest.raises(TypeError):
            processor.handle.registerTimer(7000.5)
        return list(processor.handle.listTimers())

    assert task.batch(Scripted(lambda handle: None, act), [("a", 1)], 1000) == [("a", "[5000]")]


def test_timers_timeouts_and_ttls_for_never(task: Task) -> None:
    """They do not fire, whether they are set once or in each batch. What is later than that counts as never, too."""

    def timed_out(key: Any, rows: Any, state: Any) -> Iterator[Row]:
        before = state.getOption
        state.update((1,))
        state.setTimeoutTimestamp(NEVER_MS)
        yield Row(id=key[0], seen=repr((before, state.hasTimedOut)))

    task.record = Record(KEY, "visits", "eventtime", {})
    timeout = GroupFunction(timed_out, NUMBER, GroupStateTimeout.EventTimeTimeout)
    for before in (None, (1,)):
        assert task.batch(timeout, [("a", 1)], 1000, "eventtime", 10**12) == [("a", repr((before, False)))]
        assert list(timers.of_key(task.job.store, encode_key(KEY, ("a",)))) == [NEVER_MS]

    def act(processor: Any, numbers: list[int]) -> Any:
        before = processor.states.get()
        processor.states.update((numbers[0],))
        processor.handle.registerTimer(NEVER_MS)
        return before, list(processor.handle.listTimers())

    task.record = Record(KEY, "visits", "processingtime", {})
    for ttl, before in ((2**64, None), (NEVER_MS, (1,))):
        assert task.batch(Scripted(value(ttl), act), [("b", 1)], 1000) == [("b", repr((before, [NEVER_MS])))]


def test_keys_that_begin_alike_are_apart(task: Task) -> None:
    """Keys and variables whose names start alike are separate, even if a key is null, empty or has zero bytes."""

    def declare(handle: Any) -> Any:
        return [handle.getMapState(name, NUMBER, NUMBER) for name in ("m", "m\x00", "mm")]

    def act(processor: Any, numbers: list[int]) -> Any:
        for i, state in enumerate(processor.states):
            assert not state.exists()
            state.updateValue((i,), (i,))
        return [[tuple(k) for k in state.keys()] for state in processor.states]  # noqa: SIM118

    ids = [None, "", "\x00", "\x00\x01", "a", "a\x00", "aa"]
    found = task.batch(Scripted(declare, act), [(i, 1) for i in ids], 1000)
    assert found == [(i, "[[(0,)], [(1,)], [(2,)]]") for i in ids]


def test_a_deleted_variable_is_gone_for_every_key(task: Task) -> None:
    """The deletes reach the changelog, and the name can be declared again with another type."""
    task.batch(Scripted(value(), lambda p, n: p.states.update((n[0],))), [("a", 1), ("b", 2)], 1000)
    assert len(task.job.changelog) == 2

    task.batch(Scripted(lambda handle: handle.deleteIfExists("value"), lambda p, n: None), [("a", 1)], 1000)

    assert task.job.changelog == {}
    assert task.record.variables == {}
    text = StructType([StructField("n", StringType())])
    other = Scripted(lambda handle: handle.getValueState("value", text), lambda p, n: p.states.get())
    assert task.batch(other, [("a", 1)], 1000) == [("a", "None")]


@pytest.mark.parametrize("kind", ["value", "list", "map"])
def test_a_variable_that_init_deletes_again_is_refused_by_name(task: Task, kind: str) -> None:
    """Each use of it raises, as on Spark. What it had is deleted, and the record does not have it."""
    used = {
        "value": [lambda v: v.exists(), lambda v: v.get(), lambda v: v.update((1,)), lambda v: v.clear()],
        "list": [lambda v: v.exists(), lambda v: list(v.get()), lambda v: v.appendValue((1,)), lambda v: v.clear()],
        "map": [lambda v: v.exists(), lambda v: v.getValue((1,)), lambda v: v.updateValue((1,), (1,))],
    }[kind]

    def declare(handle: Any) -> Any:
        if kind == "map":
            return handle.getMapState("gone", NUMBER, NUMBER)
        return (handle.getValueState if kind == "value" else handle.getListState)("gone", NUMBER)

    def declare_and_delete(handle: Any) -> Any:
        found = declare(handle)
        handle.deleteIfExists("gone")
        return found

    def act(processor: Any, numbers: list[int]) -> None:
        for use in used:
            with pytest.raises(PySparkRuntimeError, match=f"{kind.capitalize()} state gone is not initialized"):
                use(processor.states)

    write = {
        "value": lambda p, n: p.states.update((1,)),
        "list": lambda p, n: p.states.appendValue((1,)),
        "map": lambda p, n: p.states.updateValue((1,), (1,)),
    }[kind]
    task.batch(Scripted(declare, write), [("a", 1)], 1000)
    assert task.job.changelog
    for _ in range(2):
        task.batch(Scripted(declare_and_delete, act), [("a", 1)], 1000)
        assert task.job.changelog == {}
        assert task.record.variables == {}


def test_a_variable_that_init_declares_after_it_has_deleted_it(task: Task) -> None:
    """Each batch would delete it, so it is refused."""

    def declare(handle: Any) -> Any:
        handle.deleteIfExists("value")
        return value()(handle)

    with pytest.raises(InvalidError, match="'value' after it has deleted it"):
        task.batch(Scripted(declare, lambda p, n: None), [("a", 1)], 1000)


NOT_NULL = StructType([StructField("n", LongType(), False)])


@pytest.mark.parametrize(
    "schema",
    [
        NOT_NULL,
        StructType([StructField("inner", NOT_NULL)]),
        StructType([StructField("list", ArrayType(LongType(), False))]),
        StructType([StructField("map", MapType(StringType(), LongType(), False))]),
    ],
)
def test_fields_that_are_not_null(task: Task, schema: StructType) -> None:
    """Where Spark's state has Avro's format, they are refused as by Spark. Elsewhere, a null in one is."""
    discovery = Discovery("none")
    discovery.getValueState("value", schema)
    discovery.found()
    with pytest.raises(PySparkRuntimeError, match="SCHEMA_MUST_BE_NULLABLE"):
        discovery.found(nullable=True)

    nulls = {"n": None, "inner": (None,), "list": [1, None], "map": {"a": None}}
    values = {"n": 1, "inner": (1,), "list": [1, 2], "map": {"a": 1}}
    [name] = schema.names

    def keep(given: dict[str, Any]) -> Scripted:
        return Scripted(
            lambda handle: handle.getValueState("value", schema), lambda p, n: p.states.update((given[name],))
        )

    task.batch(keep(values), [("a", 1)], 1000)
    with pytest.raises(InvalidError, match="null where it is declared NOT NULL"):
        task.batch(keep(nulls), [("a", 1)], 1000)


@pytest.mark.parametrize(
    ("written", "read", "at"),
    [
        (NUMBER, NOT_NULL, "n"),
        (StructType(), NOT_NULL, "n"),
        *(
            (StructType().add("in", kind(True)), StructType().add("in", kind(False)), at)
            for kind, at in (
                (lambda null: StructType([StructField("n", LongType(), null)]), "in.n"),
                (lambda null: ArrayType(LongType(), null), "in.element"),
                (lambda null: MapType(StringType(), LongType(), null), "in.value"),
                (lambda null: ArrayType(MapType(StringType(), LongType(), null), False), "in.element.value"),
            )
        ),
    ],
)
def test_what_becomes_not_null(task: Task, written: StructType, read: StructType, at: str) -> None:
    """Values that were written before may have a null in the field, element or value, so the change is refused. The
    reverse is not."""

    def declared(schema: StructType) -> Scripted:
        return Scripted(lambda handle: handle.getValueState("value", schema), lambda p, n: None)

    task.batch(declared(written), [("a", 1)], 1000)
    with pytest.raises(InvalidError, match=f": {at} is declared NOT NULL now"):
        task.batch(declared(read), [("a", 1)], 1000)
    task.record = Record(KEY, "visits", "processingtime", {})
    for schema in (read, written):
        task.batch(declared(schema), [("a", 1)], 1000)


def test_values_of_older_schemas_are_read_with_the_newest(task: Task) -> None:
    """Fields may be added, removed and widened. Values of the first schema are still readable after two changes."""
    first = StructType([StructField("n", IntegerType()), StructField("old", StringType())])
    second = StructType([StructField("n", LongType()), StructField("new", StringType())])
    third = StructType([StructField("new", StringType()), StructField("n", LongType())])

    def keep(schema: StructType, *values: Any) -> Scripted:
        return Scripted(lambda handle: handle.getValueState("value", schema), lambda p, n: p.states.update(values))

    def read(schema: StructType) -> Scripted:
        return Scripted(lambda handle: handle.getValueState("value", schema), lambda p, n: p.states.get())

    task.batch(keep(first, 1, "x"), [("a", 1)], 1000)
    task.batch(keep(second, 2**40, "y"), [("b", 1)], 1000)
    assert task.batch(read(third), [("a", 1), ("b", 1)], 1000) == [("a", "(None, 1)"), ("b", f"('y', {2**40})")]
    assert task.batch(read(second), [("a", 1)], 1000) == [("a", "(1, None)")]


@pytest.mark.parametrize(
    ("declare", "message"),
    [
        (lambda h: h.getListState("value", NUMBER), "was a value state and is a list state"),
        (lambda h: h.getValueState("value", NUMBER, 5), "without a TTL and is now with one"),
        (
            lambda h: h.getValueState("value", StructType([StructField("n", StringType())])),
            "n was bigint and is string",
        ),
        (lambda h: h.getValueState("value", StructType([StructField("n", IntegerType())])), "n was bigint and is int"),
        (lambda h: h.getMapState("map", StructType([StructField("k", StringType())]), NUMBER), "keys of the map state"),
        (lambda h: h.getMapState("map", NUMBER, StructType([StructField("n", StringType())])), "n was bigint"),
    ],
)
def test_a_change_that_cannot_be_resolved(task: Task, declare: Callable[[Any], None], message: str) -> None:
    """The processor's record shows that the change is impossible, and the error has a hint."""

    def both(handle: Any) -> Any:
        return handle.getValueState("value", NUMBER), handle.getMapState("map", NUMBER, NUMBER)

    task.batch(Scripted(both, lambda p, n: None), [("a", 1)], 1000)

    with pytest.raises(InvalidError, match=message) as caught:
        task.batch(Scripted(declare, lambda p, n: None), [("a", 1)], 1000)
    assert caught.value.hint


def test_a_text_becomes_binary_and_not_the_reverse(task: Task) -> None:
    """Bytes that were written before need not be a text, so that change is refused at the start."""
    text, binary = (StructType().add("b", kind) for kind in (StringType(), BinaryType()))

    def declared(schema: StructType, act: Callable[[Any], Any]) -> Scripted:
        return Scripted(lambda handle: handle.getValueState("value", schema), lambda p, n: act(p.states))

    task.batch(declared(text, lambda state: state.update(("é",))), [("a", 1)], 1000)
    assert task.batch(declared(binary, lambda state: state.get()), [("a", 1)], 1000) == [("a", repr(("é".encode(),)))]
    with pytest.raises(InvalidError, match="b was binary and is string"):
        task.batch(declared(text, lambda state: state.get()), [("a", 1)], 1000)


def test_a_text_as_the_key_of_a_map(task: Task) -> None:
    """As on Spark, a row may be any sequence, so a text of one character is a row of it."""
    name = StructType([StructField("name", StringType())])

    def act(processor: Any, numbers: list[int]) -> Any:
        processor.states.updateValue("x", [numbers[0]])
        return list(processor.states.iterator())

    processor = Scripted(lambda handle: handle.getMapState("map", name, NUMBER), act)
    assert task.batch(processor, [("a", 1)], 1000) == [("a", "[(('x',), (1,))]")]


def count_rows(key: Any, frames: Any, state: Any) -> Iterator[Any]:
    """A function for ``applyInPandasWithState``."""
    yield from ()


def test_the_names_of_an_operator() -> None:
    """Progress and plans have Spark's name of the operator, and the name of the user's class or function."""
    function = ProcessorProgram(GroupFunction(count_rows, NUMBER, "NoTimeout"), ("id",), OUT, "none", True)
    assert (function.operator, function.function) == ("applyInPandasWithState", "count_rows")
    processor = ProcessorProgram(Scripted(value(), lambda p, n: None), ("id",), OUT, "none", True)
    assert (processor.operator, processor.function) == ("transformWithStateInPandasExec", "Scripted")


def test_other_columns_or_another_time_mode() -> None:
    """State belongs to its key's type, and timers to their clock, so another key or time mode is refused."""
    record = Record(KEY, "visits", "processingtime", {})
    with pytest.raises(InvalidError, match="grouped by id string, and the query by id bigint"):
        record.check_same(StructType([StructField("id", LongType())]), "processingtime")
    with pytest.raises(InvalidError, match="time mode processingtime, and the query has none"):
        record.check_same(KEY, "none")


@pytest.mark.parametrize("data", [b"", b"{}", b'{"format": 2}', b'{"format": 1, "key": 5}'])
def test_a_record_that_cannot_be_read(data: bytes) -> None:
    """A damaged record raises CorruptRecord."""
    with pytest.raises(CorruptRecord):
        Record.from_bytes(data)


def test_values_of_wrong_types_are_refused(task: Task) -> None:
    """A wrong type, a number that is too large and too many columns are refused."""
    for wrong in (("text",), (1.5,), (1, 2), (2**70,)):
        processor = Scripted(value(), lambda p, n, wrong=wrong: p.states.update(wrong))  # type: ignore[misc]
        with pytest.raises(InvalidError):
            task.batch(processor, [("a", 1)], 1000)


@pytest.mark.parametrize(
    ("kind", "wrong"),
    [
        *((DateType(), one) for one in ("2024-01-01", 5)),
        *((TimestampType(), one) for one in ("2024", 5, date(2024, 1, 1), np.datetime64("2024-01-01", "ns"))),
        (TimestampNTZType(), "2024"),
        (DayTimeIntervalType(), 5),
        (NullType(), 1),
        (ArrayType(DateType()), 5),
        (MapType(StringType(), DateType()), [1]),
        (StructType().add("at", DateType()), (date(2024, 1, 1), 5)),
        (StructType().add("at", DateType()), {"other": date(2024, 1, 1)}),
        (ArrayType(StructType().add("at", DateType())), [(date(2024, 1, 1), 5)]),
        (MapType(StringType(), StructType().add("at", DateType())), {"a": (date(2024, 1, 1), 5)}),
    ],
    ids=str,
)
def test_what_is_not_of_a_type_is_refused(task: Task, kind: DataType, wrong: Any) -> None:
    """Also where PySpark converts the value: it would leave out fields, or raise an error of its own."""
    schema = StructType([StructField("f", kind)])
    is_key = not isinstance(kind, MapType | NullType)

    def declare(handle: Any) -> Any:
        return handle.getValueState("v", schema), handle.getMapState("m", schema if is_key else NUMBER, NUMBER)

    def act(processor: Any, numbers: list[int]) -> None:
        one, mapped = processor.states
        for refused in ((wrong,), (None, 5), {"g": 1}, None, 5):
            with pytest.raises(InvalidError):
                one.update(refused)
            for use in (
                mapped.containsKey,
                mapped.removeKey,
                mapped.getValue,
                lambda key: mapped.updateValue(key, (1,)),
            ):
                with pytest.raises(InvalidError):
                    use(refused if is_key else ("text",))
        one.update((None,))
        assert one.get() == (None,)

    assert task.batch(Scripted(declare, act), [("a", 1)], 1000) == [("a", "None")]


def test_two_fields_of_one_name_are_refused(task: Task) -> None:
    """Both would get the last value, at any depth."""
    twice = StructType().add("a", LongType()).add("a", LongType())
    for schema, at in ((twice, "a"), (StructType().add("in", ArrayType(twice)), "in.element.a")):
        discovery = Discovery("none")
        discovery.getListState("values", schema)
        with pytest.raises(InvalidError, match=f"'values' has two fields of one name.*field={at}"):
            discovery.found()


def test_a_number_that_a_float_cannot_hold() -> None:
    """It is refused, and does not become infinite. Infinity and the largest number are stored."""
    serde = value_serde([StructType([StructField("f", FloatType())])])
    largest = float(np.finfo(np.float32).max)
    least_too_large = (largest + 2.0**128) / 2
    for wrong in (least_too_large, -least_too_large, 1e300, 10**400, "1.0"):
        with pytest.raises(InvalidError):
            serde.serialize((wrong,))
    for given in (largest, -largest, math.inf, -math.inf, 0.5, 1, None):
        assert serde.deserialize(serde.serialize((given,))) == (given,)
    below = math.nextafter(least_too_large, 0)
    assert serde.deserialize(serde.serialize((below,))) == (largest,)
    assert math.isnan(serde.deserialize(serde.serialize((math.nan,)))[0])


def test_only_bytes_are_binary() -> None:
    """A whole number, a list of them and a text are refused as values and as keys."""
    schema = StructType([StructField("b", BinaryType())])
    serde = value_serde([schema])
    for wrong in (5, [1, 2], "text"):
        with pytest.raises(InvalidError):
            serde.serialize((wrong,))
        with pytest.raises(InvalidError):
            encode_key(schema, (wrong,))
    for given in (b"ab", bytearray(b"ab"), memoryview(b"ab")):
        assert serde.deserialize(serde.serialize((given,))) == decode_key(schema, encode_key(schema, (given,)))[0]


def test_state_that_init_declares_on_an_executor_alone(task: Task) -> None:
    """State that only an executor declares is refused, because no record would have its schema."""
    calls = []

    def declare(handle: Any) -> None:
        calls.append(1)
        handle.getValueState(f"value{len(calls)}", NUMBER)

    with pytest.raises(InvalidError, match="on an executor, but not on the driver"):
        task.batch(Scripted(declare, lambda p, n: None), [("a", 1)], 1000)


def test_state_outside_of_a_key(task: Task) -> None:
    """In init there is no grouping key, so state cannot be read."""

    def declare(handle: Any) -> None:
        handle.getValueState("value", NUMBER).get()

    with pytest.raises(PySparkRuntimeError, match="Implicit key not found"):
        task.batch(Scripted(declare, lambda p, n: None), [("a", 1)], 1000)


def test_wrong_use_has_the_exceptions_of_spark(task: Task) -> None:
    """Wrong use raises ``PySparkRuntimeError`` with Spark's conditions, which the processor may catch."""
    conditions = []

    def refused(call: Callable[[], Any]) -> None:
        with pytest.raises(PySparkRuntimeError, match=r"STATEFUL_PROCESSOR_|EMPTY_LIST_VALUE") as caught:
            call()
        conditions.append(str(caught.value).partition("[")[2].partition("]")[0].removeprefix("STATEFUL_PROCESSOR_"))

    def declare(handle: Any) -> Any:
        found = handle.getListState("list", NUMBER)
        refused(lambda: handle.getValueState("list", NUMBER))
        refused(lambda: handle.getValueState("ttl", NUMBER, 0))
        refused(lambda: handle.getValueState("ttl", NUMBER, 5))
        refused(lambda: handle.registerTimer(1))
        return found

    def act(processor: Any, numbers: list[int]) -> None:
        conditions.clear()
        refused(lambda: processor.handle.getValueState("late", NUMBER))
        refused(lambda: processor.handle.deleteIfExists("list"))
        refused(lambda: processor.handle.deleteTimer(1))
        refused(lambda: processor.handle.listTimers())
        refused(lambda: processor.states.put([]))
        refused(lambda: processor.states.appendList([]))

    task.record = Record(KEY, "visits", "none", {})
    assert task.batch(Scripted(declare, act), [("a", 1)], 1000, "none") == [("a", "None")]
    state, mode = (f"CANNOT_PERFORM_OPERATION_WITH_INVALID_{what}" for what in ("HANDLE_STATE", "TIME_MODE"))
    assert conditions == [state, state, mode, mode, *["ILLEGAL_STATE_STORE_VALUE.EMPTY_LIST_VALUE"] * 2]


@pytest.mark.parametrize("unit", ["ms", "us", "ns"])
def test_late_rows(unit: str) -> None:
    """A row at the watermark is late, but not a row without a time. A window counts by its end."""
    times = (
        pa.array([None, 1_000, 1_001, 999], pa.int64()).cast(pa.timestamp("ms", "UTC")).cast(pa.timestamp(unit, "UTC"))
    )
    windows = pa.StructArray.from_arrays([pa.nulls(4, times.type), times], ["start", "end"])
    batch = pa.RecordBatch.from_arrays([pa.array([1, 2, 3, 4]), times, windows], ["n", "t", "w"])
    for event_time in (EventTime("t", False), EventTime("w", True)):
        late: list[int] = []
        assert [b.column("n").to_pylist() for b in in_time([batch], event_time, 1_000, late.append)] == [[1, 3]]
        assert late == [2]


def test_the_times_that_move_the_watermark() -> None:
    """Late rows count, but neither rows without a time nor those of the initial state."""
    times = pa.array([5, None, 7, 99], pa.timestamp("ms", "UTC"))
    batch = pa.RecordBatch.from_arrays([times, pa.array([True, True, True, False])], ["at", IS_INPUT])
    context = StateContext(TASK, 1, 1000, None, "a")
    assert context.next_watermark_ms is None
    for part in (batch, batch.slice(0, 1), batch.slice(1, 1)):
        see = partial(context.see_time, delay_ms=2)
        assert list(timed([part], EventTime("at", False), see)) == [part]
    assert context.next_watermark_ms == 5


def test_a_record_notes_the_watermark() -> None:
    """A record without one is as earlier versions wrote it."""
    record = Record(KEY, "visits", "eventtime", {})
    assert b"watermark" not in record.to_bytes()
    for found in (record, replace(record, watermark_ms=7)):
        assert Record.from_bytes(found.to_bytes()) == found


def test_output_that_is_not_newer_than_the_watermark_is_refused() -> None:
    """Even output at the watermark is refused. A row without a time passes."""
    times = pa.array([1_000_000, None, 1_500_000], pa.timestamp("us", tz="UTC"))
    batch = pa.RecordBatch.from_arrays([times], names=["at"])
    assert list(newer([batch], EventTime("at", False), 999)) == [batch]
    with pytest.raises(InvalidError, match=r"time 1000, which is not newer than the watermark 1000.*column=at"):
        list(newer([batch], EventTime("at", False), 1_000))


def test_decimals_with_all_of_sparks_digits() -> None:
    """38 digits are rounded as Spark rounds them. A number with more digits is refused."""
    serde = value_serde([StructType([StructField("price", DecimalType(38, 10))])])
    most = Decimal("9" * 28 + "." + "9" * 10)
    for given, stored in ((most, most), (most.copy_negate(),) * 2, (Decimal("0.00000000005"), Decimal("0.0000000001"))):
        assert serde.deserialize(serde.serialize((given,))) == (stored,)
    with pytest.raises(InvalidError):
        serde.serialize((Decimal("1e28"),))
