"""The data sources for published state: columns by serde, backends, filters, changes, processors and options."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql.datasource import EqualTo, GreaterThan, GreaterThanOrEqual, In, LessThan, StringStartsWith
from pyspark.sql.streaming import StatefulProcessor

from spark_integration import register, stateful
from spark_integration.reading.sources import StateSource
from statemgr import JobConfig, StateManager, Task
from statemgr.errors import InvalidError
from tests.cli.test_running_job import write_toml
from tests.docs.blocks import blocks
from tests.jobs import DUAL, SEGMENTS, job_mapping
from tests.servers import KafkaServer
from tests.spark.conftest import Pipeline

Read = Callable[..., DataFrame]
TASKS = ("Partition 0", "Partition 1")
EVENT = {
    "type": "record",
    "name": "event",
    "fields": [
        {"name": "at", "type": {"type": "long", "logicalType": "timestamp-micros"}},
        {"name": "tags", "type": {"type": "map", "values": "int"}},
        {"name": "note", "type": ["null", "string"]},
    ],
}
NOON = datetime(2024, 1, 1, 12, tzinfo=UTC)
#: Store → its serdes, and functions that make a key and a value.
STORES: dict[str, tuple[str, str, Any, Any]] = {
    "bytes": ("bytes", "bytes", lambda i: b"%04d" % i, lambda i: b"\xff%d" % i),
    "json": ("string", "json", lambda i: f"ä-{i:04}", lambda i: {"n": i}),
    "msgpack": ("integer", "msgpack", lambda i: i - 20, lambda i: [i, b"\x00"]),
    "avro": ("string", "avro", lambda i: f"{i:04}", lambda i: {"at": NOON, "tags": {"a": i}, "note": None}),
}


@pytest.fixture
def read(spark: SparkSession) -> Read:
    """Return a function that reads a source with options: ``read("state", config, store="totals")``."""
    register(spark)

    def load(source: str, config: JobConfig, **options: object) -> DataFrame:
        given = {name: str(value) for name, value in options.items()}
        mapping = json.dumps(config.to_mapping())
        return spark.read.format(f"statemgr.{source}").options(config=mapping, **given).load()

    return load


def a_job(kafka: KafkaServer, directory: Path, stores: Mapping[str, tuple[str, str, Any, Any]]) -> JobConfig:
    """Return a job of two tasks with some of the stores."""
    serdes: dict[str, object] = {}
    for name, (key, value, _, _) in stores.items():
        serdes |= {f"stores.{name}.key.serde": key, f"stores.{name}.value.serde": value}
        if value == "avro":
            serdes[f"stores.{name}.value.avro.schemas"] = [json.dumps(EVENT)]
    mapping = job_mapping(kafka, directory, stores=list(stores), tasks=2, kind=SEGMENTS)
    return JobConfig.from_mapping({**mapping, "task.checkpoint.retained": 5, **serdes})


def opened(config: JobConfig, closing: ExitStack) -> list[Task]:
    """Open both tasks."""
    manager = closing.enter_context(StateManager(config))
    return [manager.open_task(task) for task in TASKS]


def fill(tasks: list[Task], config: JobConfig, numbers: range) -> None:
    """Put even numbers in the first task and odd ones in the second, in every store. Commit each task once."""
    for index, task in enumerate(tasks):
        for name in config.stores:
            _, _, key, value = STORES[name]
            task.store(name).put_many([(key(i), value(i)) for i in numbers if i % 2 == index])
        task.commit({f"rows-{index}": len(numbers)})


def rows(frame: DataFrame) -> list[tuple[Any, ...]]:
    """Return the rows, sorted by task and key."""
    return sorted((tuple(row) for row in frame.collect()), key=lambda row: (row[0], row[1]))


@pytest.mark.long
def test_the_columns_of_every_serde_from_every_backend(kafka: KafkaServer, tmp_path: Path, read: Read) -> None:
    """The source decodes values as the application wrote them, while the tasks are open. The tasks then continue."""
    config = a_job(kafka, tmp_path, STORES)
    with ExitStack() as closing:
        tasks = opened(config, closing)
        fill(tasks, config, range(30))
        fill(tasks, config, range(30, 40))
        shown = {
            "bytes": lambda i: bytearray(b"\xff%d" % i),
            "json": lambda i: f'{{"n":{i}}}',
            "msgpack": lambda i: f'[{i},"AA=="]',
            "avro": lambda i: Row(at=NOON.astimezone().replace(tzinfo=None), tags={"a": i}, note=None),
        }
        backend = dict(zip(STORES, cycle(DUAL), strict=False))
        for store, (_, _, key, _) in STORES.items():
            expected = sorted((TASKS[i % 2], key(i), shown[store](i)) for i in range(40))
            found = read("state", config, store=store, backend=backend[store])
            assert rows(found) == expected
        fill(tasks, config, range(40, 41))  # the reader has fenced nobody
        found = read("state", config, store="json", task="1")
        assert (found.count(), found.rdd.getNumPartitions()) == (20, 1)


@pytest.mark.long
def test_checkpoints_and_the_changes_between_them(kafka: KafkaServer, tmp_path: Path, read: Read) -> None:
    """The sources show every retained checkpoint, its state, and each key that differs, with both values."""
    config = a_job(kafka, tmp_path, {"json": STORES["json"]})
    with ExitStack() as closing:
        tasks = opened(config, closing)
        fill(tasks, config, range(3))
        first = tasks[0].last_checkpoint
        assert first is not None
        tasks[0].store("json").put_many([("ä-0000", {"n": -1}), ("ä-0004", {"n": 4})])
        tasks[0].store("json").delete("ä-0002")
        tasks[0].commit({"rows-0": 5})

    checkpoints = read("checkpoints", config, task="0").orderBy("sequence").collect()
    assert [row.current for row in checkpoints] == [False, True]
    assert checkpoints[0].checkpoint_id == str(first.checkpoint_id)
    assert checkpoints[1].input_offsets == {"rows-0": 5}
    assert sorted(checkpoints[1].backends["json"]) == ["blob-store", "kafka-changelog"]
    older = read("state", config, checkpointId=first.checkpoint_id)
    assert [row[1] for row in rows(older)] == ["ä-0000", "ä-0002"]
    forward = read("changes", config, before=first.checkpoint_id, task="Partition 0")
    assert [row[1:] for row in forward.orderBy("key").collect()] == [
        ("changed", "ä-0000", '{"n":0}', '{"n":-1}'),
        ("deleted", "ä-0002", '{"n":2}', None),
        ("added", "ä-0004", None, '{"n":4}'),
    ]
    back = read("changes", config, before=checkpoints[1].checkpoint_id, after=first.checkpoint_id)
    assert [row.change for row in back.orderBy("key").collect()] == ["changed", "added", "deleted"]


@pytest.mark.parametrize(
    ("store", "condition", "pushed", "taken", "shown"),
    [
        ("bytes", "key >= x'30303038'", [GreaterThanOrEqual(("key",), bytearray(b"0008"))], range(8, 40), range(8, 40)),
        pytest.param(
            "json", "key LIKE 'ä-000%'", [StringStartsWith(("key",), "ä-000")], range(10), range(10),
            marks=pytest.mark.long,
        ),
        pytest.param(
            "msgpack", "key > 5 AND key < 8", [GreaterThan(("key",), 5), LessThan(("key",), 8)], range(25, 29),
            (26, 27), marks=pytest.mark.long,
        ),
        pytest.param(
            "msgpack", "key IN (-20, -17)", [In(("key",), (-20, -17))], range(4), (0, 3), marks=pytest.mark.long
        ),
    ],
)  # fmt: skip
def test_a_filter_reads_only_its_range(
    kafka: KafkaServer,
    tmp_path: Path,
    read: Read,
    store: str,
    condition: str,
    pushed: list[Any],
    taken: Sequence[int],
    shown: Sequence[int],
) -> None:
    """The reader reads no key outside the range, ends included, and Spark shows the rows that match."""
    _, _, key, _ = STORES[store]
    config = a_job(kafka, tmp_path, {store: STORES[store]})
    with ExitStack() as closing:
        fill(opened(config, closing), config, range(40))
    source = StateSource({"config": json.dumps(config.to_mapping())})
    reader = source.reader(source.schema())
    assert list(reader.pushFilters(pushed)) == pushed
    found = [one for part in reader.partitions() for batch in reader.read(part) for one in batch["key"].to_pylist()]

    assert sorted(found) == [key(i) for i in taken]
    passed = read("state", config).where(condition).collect()
    assert sorted(bytes(row.key) if store == "bytes" else row.key for row in passed) == [key(i) for i in shown]


def test_a_filter_on_the_task_reads_no_other(kafka: KafkaServer, tmp_path: Path) -> None:
    """A filter on the task leaves one Spark partition."""
    config = a_job(kafka, tmp_path, {"json": STORES["json"]})
    with ExitStack() as closing:
        fill(opened(config, closing), config, range(4))
    source = StateSource({"config": json.dumps(config.to_mapping())})
    reader = source.reader(source.schema())
    assert len(reader.partitions()) == 2
    reader.pushFilters([EqualTo(("task",), "Partition 1")])
    assert [part.task for part in reader.partitions()] == ["Partition 1"]  # type: ignore[attr-defined]


class Everything(StatefulProcessor):
    """Keeps a value with a TTL, a list, a map and a timer."""

    def init(self, handle: Any) -> None:
        self.handle = handle
        self.value = handle.getValueState("value", "n bigint, at timestamp", 3_600_000)
        self.list = handle.getListState("list", "n bigint")
        self.map = handle.getMapState("map", "day date", "n decimal(9,2), parts array<string>")

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:  # noqa: N802, N803
        numbers = sorted(int(row.value) for row in rows)
        self.value.update((len(numbers), NOON))
        self.list.appendList([(number,) for number in numbers])
        self.map.updateValue((NOON.date(),), (numbers[0], [key[0], None]))
        self.handle.registerTimer(4_000_000_000_000)
        yield Row(n=len(numbers))


@pytest.mark.long
def test_the_variables_of_a_processor(pipeline: Callable[..., Pipeline], read: Read) -> None:
    """Each variable has the types that the processor declared. The source also shows the timers, and filters by key."""
    job = pipeline(tasks=2)
    job.produce(20, keys=4)

    def parsed(offsets: str) -> DataFrame:
        return job.rows(offsets).selectExpr("cast(key as string) k", "cast(value as string) value")

    frame = stateful(parsed, "k", config=job.config).transformWithState(
        Everything(), "n bigint", "Update", "ProcessingTime"
    )
    writer = frame.writeStream.foreachBatch(lambda df, sequence: None).trigger(availableNow=True)
    writer.option("checkpointLocation", job.location.as_uri()).start().awaitTermination()
    numbers: dict[str | None, list[int]] = {}
    for i in range(20):
        numbers.setdefault(None if i % 10 == 9 else f"key-{i % 4}", []).append(i)

    value = read("state", job.config, stateVarName="value")
    assert {row.key.k: row.value.n for row in value.collect()} == {key: len(of) for key, of in numbers.items()}
    assert {row.value.at for row in value.collect()} == {NOON.astimezone().replace(tzinfo=None)}
    assert min(row.expires.timestamp() for row in value.collect()) > time.time()
    listed = read("state", job.config, stateVarName="list").where("key.k = 'key-1'").orderBy("position")
    assert [(row.position, row.value.n) for row in listed.collect()] == list(enumerate(numbers["key-1"]))
    (mapped,) = read("state", job.config, stateVarName="map").where("key.k = 'key-2'").collect()
    assert mapped.map_key.day == NOON.date()
    assert (str(mapped.value.n), mapped.value.parts) == ("2.00", ["key-2", None])
    timers = read("state", job.config, readRegisteredTimers="true").selectExpr("key.k", "unix_millis(expires) at")
    assert {row.k: row.at for row in timers.collect()} == dict.fromkeys(numbers, 4_000_000_000_000)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"chekpointId": "1"}, "no option 'chekpointId'.*did you mean checkpointId"),
        ({"store": "jsom"}, "no store 'jsom'.*option=store.*did you mean 'json'"),
        ({"task": "Partition 7"}, "no task 'Partition 7'.*option=task.*Partition 1"),
        ({"checkpointId": "newest"}, "not a checkpoint ID.*option=checkpointId"),
        ({"backend": "blob-stor"}, "blob-stor.*option=backend.*blob-store"),
        ({"config": "{"}, "not JSON.*option=config"),
        ({"config": "nowhere.toml"}, "nowhere.toml.*option=config"),
        ({"config": ""}, "needs the job's configuration.*option=config"),
        ({"readRegisteredTimers": "yes"}, "neither true nor false.*option=readRegisteredTimers"),
    ],
)
def test_a_wrong_option_is_named(kafka: KafkaServer, tmp_path: Path, options: dict[str, str], message: str) -> None:
    """A wrong option is rejected before anything is read, with the nearest name or the choices."""
    config = a_job(kafka, tmp_path, {"json": STORES["json"]})
    with pytest.raises(InvalidError, match=message):
        StateSource({"config": json.dumps(config.to_mapping()), **options})


def test_a_wrong_option_reaches_the_user(kafka: KafkaServer, tmp_path: Path, read: Read) -> None:
    """Spark's exception contains the message of the source's error."""
    config = a_job(kafka, tmp_path, {"json": STORES["json"]})
    with pytest.raises(Exception, match="needs the checkpoint to compare with"):
        read("changes", config)
    with pytest.raises(Exception, match="did you mean 'json'"):
        read("state", config, store="jso")


def test_the_documented_example(
    kafka: KafkaServer, tmp_path: Path, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """docs/spark.md, "Looking at state": the program runs unchanged up to the processor."""
    program = blocks("docs/spark.md", "## Looking at state")[0].partition("visits = ")[0]
    mapping = job_mapping(kafka, tmp_path, stores=["totals"], task__checkpoint__retained=5)
    config = JobConfig.from_mapping({**mapping, "stores.totals.key.serde": "string"})
    with StateManager(config) as manager:
        task = manager.open_task("Partition 0")
        for value in (b"1", b"2"):
            task.store("totals").put_many({"N1": value, "N2": b"0"})
            task.commit({})
    write_toml(config, tmp_path / "job.toml")
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"spark": spark}
    exec(program.replace('"job.toml"', repr(str(tmp_path / "job.toml"))), names)

    assert [tuple(row) for row in names["totals"].collect()] == [("Partition 0", "N1", bytearray(b"2"))]
    assert [row.key for row in names["changes"].collect()] == ["N1"]
