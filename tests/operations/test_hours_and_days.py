"""``task.checkpoint.hourly`` and ``task.checkpoint.daily``, and ``statemgr checkpoints rollback --before``."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from confluent_kafka import Message

from statemgr import Task
from statemgr.cli.main import cli
from statemgr.reader import JobReader
from statemgr.testing import JobTester
from tests.cli.test_running_job import write_toml

#: A Monday, at midnight in UTC.
START = datetime(2024, 1, 1, tzinfo=UTC)
CONFIG: dict[str, object] = {
    "job.name": "orders",
    "job.tasks": 2,
    "task.inputs": ["orders"],
    "task.backup.factories": ["blob-store"],
    "task.commit.snapshot.interval": ["7 commits"],
    "task.checkpoint.retained": 2,
    "task.checkpoint.hourly": 3,
    "task.checkpoint.daily": 2,
    "stores.totals.value.serde": "bytes",
}


def remember(task: Task, message: Message) -> None:
    """The state is the last message."""
    task.store("totals").put(b"last", message.value() or b"")


def at(hours: float) -> datetime:
    """Hours after the start."""
    return START + timedelta(hours=hours)


@pytest.fixture
def opened() -> list[bytes | None]:
    """What each task had when it was opened."""
    return []


@pytest.fixture
def tester(opened: list[bytes | None]) -> Iterator[JobTester]:
    """A job that has committed every half hour from midnight to 05:30 on the third day."""

    def on_open(task: Task) -> None:
        opened.append(task.store("totals").get(b"last"))

    with JobTester(CONFIG, remember, on_open=on_open, start_ms=int(START.timestamp() * 1000)) as tester:
        for half_hour in range(108):
            for partition in (0, 1):
                tester.send("orders", "a", str(half_hour), partition=partition)
            tester.commit()
            tester.advance(seconds=1800)
        yield tester


def times(tester: JobTester, task: str = "Partition 0") -> list[datetime]:
    """When the retained checkpoints of a task were made, newest first."""
    with JobReader(tester.config) as reader:
        record = reader.records()[task]
    return [datetime.fromtimestamp(one.checkpoint_id.millis / 1000, UTC) for one in record.checkpoints]


def run(tester: JobTester, directory: Path, *arguments: str) -> Result:
    """Run `statemgr` with the configuration of the job."""
    file = directory / "job.toml"
    write_toml(tester.config, file)
    return CliRunner().invoke(cli, [*arguments, "--config", str(file)], catch_exceptions=False)


def test_the_last_of_each_hour_and_of_each_day_stays(
    tester: JobTester, opened: list[bytes | None], tmp_path: Path
) -> None:
    """The two newest, the last of three hours and the last of two days, each with its blobs: gc finds nothing to
    delete, and the job can go back to each."""
    expected = [at(53.5), at(53), at(52.5), at(51.5), at(47.5)]
    assert times(tester) == times(tester, "Partition 1") == expected
    tester.stop()
    report = json.loads(run(tester, tmp_path, "gc", "--write", "--json").stdout)
    assert report["deleted"]["blobs"] == report["orphans"]["blobs"] == 0
    for time in expected[::-1]:
        back = run(tester, tmp_path, "checkpoints", "rollback", "--before", f"{time + timedelta(seconds=1)}", "--write")
        assert back.exit_code == 0, back.output
        tester.restore("blob-store")  # it processes again what came after the checkpoint
        tester.crash()
        assert opened[-2:] == [b"%d" % ((time - START) / timedelta(minutes=30))] * 2


def test_a_time_is_in_utc_unless_it_says_otherwise(tester: JobTester, tmp_path: Path) -> None:
    """Both tasks go back to the newest checkpoint from before that time, although each has IDs of its own."""
    for text in ("2024-01-03T05:15", "2024-01-03 07:15+02:00", "2024-01-03T05:15:00Z"):
        found = json.loads(run(tester, tmp_path, "checkpoints", "rollback", "--before", text, "--json").stdout)
        assert [task["to"].partition("-")[0] for task in found["tasks"]] == [f"{at(53).timestamp() * 1000:.0f}"] * 2
        assert found["written"] is False


@pytest.mark.parametrize(
    ("arguments", "status", "text"),
    [
        (("--before", "2024-01-01"), 4, "no checkpoint from before that time is retained for Partition 0, Partition 1"),
        (("--before", "yesterday"), 2, "give a time such as 2025-06-30T12:00"),
        (("--before", "2024-01-03T05:15", "--to", "1700000000000-123456"), 2, "--to ID or --before TIME"),
        ((), 2, "--to ID or --before TIME"),
    ],
)
def test_mistakes(tester: JobTester, tmp_path: Path, arguments: tuple[str, ...], status: int, text: str) -> None:
    """A wrong time, or none, changes nothing."""
    result = run(tester, tmp_path, "checkpoints", "rollback", *arguments, "--write")
    assert result.exit_code == status
    assert text in " ".join(result.output.split())
    assert len(times(tester)) == 5


def test_the_keys_can_change_at_a_restart(tester: JobTester) -> None:
    """Fewer hours thin out what is there with the next commit."""
    tester.stop()
    tester.restore(settings={"task.checkpoint.hourly": 0, "task.checkpoint.daily": 1})
    tester.send("orders", "a", "x", partition=0)
    tester.commit()
    assert times(tester) == [at(54), at(53.5)]


def test_tasks_that_share_an_id_go_back_a_second_time(tester: JobTester, tmp_path: Path) -> None:
    """After a rollback, both tasks have the same ID. One goes on, the other one stays there: each finds its own."""
    tester.stop()
    back = ("checkpoints", "rollback", "--before", "2024-01-03T05:15", "--write")
    assert run(tester, tmp_path, *back).exit_code == 0
    tester.restore(settings={"task.inputs": ["orders"]})
    tester.send("orders", "a", "x", partition=0)
    tester.commit()
    tester.stop()
    again = run(tester, tmp_path, "checkpoints", "rollback", "--before", "2100-01-01", "--json")
    assert again.exit_code == 0, again.output
