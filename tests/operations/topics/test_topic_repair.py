"""`statemgr topics repair` says what it takes away from a task, and leaves a topic that the job can use."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from statemgr import JobConfig
from statemgr.cli.main import cli
from statemgr.engine import MicroBatch, open_attempt
from statemgr.engine.host import AttemptHost
from statemgr.errors import (
    AccessDenied,
    CorruptRecord,
    FencedError,
    InvalidError,
    PermissionNeeded,
    TopicMisconfigured,
)
from statemgr.flows.opening.open_job import JobTopics
from statemgr.health.checks import Report, Status, check_brokers
from statemgr.ids import task_name, transactional_id
from statemgr.kafka.checkpoint_topic import CheckpointTopic
from statemgr.kafka.topics import TopicAdmin
from statemgr.kafka.transactions.publisher import TransactionalPublisher, publish_alone
from statemgr.model import codecs
from statemgr.model.checkpoint import CheckpointKey
from statemgr.operations.rescale.publish import newest_sequence
from statemgr.operations.rollback.owner import Goal, roll_back
from statemgr.operations.topics import topic_repair
from statemgr.operations.topics.topic_repair import check_target, copy_valid, look, target_config
from statemgr.testing.memory_servers import MemoryServers
from tests.cli.test_running_job import write_toml
from tests.jobs import with_changes

CONFIG: dict[str, object] = {
    "job.name": "orders",
    "job.tasks": 2,
    "task.inputs": ["orders"],
    "task.checkpoint.retained": 3,
    "stores.totals.value.serde": "bytes",
}
NEW = "repaired"


@pytest.fixture
def config(servers: MemoryServers) -> JobConfig:
    """Create a job of two tasks that have committed three times, one by one."""
    config = servers.on_disk(servers.config, "disk")
    commit(servers, config)
    return config


def commit(servers: MemoryServers, config: JobConfig) -> None:
    """Commit three times with each task."""
    with servers.manager(config, "kafka-partition") as manager:
        for number in range(2):
            with manager.open_task(task_name(number)) as task:
                for offset in (1, 2, 3):
                    task.store("totals").put(b"count", b"%d" % offset)
                    task.commit({f"orders-{number}": offset})


def read(servers: MemoryServers, config: JobConfig) -> dict[str, int]:
    """Task → the sequence number of its current checkpoint."""
    with closing(CheckpointTopic(config, servers.clock)) as log:
        return {task: record.current.sequence for task, record in log.read().items()}


def damage(servers: MemoryServers, config: JobConfig, task: str, sequence: int) -> None:
    """Change a byte of a record on the broker's disk. Without a task: of a job record."""
    for entry in servers.broker.log(config.checkpoint_topic, 0).entries:
        if entry and entry.key and entry.value and codecs.is_key(entry.key):
            key = codecs.decode_key(entry.key)
            if (key.task, key.sequence) == (task, sequence):
                entry.value = entry.value[:-1] + bytes([entry.value[-1] ^ 1])
    with pytest.raises(CorruptRecord):
        read(servers, config)


def repaired(config: JobConfig) -> JobConfig:
    """Return the job on the new topic."""
    return JobConfig.from_mapping(config.to_mapping(), {"task.checkpoint.topic": NEW})


def test_a_task_goes_back_only_with_a_permission(servers: MemoryServers, config: JobConfig) -> None:
    """The report names the task, and the checkpoint that becomes its current one. Without the permission, nothing is
    copied."""
    with closing(CheckpointTopic(config, servers.clock)) as log:
        before = log.read()["Partition 0"].checkpoints[1]
    damage(servers, config, "Partition 0", 3)
    (left_out,) = look(config, servers.clock).left_out
    assert left_out.key == "Partition 0, layout 1, sequence 3"
    assert left_out.then == f"Partition 0 goes back to checkpoint {before.checkpoint_id} (sequence 2)"
    with pytest.raises(PermissionNeeded, match=left_out.then.replace("(", r"\(").replace(")", r"\)")) as raised:
        copy_valid(config, servers.clock, NEW)
    assert "--allow-older-checkpoints" in str(raised.value.hint)
    assert NEW not in servers.broker.topics
    copy_valid(config, servers.clock, NEW, allow_older=True)
    assert read(servers, repaired(config)) == {"Partition 0": 2, "Partition 1": 3}


@pytest.mark.parametrize("also", [None, 1])
def test_a_newest_record_that_other_software_deleted(
    servers: MemoryServers, config: JobConfig, also: int | None
) -> None:
    """The delete is left out, and its task goes back: otherwise the copy could not be read either. An older record that
    is damaged as well changes nothing."""
    gone = codecs.encode_key(CheckpointKey("orders", "1", 1, "Partition 0", 2, 3))
    publish_alone(config, servers.clock, "test", config.checkpoint_topic, [(gone, None)])
    with pytest.raises(CorruptRecord, match="deleted the newest checkpoint record"):
        read(servers, config)
    if also is not None:
        damage(servers, config, "Partition 0", also)
    *_, left_out = look(config, servers.clock).left_out
    assert left_out.key == "Partition 0, layout 1, sequence 3"
    assert "goes back" in str(left_out.then)
    with pytest.raises(PermissionNeeded):
        copy_valid(config, servers.clock, NEW)
    copy_valid(config, servers.clock, NEW, allow_older=True)
    assert read(servers, repaired(config)) == {"Partition 0": 2, "Partition 1": 3}


def test_an_older_record_and_that_of_another_job_need_no_permission(servers: MemoryServers, config: JobConfig) -> None:
    """A task keeps its current checkpoint. The other job's record stays as it is: that job refuses it."""
    other = codecs.encode_key(CheckpointKey("other", "1", 1, "Partition 0", 2, 1)), b"damaged"
    publish_alone(config, servers.clock, "test", config.checkpoint_topic, [other])
    damage(servers, config, "Partition 0", 2)
    assert [one.then for one in copy_valid(config, servers.clock, NEW).left_out] == [None]
    assert read(servers, repaired(config)) == {"Partition 0": 3, "Partition 1": 3}
    assert other in [(entry.key, entry.value) for entry in servers.broker.log(NEW, 0).entries if entry]


def test_owners_of_all_tasks_are_fenced(servers: MemoryServers, config: JobConfig, tmp_path: Path) -> None:
    """The command has the configuration of an older layout with one task. Owners of other tasks would go on, and delete
    blobs that the new topic needs."""
    write_toml(with_changes(config, job__tasks=1), file := tmp_path / "job.toml")
    with servers.manager(config, "kafka-partition") as manager, manager.open_task("Partition 1") as task:
        done = CliRunner().invoke(cli, ["topics", "repair", "--to", NEW, "--write", "--config", str(file)])
        assert done.exit_code == 0, done.output
        task.store("totals").put(b"count", b"4")
        with pytest.raises(FencedError):
            task.commit({"orders-1": 4})


def test_records_that_need_a_lost_job_record_are_left_out_with_it(servers: MemoryServers, config: JobConfig) -> None:
    """The tasks were published together. Without the job record nobody can read their records: the new topic would be
    as useless as the old one."""
    with (
        closing(servers.services(config)) as services,
        closing(CheckpointTopic(config, services.clock, owned=True)) as log,
    ):
        older = [str(record.checkpoints[1].checkpoint_id) for record in log.read().values()]
        roll_back(services, log, JobTopics(services), Goal(older))
    assert read(servers, config) == {"Partition 0": 4, "Partition 1": 4}
    damage(servers, config, "", 4)
    found = copy_valid(config, servers.clock, NEW, allow_older=True).left_out
    assert [one.key for one in found] == [
        f"{of}, layout 1, sequence 4" for of in ("job record", "Partition 0", "Partition 1")
    ]
    assert [bool(one.then) for one in found] == [False, True, True]
    assert read(servers, repaired(config)) == {"Partition 0": 3, "Partition 1": 3}


def test_an_earlier_layout_was_deleted(servers: MemoryServers, config: JobConfig) -> None:
    """`gc` and `rescale --undo` leave the deletes of its records, until compaction. They are no loss."""
    keys = [
        codecs.encode_key(replace(codecs.decode_key(entry.key), layout_generation=0))
        for entry in servers.broker.log(config.checkpoint_topic, 0).entries
        if entry and entry.key and entry.value and codecs.is_key(entry.key)
    ]
    publish_alone(config, servers.clock, "test", config.checkpoint_topic, [(key, None) for key in keys])
    damage(servers, config, "Partition 0", 3)
    (left_out,) = look(config, servers.clock).left_out
    assert "goes back" in str(left_out.then)
    copy_valid(config, servers.clock, NEW, allow_older=True)
    assert read(servers, repaired(config)) == {"Partition 0": 2, "Partition 1": 3}


@pytest.mark.parametrize("tasks", [1, 2])
def test_the_sequence_numbers_of_lost_records_are_not_used_again(servers: MemoryServers, tasks: int) -> None:
    """Outputs skip a number that they have, and the next publish has other rows. This holds for a rescale, too, and a
    publish removes what says so."""
    config = servers.on_disk(with_changes(servers.config, job__tasks=tasks), "disk")
    for sequence in (1, 2, 3):
        assert publish(servers, config, sequence) == sequence
    damage(servers, config, "" if tasks > 1 else "Partition 0", 3)
    copy_valid(config, servers.clock, NEW, allow_older=True)
    new = repaired(config)
    assert read(servers, new) == dict.fromkeys((task_name(number) for number in range(tasks)), 2)
    with closing(CheckpointTopic(new, servers.clock)) as log:
        records = log.read()
        (reserved,) = set(log.job_records()) - {1, 2}
        assert newest_sequence(log, records) == reserved == servers.clock.time_ns() // 1_000_000
        assert publish(servers, new, 4) == reserved + 1
        log.read()
        assert reserved not in log.job_records()
    assert publish(servers, new, 5) == reserved + 2


def test_a_clock_that_is_behind(servers: MemoryServers, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another machine repaired the topic before, with a later clock. The numbers go up all the same."""
    config = servers.on_disk(with_changes(servers.config, job__tasks=1), "disk")
    publish(servers, config, 1)
    publish(servers, config, 2)
    damage(servers, config, "Partition 0", 2)
    copy_valid(config, servers.clock, NEW, allow_older=True)
    first = publish(servers, repaired(config), 2)
    damage(servers, repaired(config), "Partition 0", publish(servers, repaired(config), 3))
    monkeypatch.setattr(servers.clock, "time_ns", lambda: 0)
    copy_valid(repaired(config), servers.clock, "again", allow_older=True)
    again = JobConfig.from_mapping(config.to_mapping(), {"task.checkpoint.topic": "again"})
    assert publish(servers, again, 4) > first + 1


def publish(servers: MemoryServers, config: JobConfig, offset: int) -> int:
    """Publish a commit of all tasks together, as a Spark driver does. Return its sequence number."""
    with closing(servers.services(config)) as services, servers.manager(config, "spark-hash") as manager:
        epoch, commits = manager.acquire(), []
        for task, checkpoint in epoch.checkpoints.items():
            with open_attempt(config, task, checkpoint, epoch, host=AttemptHost(services)) as attempt:
                attempt.store("totals").put(b"count", b"%d" % offset)
                commits.append(attempt.prepare({"orders-0": offset}))
        published = manager.publish(commits, MicroBatch("query", offset, "{}", "{}"))
        assert {one.sequence for one in published.values()} == {epoch.sequence + 1}
        return epoch.sequence + 1


def test_later_checkpoints_have_a_time_of_publication(servers: MemoryServers, config: JobConfig) -> None:
    """A changelog needs it to supply an older checkpoint. The copied ones have none: the time of the copy would hide
    that compaction may have changed what they need."""
    copy_valid(config, servers.clock, NEW)
    new = with_changes(repaired(config), task__checkpoint__retained=6)
    commit(servers, new)
    with closing(CheckpointTopic(new, servers.clock)) as log:
        found = log.read()["Partition 0"].checkpoints
    assert [one.published_ms is not None for one in found] == [True] * 3 + [False] * 3


def test_a_target_with_the_times_of_the_broker_is_refused(servers: MemoryServers, config: JobConfig) -> None:
    """Such as one that `statemgr topics create` has made: the copied checkpoints would look young."""
    servers.broker.create(NEW, 1, {"cleanup.policy": "compact", "message.timestamp.type": "LogAppendTime"})
    with pytest.raises(TopicMisconfigured, match="must be CreateTime"):
        copy_valid(config, servers.clock, NEW)
    assert read(servers, repaired(config)) == {}


def test_times_that_cannot_be_set(servers: MemoryServers, config: JobConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The records are there. The hint has the command for somebody with the right, and `statemgr doctor` notes it."""

    def refuse(*_: object) -> None:
        raise AccessDenied("told to")

    monkeypatch.setattr(TopicAdmin, "set", refuse)
    with pytest.raises(AccessDenied, match=f"message.timestamp.type=LogAppendTime, then set .* = {NEW}"):
        copy_valid(config, servers.clock, NEW)
    assert read(servers, repaired(config)) == {"Partition 0": 3, "Partition 1": 3}
    report = Report()
    check_brokers(report, repaired(config))
    (note,) = (one for one in report.findings if one.status is Status.NOTE)
    assert "message.timestamp.type is CreateTime" in note.detail
    assert note.fix.endswith("message.timestamp.type=LogAppendTime")


def test_a_task_that_has_lost_all_its_records(servers: MemoryServers, config: JobConfig) -> None:
    """Deletes of its older records do not make the new topic unreadable: the task is one without a checkpoint."""
    commit(servers, config)  # so that retention has deleted records
    for sequence in (4, 5, 6):
        damage(servers, config, "Partition 0", sequence)
    found = look(config, servers.clock).left_out
    assert {one.then for one in found} == {"Partition 0 has no checkpoint left"}
    copy_valid(config, servers.clock, NEW, allow_older=True)
    assert read(servers, repaired(config)) == {"Partition 1": 6}


def test_an_interrupted_copy_is_made_again(
    servers: MemoryServers, config: JobConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its aborted records are no records of the target. After a copy, another one is refused."""

    def interrupted(*given: Any) -> None:
        def some(records: Iterable[Any]) -> Iterator[Any]:
            yield next(iter(records))
            raise KeyboardInterrupt

        publish_alone(*given[:-1], some(given[-1]))

    with monkeypatch.context() as patch:
        patch.setattr(topic_repair, "publish_alone", interrupted)
        with pytest.raises(KeyboardInterrupt):
            copy_valid(config, servers.clock, NEW)
    copy_valid(config, servers.clock, NEW)
    assert read(servers, repaired(config)) == {"Partition 0": 3, "Partition 1": 3}
    with pytest.raises(InvalidError, match="already has records"):
        copy_valid(config, servers.clock, NEW)


def a_topic_with_a_record(servers: MemoryServers, config: JobConfig) -> str:
    """Copy the records, as an earlier run of the command."""
    copy_valid(config, servers.clock, NEW)
    return NEW


def a_topic_with_another_use(servers: MemoryServers, config: JobConfig) -> str:
    """Create the topic of another application: empty, and not compacted."""
    servers.broker.create("other", 3)
    return "other"


@pytest.mark.parametrize(
    ("target", "why", "hint"),
    [
        (a_topic_with_a_record, "already has records", "set task.checkpoint.topic"),
        (a_topic_with_another_use, "it has 3 partitions instead of 1", "set task.checkpoint.topic to a new topic"),
        ("orders", "task.inputs names the same topic", "--to"),
        ("orders-1-totals-changelog", "changelog.topic names the same topic", "--to"),
        ("a b", "task.checkpoint.topic must be a topic's name", "--to"),
        ("a" * 250, "at most 249", "--to"),
    ],
)
def test_a_wrong_target_is_refused_before_the_job_is_fenced(
    servers: MemoryServers,
    config: JobConfig,
    tmp_path: Path,
    target: Callable[[MemoryServers, JobConfig], str] | str,
    why: str,
    hint: str,
) -> None:
    """Such as when somebody repeats the command, while the job runs on the new topic: its owner goes on."""
    write_toml(config, file := tmp_path / "job.toml")
    name = target if isinstance(target, str) else target(servers, config)
    with servers.manager(config, "kafka-partition") as manager, manager.open_task("Partition 1") as task:
        done = CliRunner().invoke(cli, ["topics", "repair", "--to", name, "--write", "--config", str(file)])
        assert (done.exit_code, done.stdout) in ((1, ""), (2, ""))
        assert why in done.stderr
        assert hint in done.stderr
        task.store("totals").put(b"count", b"4")
        task.commit({"orders-1": 4})


def test_the_open_transaction_of_a_killed_copy_does_not_delay_the_next_one(
    servers: MemoryServers, config: JobConfig
) -> None:
    """The look at the target before the fence reads up to the transaction. The next copy ends it."""
    new = target_config(config, NEW)
    servers.broker.create(NEW, 1, {"cleanup.policy": "compact"})
    open_one = TransactionalPublisher(config, transactional_id("orders", "1", "repair"), servers.clock)
    with closing(open_one), ExitStack() as stack:
        open_one.fence()
        transaction = stack.enter_context(open_one.transaction())
        transaction.send(NEW, b"?", b"?", partition=0)
        transaction.flush()
        check_target(new, servers.clock)
        copy_valid(config, servers.clock, NEW)
        with pytest.raises(FencedError):
            stack.close()
    assert read(servers, new) == {"Partition 0": 3, "Partition 1": 3}
