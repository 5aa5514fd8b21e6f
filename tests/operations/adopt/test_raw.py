"""``statemgr adopt --from raw``: adopts plain changelogs, with offsets given by hand or taken from a consumer group."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, AlterConfigOpType, ConfigEntry, ConfigResource, ResourceType

from statemgr import JobConfig, StateManager
from statemgr.cli.main import cli
from statemgr.errors import PermissionNeeded
from statemgr.kafka.checkpoint_topic import CheckpointTopic
from statemgr.operations.adopt import adopt as adopting
from statemgr.operations.adopt import copying as adopt_copy
from statemgr.operations.adopt.adopt import adopt
from statemgr.operations.adopt.found import Request
from statemgr.operations.adopt.old_topics import Bounds, OldTopics
from statemgr.operations.adopt.origins import ORIGINS, OldRecord
from statemgr.ports import Progress, TopicInfo, no_progress
from statemgr.reader import JobReader
from statemgr.wiring import open_services
from tests.kafka_jobs import committed, plain_producer, send, state_of
from tests.old_jobs import Adopter, commit, ends, make, member, state, topics_of, write
from tests.servers import KafkaServer

STATE = (
    {f"key-{n}".encode(): f"value {n}".encode() for n in range(500)},
    {f"other-{n}".encode(): b"" for n in range(7)},
)


@pytest.fixture
def old(kafka: KafkaServer, tmp_path: Path) -> Adopter:
    """A stopped job of two partitions: a changelog with overwritten and deleted keys, and a group that has read 8 of 10
    and 5 of 5 input records."""
    name = kafka.fresh_name("old")
    make(kafka, f"{name}-totals")
    make(kafka, f"{name}-in", cleanup__policy="delete")
    for partition, of_partition in enumerate(STATE):
        write(kafka, f"{name}-totals", partition, [(b"gone", b"1"), *((key, b"older") for key in of_partition)])
        write(kafka, f"{name}-totals", partition, [*of_partition.items(), (b"gone", None)])
    write(kafka, f"{name}-in", 0, [(b"k", b"v")] * 10)
    write(kafka, f"{name}-in", 1, [(b"k", b"v")] * 5)
    commit(kafka, name, {(f"{name}-in", 0): 8, (f"{name}-in", 1): 5})
    return Adopter(kafka, tmp_path, "--from", "raw", "--job", name, "--changelog", f"totals={name}-totals")


def job_of(old: Adopter) -> str:
    """The name of the old job, which is also its group."""
    return old.old[old.old.index("--job") + 1]


def test_a_job_is_looked_at_then_adopted_and_goes_on(kafka: KafkaServer, old: Adopter) -> None:
    """The dry run counts records and writes nothing. The adopted job has every key and the group's offsets, continues
    from there, and leaves the old topics untouched."""
    name = job_of(old)
    before = ends(kafka, f"{name}-totals", f"{name}-in")
    config = old.init(f"{name}-new")
    assert (config.tasks, config.inputs) == (2, [f"{name}-in"])
    found = old.json()
    assert topics_of(kafka, name) == {f"{name}-totals", f"{name}-in"}
    assert [row["records"] for row in found["changelogs"]] == [2 * len(of) + 2 for of in STATE]
    assert [row["deletes"] for row in found["changelogs"]] == [1, 1]
    assert found["input_offsets"] == {f"{name}-in-0": 8, f"{name}-in-1": 5}
    assert found["doubled_at_most"] == 2
    assert found["published"] == {}
    assert "at most 2 input records" in old.run()
    adopted = old.json("--write")
    assert list(adopted["published"]) == ["Partition 0", "Partition 1"]
    assert state(config) == ([{"totals": of} for of in STATE], [{f"{name}-in-0": 8}, {f"{name}-in-1": 5}])
    with StateManager(config) as manager, manager.open_task("Partition 0") as task:
        assert task.last_checkpoint is not None
        assert list(task.last_checkpoint.input_topic_ids) == [f"{name}-in"]
        task.store("totals").put(b"new", b"1")
        task.commit({f"{name}-in-0": 9})
    elsewhere = JobConfig.from_mapping(config.to_mapping(), {"state.dir": str(old.directory / "elsewhere")})
    assert state(elsewhere)[0][0] == {"totals": STATE[0] | {b"new": b"1"}}
    assert ends(kafka, f"{name}-totals", f"{name}-in") == before
    assert "already adopted" in old.run("--write")


def test_in_place_the_old_changelog_becomes_the_jobs_own(kafka: KafkaServer, old: Adopter) -> None:
    """Adoption in place copies no record: the marker is the end of the old topic, whose settings must be suitable."""
    name = job_of(old)
    config = old.init(f"{name}-new", "--in-place")
    before = ends(kafka, f"{name}-totals")
    assert "nothing would be copied" in old.run("--write", status=2)
    assert "min.compaction.lag.ms" in old.run("--write", "--in-place", status=1)
    lag = ("--set", "stores.totals.changelog.min.compaction.lag.ms=0")
    old.run("--write", "--in-place", *lag)
    assert ends(kafka, f"{name}-totals") == before
    mine = JobConfig.from_mapping(config.to_mapping(), {"stores.totals.changelog.min.compaction.lag.ms": 0})
    assert state(mine)[0] == [{"totals": of} for of in STATE]
    with StateManager(mine) as manager, manager.open_task("Partition 1") as task:
        task.store("totals").delete(b"other-0")
        task.commit({f"{name}-in-1": 5})
    now = state_of(committed(mine, f"{name}-totals", 1))
    assert now == {key: value for key, value in STATE[1].items() if key != b"other-0"}


def test_offsets_by_hand(kafka: KafkaServer, old: Adopter) -> None:
    """Without a group, every partition that has records needs an offset, and the offset must exist in the topic."""
    name = job_of(old)
    config = old.init(f"{name}-new")
    by_hand = [*old.old[:2], *old.old[4:]]
    assert "has no offset of" in old.run("--offset", f"{name}-in-0=3", status=2, old=by_hand)
    both = ("--offset", f"{name}-in-0=3", "--offset", f"{name}-in-1=0")
    assert "has 0 to 5" in old.run(*both[:3], f"{name}-in-1=6", status=2, old=by_hand)
    assert "at most 12 input records" in old.run(*both, old=by_hand)
    old.run("--write", *both, old=by_hand)
    assert state(config)[1] == [{f"{name}-in-0": 3}, {f"{name}-in-1": 0}]


def test_what_is_refused(kafka: KafkaServer, old: Adopter) -> None:
    """A running job, an open transaction, and partitions or stores that do not match are refused, and nothing is
    written."""
    name = job_of(old)
    old.init(f"{name}-new")
    with member(kafka, name, f"{name}-in"):
        assert "is not stopped" in old.run("--write", status=2)
    writer = plain_producer(old.config, f"{name}-tx")
    writer.begin_transaction()
    writer.produce(f"{name}-totals", b"open", b"open", 1)
    writer.flush()
    assert "a transaction is open in the changelog" in old.run("--write", status=2)
    writer.abort_transaction(30)
    assert "has 2 partitions, but the job has 3 tasks" in old.run("--write", "--set", "job.tasks=3", status=2)
    assert "has the stores totals, but" in old.run("--set", "stores.more.type=memory", status=2)
    assert "does not exist" in old.run("--changelog", "more=not-there", status=4)
    windowed = f"{name}-windowed"
    make(kafka, windowed, cleanup__policy="compact,delete")
    assert "deletes old keys by itself" in old.run("--changelog", f"more={windowed}", status=2)
    assert topics_of(kafka, name) == {f"{name}-totals", f"{name}-in", windowed}


def test_changelogs_with_records_of_others_are_not_copied_over(kafka: KafkaServer, old: Adopter) -> None:
    """Invariant 16: adoption does not touch a new changelog that somebody else has written to."""
    name = job_of(old)
    config = old.init(f"{name}-new")
    target = config.stores["totals"].changelog_topic
    make(kafka, target, min__compaction__lag__ms="14400000")
    send(config, target, [(b"theirs", b"1")])
    assert "no copy of the old one" in old.run("--write", status=2)
    assert committed(config, target) == [(b"theirs", b"1")]


def interrupt(old: Adopter, monkeypatch: pytest.MonkeyPatch) -> None:
    """Crash after the first transaction of the first copy."""
    monkeypatch.setattr(adopt_copy, "_MOST_RECORDS", 100)

    def crash(what: str, done: int, total: int) -> None:
        if what == "copy totals 0":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(old, crash)


def test_an_interrupted_copy_continues(old: Adopter, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a crash between two transactions of the copy, the next run copies the rest, and copies nothing twice."""
    config = old.init(f"{job_of(old)}-new")
    target = config.stores["totals"].changelog_topic
    interrupt(old, monkeypatch)
    partly = committed(config, target)
    assert 0 < len(partly) < 1002
    run(old, no_progress)
    assert state(config)[0] == [{"totals": of} for of in STATE]
    assert len(committed(config, target)) == 2 * len(STATE[0]) + 2


def test_the_progress_is_found_before_a_large_aborted_transaction() -> None:
    """Many offsets without a record follow the last one: they are read about twice, and not once for each step."""
    reads: list[int] = []

    class Old:
        def bounds(self, topic: str, partition: int) -> Bounds:
            return Bounds(0, 100_000, 100_000)

        def records(self, topic: str, partition: int, start: int, end: int) -> Iterator[list[OldRecord]]:
            reads.append(end - start)
            if start <= 7:
                yield [OldRecord(b"k", b"v", [(adopt_copy.HEADER, b'["old", 8, 1]')], 7)]

    topic = TopicInfo("totals", "old", 1, {})
    unused: Any = None
    old: Any = Old()
    copy = adopt_copy.Copy(
        unused, old, unused, "totals", topic, topic, 0, 0, Bounds(0, 9, 9), None, "plain", False, no_progress
    )
    assert copy.has_begun()
    assert sum(reads) < 300_000


def test_an_interrupted_copy_does_not_go_on_in_another_form(old: Adopter, monkeypatch: pytest.MonkeyPatch) -> None:
    """Records of two forms in one changelog would be read as one. The run with the earlier settings goes on."""
    config = old.init(f"{job_of(old)}-new")
    interrupt(old, monkeypatch)
    with monkeypatch.context() as other:
        real = adopt_copy.Copy
        other.setattr(adopting, "Copy", lambda *given: real(*given[:10], "plain, TTL 1000", *given[11:]))
        with pytest.raises(PermissionNeeded, match="this one would go on as plain, TTL 1000"):
            run(old, no_progress)
    run(old, no_progress)
    assert state(config)[0] == [{"totals": of} for of in STATE]


def test_a_job_does_not_start_while_its_adoption_is_not_over(old: Adopter, monkeypatch: pytest.MonkeyPatch) -> None:
    """FAULT 60, invariant 8: an adoption was killed in its first partition, and somebody starts the job. No task
    starts, not even one whose new changelog has no record yet, until the adoption is continued or revoked."""
    config = old.init(f"{job_of(old)}-new")
    interrupt(old, monkeypatch)
    with StateManager(config) as manager:
        for number in range(2):
            with pytest.raises(PermissionNeeded, match="adoption of this job has begun") as refused:
                manager.open_task(f"Partition {number}")
            assert "adopt --write" in str(refused.value.hint)
        with pytest.raises(PermissionNeeded, match="adoption of this job has begun"):
            manager.acquire()
    permit = ["permit", "--config", str(old.file)]
    listed = CliRunner().invoke(cli, [*permit, "--list", "--json"], catch_exceptions=False)
    assert [(one["task"], one["permissions"]) for one in json.loads(listed.stdout)] == [
        ("Partition 0", ["adoption"]),
        ("Partition 1", ["adoption"]),
    ]
    assert CliRunner().invoke(cli, [*permit, "--revoke"], catch_exceptions=False).exit_code == 0
    with StateManager(config) as manager, manager.open_task("Partition 1") as task:
        assert task.last_checkpoint is None, "given up, and nothing was committed"
    old.run("--write")
    assert state(config)[0] == [{"totals": of} for of in STATE]
    left = CliRunner().invoke(cli, [*permit, "--list", "--json"], catch_exceptions=False)
    assert json.loads(left.stdout) == []


def test_a_changelog_with_a_record_without_a_key_is_not_adopted_in_place(kafka: KafkaServer, tmp_path: Path) -> None:
    """FAULT 60: a record without a key, from before the topic was compacted, could never be restored. Adoption refuses
    the topic and publishes nothing, also if the record is not among those that a look at the topic reads: the first
    and the newest ones."""
    name = kafka.fresh_name("old")
    make(kafka, f"{name}-totals", 1, cleanup__policy="delete")
    make(kafka, f"{name}-in", 1, cleanup__policy="delete")
    write(kafka, f"{name}-totals", 0, [(b"key", b"1")] * 600)
    producer = Producer({"bootstrap.servers": kafka.bootstrap_servers})
    producer.produce(f"{name}-totals", b"no key", None, 0)
    assert producer.flush(30) == 0
    write(kafka, f"{name}-totals", 0, [(b"key", b"2")] * 1500)
    compacted = [ConfigEntry("cleanup.policy", "compact", incremental_operation=AlterConfigOpType.SET)]
    resource = ConfigResource(ResourceType.TOPIC, f"{name}-totals", incremental_configs=compacted)
    admin = AdminClient({"bootstrap.servers": kafka.bootstrap_servers})
    for altered in admin.incremental_alter_configs([resource]).values():
        altered.result(30)
    given = ("--changelog", f"totals={name}-totals", "--offset", f"{name}-in-0=0")
    old = Adopter(kafka, tmp_path, "--from", "raw", *given)
    config = old.init(f"{name}-new", "--in-place", "--set", "stores.totals.changelog.min.compaction.lag.ms=0")
    assert "has no key" in old.run("--in-place", "--write", status=4)
    with JobReader(config) as reader:
        assert reader.records() == {}


def test_a_copy_that_took_too_long_is_refused(kafka: KafkaServer, tmp_path: Path) -> None:
    """If the old topic may have dropped deletes during the copy, nothing is published."""
    name = kafka.fresh_name("old")
    make(kafka, f"{name}-totals", 1, delete__retention__ms="1")
    make(kafka, f"{name}-in", 1)
    write(kafka, f"{name}-totals", 0, [(b"a", b"1")])
    offset = ("--offset", f"{name}-in-0=0")
    old = Adopter(kafka, tmp_path, "--from", "raw", "--changelog", f"totals={name}-totals", *offset)
    config = old.init(f"{name}-new")
    assert "may have removed deletes" in old.run("--write", status=2)
    with JobReader(config) as reader:
        assert reader.records() == {}


def run(old: Adopter, progress: Progress) -> None:
    """Adopt in this process, without the command line."""
    config, name = old.config, job_of(old)
    request = Request(
        ORIGINS["raw"], name, {"totals": f"{name}-totals"}, inputs=config.inputs, tasks=config.tasks, settle_s=0
    )
    services = open_services(config)
    log = CheckpointTopic(config, services.clock, owned=True)
    try:
        with OldTopics(config, services.clock) as topics:
            adopt(services, log, topics, request, in_place=False, progress=progress)
    finally:
        log.close()
        services.close()
