"""The demo itself on a small table: killed for real around the publish and the output, and equal at the end."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from spark_integration.commands import demo
from tests.servers import KafkaServer


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """A table with decimals, missing values, rows without a key, and two rows that cannot be parsed."""
    path = tmp_path / "table.csv"
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["name", "amount", "price"])
        for i in range(600):
            writer.writerow([f"n{i % 7}" if i % 11 else "", "NA" if i % 13 == 0 else i, f"{i}.0{i % 10}"])
        writer.writerow(["n1", "twelve", "1"])
        writer.writerow(["n1", "1"])
    return path


@pytest.fixture
def run(kafka: KafkaServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, str]]:
    """Run ``statemgr demo`` with the test's broker: exit status and what it printed."""
    monkeypatch.setenv("STATEMGR_TEST_KAFKA", kafka.bootstrap_servers)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))

    def invoke(*arguments: object) -> tuple[int, str]:
        result = CliRunner().invoke(demo, [str(a) for a in (*arguments, "--directory", tmp_path / "work")])
        return result.exit_code, result.output

    return invoke


@pytest.mark.timeout(300)
def test_killed_after_the_publish_and_before_the_output(run: Callable[..., tuple[int, str]], table: Path) -> None:
    """SIGKILL to driver, JVM and workers right after the publish: restored from blobs, replayed, all sides equal."""
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
    """A column that is not there, options that do not fit, no Java: a line, exit status 2, no traceback."""
    cases = [
        (("--input", table, "--key", "nome", "--sum", "amount"), "no column 'nome'"),
        (("--sum", "amount"), "--input"),
        (("--aim", "lunch"), "not a phase"),
    ]
    for arguments, message in cases:
        status, page = run(*arguments)
        assert (status, page.count("\n")) == (2, 1), page
        assert message in page
    monkeypatch.setenv("JAVA_HOME", "/nonexistent")
    status, page = run()
    assert status == 2
    assert "install Java 17" in page
