"""Stateful processors that use only PySpark, and a comparison that runs the same query on both engines."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import pandas as pd
from confluent_kafka import Producer
from pyspark.sql import DataFrame, GroupedData, Row
from pyspark.sql import functions as sf
from pyspark.sql.streaming import StatefulProcessor, StatefulProcessorHandle
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.types import LongType, StructField, StructType

from spark_integration import RunningQuery, stateful
from tests.kafka_jobs import wait_until
from tests.spark.conftest import Pipeline

INPUT = "id string, n bigint, t timestamp"
SEEN = "id string, seen string, exists boolean"
#: Settings that Spark needs to run processors.
ENGINE = {
    "spark.sql.streaming.stateStore.providerClass": (
        "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
    ),
    "spark.sql.shuffle.partitions": "2",
}
Batches = list[list[tuple[Any, ...]]]
Function = Callable[[Any, Any, Any], Iterator[Any]]
#: The state of a function for ``applyInPandasWithState``, and its timeouts.
GROUP_STATE = "n bigint, text string"
TIMEOUTS = {
    "none": "NoTimeout",
    "ProcessingTime": "ProcessingTimeTimeout",
    "EventTime": "EventTimeTimeout",
}
COUNT = StructType([StructField("count", LongType())])


@dataclass
class Comparison:
    """One topic that both engines read in the same batches."""

    job: Pipeline
    rows_per_batch: int = 4
    keys: tuple[str, ...] = ("id",)
    input: str = INPUT
    watermark: str | None = None
    initial: DataFrame | None = None
    output_time: str = ""
    produced: int = 0

    def produce(self, rows: Sequence[dict[str, Any]]) -> None:
        """Write rows to the topic, which has one partition."""
        producer = Producer({"bootstrap.servers": self.job.kafka.bootstrap_servers})
        for row in rows:
            producer.produce(self.job.topic, value=json.dumps(row))
            self.produced += 1
        assert producer.flush(30) == 0

    def rows(self, starting_offsets: str) -> DataFrame:
        """Return the parsed input."""
        parsed = sf.from_json(sf.col("value").cast("string"), self.input).alias("row")
        rows = self.job.rows(starting_offsets, self.rows_per_batch).select(parsed).select("row.*")
        return rows if self.watermark is None else rows.withWatermark("t", self.watermark)

    def on_spark(
        self, processor: StatefulProcessor | Function, output: Any, mode: str = "none", *, pandas: bool = False
    ) -> Batches:
        """Return the rows of each batch on Spark's own engine, sorted, without empty batches."""
        batches: Batches = []
        before = {name: self.job.spark.conf.get(name, None) for name in ENGINE}
        for name, value in ENGINE.items():
            self.job.spark.conf.set(name, value)
        try:
            frame = self.applied(self.rows("earliest").groupBy(*self.keys), processor, output, mode, pandas=pandas)
            writer = (
                frame.writeStream.outputMode("update")
                .foreachBatch(lambda df, _: batches.append(_sorted(df)))
                .option("checkpointLocation", (self.job.directory / "spark-location").as_uri())
            )
            if mode.lower() != "processingtime":
                writer.trigger(availableNow=True).start().awaitTermination()
            else:
                self._while_batches_go_on(writer.start())
        finally:
            for name, old in before.items():
                if old is None:
                    self.job.spark.conf.unset(name)
                else:
                    self.job.spark.conf.set(name, old)
        return [batch for batch in batches if batch]

    def applied(
        self, groups: Any, processor: StatefulProcessor | Function, output: Any, mode: str, *, pandas: bool
    ) -> Any:
        """Apply the operator to the groups of either engine. A function gets the timeout of the mode's clock."""
        if not isinstance(processor, StatefulProcessor):
            return groups.applyInPandasWithState(processor, output, GROUP_STATE, "Update", TIMEOUTS[mode])
        transform = groups.transformWithStateInPandas if pandas else groups.transformWithState
        return transform(processor, output, "Update", mode, self.initial_state(), self.output_time)

    def initial_state(self) -> GroupedData | None:
        """Return the initial state as both engines take it."""
        return None if self.initial is None else self.initial.groupBy(*self.keys)

    def _while_batches_go_on(self, running: StreamingQuery) -> None:
        """Stop after the input is read. With a processing-time clock, Spark makes batches without end."""
        try:
            wait_until(lambda: sum(progress.numInputRows for progress in running.recentProgress) >= self.produced)
        finally:
            running.stop()

    def on_statemgr(
        self, processor: StatefulProcessor | Function, output: Any, mode: str = "none", *, pandas: bool = False
    ) -> Batches:
        """Return the rows of each batch with state in statemgr, sorted, without empty batches."""
        batches: Batches = []
        self.run(processor, output, mode, pandas=pandas, write=lambda df, _: batches.append(_sorted(df)))
        return [batch for batch in batches if batch]

    def run(
        self,
        processor: StatefulProcessor | Function,
        output: Any,
        mode: str = "none",
        *,
        pandas: bool = False,
        write: Callable[[DataFrame, int], None] = lambda df, sequence: None,
        config: Any = None,
        started: Callable[[RunningQuery], None] = lambda running: None,
    ) -> RunningQuery:
        """Process all available input with state in statemgr."""
        groups = stateful(self.rows, *self.keys, config=config or self.job.config)
        running = (
            self.applied(groups, processor, output, mode, pandas=pandas)
            .writeStream.outputMode("update")
            .foreachBatch(write)
            .option("checkpointLocation", self.job.location.as_uri())
            .trigger(availableNow=True)
            .start()
        )
        started(running)
        running.awaitTermination()
        return running


def _sorted(rows: DataFrame) -> list[tuple[Any, ...]]:
    return sorted((tuple(row) for row in rows.collect()), key=repr)


class Counting(StatefulProcessor):
    """Value state: the number of rows of a key."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self.state = handle.getValueState("count", COUNT)

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        count = self.state.get()[0] if self.state.exists() else 0
        total = 0
        for row in rows:
            assert row.id == key[0]
            count += 1
            total += row.n
        self.state.update((count,))
        if count % 5 == 0:
            self.state.clear()
        yield Row(id=key[0], count=count, total=total)

    def close(self) -> None:
        pass


class CountingInPandas(Counting):
    """Counts as :class:`Counting` does, with data frames."""

    def handleInputRows(self, key: Any, rows: Iterator[pd.DataFrame], timerValues: Any) -> Iterator[pd.DataFrame]:
        count = self.state.get()[0] if self.state.exists() else 0
        total = 0
        for frame in rows:
            count += len(frame)
            total += int(frame["n"].sum())
        self.state.update((count,))
        if count % 5 == 0:
            self.state.clear()
        yield pd.DataFrame({"id": key, "count": count, "total": total})


class NotNull(Counting):
    """Has a field that may not be null."""

    def init(self, handle: Any) -> None:
        self.state = handle.getValueState("count", StructType([StructField("count", LongType(), False)]))


class Alarm(StatefulProcessor):
    """Sets a timer that is due at once, but after the batch."""

    def init(self, handle: Any) -> None:
        self.handle = handle

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        self.handle.registerTimer(timerValues.getCurrentProcessingTimeInMs() + 1)
        yield Row(id=key[0], count=len(list(rows)), total=0)

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Row]:
        yield Row(id=key[0], count=-1, total=0)


class Stamping(StatefulProcessor):
    """Yields rows with a time from the input: ``n`` seconds after the start of 2024."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        pass

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        for row in rows:
            yield Row(id=key[0], at=datetime(2024, 1, 1, tzinfo=UTC) + timedelta(seconds=row.n))


class CountingOn(Counting):
    """Continues the counts of an initial state, in which a key may have several rows."""

    def handleInitialState(self, key: Any, initialState: Any, timerValues: Any) -> None:
        assert initialState.id == key[0]
        before = self.state.get()[0] if self.state.exists() else 0
        self.state.update((before + initialState.already,))


class CountingOnInPandas(CountingInPandas):
    """Continues counts as :class:`CountingOn` does, with data frames."""

    def handleInitialState(self, key: Any, initialState: Any, timerValues: Any) -> None:
        before = self.state.get()[0] if self.state.exists() else 0
        self.state.update((before + int(initialState["already"].sum()),))


class Lists(StatefulProcessor):
    """Calls every method of list state."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self.state = handle.getListState("seen", "n bigint, text string")

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        for row in rows:
            if row.n % 5 == 0:
                self.state.put([(row.n, "put"), (None, None)])
            elif row.n % 5 == 1:
                self.state.appendList([(row.n, "a"), (row.n, "b")])
            elif row.n % 7 == 2:
                self.state.clear()
            else:
                self.state.appendValue((row.n, None))
        yield Row(id=key[0], seen=repr(list(self.state.get())), exists=self.state.exists())


class Maps(StatefulProcessor):
    """Calls every method of map state. The comparison ignores the order of a map."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self.state = handle.getMapState("by_n", "n bigint, text string", "count bigint")

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        notes = []
        for row in rows:
            at = (row.n % 3, "k" if row.n % 2 else None)
            if row.n % 11 == 0:
                self.state.clear()
            elif row.n % 4 == 0:
                self.state.removeKey(at)
            else:
                old = self.state.getValue(at)
                notes.append((self.state.containsKey(at), None if old is None else tuple(old)))
                self.state.updateValue(at, ((old[0] if old else 0) + 1,))
        pairs = sorted(((tuple(k), tuple(v)) for k, v in self.state.iterator()), key=repr)
        keys = sorted((tuple(k) for k in self.state.keys()), key=repr)
        values = sorted(tuple(v) for v in self.state.values())
        yield Row(id=key[0], seen=repr((notes, pairs, keys, values)), exists=self.state.exists())


class Timers(StatefulProcessor):
    """Registers expired timers, which fire in the same batch. The comparison ignores the order of a list."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self.handle = handle

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        ns = [row.n for row in rows]
        for n in ns:
            self.handle.registerTimer(n)
        self.handle.registerTimer(4_000_000_000_000)
        self.handle.deleteTimer(max(ns))
        self.handle.deleteTimer(12345)
        assert timerValues.getCurrentProcessingTimeInMs() > 1_700_000_000_000
        seen = sorted(self.handle.listTimers())
        yield Row(id=key[0], seen=repr((seen, timerValues.getCurrentWatermarkInMs())), exists=True)

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Row]:
        expiry = expiredTimerInfo.getExpiryTimeInMs()
        left = sorted(self.handle.listTimers())
        if expiry < 100:
            self.handle.registerTimer(expiry + 100)  # fires in the next batch
        yield Row(id=key[0], seen=repr(("fired", type(key).__name__, expiry, left)), exists=False)


class Events(StatefulProcessor):
    """Event-time timers: each row registers one at its own time, and each batch registers one in the past."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self.handle = handle
        self.state = handle.getListState("seen", "n bigint")

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        watermark = timerValues.getCurrentWatermarkInMs()
        numbers = []
        for row in rows:
            numbers.append(row.n)
            if row.t is not None:
                self.handle.registerTimer(round(row.t.timestamp() * 1000))
        self.state.appendList([(n,) for n in numbers])
        self.handle.registerTimer(watermark - 1000)
        yield Row(id=key[0], seen=repr((watermark, sorted(numbers), len(list(self.handle.listTimers())))), exists=True)

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Row]:
        expiry = expiredTimerInfo.getExpiryTimeInMs()
        numbers = sorted(n for (n,) in self.state.get())
        yield Row(id=key[0], seen=repr((timerValues.getCurrentWatermarkInMs(), expiry, numbers)), exists=False)
