"""The demo on a small table: real kills around the publish and the output, and equal totals at the end."""

from __future__ import annotations

import csv
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from click.testing import CliRunner

from statemgr.cli.main import cli
from statemgr_tools.dev import servers
from tests.servers import KafkaServer


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """Write a table with decimals, missing values, rows without a key, and two rows that cannot be parsed."""
    return write_table(tmp_path / "table.csv", 600)


def write_table(path: Path, rows: int) -> Path:
    """Write ``rows`` rows, and two that cannot be parsed."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["name", "amount", "price"])
        for i in range(rows):
            writer.writerow([f"n{i % 7}" if i % 11 else "", "NA" if i % 13 == 0 else i, f"{i}.0{i % 10}"])
        writer.writerow(["n1", "twelve", "1"])
        writer.writerow(["n1", "1"])
    return path


@pytest.fixture
def run(kafka: KafkaServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, str]]:
    """Return a function that runs ``statemgr demo`` in a path with a space and returns exit status and output."""
    monkeypatch.setenv("STATEMGR_TEST_KAFKA", kafka.bootstrap_servers)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))

    def invoke(*arguments: object) -> tuple[int, str]:
        result = CliRunner().invoke(cli, ["demo", *map(str, arguments), "--directory", str(tmp_path / "my work")])
        return result.exit_code, result.output

    return invoke


@pytest.mark.long
def test_killed_after_the_publish_and_before_the_output(run: Callable[..., tuple[int, str]], table: Path) -> None:
    """After SIGKILL to driver, JVM and workers, the demo restores from blobs and replays. All totals are equal."""
    status, page = run(
        "--input",
        table,
        "--key",
        "name",
        "--sum",
        "amount",
        "--sum",
        "amount*price",
        "--kills",
        1,
        "--seed",
        5,
        "--aim",
        "publish.acknowledged",
    )
    assert status == 0, page
    assert "killed in publish.acknowledged" in page
    assert page.count("equal  ") == 4
    replays = next(line for line in page.splitlines() if "blob-store" in line and "ran to the end" in line)
    assert replays.split()[-2] == "1", replays
    assert next(line for line in page.splitlines() if "unparsable rows" in line).split()[-4:] == ["2"] * 4
    assert "Partition 3" in page


def test_wrong_use_is_one_line(
    run: Callable[..., tuple[int, str]], table: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A missing column, wrong options or no Java give an error line and a hint, with status 2 and no traceback."""
    cases = [
        (("--input", table, "--key", "nome", "--sum", "amount"), "no column 'nome'"),
        (("--sum", "amount"), "--key and --sum need a file"),
        (("--aim", "lunch"), "not a phase"),
    ]
    for arguments, message in cases:
        status, page = run(*arguments)
        error, hint, _see = page.splitlines()
        assert status == 2
        assert error.startswith("error: ")
        assert message in error
        assert hint.startswith("hint: ")
    monkeypatch.setenv("JAVA_HOME", "/nonexistent")
    status, page = run()
    assert status == 2
    assert "install Java 17" in page


@pytest.mark.long
def test_the_summary_for_machines(kafka: KafkaServer, table: Path, tmp_path: Path) -> None:
    """With --json, stdout is one JSON object, and all text for people goes to stderr."""
    command = [*demo_command(tmp_path / "my work"), "--json", "--kills", "0", "--seed", "3"]
    done = subprocess.run(
        [*command, "--input", str(table), "--key", "name", "--sum", "amount"],
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
        env=environment(STATEMGR_TEST_KAFKA=kafka.bootstrap_servers),
    )
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert (summary["seed"], summary["rows"], summary["equal"]) == (3, 602, True)
    assert [start["killed_in"] for start in summary["starts"]] == [None]
    assert {side["rows"] for side in summary["totals"].values()} == {602}
    assert "seed 3" in done.stderr


@pytest.mark.heavy
@pytest.mark.timeout(1800)
def test_a_migration(kafka: KafkaServer, tmp_path: Path) -> None:
    """The demo migrates a running job through all stages and back, with kills and a rescale. The totals are equal."""
    command = [*demo_command(tmp_path / "my work"), "--json", "--migrate", "--seed", "3"]
    table = write_table(tmp_path / "table.csv", 6000)
    done = subprocess.run(
        [*command, "--input", str(table), "--key", "name", "--sum", "amount"],
        capture_output=True,
        text=True,
        check=False,
        timeout=1700,
        env=environment(STATEMGR_TEST_KAFKA=kafka.bootstrap_servers),
    )
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert (summary["rows"], summary["equal"], summary["kills"]) == (6002, True, 8)
    samples = summary["timeline"]["samples"]
    stages = [one["stage"] for one in samples]
    assert [stage for stage, _ in itertools.groupby(stages)] == [1, 2, 3, 4, 3, 2, 1]
    assert [tasks for tasks, _ in itertools.groupby(one["tasks"] for one in samples)] == [4, 6]
    assert all(one["blob_bytes"] > 0 for one in samples if one["stage"] == 4)
    assert sum(command["text"] == "statemgr migrate verify" for command in summary["commands"]) == 4
    assert "<svg" in (tmp_path / "my work" / "demo" / "migration.svg").read_text()


def demo_command(directory: Path) -> list[str]:
    """Return the command that runs ``statemgr demo`` in its own process."""
    return [sys.executable, "-m", "statemgr", "demo", "--directory", str(directory)]


def environment(**more: str) -> dict[str, str]:
    """Return this process's environment without addresses of servers for tests, except the given ones."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("STATEMGR_TEST_")}
    return {**kept, "PYTHONPATH": str(Path(__file__).parents[2]), **more}


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Return a function that starts the demo in the background. The fixture ends the demo and its servers."""
    running: list[subprocess.Popen[bytes]] = []

    def start(arguments: list[str], **more: str) -> subprocess.Popen[bytes]:
        with (tmp_path / "demo.log").open("wb") as log:
            command = [*demo_command(tmp_path / "work"), *arguments]
            before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # with nohup, a child would ignore the signal
            try:
                running.append(subprocess.Popen(command, stdout=log, stderr=log, env=environment(**more)))
            finally:
                signal.signal(signal.SIGHUP, before)
        return running[-1]

    yield start
    for demo in running:
        if demo.poll() is None:
            demo.kill()
            demo.wait()
    servers.down(tmp_path / "work" / "dev")


def until(found: Callable[[], object], demo: subprocess.Popen[bytes], log: Path) -> None:
    """Wait for something that the running demo does."""
    end = time.monotonic() + 60
    while not found():
        assert demo.poll() is None, log.read_text()
        assert time.monotonic() < end, log.read_text()
        time.sleep(0.05)


@pytest.mark.long
def test_terminated_while_its_broker_starts(
    started: Callable[..., subprocess.Popen[bytes]], table: Path, tmp_path: Path
) -> None:
    """After a SIGTERM during startup, the demo does not leave its broker behind."""
    demo = started(["--input", str(table), "--key", "name", "--sum", "amount"])
    directory = tmp_path / "work" / "dev"
    until(lambda: servers.status(directory).kafka_pid, demo, tmp_path / "demo.log")
    broker = servers.status(directory).kafka_pid
    assert broker is not None
    demo.send_signal(signal.SIGTERM)
    assert demo.wait(60) == 128 + signal.SIGTERM
    assert servers.status(directory).kafka_pid is None
    assert not psutil.pid_exists(broker) or psutil.Process(broker).status() == psutil.STATUS_ZOMBIE


@pytest.mark.long
def test_hung_up_while_the_pipeline_runs(
    started: Callable[..., subprocess.Popen[bytes]], kafka: KafkaServer, table: Path, tmp_path: Path
) -> None:
    """After SIGHUP, as when a terminal closes, the pipeline's Python and JVM end with the demo."""
    arguments = ["--input", str(table), "--key", "name", "--sum", "amount"]
    demo = started(arguments, STATEMGR_TEST_KAFKA=kafka.bootstrap_servers)

    offsets = tmp_path / "work" / "demo" / "checkpoint-location" / "offsets"
    until(offsets.exists, demo, tmp_path / "demo.log")
    processes = psutil.Process(demo.pid).children(recursive=True)
    assert any("java" in process.name() for process in processes)
    demo.send_signal(signal.SIGHUP)
    assert demo.wait(60) == 128 + signal.SIGHUP
    _, alive = psutil.wait_procs(processes, timeout=20)
    assert [process for process in alive if process.status() != psutil.STATUS_ZOMBIE] == []
