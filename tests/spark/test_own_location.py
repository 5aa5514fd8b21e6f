"""Queries without the option ``checkpointLocation``: each start has a location of its own, which nobody keeps."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewPartitions
from pyspark.sql import DataFrame

from spark_integration import RunningQuery, StatefulQuery, location
from spark_integration.location import Location
from statemgr.errors import InvalidError
from tests.spark.conftest import OUTPUT, Pipeline, count

MakePipeline = Callable[..., Pipeline]

#: A process that has a location, says so, and waits for SIGKILL.
KILLED = """
import sys
from pathlib import Path
from spark_integration import location
from statemgr import JobConfig, StateManager
location._MEMORY = Path(sys.argv[1])
config = JobConfig.from_mapping({"job.name": "killed", "kafka.bootstrap.servers": "127.0.0.1:1"})
own = StateManager(config).scratch(*location.own_locations())
(own() / "location" / "offsets").mkdir(parents=True)
print(own(), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file system in memory. Its only directory has the locations of this test."""
    directory = tmp_path / "in memory"
    directory.mkdir()
    monkeypatch.setattr(location, "_MEMORY", directory)
    return directory


def without(job: Pipeline, per_batch: int = 1_000_000) -> StatefulQuery:
    """Return a query without a location that waits for more input."""
    rows = StatefulQuery(job.config).input(lambda offsets: job.rows(offsets, per_batch)).key_by("key")
    return rows.process(count, OUTPUT).output(job.outputs.write)


def locations(memory: Path) -> list[Path]:
    """Return the locations that exist."""
    return sorted(memory.glob("statemgr-*/locations/*/location"))


def ended(query: RunningQuery) -> None:
    """Wait until everything is processed, and stop."""
    query.processAllAvailable()
    query.stop()


def test_each_start_has_a_location_of_its_own(pipeline: MakePipeline, memory: Path) -> None:
    """Two queries at once, a restart, and a topic that grew: every row counts once, and no location stays."""
    jobs = [pipeline(tasks=1, partitions=1, backup=["blob-store"], job__id=str(number)) for number in range(2)]
    for _ in range(2):
        running = []
        for job in jobs:
            job.produce(60)
            running.append(without(job, 30).start())
        for query in running:
            query.processAllAvailable()
        assert len(locations(memory)) == 2
        for found in locations(memory):
            assert (found / "commits" / "0").is_file()
            assert list(found.rglob("*.crc")) == [], "each costs a process"
        for query in running:
            query.stop()
        assert locations(memory) == []
    for job in jobs:
        assert job.state("blob-store") == job.outputs.counts() == job.produced

    grown = jobs[0]
    admin = AdminClient({"bootstrap.servers": grown.kafka.bootstrap_servers})
    admin.create_partitions([NewPartitions(grown.topic, 2)])[grown.topic].result(timeout=30)
    grown.produce(30, partition=1)
    ended(without(grown).start())
    assert grown.state("blob-store") == grown.outputs.counts() == grown.produced


@pytest.mark.parametrize("can_compile", [True, pytest.param(False, marks=pytest.mark.long)])
def test_logs_are_plain_files(
    pipeline: MakePipeline, memory: Path, monkeypatch: pytest.MonkeyPatch, can_compile: bool
) -> None:
    """Spark writes its logs in a location of its own with a class that starts no process, or, if that cannot be
    compiled, as always. The output's session does not know that class."""
    if not can_compile:
        monkeypatch.setattr(location, "_PLAIN_FILES", "no Java")
    job = pipeline(tasks=1, partitions=1, backup=["blob-store"])
    job.produce(30)
    managers = []

    def write(rows: DataFrame, sequence: int) -> None:
        managers.append(rows.sparkSession.conf.get("spark.sql.streaming.checkpointFileManagerClass", None))
        job.outputs.write(rows, sequence)

    query = without(job).output(write).start()
    query.processAllAvailable()
    of_logs = query._jsq.streamingQuery().commitLog().fileManager().getClass().getName()
    query.stop()
    assert (of_logs == "statemgr.PlainFiles") is can_compile
    assert managers == [None]
    assert job.state("blob-store") == job.outputs.counts() == job.produced


class OnlySettings:
    """A session with settings, whose JVM Python may not call."""

    def __init__(self) -> None:
        self.settings: dict[str, str] = {}
        self.conf = self
        self.get, self.set, self.unset = self.settings.get, self.settings.__setitem__, self.settings.pop


def test_starts_on_two_threads_leave_the_sessions_settings() -> None:
    """A start that begins within another one, and ends after it, does not take its settings for the user's."""
    session: Any = OnlySettings()
    inside, leave = threading.Event(), threading.Event()

    def start() -> None:
        with Location(session, "file:/two", kept=False).quick():
            inside.set()
            assert leave.wait(30)

    other = threading.Thread(target=start)
    with Location(session, "file:/one", kept=False).quick():
        assert session.settings
        other.start()
        inside.wait(0.5)
    assert inside.wait(30)
    leave.set()
    other.join()
    assert session.settings == {}


def test_what_a_killed_driver_leaves(pipeline: MakePipeline, memory: Path) -> None:
    """The location of a driver that was killed is removed by the next start. Those of living ones stay."""
    drivers = [
        subprocess.Popen([sys.executable, "-c", KILLED, str(memory)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        for _ in range(2)
    ]
    try:
        left = []
        for driver in drivers:
            assert driver.stdout is not None
            left.append(Path(driver.stdout.readline().decode().strip()) / "location")
        drivers[0].kill()
        assert drivers[0].wait(30) == -signal.SIGKILL
        assert locations(memory) == sorted(left)
        job = pipeline(tasks=1, backup=["blob-store"])
        job.produce(30)
        running = without(job).start()
        running.processAllAvailable()
        found = locations(memory)
        assert left[0] not in found
        assert left[1] in found
        assert len(found) == 2
        running.stop()
    finally:
        for driver in drivers:
            driver.kill()
            driver.communicate()


def test_a_location_that_vanishes(pipeline: MakePipeline, memory: Path) -> None:
    """The query ends with an error before it publishes another batch, and the next start counts every row once."""
    job = pipeline(tasks=1, backup=["blob-store"])
    job.produce(30)
    running = without(job).start()
    running.processAllAvailable()
    shutil.rmtree(memory / next(memory.iterdir()))
    job.produce(30)
    with pytest.raises(Exception, match=r"location|No such file|does not exist|FileNotFound"):
        running.awaitTermination(120)
    running.stop()

    ended(without(job).start())
    assert job.state("blob-store") == job.outputs.counts() == job.produced


def test_inputs_that_need_a_kept_location(pipeline: MakePipeline, memory: Path) -> None:
    """A DataFrame is refused by ``start``, and a source other than Kafka by the first batch, before it publishes."""
    job = pipeline(tasks=1)
    job.produce(5)
    with pytest.raises(InvalidError, match="the input is a DataFrame"):
        without(job).input(job.rows("earliest")).start()

    def rate(offsets: str) -> object:
        return (
            job.spark.readStream.format("rate-micro-batch")
            .option("rowsPerBatch", 5)
            .load()
            .selectExpr("cast(cast(value as string) as binary) key")
        )

    with_rate = without(job).input(rate).start()
    with pytest.raises(InvalidError, match="other than Kafka"):
        with_rate.processAllAvailable()
    with_rate.stop()
    assert job.contents() == {"Partition 0": {}}
    assert locations(memory) == []
