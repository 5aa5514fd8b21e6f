"""While the input is idle, timers and TTLs take effect exactly once, and other batches publish nothing."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, Row
from pyspark.sql.streaming import StatefulProcessor, StatefulProcessorHandle

from spark_integration import RunningQuery, stateful
from tests.kafka_jobs import wait_until
from tests.spark.conftest import Pipeline
from tests.spark.processors import SEEN, Comparison, Events

MakePipeline = Callable[..., Pipeline]
TTL_MS = 1500


class Forgetting(StatefulProcessor):
    """Gives each key a value with a TTL, and a timer that fires a second after the TTL.

    Timers record their times in a file. With ``fails``, the timer fails until a file ``go`` exists.
    """

    def __init__(self, directory: Path, fails: bool = False) -> None:
        self.directory, self.fails = directory, fails

    def init(self, handle: StatefulProcessorHandle) -> None:
        self.handle = handle
        self.value = handle.getValueState("value", "n bigint", TTL_MS)

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:  # noqa: N802, N803
        self.value.update((len(list(rows)),))
        self.handle.registerTimer(timerValues.getCurrentProcessingTimeInMs() + TTL_MS + 1000)
        yield Row(id=key[0], seen=repr(self.value.get()), exists=True)

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Row]:  # noqa: N802, N803
        with (self.directory / "times").open("a") as file:
            file.write(f"{timerValues.getCurrentProcessingTimeInMs()}\n")
        if self.fails and not (self.directory / "go").exists():
            raise ValueError("not yet")
        yield Row(id=key[0], seen=f"timer, {self.value.get()}", exists=False)

    def close(self) -> None:
        pass


def start(
    comparison: Comparison, processor: StatefulProcessor, write: Callable[[DataFrame, int], None], mode: str
) -> RunningQuery:
    """Start a query without end."""
    frame = stateful(comparison.rows, "id", config=comparison.job.config).transformWithState(
        processor, SEEN, "Update", mode
    )
    return frame.writeStream.foreachBatch(write).option("checkpointLocation", comparison.job.location.as_uri()).start()


def planned(comparison: Comparison) -> int:
    """Return the last batch that Spark has planned."""
    offsets = comparison.job.location / "offsets"
    return max(int(path.name) for path in offsets.iterdir() if path.name.isdigit())


def delivered(calls: list[tuple[int, list[Row]]]) -> dict[int, list[Row]]:
    """Return sequence → rows. Check that a repeated sequence has the same rows."""
    found: dict[int, list[Row]] = {}
    for sequence, rows in calls:
        assert found.setdefault(sequence, rows) == rows
    return found


@pytest.mark.long
def test_a_ttl_and_a_timer_expire_without_input(pipeline: MakePipeline, tmp_path: Path) -> None:
    """A TTL and a timer each take effect in one published batch, which deletes state. Others publish nothing."""
    comparison = Comparison(pipeline(tasks=2, partitions=1))
    comparison.produce([{"id": "a", "n": 1}])
    calls: list[tuple[int, list[Row]]] = []

    query = start(
        comparison, Forgetting(tmp_path), lambda df, at: calls.append((at, sorted(df.collect()))), "ProcessingTime"
    )
    try:
        wait_until(lambda: any(rows and "timer" in rows[0].seen for _, rows in calls))
        published, batch = calls[-1][0], planned(comparison)
        wait_until(lambda: planned(comparison) > batch + 5)
        assert calls[-1][0] == published
        comparison.produce([{"id": "b", "n": 1}])
        query.processAllAvailable()
    finally:
        query.stop()

    assert [rows for _, rows in calls if rows][:3] == [
        [Row(id="a", seen="(1,)", exists=True)],
        [Row(id="a", seen="timer, None", exists=False)],
        [Row(id="b", seen="(1,)", exists=True)],
    ]
    assert published <= 4  # input, TTL and timer, and the job's first batch if the input came later
    assert all(
        b"b" in key
        for contents in comparison.job.contents(partitioner="spark-hash(string)").values()
        for key in contents
    )


@pytest.mark.long
def test_event_time_goes_on_once_after_the_watermark_has_moved(pipeline: MakePipeline) -> None:
    """Batches and rows are the same as on Spark, and the last batch has no input. Idle batches publish nothing."""
    comparison = Comparison(pipeline(tasks=2, partitions=1), watermark="2 seconds", rows_per_batch=3)
    seconds = [10, 11, 12, 20, 5, 30]
    comparison.produce([{"id": "ab"[i % 2], "n": i, "t": f"2024-01-01T00:00:{s:02}Z"} for i, s in enumerate(seconds)])
    calls: list[tuple[int, list[tuple[Any, ...]]]] = []

    def write(df: DataFrame, sequence: int) -> None:
        calls.append((sequence, sorted((tuple(row) for row in df.collect()), key=repr)))

    query = start(comparison, Events(), write, "EventTime")
    try:
        query.processAllAvailable()
        last, batch = calls[-1][0], planned(comparison)
        wait_until(lambda: planned(comparison) > batch + 3)
    finally:
        query.stop()

    assert calls[-1][0] == last
    batches = [rows for _, rows in calls if rows]
    assert len(batches) == 3
    assert not any(is_input for _, _, is_input in batches[-1])
    assert batches == comparison.on_spark(Events(), SEEN, "EventTime")


@pytest.mark.long
def test_the_watermark_moves_from_start_to_start(pipeline: MakePipeline) -> None:
    """With one batch for each start, and each at a new location, a batch has the watermark of the rows before it."""
    comparison = Comparison(pipeline(tasks=2, partitions=1, backup=["blob-store"]), 100, watermark="2 seconds")
    batches = []
    for seconds in ([10, 30], [31], [20, 33]):
        comparison.produce([{"id": "a", "n": s, "t": f"2024-01-01T00:00:{s:02}Z"} for s in seconds])
        batches += comparison.on_statemgr(Events(), SEEN, "EventTime")
        shutil.rmtree(comparison.job.location)

    first, second, third = ([seen for _, seen, _ in batch] for batch in batches[::2])  # each is delivered twice
    ms = 1_704_067_200_000
    assert first == [repr((0, -1000, [10, 30])), repr((0, [10, 30], 3))]
    assert repr((ms + 28_000, ms + 10_000, [10, 30, 31])) in second  # a timer
    assert repr((ms + 29_000, [33], 4)) in third  # without the row of 20, which is late


@pytest.mark.long
@pytest.mark.parametrize("lost", [pytest.param(False, id="kept"), pytest.param(True, id="lost")])
def test_an_idle_batch_that_is_interrupted_runs_again(pipeline: MakePipeline, tmp_path: Path, lost: bool) -> None:
    """An idle batch that fails before its publish or its output runs again with the same time and rows.

    If the checkpoint location is lost, the time differs, but the timer still fires once.
    """
    comparison = Comparison(pipeline(tasks=2, partitions=1))
    comparison.produce([{"id": "a", "n": 1}])
    calls: list[tuple[int, list[Row]]] = []
    stopped = tmp_path / "stopped"

    def write(df: DataFrame, sequence: int) -> None:
        rows = df.collect()
        calls.append((sequence, rows))
        if rows and "timer" in rows[0].seen and not stopped.exists():
            stopped.touch()
            raise ValueError("not delivered")

    for expected in ("not yet", "not delivered"):
        query = start(comparison, Forgetting(tmp_path, fails=True), write, "ProcessingTime")
        with pytest.raises(StreamingQueryException, match=expected):
            query.awaitTermination()
        query.stop()
        (tmp_path / "go").touch()
        if lost:
            shutil.rmtree(comparison.job.location)
    query = start(comparison, Forgetting(tmp_path), write, "ProcessingTime")
    try:
        query.processAllAvailable()
    finally:
        query.stop()

    fired = {sequence for sequence, rows in delivered(calls).items() if rows and "timer" in rows[0].seen}
    assert len(fired) == 1
    assert sum(sequence in fired for sequence, _ in calls) == 2
    times = (tmp_path / "times").read_text().splitlines()
    assert len(times) >= 2
    assert len(set(times)) == (2 if lost else 1)


@pytest.mark.long
def test_the_trigger_available_now_ends(pipeline: MakePipeline, tmp_path: Path) -> None:
    """The trigger reads its input in batches of the requested size. A start without input makes one batch."""
    comparison = Comparison(pipeline(tasks=2, partitions=1), rows_per_batch=2)
    comparison.produce([{"id": "a", "n": n} for n in range(6)])

    first = comparison.on_statemgr(Forgetting(tmp_path), SEEN, "ProcessingTime")
    assert [row for rows in first for row in rows if "timer" not in row[1]] == [("a", "(2,)", True)] * 3
    assert planned(comparison) == 2
    comparison.on_statemgr(Forgetting(tmp_path), SEEN, "ProcessingTime")
    assert planned(comparison) == 3
    heartbeat = json.loads((comparison.job.location / "offsets" / "3").read_text().splitlines()[-1])
    assert set(heartbeat) == {"offset", "timestamp"}
