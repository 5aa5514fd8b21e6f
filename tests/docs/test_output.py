"""The program prints the output that the pages show."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest

from statemgr import Task
from statemgr.cli.main import cli
from statemgr.logs.formats import TextFormat
from statemgr.testing import JobTester
from tests.docs.blocks import blocks

_ORDERS = {
    "job.name": "orders",
    "job.tasks": 4,
    "task.inputs": ["orders"],
    "task.commit.ms": 10_000,
    "task.backup.factories": ["kafka-changelog", "blob-store"],
    "task.restore.factories": ["blob-store", "kafka-changelog"],
    "blob.store.uri": "memory://orders",
    "stores.totals.value.serde": "bytes",
}


def test_the_error_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    """docs/errors.md shows a message, its hint and its link exactly as the command prints them."""
    monkeypatch.chdir(tmp_path)
    (documented,) = blocks("docs/errors.md", "# Errors", "text")
    with pytest.raises(SystemExit, match="2"):
        cli.main(["config", "check", "--config", "orders.toml"])
    assert capsys.readouterr().err == documented


def test_the_log_of_the_page(caplog: pytest.LogCaptureFixture) -> None:
    """docs/monitoring.md shows log lines that a loop writes, apart from times, sizes and numbers."""
    (documented,) = blocks("docs/monitoring.md", "## Logs", "text")

    def count(task: Task, message: object) -> None:
        task.store("totals").put(b"key", b"1")

    with caplog.at_level(logging.INFO, logger="statemgr"), JobTester(_ORDERS, count) as tester:
        for partition in range(4):
            tester.send("orders", "key", "1", partition=partition)
        tester.commit()
        tester.crash(lose_disk=True)
        caplog.clear()
        tester.restore()
        for _ in range(3):
            tester.send("orders", "key", "1", partition=0)
            tester.advance(seconds=20)
        tester.stop()
    said = [shape(TextFormat().format(record)) for record in caplog.records]
    missing = [line for line in documented.splitlines() if shape(line) not in said]
    assert not missing, "\n".join([*map(shape, missing), "", *said])


def shape(line: str) -> str:
    """Return a log line without the parts that differ between runs."""
    line = line.replace("a call of stop()", "SIGTERM")
    return re.sub(r"\d[\d.:TZ-]*( [KMG]?i?B\b)?|\bcommits?\b", "0", line)
