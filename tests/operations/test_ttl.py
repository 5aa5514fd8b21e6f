"""Stores with a time to live, on a real broker: backends, readers, and a TTL that is added or removed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from statemgr import JobConfig, JobReader, StateManager
from statemgr.cli.main import cli
from statemgr.errors import ConfigError
from statemgr.operations.standby.followed_store import FollowedStore
from tests.commits import TASK
from tests.jobs import SEGMENTS, SNAPSHOTS, elsewhere, job_mapping, with_changes
from tests.kafka_jobs import wait_until
from tests.servers import KafkaServer

HOUR_MS = 3_600_000
STAY = {b"stay-%d" % number: b"%d" % number for number in range(5)}
GO = {b"go-%03d" % number: b"x" * number for number in range(100)}


def offset(count: int) -> dict[str, int]:
    """Return the input offsets after some messages."""
    return {"orders-0": count}


def command(config: JobConfig, directory: Path, *arguments: str) -> str:
    """Run a `statemgr` command for a job. Returns: what it printed."""
    file = directory / "job.toml"
    file.write_text("\n".join(f"{json.dumps(k)} = {json.dumps(v)}" for k, v in config.to_mapping().items()))
    result = CliRunner().invoke(cli, [*arguments[:2], "--config", str(file), *arguments[2:]], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.mark.long
@pytest.mark.parametrize("kind", [SNAPSHOTS, SEGMENTS])
def test_expired_entries_leave_both_backends(kafka: KafkaServer, tmp_path: Path, kind: str) -> None:
    """Expired entries are hidden from tasks and readers, then deleted in both backends. The other entries stay."""
    config = JobConfig.from_mapping(
        job_mapping(kafka, tmp_path, kind=kind, stores__totals__ttl__ms=HOUR_MS, task__checkpoint__retained=5)
    )
    with StateManager(config) as manager, manager.open_task(TASK) as task:
        task.store("totals").put_many(STAY)
        first = task.commit(offset(1))

    briefly = with_changes(config, stores__totals__ttl__ms=1)
    with StateManager(briefly) as manager, manager.open_task(TASK) as task:
        task.store("totals").put_many(GO)
        second = task.commit(offset(2))
        wait_until(lambda: dict(task.store("totals").range()) == STAY)
        assert task.store("totals").get_many([b"go-001", b"stay-1"]) == [None, b"1"]
        wait_until(lambda: task.run_timers() and task.has_changes)
        third = task.commit(offset(3))

    with JobReader(config) as reader:
        (pair,) = reader.pairs(str(first.checkpoint_id), str(second.checkpoint_id))
        assert {change.key: change.after for change in reader.changes(pair, "totals")} == GO
        (pair,) = reader.pairs(str(second.checkpoint_id))
        assert {change.key: (change.before, change.after) for change in reader.changes(pair, "totals")} == {
            key: (value, None) for key, value in GO.items()
        }
        with reader.open_store(TASK, "totals", str(third.checkpoint_id)) as store:
            assert dict(store.scan(None, None)) == STAY
    with FollowedStore(with_changes(config, state__dir=str(tmp_path / "follower")), "totals") as followed:
        assert followed.get_many([b"stay-3", b"go-003"]) == [b"3", None]
    rows = json.loads(command(config, tmp_path, "store", "scan", "totals", "--json"))
    assert {row["key"]: row["value"] for row in rows} == {k.decode(): v.decode() for k, v in STAY.items()}
    assert json.loads(command(config, tmp_path, "migrate", "verify", "--json"))["equal"]

    for backend in ("kafka-changelog", "blob-store"):
        job = elsewhere(config, tmp_path / backend, backend)
        with StateManager(job) as manager, manager.open_task(TASK) as task:
            opened = task._stores["totals"]
            stored = dict(opened.content.scan(None, None))
            assert {key: value[8:] for key, value in stored.items()} == STAY
            assert dict(task.store("totals").range()) == STAY


@pytest.mark.long
def test_a_ttl_neither_comes_nor_goes(kafka: KafkaServer, tmp_path: Path) -> None:
    """An opening with the wrong configuration is refused and changes nothing. A new store may have a TTL."""
    plain = JobConfig.from_mapping(job_mapping(kafka, tmp_path))
    with_ttl = with_changes(plain, job__name=plain.job_name + "-ttl", stores__totals__ttl__ms=HOUR_MS)
    for config, wrong in (
        (plain, with_changes(plain, stores__totals__ttl__ms=HOUR_MS)),
        (with_ttl, with_changes(plain, job__name=with_ttl.job_name)),
    ):
        with StateManager(config) as manager, manager.open_task(TASK) as task:
            task.store("totals").put(b"k", b"v")
            published = task.commit(offset(1))
        with (
            StateManager(wrong) as manager,
            pytest.raises(ConfigError, match=r"stores\.totals\.ttl\.ms.*task=Partition 0"),
        ):
            manager.open_task(TASK)
        with StateManager(config) as manager, manager.open_task(TASK) as task:
            assert task.last_checkpoint == published
            assert task.store("totals").get(b"k") == b"v"

    more = with_changes(plain, stores__seen__ttl__ms=HOUR_MS)
    with StateManager(more) as manager, manager.open_task(TASK, allow_new_stores=True) as task:
        task.store("seen", "string", "json").put("a", 1)
        assert task.commit(offset(2)).serdes == {"totals": ("bytes", "bytes"), "seen": ("string", "json with TTL")}
    with StateManager(more) as manager, manager.open_task(TASK) as task:
        assert task.store("seen", "string", "json").get("a") == 1
        assert task.store("totals").get(b"k") == b"v"
