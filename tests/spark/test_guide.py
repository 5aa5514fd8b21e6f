"""The programs of docs/spark.md that no other test runs, with changed names of topics and directories only."""

from __future__ import annotations

import json
import logging
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Producer
from pyspark.sql import Row

from tests.cli.test_running_job import write_toml
from tests.docs.blocks import blocks
from tests.spark.conftest import Pipeline

MakePipeline = Callable[..., Pipeline]
#: A row of a table of customer, orders and amount.
_ROW = re.compile(r"\| *(\w+)\| *(\d+)\| *(\d+)\|")


def batches(output: str) -> dict[int, dict[str, int]]:
    """Return sequence → word → count from the output of Spark's console sink."""
    found: dict[int, dict[str, int]] = {}
    for part in output.split("Sequence: ")[1:]:
        counts = re.findall(r"\| *(\w+)\| *(\d+)\|", part)
        found[int(part.partition("\n")[0])] = {word: int(count) for word, count in counts}
    return found


@pytest.mark.long
def test_the_first_query(
    pipeline: MakePipeline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each run repeats the last output and continues the counts, also after a loss of all local files."""
    job = pipeline()
    monkeypatch.chdir(tmp_path)
    (program,) = blocks("docs/spark.md", "## Start")
    (output,) = blocks("docs/spark.md", "## Start", "text")
    for old, new in {
        '"localhost:9092"': repr(job.kafka.bootstrap_servers),
        '"words"': repr(job.topic),
        "/tmp/words": str(tmp_path / "words"),
    }.items():
        assert old in program
        program = program.replace(old, new)

    def run() -> dict[int, dict[str, int]]:
        capsys.readouterr()
        exec(program, {"__name__": "__main__"})  # the program's class is shipped by value
        return batches(capsys.readouterr().out)

    counts = {"to": 2, "be": 2, "or": 1, "not": 1}
    assert run() == batches(output) == {1: counts}
    second = {word: 2 * count for word, count in counts.items()}
    assert run() == {1: counts, 2: second}
    shutil.rmtree(tmp_path / ".statemgr")
    assert run() == {2: second, 3: {word: 3 * count for word, count in counts.items()}}


@pytest.mark.long
def test_a_function_of_your_own(pipeline: MakePipeline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The query writes a directory for each sequence, and the documented listener runs."""
    job = pipeline(tasks=2)
    job.produce(20, keys=4)
    write_toml(job.config, tmp_path / "job.toml")
    monkeypatch.chdir(tmp_path)
    (program,) = blocks("docs/spark.md", "### A function of your own")
    (listener,) = blocks("docs/spark.md", "## Metrics")
    for old, new in {
        '"localhost:9092"': repr(job.kafka.bootstrap_servers),
        '"orders"': repr(job.topic),
        "/data": str(tmp_path),
        "        .load()": "        .load().where('key is not null')",
        'processingTime="10 seconds"': 'processingTime="0 seconds"',
        "query.awaitTermination()": "",
    }.items():
        assert old in program
        program = program.replace(old, new)
    names: dict[str, Any] = {"__name__": "__main__", "spark": job.spark}

    exec(program, names)
    try:
        exec(listener.replace("> 10", "> 0"), names)
        names["query"].processAllAvailable()
    finally:
        names["query"].stop()

    output = job.spark.read.parquet(str(tmp_path / "totals"))
    totals = {row.key: row.total for row in output.groupBy("key").agg({"total": "max"}).toDF("key", "total").collect()}
    assert totals == {key: count for key, count in job.produced.items() if key != "(null)"}


@pytest.mark.long
def test_a_function_with_a_group_state_to_kafka(
    pipeline: MakePipeline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``applyInPandasWithState`` runs, and its rows arrive on a topic as JSON."""
    job, visits = pipeline(tasks=2), pipeline(partitions=1).topic
    job.produce(9, keys=3)
    (function,), (sink,) = blocks("docs/spark.md", "### applyInPandasWithState"), blocks("docs/spark.md", "## Sinks")
    assert '"visits"' in sink
    sink = sink.replace('"visits"', repr(visits))
    names: dict[str, Any] = {
        "__name__": "__main__",
        "config": job.config,
        "rows": lambda offsets: job.rows(offsets).selectExpr("cast(key as string) user"),
    }
    exec("from spark_integration import stateful\n" + function + sink, names)
    try:
        names["query"].processAllAvailable()
    finally:
        names["query"].stop()

    read = job.spark.read.format("kafka").option("kafka.bootstrap.servers", job.kafka.bootstrap_servers)
    records = read.option("subscribe", visits).load().selectExpr("cast(key as string)", "cast(value as string)")
    assert sorted(records.collect()) == [
        Row(key=f"key-{i}", value=f'{{"user":"key-{i}","visits":3}}') for i in range(3)
    ]


@pytest.mark.long
def test_the_query_in_the_readme(pipeline: MakePipeline, tmp_path: Path) -> None:
    """The query writes each customer's totals to a directory that Spark can read."""
    job = pipeline(tasks=2)
    job.produce(10, keys=2)
    (program,) = blocks("README.md", "## On Spark")
    assert "/data" in program
    names: dict[str, Any] = {
        "__name__": "__main__",
        "config": job.config,
        "orders": lambda offsets: job.rows(offsets).selectExpr("cast(key as string) customer", "1 as amount"),
    }
    exec(program.replace("/data", str(tmp_path)), names)
    try:
        names["query"].processAllAvailable()
    finally:
        names["query"].stop()

    found = {row.customer or "(null)": row.total for row in job.spark.read.parquet(str(tmp_path / "totals")).collect()}
    assert found == job.produced


@pytest.mark.long
def test_the_quickstart_on_spark(
    pipeline: MakePipeline,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """docs/quickstart.md: with a hundredth of its orders, the program gives a hundredth of its totals.

    A restart on an empty machine logs what the page shows, and prints the last batch again.
    """
    job = pipeline(tasks=4, partitions=4)
    (program,) = blocks("docs/quickstart.md", "## The same on Spark")
    (settings,) = blocks("docs/quickstart.md", "## The same on Spark", "toml")
    (table,) = blocks("docs/quickstart.md", "## The same on Spark", "text")
    again = blocks("docs/quickstart.md", "## The same on Spark", "console")[-1]
    for old, new in {
        "127.0.0.1:9092": job.kafka.bootstrap_servers,
        "/tmp/totals": str(tmp_path),
        'name = "totals"': f'name = "{job.topic}"',
        '"subscribe", "orders"': f'"subscribe", "{job.topic}"',
        ".start()": ".trigger(availableNow=True).start()",
    }.items():
        assert old in settings + program
        settings, program = settings.replace(old, new), program.replace(old, new)
    settings += f'[state]\ndir = "{tmp_path}/state"\n'  # the workers of the shared session run in another directory
    (tmp_path / "job.toml").write_text(settings, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    totals = {name: (int(count) // 100, int(amount) // 100) for name, count, amount in _ROW.findall(table)}
    assert len(totals) == 8
    producer = Producer({"bootstrap.servers": job.kafka.bootstrap_servers})

    def send() -> None:
        for name, (count, amount) in totals.items():
            for part in [amount - count + 1, *[1] * (count - 1)]:
                producer.produce(job.topic, key=name, value=json.dumps({"amount": part}))
        assert producer.flush(60) == 0

    def batches_printed() -> list[dict[str, tuple[int, int]]]:
        capsys.readouterr()
        exec(program, {"__name__": "__main__"})
        parts = capsys.readouterr().out.split("Sequence: ")[1:]
        return [{name: (int(count), int(amount)) for name, count, amount in _ROW.findall(part)} for part in parts]

    send()
    assert batches_printed() == [totals]
    shutil.rmtree(tmp_path / "state")
    send()
    with caplog.at_level(logging.INFO, logger="spark_integration"):
        caplog.clear()
        doubled = {name: (2 * count, 2 * amount) for name, (count, amount) in totals.items()}
        assert batches_printed() == [totals, doubled]
    said = "\n".join(f"{record.name}: {record.getMessage()}" for record in caplog.records)
    for line in re.findall(" INFO (.*)", again):
        assert _without_numbers(line) in _without_numbers(said.replace(job.topic, "totals")), said


def _without_numbers(text: str) -> str:
    """Return log lines without the numbers, which differ between runs."""
    return re.sub(r"\d[\d.]*( [KMG]?i?B\b)?", "0", text)


@pytest.mark.long
def test_a_processor_and_its_state(pipeline: MakePipeline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/spark.md: the processor's query runs, and the documented line reads one user's state."""
    job = pipeline(tasks=2, partitions=1)
    write_toml(job.config, tmp_path / "job.toml")
    monkeypatch.chdir(tmp_path)
    producer = Producer({"bootstrap.servers": job.kafka.bootstrap_servers})
    for user in ("ann", "bob", "ann"):
        producer.produce(job.topic, key=user, value="home")
    assert producer.flush(60) == 0
    (program,) = blocks("docs/spark.md", "## Processors")
    for old, new in {
        ".start()": ".trigger(availableNow=True).start()",
    }.items():
        assert old in program
        program = program.replace(old, new)
    written: list[Row] = []
    names: dict[str, Any] = {
        "__name__": "__main__",  # the program's class is shipped by value
        "spark": job.spark,
        "rows": lambda offsets: job.rows(offsets).selectExpr("cast(key as string) user", "cast(value as string) page"),
        "write": lambda df, sequence: written.extend(df.collect()),
    }
    exec(program, names)
    names["query"].awaitTermination()
    assert sorted(written) == [Row(user="ann", visits=2), Row(user="bob", visits=1)]

    (reading,) = blocks("docs/spark.md", "## Looking at state")
    start, end = reading.index("totals = "), reading.index("visits = ")
    reading = reading[:start] + reading[end:]  # tests/spark/test_reading.py runs the lines in between
    exec(reading.replace('"job.toml"', repr(str(tmp_path / "job.toml"))), names)
    assert [(row.key.user, row.value["count"]) for row in names["visits"].collect()] == [("ann", 2)]
