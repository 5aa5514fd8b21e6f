"""The measurements of the Spark cases, in their own process: both engines, batch by batch, on the same input.

Each engine reads its own topic with the same records. An engine runs its batch while the other one waits for input, and
the first engine changes from batch to batch. A batch's time is Spark's ``triggerExecution``: planning, the state, the
output and Spark's own commits.
"""

from __future__ import annotations

import os
import random
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
import pyarrow as pa
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, Row, SparkSession, functions
from pyspark.sql.streaming.stateful_processor import StatefulProcessor

from spark_integration import ArrowStore, BatchReport, RunningQuery, StateContext, StatefulQuery, stateful
from statemgr import JobConfig
from statemgr.errors import StatemgrError
from statemgr_tools.bench.fresh import MeasurementFailed
from statemgr_tools.demo.pipeline import java_options
from statemgr_tools.dev import connector_jars, find_java, s3a_jars

if TYPE_CHECKING:
    from pyspark.sql.streaming.query import StreamingQuery
    from pyspark.sql.streaming.stateful_processor import StatefulProcessorHandle, TimerValues

    Query = RunningQuery | StreamingQuery

STATEMGR, SPARK = "statemgr", "spark"
#: statemgr with the option ``checkpointLocation``.
KEPT = "statemgr-kept"
OUTPUT = "key string, total bigint, rows bigint"
_PARTITIONS = 4
_DEADLINE_S = 1800
#: Batches that do not count: on either engine they take up to twice as long, because Spark's code is not compiled yet,
#: and the files of the first batch are still written to disk and compacted.
_WARM_UP = 10
#: The same for batches that take minutes.
_SHORT_WARM_UP = 1
#: Number of batches until every executor has had every task.
_SETTLING = 15
#: A key and its two numbers.
_ITEM_BYTES = 12 + 16


def measure(
    *,
    config: Mapping[str, object],
    api: str,
    engines: list[str],
    keys: int,
    rows: int,
    batches: int,
    directory: str,
    s3: bool = False,
) -> dict[str, Any]:
    """Fill the state with ``keys`` keys, then run ``batches`` warm batches of ``rows`` rows with random keys.

    Args:
        api: ``aggregate``, or ``row`` or ``pandas`` for a processor.
        engines: ``statemgr``, ``statemgr-kept``, ``spark``.
        directory: the directory for Spark's state and checkpoint locations.
        s3: whether the checkpoint locations are on the job's S3 server instead.

    Returns: engine → the seconds of each batch.
    Raises: MeasurementFailed, if the engines' last batches have different rows.
    """
    with _filled(config, api, engines, keys, rows, directory, s3=s3) as (sides, records):

        def timed(side: _Side, batch: list[tuple[int, int]]) -> float:
            side.produce(batch)
            return side.next_batch()

        found = _in_turn(sides, records, timed, _WARM_UP, batches)
        _check_same(sides, keys, rows)
        return found


def measure_restart(
    *, config: Mapping[str, object], engines: list[str], keys: int, rows: int, rounds: int, directory: str
) -> dict[str, Any]:
    """Like :func:`measure`, but stop the query and delete the local state before each batch.

    Returns: engine → for each round, the seconds from the start of the query until the end of its first batch, which
        restores the state.
    """
    with _filled(config, "aggregate", engines, keys, rows, directory) as (sides, records):

        def timed(side: _Side, batch: list[tuple[int, int]]) -> float:
            side.stop()
            side.lose_local_state()
            side.produce(batch)
            began = time.perf_counter()
            side.start()
            side.next_batch()
            return time.perf_counter() - began

        found = _in_turn(sides, records, timed, 1, rounds)
        _check_same(sides, keys, rows)
        return found


def _in_turn(
    sides: list[_Side],
    records: Callable[[], list[tuple[int, int]]],
    timed: Callable[[_Side, list[tuple[int, int]]], float],
    warm_up: int,
    rounds: int,
) -> dict[str, list[float]]:
    """Return engine → the results of ``timed`` after the first rounds. The first engine changes from round to round."""
    found: dict[str, list[float]] = {side.engine: [] for side in sides}
    for number in range(-warm_up, rounds):
        batch = records()
        for side in sides if number % 2 else sides[::-1]:
            seconds = timed(side, batch)
            if number >= 0:
                found[side.engine].append(seconds)
    return found


def measure_frames(*, keys: int, rows: int, tasks: int, batches: int) -> dict[str, Any]:
    """Run the code of the pandas processor alone, on data frames that are there, in as many processes as tasks.

    Returns: ``own``: for each batch, the seconds that the slowest process takes.
    """
    with ProcessPoolExecutor(tasks, get_context("spawn")) as pool:
        found = [pool.submit(_frames_alone, keys // tasks, rows // tasks, batches, seed) for seed in range(tasks)]
        return {"own": [max(times) for times in zip(*(one.result() for one in found), strict=True)]}


def _frames_alone(keys: int, rows: int, batches: int, seed: int) -> list[float]:
    picks, found = random.Random(seed), []
    processor, state = PandasTotals(), _Remembered()
    processor._state = state  # type: ignore[assignment]
    for _ in range(batches):
        values: dict[str, list[int]] = {}
        for _ in range(rows):
            values.setdefault(f"{picks.randrange(keys):012}", []).append(picks.randrange(1000))
        frames = {key: pd.DataFrame({"key": key, "value": of_key}) for key, of_key in values.items()}
        began = time.perf_counter()
        for state.key, frame in frames.items():
            for _ in processor.handleInputRows((state.key,), iter((frame,)), None):  # type: ignore[arg-type]
                pass
        found.append(time.perf_counter() - began)
    return found


class _Remembered:
    """A value state that costs nothing."""

    def __init__(self) -> None:
        self.key = ""
        self._values: dict[str, Any] = {}

    def get(self) -> Any:
        """Return the value of the key."""
        return self._values.get(self.key)

    def update(self, value: Any) -> None:
        """Set the value of the key."""
        self._values[self.key] = value


def measure_fetches(
    *, config: Mapping[str, object], executors: int, keys: int, rows: int, batches: int, directory: str
) -> dict[str, Any]:
    """Run batches on separate executors, each with one core and its own disk.

    Returns: ``fetched``: the bytes that all tasks of each warm batch fetched to open their stores. ``changed``: the
        bytes of the keys and values that it changed.
    """
    own = Path(directory) / "disks"
    own.mkdir()
    os.environ |= {"SPARK_EXECUTOR_DIRS": str(own), "SPARK_WORKER_DIR": str(Path(directory) / "work")}
    job = JobConfig.from_mapping(config)
    spark = _session(Path(directory), f"local-cluster[{executors},1,1024]", job.tasks)
    found: dict[str, list[float]] = {"fetched": [], "changed": []}
    try:
        side = _Side(STATEMGR, job, spark, "aggregate", rows, Path(directory), _PARTITIONS)
        picks = random.Random(7)
        for number in range(-_SETTLING, batches):
            filling = number == -_SETTLING
            pick = iter(range(keys)).__next__ if filling else partial(picks.randrange, keys)
            side.produce((pick(), picks.randrange(1000)) for _ in range(keys if filling else rows))
            if filling:
                side.start()
            side.next_batch()
            if number >= 0:
                report = side.report()
                found["fetched"].append(sum(one.bytes_fetched for one in report.restored))
                found["changed"].append(report.keys_written * _ITEM_BYTES)
        side.stop()
        return found
    finally:
        spark.stop()


def measure_share(
    *, config: Mapping[str, object], slots: int, partitions: int, rows: int, batches: int, directory: str
) -> dict[str, Any]:
    """Run warm batches of a job with many tasks.

    Returns: ``batch``: the seconds of each batch. ``statemgr``: of these, the seconds in statemgr outside of the
        process function: the time of all attempts to open and prepare, divided by the slots, plus the publish.
    """
    job = JobConfig.from_mapping(config)
    spark = _session(Path(directory), f"local[{slots}]", job.tasks)
    found: dict[str, list[float]] = {"batch": [], "statemgr": []}
    try:
        side = _Side(STATEMGR, job, spark, "aggregate", rows, Path(directory), partitions)
        picks = random.Random(7)
        for number in range(-_SHORT_WARM_UP, batches):
            side.produce([(picks.randrange(rows), picks.randrange(1000)) for _ in range(rows)])
            if number == -_SHORT_WARM_UP:
                side.start()
            seconds = side.next_batch()
            if number >= 0:
                found["batch"].append(seconds)
                report = side.report()
                attempts = sum(task.open_seconds + task.prepare_seconds for task in report.tasks)
                found["statemgr"].append(attempts / slots + report.publish_seconds)
        side.stop()
        return found
    finally:
        spark.stop()


@contextmanager
def _filled(
    config: Mapping[str, object],
    api: str,
    engines: list[str],
    keys: int,
    rows: int,
    directory: str,
    *,
    s3: bool = False,
) -> Iterator[tuple[list[_Side], Callable[[], list[tuple[int, int]]]]]:
    """Yield the engines with running queries whose state has all keys, and a function that draws a batch."""
    job = JobConfig.from_mapping(config)
    spark = _session(Path(directory), f"local[{job.tasks}]", job.tasks, job if s3 else None)
    try:
        sides = [_Side(engine, job, spark, api, rows, Path(directory), _PARTITIONS) for engine in engines]
        for side in sides if s3 else ():
            side.location = f"{str(job.blob_uri).replace('s3:', 's3a:', 1)}/location-{side.engine}"
        picks = random.Random(7)
        for side in sides:
            side.produce((number % keys, number % 97) for number in range(max(keys, rows)))
            side.start()
            side.next_batch()
        yield sides, lambda: [(picks.randrange(keys), picks.randrange(1000)) for _ in range(rows)]
        for side in sides:
            side.stop()
    finally:
        spark.stop()


def _check_same(sides: list[_Side], keys: int, rows: int) -> None:
    """Run one more batch, and compare the engines' outputs."""
    outputs = []
    for side in sides:
        side.keep = True
        side.produce((number * 31 % keys, number) for number in range(rows))
        side.next_batch()
        outputs.append(sorted(side.kept))
    if not outputs[0] or any(output != outputs[0] for output in outputs):
        raise MeasurementFailed("the two engines have different rows for the same input")


class _Side:
    """One engine with its topic and its query."""

    def __init__(
        self,
        engine: str,
        job: JobConfig,
        spark: SparkSession,
        api: str,
        rows: int,
        directory: Path,
        partitions: int,
    ) -> None:
        self.engine = engine
        self.keep = False
        self.kept: list[tuple[Any, ...]] = []
        name = {"job.name": f"{job.job_name}-{engine}"}
        self._job = JobConfig.from_mapping(job.to_mapping(), name)
        self._spark = spark
        self._api = api
        self._rows = rows
        self._partitions = partitions
        self.location = (directory / f"location-{engine}").as_uri()
        self._servers = str(job.to_mapping()["kafka.bootstrap.servers"])
        self._topic = f"{job.job_name}-{engine}-input"
        self._query: Query | None = None
        self._seen = -1
        admin = AdminClient({"bootstrap.servers": self._servers})
        admin.create_topics([NewTopic(self._topic, partitions, 1)])[self._topic].result(30)

    def produce(self, records: Any) -> None:
        """Write records to the topic, the same number to each partition."""
        producer = Producer({"bootstrap.servers": self._servers, "linger.ms": 20})
        for number, (key, value) in enumerate(records):
            while True:
                try:
                    producer.produce(
                        self._topic, key=f"{key:012}", value=str(value), partition=number % self._partitions
                    )
                    break
                except BufferError:
                    producer.poll(0.1)
        if producer.flush(60):
            raise MeasurementFailed("the broker did not take the input")

    def start(self) -> None:
        """Start the query on the records in the topic."""
        self._seen = -1  # batches have no numbers of an earlier start
        self._query = self._theirs() if self.engine == SPARK else self._ours()

    def stop(self) -> None:
        """Stop the query."""
        if self._query is not None:
            self._query.stop()

    def lose_local_state(self) -> None:
        """Delete the engine's data on the local disk, as on a new machine."""
        if self.engine != SPARK:
            shutil.rmtree(self._job.state_dir)
        else:
            # this also deletes the stores' directories
            self._spark._jvm.org.apache.spark.sql.execution.streaming.state.StateStore.stop()  # type: ignore[union-attr]

    def report(self) -> BatchReport:
        """Return statemgr's report of the last batch."""
        assert isinstance(self._query, RunningQuery)
        report = self._query.lastBatch
        assert report is not None
        return report

    def next_batch(self) -> float:
        """Wait for the next batch with input. Returns: its total seconds.

        Spark's JVM waits. Asking it for the progress again and again would take time from the driver that is measured.
        """
        assert self._query is not None
        deadline = time.monotonic() + _DEADLINE_S
        while time.monotonic() < deadline:
            try:
                self._query.processAllAvailable()
            except (StatemgrError, PySparkException) as error:
                raise MeasurementFailed(f"{self.engine}: the query ended: {error}") from error
            for progress in self._query.recentProgress:
                if progress["batchId"] > self._seen and progress["numInputRows"] > 0:
                    self._seen = progress["batchId"]
                    return float(progress["durationMs"]["triggerExecution"]) / 1000
            time.sleep(0.02)
        raise MeasurementFailed(f"{self.engine}: a batch has not ended within {_DEADLINE_S} s")

    def _input(self, starting_offsets: str) -> DataFrame:
        # take only a batch with all rows, not with the first part of the records that are being produced
        return (
            self._spark.readStream.format("kafka")
            .option("kafka.bootstrap.servers", self._servers)
            .option("subscribe", self._topic)
            .option("startingOffsets", starting_offsets)
            .option("minOffsetsPerTrigger", self._rows)
            .option("maxTriggerDelay", "1d")
            .load()
            .selectExpr("CAST(key AS STRING) AS key", "CAST(CAST(value AS STRING) AS BIGINT) AS value")
        )

    def _write(self, rows: DataFrame, _sequence: int) -> None:
        if self.keep:
            self.kept = [tuple(row) for row in rows.collect()]
        else:
            rows.write.format("noop").mode("overwrite").save()

    def _ours(self) -> RunningQuery:
        if self._api == "aggregate":
            query = StatefulQuery(self._job).input(self._input).key_by("key").process(totals, OUTPUT)
            kept = {"checkpointLocation": self.location} if self.engine == KEPT else {}
            return query.output(self._write).options(**kept).start()
        groups = stateful(self._input, "key", config=self._job)
        transform = groups.transformWithState if self._api == "row" else groups.transformWithStateInPandas
        frame = transform(_PROCESSORS[self._api](), OUTPUT, "Update", "None")
        return frame.writeStream.foreachBatch(self._write).start()

    def _theirs(self) -> StreamingQuery:
        rows = self._input("earliest")
        if self._api == "aggregate":
            sums = functions.sum("value").alias("total"), functions.count("value").alias("rows")
            frame = rows.groupBy("key").agg(*sums)
        else:
            grouped = rows.groupBy("key")
            transform: Callable[..., DataFrame]
            transform = grouped.transformWithState if self._api == "row" else grouped.transformWithStateInPandas
            frame = transform(_PROCESSORS[self._api](), OUTPUT, "Update", "None")
        writer = frame.writeStream.foreachBatch(self._write).outputMode("update")
        return writer.option("checkpointLocation", self.location).start()


def totals(batches: Iterator[pa.RecordBatch], stores: Any, context: StateContext) -> Iterator[pa.RecordBatch]:
    """Running totals, computed by columns."""
    arrived = [batch.select(["key", "value"]) for batch in batches]
    if arrived:
        rows = pa.Table.from_batches(arrived)
        yield ArrowStore(stores["s"]).merge(rows, "key", total=("value", "sum"), rows=("value", "count"))


class RowTotals(StatefulProcessor):
    """Running totals, with rows."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        """Declare the state."""
        self._state = handle.getValueState("totals", "total bigint, rows bigint")

    def handleInputRows(self, key: Any, rows: Any, timerValues: TimerValues) -> Iterator[Any]:  # noqa: N802, N803
        """Add the rows of a key."""
        total, count = self._state.get() or (0, 0)
        for row in rows:
            total, count = total + row.value, count + 1
        self._state.update((total, count))
        yield Row(key=key[0], total=total, rows=count)

    def close(self) -> None:
        """Close nothing."""


class PandasTotals(RowTotals):
    """Running totals, with data frames."""

    def handleInputRows(self, key: Any, rows: Any, timerValues: TimerValues) -> Iterator[Any]:  # noqa: N802, N803
        """Add the rows of a key."""
        total, count = self._state.get() or (0, 0)
        for frame in rows:
            total, count = total + int(frame["value"].sum()), count + len(frame)
        self._state.update((total, count))
        yield pd.DataFrame({"key": [key[0]], "total": [total], "rows": [count]})


_PROCESSORS: Mapping[str, Callable[[], StatefulProcessor]] = {"row": RowTotals, "pandas": PandasTotals}


def _session(directory: Path, master: str, tasks: int, s3: JobConfig | None = None) -> SparkSession:
    """Start a session. ``s3``: the job whose S3 server Hadoop's file system ``s3a`` reaches."""
    find_java()
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    state = "spark.sql.streaming.stateStore"
    settings = {
        "spark.jars": ",".join(map(str, [*connector_jars(), *(s3a_jars() if s3 is not None else [])])),
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.sql.shuffle.partitions": str(tasks),
        "spark.local.dir": str(directory / "local"),
        "spark.sql.warehouse.dir": str(directory / "warehouse"),
        "spark.driver.memory": "3g",
        "spark.driver.extraJavaOptions": java_options(str(directory)).replace(" -XX:TieredStopAtLevel=1", ""),
        f"{state}.providerClass": "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider",
        f"{state}.rocksdb.changelogCheckpointing.enabled": "true",
        # how often the idle engine asks for offsets
        "spark.sql.streaming.pollingDelay": "100ms",
    }
    if s3 is not None:
        settings |= {
            "spark.hadoop.fs.s3a.endpoint": str(s3.blob_s3["endpoint"]),
            "spark.hadoop.fs.s3a.endpoint.region": str(s3.blob_s3["region"]),
            "spark.hadoop.fs.s3a.access.key": str(s3.blob_s3["access.key"]),
            "spark.hadoop.fs.s3a.secret.key": str(s3.blob_s3["secret.key"]),
            "spark.hadoop.fs.s3a.path.style.access": "true",
            "spark.hadoop.fs.AbstractFileSystem.s3a.impl": "org.apache.hadoop.fs.s3a.S3A",
        }
    builder = SparkSession.builder.master(master).appName("statemgr bench")
    for name, value in settings.items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    return spark
