"""Random faults of a query on a cluster: kills of drivers, executors and workers, losses, a suspended driver.

``make soak-spark MINUTES=30 INPUT=rows.csv.gz KEY=column`` runs it longer, and with real rows.
"""

from __future__ import annotations

import contextlib
import csv
import gzip
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from confluent_kafka import Producer

from tests.jobs import DUAL, with_changes
from tests.kafka_jobs import committed, make_topic
from tests.servers import KafkaServer
from tests.spark.cluster import spark_environment
from tests.spark.conftest import Pipeline, make_pipeline

MINUTES = float(os.environ.get("STATEMGR_TEST_SOAK_MINUTES") or 0)
#: Errors that may end a driver here: a new driver has fenced it, or too many of its executors were killed.
_EXPECTED = {"FencedError", ""}
_ROWS_PER_SECOND = 400


class Soak:
    """A job, its current driver, and the faults so far."""

    def __init__(self, job: Pipeline, seed: int) -> None:
        self.job = job
        self.random = random.Random(seed)
        self.output = job.kafka.fresh_name("changes")
        make_topic(job.config, self.output, 1)
        self.happened: Counter[str] = Counter()
        self.drivers = 0
        self.driver = self.start()

    def start(self, **trigger: object) -> subprocess.Popen[bytes]:
        """Start a driver. Its Spark settings differ each time."""
        self.drivers += 1
        factories = self.random.sample(DUAL, 2)
        scratch = self.job.directory / f"driver-{self.drivers}"
        scratch.mkdir()
        flag = lambda: self.random.choice(["true", "false"])  # noqa: E731
        order = {
            "config": with_changes(self.job.config, task__restore__factories=factories).to_mapping(),
            "topic": self.job.topic,
            "output": self.output,
            "location": self.job.location.as_uri(),
            "scratch": str(scratch),
            # the last driver has to process everything that the drivers before it have left
            "per_batch": 100_000 if trigger else self.random.choice([100, 1000, 5000]),
            "trigger": trigger or {"processingTime": "0 seconds"},
            "settings": {
                "spark.speculation": flag(),
                "spark.speculation.interval": "50ms",
                "spark.speculation.multiplier": "1.1",
                "spark.python.worker.reuse": flag(),
                "spark.sql.adaptive.enabled": flag(),
            },
        }
        with (scratch / "out").open("wb") as out, (scratch / "log").open("wb") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "tests.spark.soak_job", json.dumps(order)],
                env=spark_environment(SPARK_WORKER_DIR=scratch / "work"),
                cwd=scratch,
                stdout=out,
                stderr=log,
            )

    def ended(self) -> None:
        """Record why the driver ended by itself. Fail if none of the faults explains its error."""
        directory = self.job.directory / f"driver-{self.drivers}"
        lines = (directory / "out").read_text().split()
        error = lines[-1] if lines else ""
        log = (directory / "log").read_text()
        assert error in _EXPECTED, log[-5000:]
        if not error and "has been terminated" not in log and "Job aborted" not in log:
            assert self.driver.returncode in (0, -signal.SIGKILL), log[-5000:]
        self.happened[f"ended by itself {error}".strip()] += 1

    # --- what happens -----------------------------------------------------------------------------------------------

    def once(self) -> None:
        """Cause one fault."""
        if self.driver.poll() is not None:
            self.ended()
            self.driver = self.start()
            return
        faults = [self.kill_driver] * 2 + [self.kill_executor] * 4 + [self.kill_worker] * 4
        fault = self.random.choice([*faults, self.lose_location, self.lose_disk, self.overtake, self.pause])
        self.happened[fault.__name__] += 1
        fault()

    def kill_driver(self) -> None:
        """Kill the driver and everything that belongs to it."""
        _kill(_tree(self.driver))
        self.driver.wait()
        self.driver = self.start()

    def kill_executor(self) -> None:
        _kill(self._some("CoarseGrainedExecutorBackend"))

    def kill_worker(self) -> None:
        _kill(self._some("pyspark.daemon", "pyspark/daemon"))

    def lose_location(self) -> None:
        _kill(_tree(self.driver))
        self.driver.wait()
        shutil.rmtree(self.job.location, ignore_errors=True)
        self.driver = self.start()

    def lose_disk(self) -> None:
        _kill(_tree(self.driver))
        self.driver.wait()
        shutil.rmtree(str(self.job.config.state_dir), ignore_errors=True)
        self.driver = self.start()

    def overtake(self) -> None:
        """Start a second driver while the first one runs. The first one then ends."""
        first = self.driver
        self.driver = self.start()
        with contextlib.suppress(subprocess.TimeoutExpired):
            first.wait(60)
        _kill(_tree(first))
        first.wait()

    def pause(self) -> None:
        """Suspend the driver for a while."""
        tree = _tree(self.driver)
        for process in tree:
            _signal(process, signal.SIGSTOP)
        time.sleep(self.random.uniform(0, 3))
        for process in tree:
            _signal(process, signal.SIGCONT)

    def _some(self, *names: str) -> list[psutil.Process]:
        found = [process for process in _tree(self.driver) if any(name in _line(process) for name in names)]
        return [self.random.choice(found)] if found else []


def _tree(driver: subprocess.Popen[bytes]) -> list[psutil.Process]:
    try:
        process = psutil.Process(driver.pid)
        return [*process.children(recursive=True), process]
    except psutil.NoSuchProcess:
        return []


def _line(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def _signal(process: psutil.Process, number: int) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        process.send_signal(number)


def _kill(processes: list[psutil.Process]) -> None:
    for process in processes:
        _signal(process, signal.SIGKILL)


def keys() -> Iterator[str]:
    """Return the keys of the input: a column of a file, repeated without end, or generated keys."""
    if not (path := os.environ.get("STATEMGR_TEST_SOAK_INPUT")):
        return (f"key-{random.Random(number).randrange(500)}" for number in itertools.count())
    column = os.environ["STATEMGR_TEST_SOAK_KEY"]
    with gzip.open(path, "rt", encoding="utf-8", errors="replace", newline="") as file:
        found = [row[column] or "(null)" for row in csv.DictReader(file)]
    return itertools.cycle(found)


@pytest.mark.long
@pytest.mark.skipif(not MINUTES, reason="`make soak-spark` runs it")
@pytest.mark.timeout(int(MINUTES * 60) + 900)
def test_random_kills_lose_and_double_nothing(kafka: KafkaServer, tmp_path: Path) -> None:
    """State in both backends and the output on Kafka equal the input, whatever the faults were."""
    job = make_pipeline(None, kafka, tmp_path, tasks=4, kind="segments")
    seed = int(os.environ.get("STATEMGR_TEST_SOAK_SEED") or time.time())
    soak, stop = Soak(job, seed), threading.Event()
    print(f"\nseed {seed}", flush=True)
    produced: Counter[str] = Counter()

    def produce() -> None:
        producer = Producer({"bootstrap.servers": kafka.bootstrap_servers})
        for number, key in enumerate(keys()):
            if number % (_ROWS_PER_SECOND // 10) == 0 and stop.wait(0.1):
                break
            producer.produce(job.topic, key=key, value=b"")
            producer.poll(0)
            produced[key] += 1
        assert producer.flush(60) == 0

    producing = threading.Thread(target=produce)
    producing.start()
    try:
        ends = time.monotonic() + MINUTES * 60
        while time.monotonic() < ends:
            time.sleep(soak.random.uniform(0, 20))
            soak.once()
        stop.set()
        producing.join()
        if soak.driver.poll() is None:
            soak.kill_driver()
        _kill(_tree(soak.driver))
        soak.driver.wait()
        soak.driver = soak.start(availableNow=True)
        assert soak.driver.wait(600) == 0, (job.directory / f"driver-{soak.drivers}" / "log").read_text()[-5000:]
    finally:
        stop.set()
        producing.join()
        _kill(_tree(soak.driver))

    sent: Counter[str] = Counter()
    for key, value in committed(job.config, soak.output):
        assert key is not None
        assert value is not None
        sent[key.decode()] += int(value)
    print(f"{sum(produced.values())} rows, {soak.drivers} drivers, {dict(soak.happened)}", flush=True)
    assert sent == produced
    for factory in DUAL:
        assert job.state(factory) == produced
