"""Running owners look at the blobs of their current checkpoints from time to time, or when they are told to. They
replace what is damaged."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from click.testing import CliRunner

from statemgr import JobConfig, StateManager
from statemgr.cli.main import cli
from statemgr.config.units import DAY_MS
from statemgr.engine import coordinator
from statemgr.engine.task import Task
from statemgr.flows import upkeep
from statemgr.ports import list_blobs
from statemgr.wiring import open_services
from tests.commits import TASK, referenced, totals, write
from tests.jobs import INTERVALS, SEGMENTS, SNAPSHOTS, job_mapping, with_changes
from tests.kafka_jobs import wait_until
from tests.servers import KafkaServer

BLOBS = "blob-store"
STATE = {b"a": random.Random(0).randbytes(60_000), b"b": random.Random(1).randbytes(60_000)}
Harm = Callable[[Path], None]


def job(kafka: KafkaServer, directory: Path, kind: str) -> JobConfig:
    """Return a job that retains one checkpoint, with its configuration in `job.toml`."""
    mapping = job_mapping(
        kafka, directory, backup=[BLOBS], task__checkpoint__retained=1,
        task__commit__snapshot__interval=INTERVALS[kind],
    )  # fmt: skip
    lines = [f"{json.dumps(key)} = {json.dumps(value)}" for key, value in mapping.items()]
    (directory / "job.toml").write_text("\n".join(lines))
    return JobConfig.from_mapping(mapping)


@contextmanager
def owner(config: JobConfig) -> Iterator[Task]:
    """Run an owner that has committed twice."""
    with StateManager(config) as manager, manager.open_task(TASK) as task:
        write(task, STATE)
        task.commit({"orders-0": 1})
        wait_until(task.check_up)
        write(task, {b"more": bytes(5000)})
        task.commit({"orders-0": 2})
        yield task


def flip(path: Path) -> None:
    """Change the last byte."""
    data = path.read_bytes()
    path.chmod(0o600)
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))


def one(config: JobConfig, directory: Path, what: str) -> Path:
    """Return a blob of the current checkpoint: an index, segments, or a part of a file."""
    for name in sorted(referenced(config)):
        kind = "index" if name.endswith("/index") else "segments" if "/_segments/" in name else "part"
        if kind == what:
            return directory / "blobs" / name
    raise AssertionError(f"there is no {what}")


def verify(*options: str) -> int:
    """Run `statemgr snapshots verify`. Returns: its exit status."""
    return CliRunner().invoke(cli, ["snapshots", "verify", "--read-data", *options]).exit_code


@pytest.mark.parametrize(
    ("kind", "what", "harm"),
    [
        pytest.param(*of, harm, marks=() if (of[1] == "part") == (harm is flip) else pytest.mark.long)
        for of in ((SNAPSHOTS, "index"), (SNAPSHOTS, "part"), (SEGMENTS, "segments"))
        for harm in (flip, Path.unlink)
    ],
)
def test_the_runbook_repairs_a_running_job(
    kafka: KafkaServer, tmp_path: Path, kind: str, what: str, harm: Harm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`snapshots verify --repair` names the damaged blob and tells the owner, who has not read it for a long time. A
    little later everything is whole, without any input."""
    monkeypatch.setattr(coordinator, "LOOK_S", 0.2)
    monkeypatch.chdir(tmp_path)
    config = job(kafka, tmp_path, kind)
    with owner(config) as task:
        before = task.last_checkpoint
        harm(one(config, tmp_path, what))
        assert verify() == 4
        assert verify("--repair") == 4
        wait_until(lambda: task.last_checkpoint is not before and not task.damage.pairs)
        assert verify() == 0
    assert totals(with_changes(config, state__dir=str(tmp_path / "elsewhere")), BLOBS)[TASK] == {
        **STATE, b"more": bytes(5000),
    }  # fmt: skip


def test_each_blob_has_its_turn_within_a_day(
    kafka: KafkaServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody has told the owner. Within a day (here: a second) it has asked for each blob, and read small ones."""
    monkeypatch.setattr(coordinator, "LOOK_S", 0.1)
    monkeypatch.setattr(upkeep, "_DAY_S", 1.0)
    monkeypatch.setattr(upkeep, "_HOUR_S", 1 / 24)
    config = job(kafka, tmp_path, SNAPSHOTS)
    with owner(config) as task:
        for what, harm in (("index", flip), ("part", Path.unlink)):
            before = task.last_checkpoint
            harm(one(config, tmp_path, what))
            wait_until(lambda before=before: task.last_checkpoint is not before and not task.damage.pairs)


def test_orders_that_are_none_are_ignored(kafka: KafkaServer, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """An order that is no text, or too large, is logged; one that names nothing does nothing; and the others are read.
    Each is read once."""
    config = job(kafka, tmp_path, SNAPSHOTS)
    services = open_services(config)
    try:
        looking = upkeep.Upkeep(services)
        upkeep.order_check(services, {"x/1", "y/2"})
        (first,) = list_blobs(services.blobs(), upkeep.order_prefix(services))
        expires_ms = services.blobs().stat(first.blob_id).expires_ms
        assert expires_ms is not None
        assert expires_ms > services.clock.time_ns() // 1_000_000 + 29 * DAY_MS, "only this TTL has a lifecycle rule"
        for number, body in enumerate((b"\xff", b"", bytes(1024 * 1024 + 1))):
            services.blobs().put(f"{upkeep.order_prefix(services)}bad-{number}", body, ttl_days=1)
        turn = looking.turn()
        assert turn.ordered - {""} == {"x/1", "y/2"}
        assert caplog.text.count("was ignored") == 2
        assert not looking.turn().ordered
        looking.repeat(TASK, turn)  # a blob could not be read
        again = looking.of_task(TASK, looking.turn())
        assert (again.begin_s, again.ordered) == (turn.begin_s, turn.ordered)
        assert not looking.of_task("Partition 1", looking.turn()).ordered
        (order,) = (path for path in (tmp_path / "blobs").rglob("_repair/[0-9]*"))
        os.utime(order, (1, 1))  # where nothing expires by itself, a collection deletes it
        CliRunner().invoke(cli, ["gc", "-c", str(tmp_path / "job.toml"), "--allow-no-checkpoints", "--write"])
        assert not order.exists()
    finally:
        services.close()


def test_doctor_samples_the_blobs_and_says_what_it_left(
    kafka: KafkaServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`doctor` finds deleted blobs of the current checkpoint, and always names what it has not checked."""
    monkeypatch.chdir(tmp_path)
    config = job(kafka, tmp_path, SNAPSHOTS)

    def doctor() -> dict[str, list[dict[str, str]]]:
        """Run it. Returns: its findings by check."""
        found: dict[str, list[dict[str, str]]] = {}
        for finding in json.loads(CliRunner().invoke(cli, ["doctor", "--json"]).stdout):
            found.setdefault(finding["check"], []).append(finding)
        return found

    with owner(config):
        found = doctor()
        assert [finding["status"] for finding in found["backups"]] == ["ok"]
        assert "snapshots verify --read-data" in found["not checked"][0]["detail"]
        path = one(config, tmp_path, "part")
        path.unlink()
        (problem,) = doctor()["backups"]
        assert problem["status"] == "problem"
        assert path.name in problem["detail"]
        assert "snapshots verify --read-data --repair" in problem["fix"]
