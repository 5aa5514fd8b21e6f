"""A Spark cluster on this machine: a driver in its own process, and executors that share no disk."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from queue import Empty, Queue
from typing import Any

import psutil
import pyspark

from tests.jobs import with_changes
from tests.spark.conftest import ROOT, Pipeline

#: Each executor's own directory, as a reference that the executor resolves.
OWN_DISK = "${env:SPARK_EXECUTOR_DIRS}"
LOCAL_CLUSTER = "local-cluster[2,1,1024]"


def spark_environment(**more: object) -> dict[str, str]:
    """Return the environment of a local Spark process that can import the tests."""
    own = {
        "PYTHONPATH": ROOT,
        "PYSPARK_PYTHON": sys.executable,
        "SPARK_HOME": Path(pyspark.__file__).parent,
        "SPARK_LOCAL_IP": "127.0.0.1",
    }
    return os.environ | {name: str(value) for name, value in (own | more).items()}


class Cluster:
    """A driver that runs one query after another in one session.

    Args:
        directory: the directory for the disks of all processes.
        settings: the settings of the session.
    """

    def __init__(self, directory: Path, master: str = LOCAL_CLUSTER, settings: Mapping[str, str] | None = None) -> None:
        self.disks = directory / "disks"
        self.disks.mkdir(parents=True)
        self._log = directory / "driver.log"
        environment = spark_environment(SPARK_WORKER_DIR=directory / "work", SPARK_EXECUTOR_DIRS=self.disks)
        start = {"master": master, "settings": dict(settings or {})}
        with self._log.open("wb") as log:
            self.driver = subprocess.Popen(
                [sys.executable, "-m", "tests.spark.cluster_job", json.dumps(start)],
                env=environment,
                cwd=directory,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        self._answers: Queue[str] = Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.driver.stdout is not None
        for line in self.driver.stdout:
            self._answers.put(line)
        self._answers.put("")

    def ask(self, order: Mapping[str, Any], timeout: float = 600) -> dict[str, Any]:
        """Send an order and wait for the answer."""
        assert self.driver.stdin is not None
        self.driver.stdin.write(json.dumps(order) + "\n")
        self.driver.stdin.flush()
        line = self._answer(timeout)
        assert line, f"the driver has ended: {self.log()}"
        answer: dict[str, Any] = json.loads(line)
        return answer

    def ask_to_die(self, order: Mapping[str, Any], timeout: float = 600) -> None:
        """Send an order that kills the driver, and wait for its end."""
        assert self.driver.stdin is not None
        self.driver.stdin.write(json.dumps(order) + "\n")
        self.driver.stdin.flush()
        line = self._answer(timeout)
        assert not line, line
        assert self.driver.wait(timeout) == -signal.SIGKILL

    def _answer(self, timeout: float) -> str:
        try:
            return self._answers.get(timeout=timeout)
        except Empty:
            raise AssertionError(f"no answer in {timeout} s: {self.log()}") from None

    def run(self, job: Pipeline, process: list[Any], **more: Any) -> dict[str, Any]:
        """Run the job's query to the end of its input and keep its output. Fail if the query fails."""
        answer = self.ask(order_for(job, process, **more))
        assert "error" not in answer, f"{answer.get('trace')}\n{self.log()}"
        job.outputs.calls += [(sequence, [tuple(row) for row in rows]) for sequence, rows in answer["outputs"]]
        return answer

    def log(self) -> str:
        """Return the end of the driver's log."""
        return self._log.read_text(errors="replace")[-4000:]

    def close(self) -> None:
        """Stop the driver and everything that it started."""
        assert self.driver.stdin is not None
        self.driver.stdin.close()
        _kill_tree(self.driver)
        assert self.driver.stdout is not None
        self.driver.stdout.close()


def _kill_tree(process: subprocess.Popen[Any]) -> None:
    """Kill a process that this class started, and all of its descendants."""
    if process.poll() is None:
        root = psutil.Process(process.pid)
        for one in [*root.children(recursive=True), root]:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.send_signal(signal.SIGKILL)
    process.wait()


def order_for(job: Pipeline, process: list[Any], disk: str = "state", **more: Any) -> dict[str, Any]:
    """Return the order for a query of the job on machines that share nothing. Another ``disk`` means empty disks."""
    order = {
        "kind": "run",
        "config": with_changes(job.config, state__dir=f"{OWN_DISK}/{disk}").to_mapping(),
        "topic": job.topic,
        "location": job.location.as_uri(),
        "per_batch": 1_000_000,
        "process": process,
    }
    return order | more


class Standalone:
    """A master and two workers on two host names of this machine. Each worker has one executor with one core.

    Spark runs the second copy of a task only on a different host, so a cluster on one host never runs one.
    """

    hosts = ("127.0.0.1", "localhost")

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._processes: list[subprocess.Popen[bytes]] = []
        master = ["master.Master", "--host", "127.0.0.1", "--port", "0", "--webui-port", "0"]
        self._start("master", master)
        self.master = self._address()
        for number, host in enumerate(self.hosts):
            size = ["--cores", "1", "--memory", "1g", "--work-dir", str(directory / f"work-{number}")]
            self._start(f"worker-{number}", ["worker.Worker", "--host", host, "--webui-port", "0", *size, self.master])

    def _start(self, name: str, command: list[str]) -> None:
        disk = self._directory / f"disk-{name}"
        disk.mkdir(parents=True)
        environment = spark_environment(SPARK_LOCAL_DIRS=disk, SPARK_DAEMON_MEMORY="256m")
        with (self._directory / f"{name}.log").open("wb") as log:
            process = subprocess.Popen(
                [f"{environment['SPARK_HOME']}/bin/spark-class", f"org.apache.spark.deploy.{command[0]}", *command[1:]],
                env=environment,
                cwd=disk,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        self._processes.append(process)

    def _address(self) -> str:
        deadline = time.monotonic() + 600
        log = self._directory / "master.log"
        while not (found := re.search(r"(spark://127\.0\.0\.1:\d+)", log.read_text(errors="replace"))):
            assert self._processes[0].poll() is None, log.read_text(errors="replace")
            assert time.monotonic() < deadline
            time.sleep(0.1)
        return found[1]

    def close(self) -> None:
        """Stop the workers with their executors, then the master."""
        for process in reversed(self._processes):
            _kill_tree(process)
