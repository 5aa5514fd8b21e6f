"""The query of a soak: a driver with executors, and what goes wrong with them."""

from __future__ import annotations

import contextlib
import json
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from statemgr import JobConfig
from tests.clusters.soak_servers import Servers
from tests.jobs import DUAL, with_changes
from tests.loop_members import ROOT
from tests.spark.cluster import spark_environment

TASKS = 4
#: Errors that may end a driver here: a new driver has fenced it, a server was away for too long, or too many of its
#: executors were killed.
_EXPECTED = {"FencedError", "UnavailableError", "RetryableError", "OutcomeUnknownError", ""}


class Query:
    """The current driver."""

    def __init__(self, servers: Servers, directory: Path, topic: str, output: str, seed: str) -> None:
        directory.mkdir()
        self._directory, self._chance = directory, random.Random(seed)
        self._topic, self._output = topic, output
        mapping = servers.mapping("SPARK", "query", TASKS, directory / "state")
        self._config = JobConfig.from_mapping(mapping)
        self.config = JobConfig.from_mapping(servers.mapping(None, "query", TASKS, directory / "reader"))
        self.log = directory / "history"
        self.log.touch()
        self.drivers = 0
        self.ended: Counter[str] = Counter()
        self.driver = self.start()

    def start(self, **trigger: object) -> subprocess.Popen[bytes]:
        """Start a driver. Its Spark settings differ each time."""
        self.drivers += 1
        factories = self._chance.sample(DUAL, 2)
        scratch = self._directory / f"driver-{self.drivers}"
        scratch.mkdir()
        flag = lambda: self._chance.choice(["true", "false"])  # noqa: E731
        order = {
            "config": with_changes(self._config, task__restore__factories=factories).to_mapping(),
            "topic": self._topic,
            "output": self._output,
            "log": str(self.log),
            "scratch": str(scratch),
            # the last driver has to process everything that the drivers before it have left
            "per_batch": 100_000 if trigger else self._chance.choice([100, 1000, 5000]),
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
                [sys.executable, "-m", "tests.clusters.soak_job", json.dumps(order)],
                env=spark_environment(SPARK_WORKER_DIR=scratch / "work", PYTHONPATH=ROOT),
                cwd=scratch,
                stdout=out,
                stderr=log,
            )

    def look(self) -> None:
        """Record why the driver ended by itself, and start another. Fail if none of the faults explains its error."""
        if self.driver.poll() is None:
            return
        lines = (self._directory / f"driver-{self.drivers}" / "out").read_text().split()
        error = lines[-1] if lines else ""
        assert error in _EXPECTED, self.tail()
        self.ended[f"driver: {error or 'too many lost tasks, or Kafka away'}"] += 1
        self._next()

    def tail(self) -> str:
        """Return the end of the driver's log."""
        return (self._directory / f"driver-{self.drivers}" / "log").read_text(errors="replace")[-5000:]

    def _next(self) -> None:
        _kill(_tree(self.driver))
        self.driver.wait()
        shutil.rmtree(self._directory / f"driver-{self.drivers - 2}", ignore_errors=True)
        self.driver = self.start()

    def faults(self, chance: random.Random, over: threading.Event) -> list[Callable[[], Any]]:
        """Return what can go wrong."""

        def driver_is_killed() -> None:
            self._next()

        def executor_is_killed() -> None:
            self._kill_some(chance, "CoarseGrainedExecutorBackend")

        def worker_is_killed() -> None:
            self._kill_some(chance, "pyspark.daemon", "pyspark/daemon")

        def driver_loses_its_disk() -> None:
            _kill(_tree(self.driver))
            self.driver.wait()
            shutil.rmtree(self._directory / "state", ignore_errors=True)
            self._next()

        def driver_is_overtaken() -> None:
            first = self.driver
            self.driver = self.start()
            with contextlib.suppress(subprocess.TimeoutExpired):
                first.wait(60)
            _kill(_tree(first))
            first.wait()

        def driver_is_suspended() -> None:
            tree = _tree(self.driver)
            for process in tree:
                _signal(process, signal.SIGSTOP)
            over.wait(chance.uniform(0, 30))
            for process in tree:
                _signal(process, signal.SIGCONT)

        kills = [executor_is_killed, worker_is_killed]
        return [driver_is_killed, *kills * 2, driver_loses_its_disk, driver_is_overtaken, driver_is_suspended]

    def _kill_some(self, chance: random.Random, *names: str) -> None:
        found = [process for process in _tree(self.driver) if any(name in _line(process) for name in names)]
        _kill([chance.choice(found)] if found else [])

    def processes(self) -> list[psutil.Process]:
        """Return the driver's Python process, and its workers."""
        return [one for one in _tree(self.driver) if "python" in _line(one)]

    def finish(self, deadline_s: float) -> None:
        """Process the rest of the input with one more driver."""
        self.kill()
        self.driver = self.start(availableNow=True)
        end = time.monotonic() + deadline_s
        while self.driver.poll() is None:
            assert time.monotonic() < end, self.tail()
            time.sleep(0.5)
        assert self.driver.returncode == 0, self.tail()

    def kill(self) -> None:
        """Kill the driver and everything that belongs to it."""
        _kill(_tree(self.driver))
        self.driver.wait()


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
