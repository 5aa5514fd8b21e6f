"""Jobs of Samza on a broker in memory: their checkpoints become old, and Kafka deletes records of their changelogs."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
from click.testing import CliRunner

from statemgr.cli.main import cli
from statemgr.errors import AccessDenied, InvalidError
from statemgr.kafka.temporary_topic import BrokerTime
from statemgr.operations.adopt import adopt as flow
from statemgr.operations.adopt import look as looking
from statemgr.operations.adopt.adopt import Adopted, adopt, dry_run
from statemgr.operations.adopt.content import contents
from statemgr.operations.adopt.found import Request
from statemgr.operations.adopt.old_topics import OldTopics
from statemgr.operations.adopt.origins import ORIGINS
from statemgr.ports import no_progress
from statemgr.testing.memory_servers import START_MS, MemoryServers
from tests.operations.adopt.memory_job import CONFIG, KEYS, MemoryJob
from tests.operations.adopt.test_origins import key_of

__all__ = ["CONFIG"]

LAG_MS = 14_400_000
REQUEST = Request(ORIGINS["samza"], "old", {"totals": "old-totals"}, inputs=("orders",), tasks=2, settle_s=0.0)


def samza(servers: MemoryServers, **changelog: str) -> MemoryJob:
    """Return a job of Samza that has written one record after the newest checkpoint of each task.

    Args:
        changelog: settings of its changelog, with ``__`` for ``.``.
    """
    job = MemoryJob(servers, {key.replace("__", "."): value for key, value in changelog.items()})
    for task, keys in enumerate(KEYS):
        place = {"stream": "old-totals", "partition": task}
        marker = {"version": 1, "changelog-ssp": place, "changelog-offset": str(len(keys) - 1)}
        content = {
            "checkpoint-id": f"{START_MS}-1",
            "input-offsets": {f"kafka.orders.{task}": str(len(keys) - 1)},
            "state-checkpoint-markers": {
                "org.apache.samza.storage.KafkaChangelogStateBackendFactory": {"totals": json.dumps(marker)}
            },
        }
        key = key_of(f"Partition {task}", "checkpoint-v2")
        job.broker.append("__samza_checkpoint_ver_1_for_old_1", 0, key, json.dumps(content).encode())
        job.broker.append("old-totals", task, keys[0], b"2")
    return job


@pytest.fixture
def job(servers: MemoryServers) -> MemoryJob:
    """Make such a job, whose changelog is not compacted yet."""
    return samza(servers, min__compaction__lag__ms=str(LAG_MS))


def is_exact(adopted: Adopted) -> bool:
    """Whether nothing after the checkpoints was adopted."""
    assert adopted.old is not None
    found = {partition.is_exact for partition in adopted.old.stores["totals"].partitions}
    assert len(found) == 1
    assert any("older than min.compaction.lag.ms" in note for note in adopted.old.notes) is (found == {False})
    return found == {True}


@pytest.mark.parametrize("in_place", [False, True])
def test_a_checkpoint_that_becomes_too_old_during_the_copy(
    job: MemoryJob, monkeypatch: pytest.MonkeyPatch, in_place: bool
) -> None:
    """It is said as it is, and not that the old job runs. The next run adopts the records after it, too."""
    options: dict[str, Any] = {"in_place": in_place, "local_copies": False}
    real: Callable[..., Any] = flow.Copy.run if not in_place else flow.count  # type: ignore[assignment]

    def slow(*arguments: Any, **more: Any) -> Any:
        job.servers.clock.advance(LAG_MS / 1000)
        return real(*arguments, **more)

    with monkeypatch.context() as patch:
        patch.setattr(flow if in_place else flow.Copy, "count" if in_place else "run", slow)
        with pytest.raises(InvalidError, match="during the copy: compaction may have removed"):
            job.adopt(REQUEST, **options)
    assert not is_exact(job.adopt(REQUEST, **options))


def test_time_that_passes_after_the_copy_is_no_movement(job: MemoryJob, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was copied stays exact, so the second look decides by the time of the first."""
    snapshots = flow._Adopting.snapshots

    def slow(*arguments: Any, **more: Any) -> Any:
        job.servers.clock.advance(LAG_MS / 1000)
        return snapshots(*arguments, **more)

    monkeypatch.setattr(flow._Adopting, "snapshots", slow)
    assert is_exact(job.adopt(REQUEST))


def test_the_age_is_that_of_the_brokers_clock(job: MemoryJob, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compaction goes by the clock of the broker, and that of this machine may be behind."""
    monkeypatch.setattr(BrokerTime, "now_ms", lambda self: START_MS + LAG_MS)
    assert not is_exact(job.adopt(REQUEST))


@pytest.mark.parametrize(
    ("module", "step", "run"),
    [
        (looking, "proved", adopt),
        (looking, "compared", adopt),
        (flow, "check_target", adopt),
        (looking, "count", dry_run),
    ],
)
def test_kafka_deletes_records_before_they_are_read(
    servers: MemoryServers, monkeypatch: pytest.MonkeyPatch, module: ModuleType, step: str, run: Callable[..., Adopted]
) -> None:
    """The changelog of a store with a time to live loses its oldest records at any time. What is left is adopted."""
    job, real, tasks = samza(servers, cleanup__policy="delete"), getattr(module, step), [0, 1]

    def delete(*arguments: Any, **more: Any) -> Any:
        while tasks:
            job.broker.delete_records("old-totals", tasks.pop(), 1)
        return real(*arguments, **more)

    monkeypatch.setattr(module, step, delete)
    more = {"counting": True} if run is dry_run else {}
    adopted = job.adopt(replace(REQUEST, confirmed={"totals": "ttl"}), run=run, **more)
    assert adopted.old is not None
    counts = adopted.old.stores["totals"].counts
    assert [one.records for one in counts] == [len(keys) - 1 for keys in KEYS]


def test_kafka_deletes_records_before_they_are_hashed(servers: MemoryServers) -> None:
    """The report of a dry run has the hash of what is left."""
    job = samza(servers, cleanup__policy="delete")
    adopted = job.adopt(replace(REQUEST, confirmed={"totals": "ttl"}), run=dry_run, counting=True)
    for task in (0, 1):
        job.broker.delete_records("old-totals", task, 1)
    with OldTopics(job.config, servers.clock) as old:
        found = job.work(lambda services, _: contents(services, old, adopted, no_progress))
    assert [content.keys for content in found["totals"]] == [len(keys) - 1 for keys in KEYS]


@pytest.mark.parametrize("local_copies", [True, False])
def test_in_place_the_state_is_written_again_after_what_was_not_committed(
    job: MemoryJob, servers: MemoryServers, local_copies: bool
) -> None:
    """Later, compaction removes values of the checkpoint in favour of records that it leaves out. The job is restored
    on another machine all the same, and the old job is still asked for."""
    assert is_exact(job.adopt(REQUEST, in_place=True, local_copies=local_copies))
    copies = [found for found in job.config.state_dir.glob("**/committed/*") if found.is_dir()]
    assert bool(copies) is local_copies
    servers.clock.advance(2 * LAG_MS / 1000)
    for task in (0, 1):
        servers.broker.compact("old-totals", task)
    elsewhere = servers.on_disk(job.config, "elsewhere")
    with servers.manager(elsewhere, "kafka-partition") as manager:
        for number, keys in enumerate(KEYS):
            with manager.open_task(f"Partition {number}") as task:
                assert dict(task.store("totals").range()) == dict.fromkeys(keys, b"1")
                assert task.last_checkpoint is not None
                assert (task.last_checkpoint.sequence, task.last_checkpoint.output_sequence) == (2, 1)


def test_in_place_the_state_cannot_be_written_again(job: MemoryJob, monkeypatch: pytest.MonkeyPatch) -> None:
    """The adoption is in force, and says what to do."""

    def denied(*arguments: object, **more: object) -> None:
        raise AccessDenied("told to")

    monkeypatch.setattr(flow, "prepare_repair", denied)
    adopted = job.adopt(REQUEST, in_place=True)
    assert list(adopted.checkpoints) == ["Partition 0", "Partition 1"]
    assert adopted.old is not None
    assert any("open every task of the new job before" in note for note in adopted.old.notes)
    assert job.adopt(REQUEST, in_place=True).old is None


def test_a_configuration_for_uploaded_snapshots_says_where_they_go() -> None:
    """The command says so before it looks at the old job, which takes more than a minute."""
    old = ["adopt", "--from", "samza", "--job", "old", "--blobs", "file:///old"]
    refused = CliRunner().invoke(cli, [*old, "--init"])
    assert refused.exit_code == 2
    assert "--set blob.store.uri=URI" in " ".join(refused.output.split())
    for enough in ("--in-place", "--set=blob.store.uri=file:///new"):
        assert "kafka.bootstrap.servers is not set" in CliRunner().invoke(cli, [*old, "--init", enough]).output
