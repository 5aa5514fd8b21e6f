"""A job with a stateful processor gets more or fewer tasks, and each key continues with all of its state."""

from __future__ import annotations

import datetime
import json
import math
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as sf
from pyspark.sql.streaming import StatefulProcessor, StatefulProcessorHandle
from pyspark.sql.types import StructType

from spark_integration.processors.keys import encode_key
from spark_integration.processors.states import variable_prefix
from statemgr import JobConfig
from statemgr.cli.main import cli
from statemgr.model.keys.partitioners import candidates
from tests.cli.test_running_job import write_toml
from tests.docs.blocks import blocks
from tests.servers import KafkaServer
from tests.spark.conftest import Pipeline, make_pipeline
from tests.spark.processors import SEEN, Comparison
from tests.spark.test_idle_batches import Forgetting

#: Types that a grouping column may have, with values.
_COLUMNS: dict[str, list[Any]] = {
    "boolean": [True, False],
    "tinyint": [-128, -1, 0, 127],
    "smallint": [-32768, -1, 0, 32767],
    "int": [-(2**31), -1, 0, 2**31 - 1],
    "bigint": [-(2**63), -1, 0, 2**63 - 1],
    "float": [-0.0, 0.0, 1.5, -1.5, math.nan, math.inf, -math.inf, 2.0**-140],
    "double": [-0.0, 0.0, 0.1, -0.1, math.nan, math.inf, -math.inf, 5e-324],
    "decimal(5,2)": [Decimal(n).scaleb(-2) for n in (0, 1, -1, 99999, -99999)],
    "decimal(18,0)": [Decimal(n) for n in (0, 10**18 - 1, 1 - 10**18)],
    "decimal(19,3)": [Decimal(n).scaleb(-3) for n in (0, 127, 128, -128, -129, 10**18)],
    "decimal(38,10)": [Decimal("9" * 28 + "." + "9" * 10), Decimal("-" + "9" * 28 + "." + "9" * 10), Decimal(0)],
    "string": ["", "a", "abc", "abcd", "é€𝄞", "\x00\x01", "x" * 33],
    "binary": [bytearray(data) for data in (b"", b"\x00", b"\xff\x80\x00\x01", b"seven b", bytes(range(256)))],
    "date": [datetime.date(1, 1, 1), datetime.date(1969, 12, 31), datetime.date(9999, 12, 31)],
    "timestamp": [datetime.datetime.fromisoformat(f"{day} 01:01:01.999999") for day in ("1950-01-01", "2024-02-29")],
    "timestamp_ntz": [
        datetime.datetime.fromisoformat(f"{day} 00:00:00.000001") for day in ("1900-01-01", "2024-02-29")
    ],
    "interval day to second": [datetime.timedelta(0), datetime.timedelta(-1, 5, 7), datetime.timedelta(9999)],
    "array<string>": [[], [None], ["a", None, "bc"], ["\x00"]],
    "array<array<int>>": [[[1, 2], None, []], [[], [3]]],
    "struct<a:bigint,b:string>": [(1, "x"), (None, None), (-1, "")],
    "array<struct<x:double,y:boolean>>": [[(1.0, True), None, (math.nan, None)], []],
}


def test_the_hash_of_grouping_columns_is_sparks(spark: SparkSession) -> None:
    """For columns of each type, several columns and nulls, the hash is that of Spark's ``hash``."""
    source, columns = random.Random(7), list(_COLUMNS.values())
    schema = StructType.fromDDL(", ".join(f"c{i} {kind}" for i, kind in enumerate(_COLUMNS)))
    most = 1 + max(map(len, columns))
    rows = [tuple([*values, None][row % (1 + len(values))] for values in columns) for row in range(most)]
    rows += [tuple(source.choice([None, *values]) for values in columns) for _ in range(100)]
    frame = spark.createDataFrame(rows, schema)
    chosen = [[i] for i in range(len(columns))] + [source.sample(range(len(columns)), 6) for _ in range(10)]
    hashes = [sf.hash(*(frame.columns[i] for i in some)) for some in chosen]
    found = frame.select(*hashes).collect()
    for place, some in enumerate(chosen):
        key = StructType([schema.fields[i] for i in some])
        values = (key.toInternal(tuple(row[i] for i in some)) for row in rows)
        keys = [variable_prefix("v") + encode_key(key, one) for one in values]
        types = json.dumps([field["type"] for field in key.jsonValue()["fields"]])
        expected = [row[place] for row in found]
        assert candidates("spark-hash(…)", "bytes", None, types)["spark-hash(…)"](keys) == expected, key.simpleString()


INPUT = "id string, part int, n bigint, t timestamp"


class Everything(StatefulProcessor):
    """Keeps a value, a list, a map, and an event-time timer for each row. Its output shows the state that it finds."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self.handle = handle
        self.count = handle.getValueState("count", "n bigint")
        self.seen = handle.getListState("seen", "n bigint")
        self.by_n = handle.getMapState("by_n", "n bigint", "count bigint")

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:  # noqa: N802, N803
        count = self.count.get()[0] if self.count.exists() else 0
        for row in rows:
            count += 1
            self.seen.appendValue((row.n,))
            old = self.by_n.getValue((row.n % 3,))
            self.by_n.updateValue((row.n % 3,), ((old[0] if old else 0) + 1,))
            self.handle.registerTimer(round(row.t.timestamp() * 1000) + 30_000)
        self.count.update((count,))
        yield Row(id=repr(tuple(key)), seen=self._shown(), exists=True)

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Row]:  # noqa: N802, N803
        seen = f"{expiredTimerInfo.getExpiryTimeInMs()} {self._shown()}"
        yield Row(id=repr(tuple(key)), seen=seen, exists=False)

    def _shown(self) -> str:
        found = [(tuple(key), tuple(value)) for key, value in self.by_n.iterator()]
        timers = sorted(self.handle.listTimers())
        return repr((self.count.get(), list(self.seen.get()), found, timers))


def produce(comparison: Comparison, first: int) -> None:
    """Produce 24 rows, one per second, with many keys. Some keys contain nulls, and some return later."""
    comparison.produce(
        [
            {
                "id": None if i % 12 == 11 else f"key-{i % 17}",
                "part": None if i % 5 == 0 else i % 2,
                "n": i,
                "t": f"2024-01-01T00:{i // 60:02}:{i % 60:02}Z",
            }
            for i in range(first, first + 24)
        ]
    )


def all_state(job: Pipeline) -> dict[bytes, bytes]:
    """Return the state of all tasks together. It must be the same in every backend."""
    found = []
    for factory in job.config.stores["totals"].backup_factories:
        contents = job.contents(factory, "spark-hash(string,int)")
        together = {key: value for one in contents.values() for key, value in one.items()}
        assert len(together) == sum(map(len, contents.values())), "a key in two tasks"
        found.append(together)
    assert all(one == found[0] for one in found)
    return found[0]


def by_command(job: Pipeline, tasks: int, *more: str) -> None:
    """Rescale the job with the command, and load its new configuration."""
    write_toml(job.config, job.directory / "job.toml")
    command = ["rescale", "--config", str(job.directory / "job.toml"), "--write", *more]
    done = CliRunner().invoke(cli, command, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    job.config = JobConfig.from_file(job.directory / "job.toml")
    assert job.config.tasks == tasks


def by_executors(job: Pipeline, tasks: int, *_: str) -> None:
    """Rescale the job with the program in docs/scaling.md."""
    (program,) = blocks("docs/scaling.md", "### With Spark's executors")
    names: dict[str, Any] = {"spark": job.spark, "config": job.config}
    exec(program.replace("64", str(tasks)), names)
    done = names["done"]
    assert done.changes["job.tasks"] == tasks
    assert done.partitioner == "spark-hash(string,int)"
    job.config = done.config


@pytest.mark.long
@pytest.mark.parametrize(("before", "after", "way"), [(2, 3, by_command), (4, 2, by_executors)])
def test_each_key_goes_on_as_if_nothing_had_happened(
    spark: SparkSession, kafka: KafkaServer, tmp_path: Path, before: int, after: int, way: Callable[..., None]
) -> None:
    """A rescaled job has the same rows and state, in both backends, as one that keeps its tasks.

    This covers values, lists, maps and timers. The undo restores the old layout.
    """
    jobs = []
    for name in ("kept", "rescaled"):
        (tmp_path / name).mkdir()
        job = make_pipeline(spark, kafka, tmp_path / name, tasks=before, partitions=1)
        jobs.append(Comparison(job, 8, ("id", "part"), INPUT, "2 seconds"))
    kept, rescaled = jobs
    rows = []
    for comparison in jobs:
        produce(comparison, 0)
        rows.append(comparison.on_statemgr(Everything(), SEEN, "EventTime"))
    assert rows[0] == rows[1]
    first = rescaled.job.contents(partitioner="spark-hash(string,int)")

    way(rescaled.job, after, "--tasks", str(after))
    assert all_state(rescaled.job) == all_state(kept.job)
    rows = []
    for comparison in jobs:
        produce(comparison, 24)
        rows.append(comparison.on_statemgr(Everything(), SEEN, "EventTime"))

    assert rows[0] == rows[1]
    assert sum(not is_input for batch in rows[0] for _, _, is_input in batch) > 5
    assert all_state(rescaled.job) == all_state(kept.job)
    by_command(rescaled.job, before, "--undo")
    assert rescaled.job.contents(partitioner="spark-hash(string,int)") == first


@pytest.mark.long
def test_each_timer_and_each_ttl_expires_once(spark: SparkSession, kafka: KafkaServer, tmp_path: Path) -> None:
    """Each timer and TTL expires once after a rescale from three tasks to two, and leaves no state behind."""
    job = make_pipeline(spark, kafka, tmp_path, tasks=3, partitions=1)
    comparison, seen = Comparison(job, 100), Counter[tuple[str, str]]()

    def write(df: DataFrame, sequence: int) -> None:
        if sequence not in written:
            seen.update((row.id, row.seen) for row in df.collect())
        written.add(sequence)

    written: set[int] = set()
    keys = [f"key-{i}" for i in range(20)]
    comparison.produce([{"id": key, "n": 1} for key in keys])
    comparison.run(Forgetting(tmp_path), SEEN, "ProcessingTime", write=write)
    assert seen == dict.fromkeys([(key, "(1,)") for key in keys], 1)

    by_command(job, 2, "--tasks", "2")
    fired = [(key, "timer, None") for key in keys]
    deadline = time.monotonic() + 600
    while not seen.keys() >= set(fired) and time.monotonic() < deadline:
        comparison.produce([{"id": "other", "n": 1}])
        comparison.run(Forgetting(tmp_path), SEEN, "ProcessingTime", write=write)
    comparison.produce([{"id": "last", "n": 1}])
    comparison.run(Forgetting(tmp_path), SEEN, "ProcessingTime", write=write)

    assert {one: seen[one] for one in fired} == dict.fromkeys(fired, 1)
    left = [key for one in job.contents(partitioner="spark-hash(string)").values() for key in one]
    assert left
    assert not [key for key in left if b"key-" in key]
