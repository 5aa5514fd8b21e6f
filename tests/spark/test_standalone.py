"""A standalone Spark cluster: a master and two workers as processes, and an application whose dependencies are shipped.

Local modes import from the driver's own environment, and so cannot show what shipping breaks.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyspark
import pytest

from statemgr_tools.dev.process import free_port
from tests.jobs import job_mapping
from tests.kafka_jobs import wait_until
from tests.loop_members import ROOT
from tests.servers import KafkaServer

_SPARK = Path(pyspark.__file__).parent
_PROGRAMS = ROOT / "tests" / "spark" / "standalone"


def _environment(**more: object) -> dict[str, str]:
    """No PYTHONPATH and no virtual environment: nothing of this process may help an executor."""
    kept = {name: os.environ[name] for name in ("HOME", "JAVA_HOME", "LANG", "PATH") if name in os.environ}
    own = {"SPARK_HOME": _SPARK, "SPARK_LOCAL_IP": "127.0.0.1"}
    return kept | {name: str(value) for name, value in (own | more).items()}


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A packed environment with statemgr, as docs/deploy.md makes it."""
    directory = tmp_path_factory.mktemp("packed")
    uv = [sys.executable, "-m", "uv"]
    needed = [f"statemgr[s3] @ {ROOT.as_uri()}", "pandas>=2.2,<3", "pyarrow>=19,<27", "protobuf>=6,<8"]
    for command in (
        [*uv, "venv", "--quiet", "--python", sys.executable, "packed"],
        [*uv, "pip", "install", "--quiet", "--python", "packed", "-c", str(ROOT / "constraints.txt"), *needed],
        [*uv, "tool", "run", "--quiet", "--from", "venv-pack", "venv-pack", "--quiet", "--prefix", "packed",
         "--output", "packed.tar.gz"],
    ):  # fmt: skip
        subprocess.run(command, cwd=directory, check=True)
    return directory / "packed.tar.gz"


@contextmanager
def _cluster(directory: Path) -> Iterator[str]:
    """Start a master and two workers with disks of their own. Yields: the master's address."""
    port, processes = free_port(), list[subprocess.Popen[bytes]]()
    master = f"spark://127.0.0.1:{port}"

    def start(name: str, *arguments: str) -> None:
        command = [str(_SPARK / "bin" / "spark-class"), f"org.apache.spark.deploy.{arguments[0]}", *arguments[1:]]
        disk = directory / name
        disk.mkdir(exist_ok=True)
        with (directory / f"{name}.log").open("ab") as log:
            environment = _environment(SPARK_LOCAL_DIRS=disk, SPARK_DAEMON_MEMORY="256m", OWN_DISK=disk)
            processes.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True))

    try:
        start("master", "master.Master", "--host", "127.0.0.1", "--port", str(port), "--webui-port", str(free_port()))
        for number in range(2):
            start(
                f"worker-{number}", "worker.Worker", "--host", "127.0.0.1", "--webui-port", str(free_port()),
                "--cores", "1", "--memory", "1g", "--work-dir", str(directory / f"worker-{number}" / "work"), master,
            )  # fmt: skip
        wait_until(lambda: (directory / "master.log").read_text().count("Registering worker") == 2, 120)
        yield master
    finally:
        for process in reversed(processes):
            process.terminate()
        for process in processes:
            process.wait(60)


def _submit(master: str, packed: Path, directory: Path, order: dict[str, Any]) -> None:
    command = [
        str(_SPARK / "bin" / "spark-submit"), "--master", master, "--deploy-mode", "client",
        "--archives", f"{packed}#packed", "--py-files", str(_PROGRAMS / "shipped.py"),
        "--conf", "spark.executor.memory=512m", "--conf", "spark.executor.cores=1", "--conf", "spark.ui.enabled=false",
        "--conf", "spark.sql.shuffle.partitions=2", str(_PROGRAMS / "query.py"), json.dumps(order),
    ]  # fmt: skip
    driver = packed.parent / "packed" / "bin" / "python"
    environment = _environment(
        PYSPARK_PYTHON="./packed/bin/python", PYSPARK_DRIVER_PYTHON=driver, OWN_DISK=directory / "driver"
    )
    ran = subprocess.run(command, cwd=directory, env=environment, check=False, capture_output=True, text=True)
    said = "\n".join(line for line in (ran.stdout + ran.stderr).splitlines() if " INFO " not in line)
    assert ran.returncode == 0, said[-6000:]


@pytest.mark.heavy
def test_queries_run_with_what_is_shipped(kafka: KafkaServer, tmp_path: Path, packed: Path) -> None:
    """J2.26: a processor and a function run on two workers with a packed environment and `--py-files`. A second
    application, on a cluster whose disks are new, continues from the checkpoints, and every amount counts once."""
    mapping = job_mapping(kafka, tmp_path, tasks=2, backup=("blob-store",))
    mapping |= {"state.dir": "${env:OWN_DISK}/state"}
    order = {"input": str(tmp_path / "input"), "output": str(tmp_path / "output"), "config": mapping}
    (tmp_path / "input").mkdir()
    expected: Counter[str] = Counter()
    for turn in range(2):
        rows = [(f"customer-{number % 40}", number) for number in range(turn * 1000, turn * 1000 + 1000)]
        lines = "".join(json.dumps({"customer": name, "amount": amount}) + "\n" for name, amount in rows)
        (tmp_path / "input" / f"{turn}.json").write_text(lines)
        for name, amount in rows:
            expected[name] += amount
        cluster = tmp_path / f"cluster-{turn}"
        cluster.mkdir()
        with _cluster(cluster) as master:
            _submit(master, packed, cluster, order)
        pythons = set()
        for kind in ("processor", "function"):
            found: Counter[str] = Counter()
            for file in (tmp_path / "output" / kind / "rows").rglob("*.json"):
                for line in file.read_text().splitlines():
                    row = json.loads(line)
                    found[row["customer"]] = max(found[row["customer"]], row["total"])
                    pythons.add(row["python"])
            assert found == expected, kind
        assert all(Path(python).name == "packed" for python in pythons), pythons
        worked = {path.relative_to(cluster).parts[0] for path in cluster.glob("worker-*/work/app-*/*/packed")}
        assert worked == {"worker-0", "worker-1"}, "each has unpacked the environment"
        shutil.rmtree(cluster)
