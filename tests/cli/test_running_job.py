"""The command line against a real broker and a real blob store, while the job runs."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from confluent_kafka.admin import (  # type: ignore[attr-defined]
    AclBinding,
    AclOperation,
    AclPermissionType,
    ResourcePatternType,
    ResourceType,
)

from statemgr import JobConfig, StateManager, Task
from statemgr.cli.main import cli
from statemgr.errors import FencedError
from statemgr.local import open_store
from tests.jobs import SEGMENTS, elsewhere, job_mapping, with_changes
from tests.kafka_jobs import client, make_topic, plain_producer, wait_until
from tests.servers import KafkaServer, S3Server

# one worker, because each would set up the job that the tests of this module share
pytestmark = pytest.mark.xdist_group("running-job")
SECRET = "hunter2-do-not-show"
ROWS = {f"key-{i:03}".encode(): str(i).encode() for i in range(200)}
Run = Callable[..., Result]


def write_toml(config: JobConfig, path: Path) -> None:
    """Write the configuration to a file with dotted keys."""
    lines = [f"{json.dumps(key)} = {json.dumps(value)}" for key, value in config.to_mapping().items()]
    path.write_text("\n".join(lines))


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs a command line with the job in `job.toml`."""
    monkeypatch.chdir(tmp_path)

    def run_(*arguments: str) -> Result:
        return CliRunner().invoke(cli, list(arguments), catch_exceptions=False)

    return run_


@pytest.fixture
def no_broker(monkeypatch: pytest.MonkeyPatch) -> tuple[str, str]:
    """Options for a broker that is not there. The deadline is shortened so that the test does not wait for the normal
    one."""
    monkeypatch.setattr("statemgr.kafka.metadata.DEADLINE_S", 2.0)
    monkeypatch.setattr("statemgr.kafka.metadata.REQUEST_S", 2.0)
    return "--set", "kafka.bootstrap.servers=localhost:1"


def new_job(kafka: KafkaServer, directory: Path) -> JobConfig:
    """Return a job of two tasks that has not run yet."""
    return JobConfig.from_mapping(
        job_mapping(kafka, directory, tasks=2, stores__totals__key__serde="string", kafka__ssl__key__password=SECRET)
    )


@contextmanager
def started(job: JobConfig) -> Iterator[list[Task]]:
    """Run a job: `Partition 0` has 200 keys, `Partition 1` has one key, and each task has two checkpoints."""
    with StateManager(job) as manager:
        tasks = [manager.open_task(f"Partition {number}") for number in range(2)]
        for number, (task, rows) in enumerate(zip(tasks, (ROWS, {b"other": b"1"}), strict=True)):
            totals = task.store("totals", key_serde="bytes")
            task.commit({f"orders-{number}": 1})
            totals.put_many(list(rows.items()))
            task.commit({f"orders-{number}": 200})
        yield tasks


@pytest.fixture
def job(kafka: KafkaServer, tmp_path: Path) -> JobConfig:
    """A job of two tasks that has not run yet, in `job.toml`."""
    config = new_job(kafka, tmp_path)
    write_toml(config, tmp_path / "job.toml")
    return config


@pytest.fixture
def running(job: JobConfig) -> Iterator[list[Task]]:
    """The job, running, for a test that changes it."""
    with started(job) as tasks:
        yield tasks


@pytest.fixture(scope="module")
def shared(kafka: KafkaServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[JobConfig]:
    """A running job of all tests that only read."""
    job = new_job(kafka, tmp_path_factory.mktemp("shared"))
    with started(job):
        yield job


@pytest.fixture
def unchanged(shared: JobConfig, tmp_path: Path) -> JobConfig:
    """The running job of all tests that only read, in `job.toml`."""
    write_toml(shared, tmp_path / "job.toml")
    return shared


# --- topics -----------------------------------------------------------------------------------------------


def test_topics_are_created_once_and_checked(run: Run, job: JobConfig) -> None:
    """`topics check` fails and names the command that fixes the problem; `create` fixes it; a second `create` changes
    nothing."""
    before = run("topics", "check")
    assert before.exit_code == 1
    assert "statemgr topics create" in before.output
    assert json.loads(run("topics", "create", "--json").stdout)["created"]
    assert run("topics", "check").exit_code == 0
    assert json.loads(run("topics", "create", "--json").stdout)["created"] == []


def test_output_topics_are_looked_at(run: Run, job: JobConfig) -> None:
    """J2.21: `topics create`, `topics check` and `doctor` name an output topic that does not exist; none creates it."""
    output = f"{job.job_name}-output"
    declared = ("--set", f"task.outputs={output}")
    created = run("topics", "create", *declared)
    assert created.exit_code == 4
    assert "the output topic does not exist" in created.stderr
    assert output in created.stderr
    checked = run("topics", "check", *declared)
    assert checked.exit_code == 1
    assert output in checked.output
    examined = run("doctor", *declared)
    assert examined.exit_code == 1
    assert f"{output}: the output topic does not exist" in " ".join(examined.output.split())
    assert output not in client(job).list_topics(timeout=60).topics
    two = run("topics", "create", "--set", f"task.outputs={output},{output}-2")
    assert f"the output topics do not exist [topic={output}, {output}-2]" in two.stderr
    make_topic(job, output, 3)
    for command in (("topics", "create"), ("topics", "check")):
        assert run(*command, *declared).exit_code == 0


def test_topics_of_the_input_and_output_are_created_on_request(run: Run, job: JobConfig) -> None:
    """`topics create --all` also creates those, with a partition for each task. It leaves existing ones alone."""
    named = [f"{job.job_name}-{name}" for name in ("input", "output", "there")]
    make_topic(job, named[2], 3)
    declared = ("--set", f"task.inputs={named[0]}", "--set", f"task.outputs={named[1]},{named[2]}")
    refused = run("topics", "create", *declared)
    assert "`statemgr topics create --all`" in refused.stderr
    created = json.loads(run("topics", "create", "--all", "--json", *declared).stdout)["created"]
    assert set(created) == set(named[:2])
    there = client(job).list_topics(timeout=60).topics
    assert [len(there[name].partitions) for name in named] == [job.tasks, job.tasks, 3]
    assert run("topics", "check", *declared).exit_code == 0


@pytest.mark.long
def test_topics_check_looks_at_the_input(run: Run, job: JobConfig) -> None:
    """`topics check` names a missing input topic and one with too many partitions, and creates neither. A job that
    distributes keys itself may have any number of partitions."""
    topic = f"{job.job_name}-input"
    check = ("topics", "check", "--set", f"task.inputs={topic}")
    run("topics", "create")
    missing = run(*check)
    assert missing.exit_code == 1
    assert "the input topic does not exist" in missing.output
    assert topic not in client(job).list_topics(timeout=60).topics
    make_topic(job, topic, 3)
    (problem,) = json.loads(run(*check, "--json").stdout)
    assert problem["topic"] == topic
    assert problem["problem"].startswith("the input topic has 3 partitions and needs as many tasks")
    assert problem["fix"].startswith("set job.tasks = 3")
    with StateManager(job, "kafka-murmur2") as manager:
        for number in range(2):
            manager.open_task(f"Partition {number}").commit({})
    assert run(*check).exit_code == 0


def test_topics_for_an_input_with_another_number_of_partitions(run: Run, job: JobConfig) -> None:
    """`topics create` looks at the input before it creates anything. Changelogs that an earlier job.tasks has left, and
    to which nothing was written, are created again on request, but never those of a job with checkpoints."""
    topic = f"{job.job_name}-input"
    make_topic(job, topic, 3)
    own = {job.checkpoint_topic, *(store.changelog_topic for store in job.stores.values())}
    refused = run("topics", "create", "--set", f"task.inputs={topic}")
    assert refused.exit_code == 2
    assert "set job.tasks = 3" in refused.stderr
    assert not own & set(client(job).list_topics(timeout=60).topics), "nothing was created"
    assert run("topics", "create").exit_code == 0
    with_three = ("--set", f"task.inputs={topic}", "--set", "job.tasks=3")
    way = "`statemgr topics create --recreate-empty`"
    problems = json.loads(run("topics", "check", *with_three, "--json").stdout)
    assert all(way in problem["fix"] for problem in problems)
    assert way in run("topics", "create", *with_three).stderr
    assert run("topics", "create", "--recreate-empty", *with_three).exit_code == 0
    assert run("topics", "check", *with_three).exit_code == 0
    with StateManager(with_changes(job, job__tasks=3)) as manager, manager.open_task("Partition 0") as task:
        task.commit({f"{topic}-0": 0})
    refused = run("topics", "create", "--recreate-empty")
    assert refused.exit_code == 2
    assert "the job has checkpoints" in refused.stderr


def test_a_lost_checkpoint_topic_is_not_created_silently(run: Run, job: JobConfig, tmp_path: Path) -> None:
    """If the job's blobs exist but its topic does not, only the one-shot permission creates the topic."""
    blob = tmp_path / "blobs" / job.job_name / job.job_id / "Partition_0" / "totals" / "a" / "index"
    blob.parent.mkdir(parents=True)
    blob.write_bytes(b"x")
    refused = run("topics", "create")
    assert refused.exit_code == 2
    assert "--allow-empty-start" in refused.stderr
    assert run("topics", "create", "--allow-empty-start").exit_code == 0


# --- checkpoints and snapshots ----------------------------------------------------------------------------


def test_checkpoints_list_as_json_is_one_array_with_offsets(run: Run, unchanged: JobConfig) -> None:
    """The list has one object per retained checkpoint, with the Kafka offset of its record, and marks the current
    one."""
    found = json.loads(run("checkpoints", "list", "--json").stdout)
    assert [(entry["task"], entry["current"]) for entry in found] == [
        ("Partition 0", True),
        ("Partition 0", False),
        ("Partition 1", True),
        ("Partition 1", False),
    ]
    assert found[0]["input_offsets"] == {"orders-0": 200}
    assert set(found[0]["state_checkpoint_markers"]) == {"kafka-changelog", "blob-store"}
    assert all(isinstance(entry["offset"], int) for entry in found)


def test_checkpoints_list_and_show_for_people(run: Run, unchanged: JobConfig) -> None:
    """The list prints a line per checkpoint; `show` prints the markers."""
    listed = run("checkpoints", "list", "--current", "--task", "0")
    assert listed.stdout.count("Partition 0") == 1
    assert "Partition 1" not in listed.stdout
    assert "orders-0:200" in listed.stdout
    assert len(json.loads(run("checkpoints", "list", "--history", "--json").stdout)) >= 2
    older = json.loads(run("checkpoints", "list", "--json").stdout)[1]["checkpoint_id"]
    shown = run("checkpoints", "show", "--task", "0", "--checkpoint", older)
    assert "no, retained" in shown.stdout
    assert "blob-store / totals" in shown.stdout


def test_a_checkpoint_that_is_not_retained_is_exit_status_4(run: Run, unchanged: JobConfig) -> None:
    """The exit status means missing state, and the hint says to choose a retained checkpoint."""
    result = run("checkpoints", "show", "--checkpoint", "1700000000000-000001")
    assert result.exit_code == 4
    assert "choose one of the retained checkpoints" in result.stderr


def test_snapshots_list_and_show(run: Run, unchanged: JobConfig) -> None:
    """`list` reports every retained snapshot, and `show` every file of one snapshot."""
    found = json.loads(run("snapshots", "list", "--json").stdout)
    assert {entry["task"] for entry in found} == {"Partition 0", "Partition 1"}
    assert all(entry["files"] and entry["problem"] is None for entry in found)
    shown = json.loads(run("snapshots", "show", "totals", "--task", "0", "--json").stdout)
    assert shown["task"] == "Partition 0"
    assert any(file["path"].endswith(".sst") for file in shown["files"])
    assert ".sst" in run("snapshots", "show", "totals").stdout


def test_a_lost_snapshot_is_listed_as_a_problem(run: Run, running: list[Task], tmp_path: Path) -> None:
    """A missing index blob is named, and the exit status is 4."""
    index = json.loads(run("snapshots", "list", "--json").stdout)[0]["index"]
    (tmp_path / "blobs" / index).unlink()
    result = run("snapshots", "list", "--json")
    assert result.exit_code == 4
    assert [entry["index"] for entry in json.loads(result.stdout) if entry["problem"]] == [index]


def test_a_job_of_segments(run: Run, kafka: KafkaServer, tmp_path: Path) -> None:
    """The commands for checkpoints, snapshots, stores and restores work if commits are segments on top of a
    snapshot."""
    mapping = job_mapping(kafka, tmp_path, backup=("blob-store",), kind=SEGMENTS, stores__totals__key__serde="string")
    config = JobConfig.from_mapping(mapping)
    write_toml(config, tmp_path / "job.toml")
    large = b"x" * 5000
    with StateManager(config) as manager, manager.open_task("Partition 0") as task:
        totals = task.store("totals", key_serde="bytes")
        totals.put_many(list(ROWS.items()))
        task.commit({"orders-0": 1})
        totals.put(b"key-007", large)
        totals.delete(b"key-008")
        task.commit({"orders-0": 2})
        newest, older = json.loads(run("checkpoints", "list", "--json").stdout)
        assert newest["state_checkpoint_markers"].keys() == {"blob-store"}
        shown = run("checkpoints", "show", "--task", "0").stdout
        assert "blob-store / totals" in shown
        assert "_segments/" in shown
        found = json.loads(run("snapshots", "list", "--json").stdout)
        assert [(entry["segments"], entry["problem"]) for entry in found] == [(1, None), (0, None)]
        assert found[0]["index"] == found[1]["index"], "the same snapshot"
        assert found[0]["segments_size"] > 0
        files = json.loads(run("snapshots", "show", "totals", "--json").stdout)["files"]
        assert any(file["path"].endswith(".sst") for file in files)
        assert run("store", "get", "totals", "key-007").stdout == large.decode() + "\n"
        assert run("store", "get", "totals", "key-008").exit_code == 1
        then = ["--task", "0", "--checkpoint", older["checkpoint_id"]]
        assert run("store", "get", "totals", "key-008", *then).stdout == "8\n"
        restored = json.loads(run("restore", "--into", "out", "--json").stdout)
        assert [(row["task"], row["factory"]) for row in restored] == [("Partition 0", "blob-store")]
        task.commit({"orders-0": 3})  # the restore fenced nobody
    opened = open_store("rocksdb", tmp_path / "out" / "Partition_0" / "totals", {})
    try:
        expected = {**ROWS, b"key-007": large}
        del expected[b"key-008"]
        assert dict(opened.scan(None, None)) == expected
    finally:
        opened.close()
    [segments] = (tmp_path / "blobs").rglob("_segments/*")
    segments.unlink()
    result = run("snapshots", "list", "--json")
    assert result.exit_code == 4
    assert [entry["problem"] is None for entry in json.loads(result.stdout)].count(False) >= 1
    assert run("restore", "--into", "again").exit_code == 4


# --- stores -----------------------------------------------------------------------------------------------


def test_store_commands_read_what_is_published(run: Run, unchanged: JobConfig) -> None:
    """`get` looks in every task, `scan` is in key order and says when it stops, and `count` adds up."""
    assert run("store", "get", "totals", "key-007").stdout == "7\n"
    assert json.loads(run("store", "get", "totals", "other", "--json").stdout)["task"] == "Partition 1"
    assert run("store", "get", "totals", "none").exit_code == 1
    scanned = json.loads(run("store", "scan", "totals", "--prefix", "key-01", "--json").stdout)
    assert [entry["key"] for entry in scanned] == [f"key-01{i}" for i in range(10)]
    few = run("store", "scan", "totals", "--limit", "3", "--task", "0")
    assert few.stdout.splitlines() == [f"Partition 0\tkey-00{i}\t{i}" for i in range(3)]
    assert "--limit 0" in few.stderr
    assert run("store", "scan", "totals", "--from", "z", "--json").stdout.split() == ["[", "]"]
    counts = json.loads(run("store", "count", "totals", "--json").stdout)
    assert {entry["task"]: entry["count"] for entry in counts} == {"Partition 0": 200, "Partition 1": 1}
    assert run("store", "count", "totals").stdout.strip().endswith("201 keys")


def test_an_older_checkpoint_can_be_read(run: Run, unchanged: JobConfig) -> None:
    """The checkpoint before the last commit can be read; it is still empty."""
    older = json.loads(run("checkpoints", "list", "--task", "0", "--json").stdout)[1]["checkpoint_id"]
    counted = run("store", "count", "totals", "--task", "0", "--checkpoint", older, "--json")
    assert json.loads(counted.stdout)[0]["count"] == 0
    # tasks of a consumer loop have checkpoints of their own, so an ID also identifies the task
    counted = run("store", "count", "totals", "--checkpoint", older, "--json")
    assert [found["task"] for found in json.loads(counted.stdout)] == ["Partition 0"]
    assert run("restore", "--into", "older", "--checkpoint", older).exit_code == 0
    assert [path.name for path in Path("older").iterdir()] == ["Partition_0"]
    assert run("restore", "--into", "none", "--checkpoint", "1700000000000-000001").exit_code == 4
    assert not Path("none").exists()


def test_a_store_that_the_job_lacks_is_named(run: Run, unchanged: JobConfig) -> None:
    """The error is one of wrong usage and names the existing stores."""
    result = run("store", "get", "total", "x")
    assert result.exit_code == 2
    assert "totals" in result.stderr


# --- restore ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("factory", ["blob-store", "kafka-changelog"])
def test_restore_makes_directories_that_hold_the_state(
    run: Run, unchanged: JobConfig, tmp_path: Path, factory: str
) -> None:
    """From either backend, every task is restored, and the restored store opens with the same state."""
    result = run("restore", "--into", "out", "--factory", factory, "--json")
    assert result.exit_code == 0
    assert [(row["task"], row["factory"]) for row in json.loads(result.stdout)] == [
        ("Partition 0", factory),
        ("Partition 1", factory),
    ]
    opened = open_store("rocksdb", tmp_path / "out" / "Partition_0" / "totals", {})
    try:
        assert dict(opened.scan(None, None)) == ROWS
    finally:
        opened.close()


def test_restore_never_overwrites(run: Run, unchanged: JobConfig) -> None:
    """A store that already exists in the directory stays, and the command refuses."""
    assert run("restore", "--into", "out", "--task", "1").exit_code == 0
    again = run("restore", "--into", "out", "--task", "1")
    assert again.exit_code == 2
    assert "exists" in again.stderr


# --- what all commands ensure -----------------------------------------------------------------------------


def test_reading_fences_nobody(run: Run, running: list[Task]) -> None:
    """The running job can still commit after every reading command."""
    for arguments in (
        ["checkpoints", "list"],
        ["snapshots", "list"],
        ["store", "count", "totals"],
        ["restore", "--into", "out"],
        ["topics", "check"],
        ["doctor"],
    ):
        assert run(*arguments).exit_code == 0, arguments
    running[0].store("totals", key_serde="bytes").put(b"after", b"1")
    assert running[0].commit({"orders-0": 201}).input_offsets == {"orders-0": 201}


def test_no_output_has_a_secret(run: Run, unchanged: JobConfig) -> None:
    """No command prints the secret, in text or in JSON."""
    for arguments in (
        ["config", "show", "--all"],
        ["checkpoints", "show"],
        ["checkpoints", "list", "--json"],
        ["snapshots", "list", "--json"],
        ["doctor", "--json"],
        ["restore", "--into", "out", "--json"],
    ):
        assert SECRET not in run(*arguments).output


def test_a_job_without_checkpoints(run: Run, job: JobConfig) -> None:
    """Before the first commit there is nothing to list and nothing to restore."""
    run("topics", "create")
    assert json.loads(run("checkpoints", "list", "--json").stdout) == []
    assert run("restore", "--into", "out").exit_code == 4
    assert run("store", "count", "totals").exit_code == 4


def test_an_empty_machine_reads_the_same(run: Run, unchanged: JobConfig, tmp_path: Path) -> None:
    """A read needs nothing local: another state directory gives the same answer."""
    config = elsewhere(unchanged, tmp_path / "empty", "blob-store")
    write_toml(config, tmp_path / "elsewhere.toml")
    counted = run("store", "count", "totals", "--config", "elsewhere.toml", "--json")
    assert sum(entry["count"] for entry in json.loads(counted.stdout)) == 201


# --- doctor -----------------------------------------------------------------------------------------------


def findings(result: Result) -> dict[str, set[str]]:
    """Maps each check to its statuses."""
    found: dict[str, set[str]] = {}
    for entry in json.loads(result.stdout):
        found.setdefault(entry["check"], set()).add(entry["status"])
    return found


def test_doctor_tries_everything(run: Run, job: JobConfig, tmp_path: Path) -> None:
    """All checks pass once the topics and the directory of blobs exist."""
    (tmp_path / "blobs" / "of another job").mkdir(parents=True)  # doctor writes nothing to an empty directory
    run("topics", "create")
    result = run("doctor", "--json")
    assert result.exit_code == 0, result.output
    found = findings(result)
    for check in (
        *("kafka", "topics", "transaction", "clock", "checkpoints", "disk"),
        *("blob put", "blob get", "blob TTL", "blob delete"),
    ):
        assert found[check] == {"ok"}, check


def test_doctor_on_s3(run: Run, kafka: KafkaServer, s3: S3Server, tmp_path: Path) -> None:
    """Doctor tries the requests of a job against a real S3 server, and a second put of the same name is refused."""
    config = JobConfig.from_mapping(job_mapping(kafka, tmp_path, s3=s3))
    write_toml(config, tmp_path / "job.toml")
    run("topics", "create")
    result = run("doctor", "--fix", "--json")
    found = findings(result)
    for check in ("blob put", "blob get", "blob overwrite", "blob TTL", "blob delete"):
        assert found[check] == {"ok"}, result.stdout
    assert s3.secret_key not in result.output


def test_doctor_names_what_is_wrong_and_the_fix(run: Run, job: JobConfig, tmp_path: Path) -> None:
    """Doctor reports missing topics and a blob store that it cannot write to, with a fix for the topics and exit status
    1."""
    (tmp_path / "file").write_text("x")
    result = run("doctor", "--json", "--set", f"blob.store.uri=file://{tmp_path}/file/blobs")
    assert result.exit_code == 1
    problems = [entry for entry in json.loads(result.stdout) if entry["status"] == "problem"]
    assert {entry["check"] for entry in problems} >= {"topics", "blobs"}
    assert any("statemgr topics create" in (entry["fix"] or "") for entry in problems)


def problems_of(run: Run, *arguments: str) -> list[dict[str, str]]:
    """The problems that doctor reports, with exit status 1."""
    result = run("doctor", "--json", *arguments)
    assert result.exit_code == 1, result.output
    return [entry for entry in json.loads(result.stdout) if entry["status"] == "problem"]


def test_doctor_reads_the_checkpoint_topic_to_its_end(run: Run, job: JobConfig, running: list[Task]) -> None:
    """FAULT 57: doctor names a record that stops every command, with its offset and the reason."""
    assert findings(run("doctor", "--json"))["checkpoints"] == {"ok"}
    producer = plain_producer(job)
    placed = []
    producer.produce(job.checkpoint_topic, b"?", b"foreign", 0, on_delivery=lambda _, m: placed.append(m.offset()))
    assert producer.flush(10) == 0
    (problem,) = problems_of(run)
    assert problem["check"] == "checkpoints"
    assert f"offset={placed[0]}" in problem["detail"]
    assert "CorruptRecord" in problem["detail"]


def test_a_foreign_record_is_left_out_by_a_repair(run: Run, job: JobConfig, running: list[Task]) -> None:
    """FAULT 57: a foreign record stops commands that read the topic. The repaired topic leaves it out, fences the job
    on the old topic, and has the newest state."""
    before = json.loads(run("checkpoints", "list", "--json").stdout)
    producer = plain_producer(job)
    for key, value in ((b"?", b"foreign"), (b"?", None)):
        producer.produce(job.checkpoint_topic, value, key, 0)
    assert producer.flush(10) == 0
    running[0].store("totals", key_serde="bytes").put(b"later", b"1")
    running[0].commit({"orders-0": 201})
    assert run("checkpoints", "list").exit_code == 4
    dry = json.loads(run("topics", "repair", "--json").stdout)
    assert [entry["key"] for entry in dry["left_out"]] == ["?", "?"]
    assert all(entry["why"] for entry in dry["left_out"])
    new = f"{job.checkpoint_topic}-repaired"
    assert new not in client(job).list_topics(timeout=60).topics
    done = json.loads(run("topics", "repair", "--write", "--json").stdout)
    assert (done["to"], done["left_out"], done["valid"]) == (new, dry["left_out"], dry["valid"])
    with pytest.raises(FencedError):  # nobody can publish to the old topic any more
        running[1].commit({"orders-1": 201})
    there = ("--set", f"task.checkpoint.topic={new}")
    after = json.loads(run("checkpoints", "list", "--json", *there).stdout)
    known = {entry["checkpoint_id"] for entry in before}
    assert {entry["checkpoint_id"] for entry in after} - known
    found = run("store", "get", "totals", "later", "--task", "0", *there)
    assert found.exit_code == 0, found.output
    assert run("topics", "repair", "--write").exit_code == 2  # the new topic already exists


def test_doctor_compares_the_layout_and_the_input_topics(run: Run, unchanged: JobConfig) -> None:
    """Doctor reports a number of tasks that differs from the checkpoints, and an input topic that is missing or has the
    wrong number of partitions."""
    found = {problem["check"]: problem["fix"] for problem in problems_of(run, "--set", "job.tasks=3")}
    assert found["layout"] == "set job.tasks = 2, or `statemgr rescale --tasks 3`"
    topic = f"{unchanged.job_name}-in"
    (problem,) = problems_of(run, "--set", f"task.inputs={topic}")
    assert problem["check"] == "inputs"
    assert "does not exist" in problem["detail"]
    make_topic(unchanged, topic, 5)
    (problem,) = problems_of(run, "--set", f"task.inputs={topic}")
    assert "5 partitions" in problem["detail"]
    make_topic(unchanged, f"{topic}-2", 2)
    result = run("doctor", "--json", "--set", f"task.inputs={topic}-2", "--group", "readers")
    assert (findings(result)["inputs"], findings(result)["group"]) == ({"ok"}, {"ok"}), result.output


@pytest.mark.long
def test_doctor_finds_that_the_group_may_not_be_read(run: Run, own_kafka: Callable[..., Any], tmp_path: Path) -> None:
    """On a broker whose ACL gives the group to somebody else, doctor reports the missing permission."""
    broker = own_kafka(
        **{
            "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
            "allow.everyone.if.no.acl.found": "true",
        }
    )
    config = JobConfig.from_mapping(
        {"job.name": "orders", "kafka.bootstrap.servers": broker.bootstrap_servers, "state.dir": str(tmp_path / "s")}
    )
    write_toml(config, tmp_path / "job.toml")
    run("topics", "create")
    admin = client(config)
    for operation in (AclOperation.READ, AclOperation.DESCRIBE):
        who = "User:somebody" if operation == AclOperation.READ else "User:*"
        acl = AclBinding(
            ResourceType.GROUP, "readers", ResourcePatternType.LITERAL, who, "*", operation, AclPermissionType.ALLOW
        )
        admin.create_acls([acl])[acl].result(30)
    wait_until(lambda: findings(run("doctor", "--json", "--group", "readers"))["group"] == {"problem"})
    (problem,) = [p for p in problems_of(run, "--group", "readers") if p["check"] == "group"]
    assert "READ" in problem["detail"]


def test_doctor_without_a_broker_goes_on(run: Run, job: JobConfig, no_broker: tuple[str, str], tmp_path: Path) -> None:
    """Doctor reports one problem for the broker and still checks the blob store."""
    (tmp_path / "blobs" / "of another job").mkdir(parents=True)  # doctor writes nothing to an empty directory
    result = run("doctor", "--json", *no_broker)
    assert result.exit_code == 1
    found = findings(result)
    assert found["kafka"] == {"problem"}
    assert "transaction" not in found
    assert found["blob put"] == {"ok"}


def test_a_broker_that_is_not_there_is_exit_status_3(run: Run, job: JobConfig, no_broker: tuple[str, str]) -> None:
    """The command prints one error and exits with status 3."""
    result = run("topics", "check", *no_broker)
    assert result.exit_code == 3
    assert result.stderr.count("error:") == 1
