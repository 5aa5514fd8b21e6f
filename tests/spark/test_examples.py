"""The examples in examples/spark give the same answers as plain Python over the same rows."""

from __future__ import annotations

import json
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Producer
from pyspark.sql import DataFrame, SparkSession

from examples.spark import enrich, last_seen_ttl, sessions, windowed_count
from examples.spark.local import Local
from spark_integration import RunningQuery, StateTable, register
from statemgr import JobConfig
from tests.docs.blocks import blocks
from tests.servers import KafkaServer
from tests.spark.conftest import ROOT, Pipeline

MakePipeline = Callable[..., Pipeline]
BEGIN = datetime(2024, 1, 1, 10, tzinfo=UTC)


def produce(job: Pipeline, rows: Iterable[dict[str, Any]], topic: str | None = None) -> None:
    """Write rows to a topic as JSON."""
    producer = Producer({"bootstrap.servers": job.kafka.bootstrap_servers})
    for row in rows:
        producer.produce(topic or job.topic, json.dumps(row))
    assert producer.flush(30) == 0


def at(seconds: float) -> str:
    """Return a time of the input as text."""
    return (BEGIN + timedelta(seconds=seconds)).isoformat()


def out_of_order(rows: list[tuple[str, int]], by_seconds: int) -> list[tuple[str, int]]:
    """Return the rows (name, second) out of order. No row comes more than ``by_seconds`` late."""
    draw = random.Random(7)
    return sorted(rows, key=lambda row: row[1] + draw.uniform(0, by_seconds))


class Results:
    """Runs a query and collects its rows. A repeated sequence replaces the earlier one."""

    def __init__(self, job: Pipeline) -> None:
        self.job = job
        self.sequences: dict[int, list[tuple[Any, ...]]] = {}

    @property
    def rows(self) -> list[tuple[Any, ...]]:
        return sorted(row for rows in self.sequences.values() for row in rows)

    def start(self, frame: Any) -> RunningQuery:
        def write(rows: DataFrame, sequence: int) -> None:
            self.sequences[sequence] = [tuple(row) for row in rows.collect()]

        running: RunningQuery = (
            frame.writeStream.foreachBatch(write).option("checkpointLocation", self.job.location.as_uri()).start()
        )
        return running

    def after(self, frame: Any, *inputs: list[dict[str, Any]]) -> RunningQuery:
        """Start the query, and send each input after the query has processed the one before."""
        running = self.start(frame)
        try:
            for rows in inputs:
                produce(self.job, rows)
                running.processAllAvailable()
        finally:
            running.stop()
        return running


def seconds_of(time: datetime) -> float:
    """Return a time of the output in seconds. Spark returns it without a time zone, in the machine's own."""
    return (time.astimezone(UTC) - BEGIN).total_seconds()


@pytest.mark.long
def test_windows_are_counted_when_they_close(pipeline: MakePipeline) -> None:
    """Window counts equal those of plain Python for unordered rows in several batches.

    A row that comes too late appears in the report and in no count.
    """
    job = pipeline(tasks=2, partitions=1)
    results = Results(job)
    draw = random.Random(3)
    views = out_of_order([(draw.choice("abc"), draw.randrange(600)) for _ in range(120)], by_seconds=9)
    rows = [{"page": page, "at": at(second)} for page, second in views]
    last, late = [{"page": "end", "at": at(1000)}], [{"page": "a", "at": at(500)}, {"page": "end", "at": at(1001)}]

    frame = windowed_count.windows(job.spark, job.kafka.bootstrap_servers, job.topic, job.config)
    running = results.after(frame, rows[:50], rows[50:], last, late)

    expected = Counter((page, second // 60 * 60 + 60) for page, second in views)
    assert [(page, seconds_of(end), count) for page, end, count in results.rows] == sorted(
        (page, end, count) for (page, end), count in expected.items()
    )
    assert sum(report.late_rows for report in running.recentBatches) == 1


@pytest.mark.long
def test_sessions_end_with_their_timers(pipeline: MakePipeline) -> None:
    """Sessions equal those that plain Python finds in the sorted rows, even if a view joins two open sessions."""
    job = pipeline(tasks=2, partitions=1)
    results = Results(job)
    draw = random.Random(5)
    views = out_of_order([(draw.choice("ab"), 60 * draw.randrange(1500)) for _ in range(150)], by_seconds=500)
    rows = [{"user": user, "at": at(second)} for user, second in views]

    frame = sessions.sessions(job.spark, job.kafka.bootstrap_servers, job.topic, job.config)
    results.after(frame, rows[:60], rows[60:], [{"user": "end", "at": at(200_000)}])

    times = defaultdict(list)
    for user, second in sorted(views):
        times[user].append(second)
    expected = []
    for user, seconds in times.items():
        session = [seconds[0]]
        for second in seconds[1:]:
            if second - session[-1] > sessions.GAP_MS / 1000:
                expected.append((user, session[0], session[-1], len(session)))
                session = []
            session.append(second)
        expected.append((user, session[0], session[-1], len(session)))
    found = [(user, seconds_of(first), seconds_of(last), count) for user, first, last, count in results.rows]
    assert len(found) > 10
    assert found == sorted(expected)


@pytest.mark.long
def test_a_device_is_forgotten_by_its_ttl(pipeline: MakePipeline) -> None:
    """Within an hour, a device appears once. With a TTL of 1 ms, each signal appears, and the state becomes empty."""
    job = pipeline(tasks=2, partitions=1)
    results = Results(job)
    signal = [{"device": "a"}]

    def devices(ttl_ms: int) -> Any:
        return last_seen_ttl.devices(job.spark, job.kafka.bootstrap_servers, job.topic, job.config, ttl_ms)

    results.after(devices(3_600_000), signal, signal)
    assert [row[0] for row in results.rows] == ["a"]
    register(job.spark)
    published = job.spark.read.format("statemgr.state").options(
        config=json.dumps(job.config.to_mapping()), stateVarName="last_seen"
    )
    assert [row.key.device for row in published.load().collect()] == ["a"]
    # the second signal still finds the first query's value, and gives it the shorter TTL
    results.after(devices(1), signal, signal, signal)
    assert [row[0] for row in results.rows] == ["a", "a", "a"]
    assert published.load().collect() == []


@pytest.mark.long
def test_orders_are_enriched_with_the_state_of_another_job(pipeline: MakePipeline, tmp_path: Path) -> None:
    """An order gets the newest rate of its currency, or none if the currency has no rate."""
    job, other = pipeline(tasks=2, partitions=1), pipeline(tasks=2, partitions=1)
    serdes = {"stores.totals.key.serde": "string", "stores.totals.value.serde": "integer"}
    mapping = {name.replace("totals", "rates"): value for name, value in (job.config.to_mapping() | serdes).items()}
    config = JobConfig.from_mapping(mapping)
    broker = job.kafka.bootstrap_servers
    produce(job, [{"currency": "EUR", "rate": 100}, {"currency": "GBP", "rate": 126}, {"currency": "EUR", "rate": 108}])
    location = (tmp_path / "rates").as_uri()
    keeping = (
        enrich.rates(job.spark, broker, job.topic, config)
        .writeStream.foreachBatch(lambda df, sequence: None)
        .option("checkpointLocation", location)
        .trigger(availableNow=True)
        .start()
    )
    keeping.awaitTermination()
    amounts = {"EUR": 20, "GBP": 3, "XXX": 1}
    orders = [{"order": i, "currency": name, "amount": amount} for i, (name, amount) in enumerate(amounts.items())]
    results = Results(other)

    results.after(enrich.priced(other.spark, broker, other.topic, StateTable(config)), orders)

    assert results.rows == [(0, "EUR", 20, 108, 2160), (1, "GBP", 3, 126, 378), (2, "XXX", 1, None, None)]


PRINTED: dict[Any, list[tuple[str, ...]]] = {
    windowed_count: [
        ("/", "2024-01-01 10:01:00", "3"),
        ("/", "2024-01-01 10:02:00", "1"),
        ("/help", "2024-01-01 10:01:00", "1"),
    ],
    sessions: [
        ("ann", "2024-01-01 10:00:00", "2024-01-01 10:40:00", "3"),
        ("ann", "2024-01-01 11:15:00", "2024-01-01 11:15:00", "1"),
        ("bob", "2024-01-01 10:10:00", "2024-01-01 10:10:00", "1"),
    ],
    enrich: [("1", "EUR", "20", "108", "2160"), ("2", "XXX", "3", "NULL", "NULL")],
}


def rows_in(text: str) -> list[tuple[str, ...]]:
    """Return the rows of the tables that Spark printed, sorted."""
    rows, lines = [], 0  # a table has a line above its header, one below it, and one at its end
    for line in text.splitlines():
        if line.startswith("+-"):
            lines += 1
        elif line.startswith("|") and lines % 3 == 2:
            rows.append(tuple(cell.strip() for cell in line[1:-1].split("|")))
    return sorted(rows)


@pytest.mark.long
@pytest.mark.parametrize("example", PRINTED, ids=lambda example: example.__name__.rpartition(".")[2])
def test_an_example_prints_what_its_readme_says(
    spark: SparkSession, kafka: KafkaServer, tmp_path: Path, capsys: pytest.CaptureFixture[str], example: Any
) -> None:
    """An example prints its documented result when it runs as a user would run it."""
    zone = spark.conf.get("spark.sql.session.timeZone")
    spark.conf.set("spark.sql.session.timeZone", "UTC")
    try:
        example.main(Local(kafka.fresh_name("example"), spark, kafka.bootstrap_servers, tmp_path))
    finally:
        spark.conf.set("spark.sql.session.timeZone", zone)

    assert rows_in(capsys.readouterr().out) == PRINTED[example]


@pytest.mark.long
def test_the_example_of_a_ttl_prints_a_device_that_is_back(
    spark: SparkSession, kafka: KafkaServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The example prints the first signal and the one after the pause. On a slow machine, the second also appears."""
    last_seen_ttl.main(Local(kafka.fresh_name("example"), spark, kafka.bootstrap_servers, tmp_path))

    reported = [row[0] for row in rows_in(capsys.readouterr().out)]
    assert reported in (["thermometer"] * 2, ["thermometer"] * 3)


def test_the_guide_quotes_the_examples() -> None:
    """docs/spark.md quotes the classes exactly as the tested programs contain them."""
    (ttl,) = blocks("docs/spark.md", "### TTL")
    windows, sessions = blocks("docs/spark.md", "### Timers and event time")
    (moved,) = blocks("docs/spark.md", "### From Spark's own state")
    for quoted, example in (
        (ttl, "spark/last_seen_ttl.py"),
        (windows, "spark/windowed_count.py"),
        (sessions, "spark/sessions.py"),
        (moved, "from-transform-with-state/run.py"),
    ):
        assert quoted in (ROOT / "examples" / example).read_text(), example
