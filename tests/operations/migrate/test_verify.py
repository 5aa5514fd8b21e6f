"""``statemgr migrate verify`` compares the state in both backends, on a real broker and a real S3 server."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner
from confluent_kafka import Producer

from statemgr import JobConfig, StateManager
from statemgr.cli.main import cli
from statemgr.errors import MissingState
from statemgr.model.checkpoint import ChangelogMarker
from statemgr.operations.migrate.verify import StoreToVerify, StoreVerified
from statemgr.operations.migrate.verify_command import _verified
from statemgr.wiring import WorkerProcesses
from tests import model_samples as sample
from tests.commits import TASK, commit, current, publish_by_hand
from tests.jobs import SEGMENTS, job_mapping, with_changes
from tests.kafka_jobs import send
from tests.servers import KafkaServer, S3Server

CHANGELOG, BLOBS = "kafka-changelog", "blob-store"
ROWS: dict[bytes, bytes | None] = {f"key-{number:03}".encode(): b"v%d" % number for number in range(200)}
Verify = Callable[..., tuple[int, dict[str, Any]]]


@pytest.fixture
def verify(tmp_path: Path) -> Verify:
    """Run the command for a job. Returns: its exit status and its JSON."""

    def run(config: JobConfig, *arguments: str) -> tuple[int, dict[str, Any]]:
        file = tmp_path / "job.toml"
        file.write_text("\n".join(f"{json.dumps(k)} = {json.dumps(v)}" for k, v in config.to_mapping().items()))
        command = ["migrate", "verify", "--config", str(file), "--json", *arguments]
        result = CliRunner().invoke(cli, command, catch_exceptions=False)
        return result.exit_code, json.loads(result.stdout)

    return run


def tampered(config: JobConfig, records: list[tuple[bytes, bytes | None]]) -> None:
    """Add records that the job's blobs do not have, below the changelog marker of its current checkpoint."""
    topic = config.stores["totals"].changelog_topic
    send(config, topic, records)
    record = current(config)
    assert record is not None
    checkpoint = record.current
    marker = checkpoint.marker(CHANGELOG, "totals")
    assert isinstance(marker, ChangelogMarker)
    markers = {name: dict(stores) for name, stores in checkpoint.state_checkpoint_markers.items()}
    markers[CHANGELOG]["totals"] = replace(marker, offset=marker.offset + 1 + len(records), newest_ms=None)
    publish_by_hand(config, replace(record, checkpoints=(replace(checkpoint, state_checkpoint_markers=markers),)))
    current(config)  # waits until the transaction is settled on the partition, as the command does not


def test_several_tasks_and_stores_are_equal(kafka: KafkaServer, s3: S3Server, tmp_path: Path, verify: Verify) -> None:
    """A48: before the dual commit ends, the command finds tasks and stores equal while the job runs. The test has
    segments on S3, deletes and an empty store."""
    mapping = job_mapping(kafka, tmp_path, stores=("totals", "counts"), tasks=2, s3=s3, kind=SEGMENTS)
    config = JobConfig.from_mapping(mapping)
    with StateManager(config) as manager:
        for number in range(2):
            task = manager.open_task(f"Partition {number}")
            task.store("totals").put_many([(key, value or b"") for key, value in ROWS.items()])
            task.commit({f"orders-{number}": 1})
            task.store("totals").delete(b"key-007")
            task.store("totals").put(b"key-008", b"other %d" % number)
            task.commit({f"orders-{number}": 2})
        status, found = verify(config)
        assert status == 0
        assert found["equal"]
        places = [(one["task"], one["store"]) for one in found["stores"]]
        assert places == [(f"Partition {n}", name) for n in range(2) for name in ("counts", "totals")]
        for one in found["stores"]:
            assert set(one["backends"]) == {CHANGELOG, BLOBS}
            assert {backend["keys"] for backend in one["backends"].values()} == {199 if one["store"] == "totals" else 0}
        hashes = {one["backends"][BLOBS]["hash"] for one in found["stores"] if one["store"] == "totals"}
        assert len(hashes) == 2
        status, found = verify(config, "--task", "1", "--store", "totals", "--against", "raw-topic")
        assert status == 0
        assert [set(one["backends"]) for one in found["stores"]] == [{"raw-topic", BLOBS}]
        task.store("totals").put(b"a", b"1")
        task.commit({"orders-1": 3})  # verify fenced nobody


@pytest.mark.parametrize(
    ("records", "key", "changelog", "blobs"),
    [
        pytest.param([(b"key-500", b"12345")], "key-500", 5, None, marks=pytest.mark.long),
        pytest.param([(b"key-007", None)], "key-007", None, 2, marks=pytest.mark.long),
        ([(b"key-007", b"other")], "key-007", 5, 2),
    ],
    ids=["an extra key", "a missing key", "another value"],
)
def test_a_difference_is_found_and_named(
    kafka: KafkaServer, tmp_path: Path, verify: Verify, records: Any, key: str, changelog: int | None, blobs: int | None
) -> None:
    """In either direction, the exit status is 1 and the output has the key and the value size on each side."""
    config = JobConfig.from_mapping(job_mapping(kafka, tmp_path))
    commit(config, ROWS, 1)
    tampered(config, records)
    status, found = verify(config)
    assert status == 1
    assert not found["equal"]
    (one,) = found["stores"]
    assert one["differences"] == [{"key": key, "value_sizes": {CHANGELOG: changelog, BLOBS: blobs}}]
    status, found = verify(config, "--against", "raw-topic")
    assert status == 1
    assert found["stores"][0]["differences"] == [{"key": key, "value_sizes": {"raw-topic": changelog, BLOBS: blobs}}]


@pytest.mark.long
def test_the_keys_that_differ_are_shown_to_people(kafka: KafkaServer, tmp_path: Path, verify: Verify) -> None:
    """The output names as many keys as the user asks for, and ends with a verdict."""
    config = JobConfig.from_mapping(job_mapping(kafka, tmp_path))
    commit(config, ROWS, 1)
    tampered(config, [(f"new-{number}".encode(), b"1") for number in range(5)])
    verify(config)  # writes the configuration
    command = ["migrate", "verify", "--config", str(tmp_path / "job.toml"), "--differences", "2"]
    shown = CliRunner().invoke(cli, command, catch_exceptions=False)
    assert shown.exit_code == 1
    assert "key new-0: kafka-changelog has 1 bytes, blob-store lacks it" in shown.stdout
    assert shown.stdout.count("lacks it") == 2
    assert "1 of 1 store not proved equal" in shown.stdout


def test_a_retained_checkpoint(kafka: KafkaServer, tmp_path: Path, verify: Verify) -> None:
    """The command compares an older checkpoint by its own state. One that is not retained gives exit status 4."""
    config = JobConfig.from_mapping(job_mapping(kafka, tmp_path))
    first = commit(config, ROWS, 1)
    commit(config, {b"key-000": None, b"more": b"1"}, 2)
    status, found = verify(config, "--checkpoint", str(first.checkpoint_id))
    assert status == 0
    assert {backend["keys"] for backend in found["stores"][0]["backends"].values()} == {200}
    file = str(tmp_path / "job.toml")
    missing = ["migrate", "verify", "--config", file, "--checkpoint", "1700000000000-000001"]
    assert CliRunner().invoke(cli, missing, catch_exceptions=False).exit_code == 4


def test_a_checkpoint_that_compaction_may_have_changed(kafka: KafkaServer, tmp_path: Path, verify: Verify) -> None:
    """Invariant 11: if the changelog cannot supply the older state exactly, the command says so, as a restore does."""
    config = JobConfig.from_mapping(job_mapping(kafka, tmp_path, stores__totals__changelog__min__compaction__lag__ms=0))
    first = commit(config, ROWS, 1)
    commit(config, {b"key-000": None}, 2)
    status, found = verify(config, "--checkpoint", str(first.checkpoint_id))
    assert status == 4
    assert "an exact rewind is impossible" in found["stores"][0]["problem"]
    assert not found["equal"]


def test_nothing_to_compare_proves_nothing(kafka: KafkaServer, tmp_path: Path, verify: Verify) -> None:
    """A store that no checkpoint has yet gives exit status 4, and a negative number of keys is refused."""
    config = JobConfig.from_mapping(job_mapping(kafka, tmp_path))
    commit(config, ROWS, 1)
    verify(with_changes(config, stores__later__value__serde="bytes"))  # writes the configuration
    command = ["migrate", "verify", "--config", str(tmp_path / "job.toml")]
    unknown = CliRunner().invoke(cli, [*command, "--store", "later"])
    assert unknown.exit_code == 4
    assert "the checkpoints have no state of these stores" in unknown.stderr
    assert CliRunner().invoke(cli, [*command, "--differences", "-1"]).exit_code == 2


def test_a_transaction_that_stays_open_is_not_waited_for(kafka: KafkaServer, tmp_path: Path, verify: Verify) -> None:
    """A transaction behind the checkpoint stays open and may last for minutes. The command does not wait for it."""
    config = JobConfig.from_mapping(job_mapping(kafka, tmp_path))
    commit(config, ROWS, 1)
    topic = config.stores["totals"].changelog_topic
    settings = {"transactional.id": f"{topic}-hangs", "transaction.timeout.ms": 600_000}
    hanging = Producer({"bootstrap.servers": kafka.bootstrap_servers} | settings)
    hanging.init_transactions(30)
    hanging.begin_transaction()
    hanging.produce(topic, b"open", b"key", 0)
    hanging.flush()
    assert verify(config)[0] == 0
    hanging.abort_transaction(30)


def test_one_backend_alone_proves_nothing(kafka: KafkaServer, tmp_path: Path, verify: Verify) -> None:
    """With one backend alone, the exit status is 1. The changelog can still be compared with what a plain consumer
    reads."""
    config = JobConfig.from_mapping(job_mapping(kafka, tmp_path, backup=(CHANGELOG,)))
    commit(config, ROWS, 1)
    status, found = verify(config)
    assert status == 1
    assert "only kafka-changelog has this state" in found["stores"][0]["problem"]
    status, found = verify(config, "--against", "raw-topic")
    assert status == 0
    assert set(found["stores"][0]["backends"]) == {CHANGELOG, "raw-topic"}


def test_blobs_are_compared_with_a_topic_that_no_checkpoint_names(
    kafka: KafkaServer, tmp_path: Path, verify: Verify
) -> None:
    """In stage 4, the command reads the changelog to its end."""
    dual = JobConfig.from_mapping(job_mapping(kafka, tmp_path))
    commit(dual, ROWS, 1)
    blobs = with_changes(dual, task__backup__factories=[BLOBS], task__restore__factories=[BLOBS])
    commit(blobs, {b"key-000": b"newer"}, 2)
    status, found = verify(blobs, "--against", "raw-topic")
    assert status == 1
    assert found["stores"][0]["differences"] == [{"key": "key-000", "value_sizes": {"raw-topic": 2, BLOBS: 5}}]


def test_a_large_changelog_is_read_in_ranges(
    kafka: KafkaServer, tmp_path: Path, verify: Verify, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several processes read ranges of offsets, with control records and overwritten keys at the borders."""
    monkeypatch.setattr("statemgr.operations.migrate.verify._WORTH_SPLITTING", 50)
    monkeypatch.setattr("statemgr.operations.migrate.verify._RANGE", 40)
    config = JobConfig.from_mapping(job_mapping(kafka, tmp_path))
    with StateManager(config) as manager, manager.open_task(TASK) as task:
        for number in range(15):
            task.store("totals").put_many([(b"key-%d" % n, b"%d" % number) for n in range(number, number + 20)])
            task.commit({"orders-0": number})
    for arguments in ((), ("--against", "raw-topic")):
        status, found = verify(config, *arguments)
        assert (status, found["equal"]) == (0, True)
        assert {backend["keys"] for backend in found["stores"][0]["backends"].values()} == {34}


def test_a_damaged_blob_is_exit_status_4(kafka: KafkaServer, tmp_path: Path, verify: Verify) -> None:
    """A backend that cannot supply the state is not a difference; the output names the problem."""
    config = JobConfig.from_mapping(job_mapping(kafka, tmp_path))
    commit(config, ROWS, 1)
    for path in (tmp_path / "blobs").rglob("*"):
        if path.is_file() and not path.name.startswith("."):
            path.unlink()
    status, found = verify(config)
    assert status == 4
    assert "blob" in found["stores"][0]["problem"]


def test_a_task_that_a_rescale_removes_meanwhile() -> None:
    """Its state cannot be read any more, and the job has no newer one."""

    def lost(_: StoreToVerify) -> StoreVerified:
        raise MissingState("the blob is gone")

    verifier: Any = SimpleNamespace(verify=lost)
    reader: Any = SimpleNamespace(records=dict)
    wanted = StoreToVerify(sample.RECORD, sample.CHECKPOINT, "totals", (BLOBS, CHANGELOG))
    found = _verified(verifier, reader, wanted, newest=True)
    assert isinstance(found.problem, MissingState)
    assert "the task was removed" in found.problem.message
    assert found.failed


def test_a_process_that_is_killed(
    kafka: KafkaServer, tmp_path: Path, verify: Verify, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When the system kills a helper process, for lack of memory for example, the command prints one line, without a
    traceback, and its exit status is 3."""
    config = JobConfig.from_mapping(job_mapping(kafka, tmp_path))
    commit(config, ROWS, 1)
    verify(config)  # writes the configuration
    submit = WorkerProcesses.submit

    def killed(self: WorkerProcesses, *work: Any) -> Any:
        return submit(self, _die)

    monkeypatch.setattr(WorkerProcesses, "submit", killed)
    command = ["migrate", "verify", "--config", str(tmp_path / "job.toml")]
    result = CliRunner().invoke(cli, command, catch_exceptions=False)
    assert result.exit_code == 3
    assert "a process that took part was killed" in result.stderr


def _die(_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)
