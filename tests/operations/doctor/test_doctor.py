"""What `doctor` reports about this machine and about a blob store, without servers."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner
from confluent_kafka import Message

from statemgr import Task
from statemgr.blobs.file import FileBlobStore
from statemgr.blobs.memory import MemoryBlobStore
from statemgr.cli.main import cli
from statemgr.config import JobConfig
from statemgr.errors import AccessDenied, UnavailableError
from statemgr.flows.opening import open_job
from statemgr.health import checks, verify_blobs
from statemgr.health.checks import CLOCK_TOLERANCE_MS, Finding, Report, Status
from statemgr.kafka import reader
from statemgr.kafka.reader import _Reading
from statemgr.kafka.topics import TopicAdmin, checkpoint_topic_spec
from statemgr.local.machine import SystemClock
from statemgr.operations.doctor import backup_checks
from statemgr.services import Services
from statemgr.testing import JobTester
from statemgr.testing.memory_producer import MemoryProducer
from statemgr.testing.memory_servers import MemoryServers
from tests.commits import TASK

CONFIG: dict[str, object] = {"job.name": "orders", "stores.totals.value.serde": "bytes"}


def config(**given: object) -> JobConfig:
    """Return the configuration of a job called `orders`; `__` stands for a dot."""
    return JobConfig.from_mapping({"job.name": "orders", **{k.replace("__", "."): v for k, v in given.items()}})


def found(check: Callable[..., object], *arguments: object, **options: object) -> list[Finding]:
    """Return what a check reports."""
    report = Report()
    check(report, *arguments, **options)
    return report.findings


@pytest.mark.parametrize("spark", [True, False])
def test_no_java_is_a_problem_only_with_spark(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, spark: bool) -> None:
    """A consumer loop needs no Java, so without Spark this is only a note. The fix says what to install."""
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: object() if spark else None)
    (finding,) = found(checks.check_java)
    assert finding.status is (Status.PROBLEM if spark else Status.NOTE)
    assert "install Java" in (finding.fix or "")


def test_the_disk_is_really_written_to(tmp_path: Path) -> None:
    """A writable directory passes, and the check leaves it empty. A path below a file is a problem."""
    assert {f.status for f in found(checks.check_disk, config(state__dir=str(tmp_path / "state")))} <= {
        Status.OK,
        Status.NOTE,
    }
    assert list((tmp_path / "state").iterdir()) == []
    (tmp_path / "file").write_text("")
    (finding,) = found(checks.check_disk, config(state__dir=str(tmp_path / "file" / "state")))
    assert finding.status is Status.PROBLEM
    assert "state.dir" in (finding.fix or "")


def test_a_full_disk_is_not_about_rights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fix is more space, not other rights."""

    def fill(_directory: Path) -> bool:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(checks, "_try_links", fill)
    (finding,) = found(checks.check_disk, config(state__dir=str(tmp_path)))
    assert (finding.status, finding.fix) == (Status.PROBLEM, "free space, or set state.dir to a larger disk")


def test_little_space_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Little free space is a note; almost none is a problem."""

    class Usage:
        free = 500 * 1024**2

    monkeypatch.setattr("shutil.disk_usage", lambda _path: Usage)
    assert found(checks.check_disk, config(state__dir=str(tmp_path)))[0].status is Status.NOTE
    Usage.free = 1024
    assert found(checks.check_disk, config(state__dir=str(tmp_path)))[0].status is Status.PROBLEM


def test_a_file_system_without_hard_links_is_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without hard links the job still works, so `doctor` only notes it."""

    def refuse(*_: object) -> None:
        raise OSError("no links")

    monkeypatch.setattr(os, "link", refuse)
    assert any("hard links" in finding.detail for finding in found(checks.check_disk, config(state__dir=str(tmp_path))))


def test_clocks_may_differ_a_little() -> None:
    """A difference above the tolerance is a problem, and the finding gives its direction."""
    assert found(checks.check_clock, "the broker's", CLOCK_TOLERANCE_MS)[0].status is Status.OK
    (ahead,), (behind,) = (found(checks.check_clock, "the broker's", skew) for skew in (60_000, -60_000))
    assert ahead.status is behind.status is Status.PROBLEM
    assert "60 s ahead of" in ahead.detail
    assert "60 s behind" in behind.detail


@pytest.mark.parametrize("there", [False, True])
def test_nothing_is_written_to_a_directory_of_blobs_that_is_missing_or_empty(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, there: bool
) -> None:
    """It may be mistyped, or its disk not mounted: a running job would take it for its own."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("doctor writes to it")

    monkeypatch.setattr(FileBlobStore, "put", refuse)
    monkeypatch.setattr(FileBlobStore, "time_ms", refuse)
    if there:
        (tmp_path / "blobs").mkdir()
    (finding,) = found(checks.check_blobs, config(blob__store__uri=(tmp_path / "blobs").as_uri()), fix=False)
    assert finding.status is checks.Status.NOTE
    assert f"{tmp_path / 'blobs'} {'is empty' if there else 'does not exist'}" in finding.detail
    assert "mounted" in str(finding.fix)
    assert (tmp_path / "blobs").exists() == there


def test_a_reference_that_is_not_set_is_one_problem() -> None:
    """It ends neither the other checks nor the list of findings."""
    (finding,) = found(checks.check_blobs, config(blob__store__uri="${env:STATEMGR_NOT_SET}"), fix=False)
    assert (finding.check, finding.status) == ("blobs", Status.PROBLEM)
    assert "STATEMGR_NOT_SET" in finding.detail


def test_every_request_to_the_blob_store_is_tried_and_nothing_stays(tmp_path: Path) -> None:
    """The check puts, gets, overwrites and deletes a blob and removes its TTL. The directory ends up as it was."""
    (tmp_path / "blobs" / "lost+found").mkdir(parents=True)
    findings = found(checks.check_blobs, config(blob__store__uri=(tmp_path / "blobs").as_uri()), fix=False)
    assert {f.check for f in findings} >= {"blob put", "blob get", "blob overwrite", "blob TTL", "blob delete"}
    assert {f.status for f in findings} == {Status.OK}
    assert not [path for path in (tmp_path / "blobs").rglob("*") if path.is_file()]


@pytest.mark.parametrize(
    ("method", "check"),
    [
        ("remove_ttl", "blob TTL"),
        ("get", "blob get"),
        ("delete", "blob delete"),
        ("put", "blobs"),
        ("fix", "blob lifecycle"),
    ],
)
def test_a_refused_request_is_named_with_its_fix(monkeypatch: pytest.MonkeyPatch, method: str, check: str) -> None:
    """One missing permission is one problem. Only the error knows the blob store, and so the right that is missing."""

    def refuse(*_: object, **__: object) -> None:
        raise AccessDenied("403", hint="ask for the right")

    monkeypatch.setattr(MemoryBlobStore, method, refuse)
    findings = found(checks.check_blobs, config(blob__store__uri="memory://doctor"), fix=True)
    problems = [finding for finding in findings if finding.status is Status.PROBLEM]
    assert [(problem.check, problem.fix) for problem in problems] == [(check, "ask for the right")]


def test_a_problem_that_no_command_fixes_names_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as rules that cannot be read: `doctor --fix` would read them first."""
    text = "the bucket's lifecycle rules cannot be read: 403; grant storage.buckets.get"
    monkeypatch.setattr(MemoryBlobStore, "probe", lambda _: [text])
    findings = found(checks.check_blobs, config(blob__store__uri="memory://rules"), fix=False)
    problems = [finding for finding in findings if finding.status is Status.PROBLEM]
    assert [(problem.detail, problem.fix) for problem in problems] == [(text, None)]


def test_other_bytes_than_were_put_are_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    """A blob store that returns other bytes than it received fails the check `blob get`."""
    real = MemoryBlobStore.put

    def spoil(self: MemoryBlobStore, blob_id: str, body: bytes, *, ttl_days: int | None) -> None:
        real(self, blob_id, bytes(reversed(body)), ttl_days=ttl_days)

    monkeypatch.setattr(MemoryBlobStore, "put", spoil)
    findings = found(checks.check_blobs, config(blob__store__uri="memory://spoiled"), fix=False)
    assert [f.check for f in findings if f.status is Status.PROBLEM] == ["blob get"]


def test_without_a_blob_store_there_is_nothing_to_check() -> None:
    """A missing blob store is a note, so that the user can spot a mistyped key."""
    (finding,) = found(checks.check_blobs, config(), fix=False)
    assert finding.status is Status.NOTE


def test_a_blob_that_would_expire_is_a_problem() -> None:
    """It exists, but not for long. The fix is another one than for a damaged blob."""
    wrong = [verify_blobs.Finding(f"orders/1/{n}", "the blob still has a TTL", "Partition 0", "s", "1-0") for n in "ab"]
    for damaged in (0, 1):
        verified = verify_blobs.Verified(damaged=wrong[:damaged], expiring=wrong[damaged:])
        findings = found(backup_checks._report_blobs, verified, 1)
        assert [one.status for one in findings] == [Status.PROBLEM] * 2
        assert "`statemgr gc --fix --write`" in (findings[-1].fix or "")


def opening(config: JobConfig, **changes: object) -> list[str | None]:
    """Return what `doctor` says about an opening with a changed configuration: None if it is well."""
    given = {**config.to_mapping(), **{key.replace("__", "."): value for key, value in changes.items()}}
    findings = found(checks.check_job, JobConfig.from_mapping(given), ())
    return [one.detail if one.status is Status.PROBLEM else None for one in findings if one.check == "opening"]


@pytest.mark.parametrize("factory", ["blob-store", "kafka-changelog"])
def test_an_opening_that_would_be_refused_is_a_problem(tmp_path: Path, factory: str) -> None:
    """`doctor` comes before an upgrade: what `open_task` refuses, it names. That is also a lost checkpoint topic."""
    given = {
        "job.name": "orders",
        "task.inputs": ["orders"],
        "task.backup.factories": [factory],
        "task.restore.factories": [factory],
        "task.commit.snapshot.interval": "1 commit",
        "stores.totals.key.serde": "string",
        "stores.totals.value.serde": "string",
    }

    def process(task: Task, message: Message) -> None:
        task.store("totals").put(message.key().decode(), message.value().decode())

    other = "kafka-changelog" if factory == "blob-store" else "blob-store"
    with JobTester(given, process) as job:
        assert opening(job.config) == [None]
        job.send("orders", "k", "v")
        job.commit()
        assert opening(job.config) == [None]
        for problem, changes in (
            (
                "no restore factory can supply",
                {"task__backup__factories": [other], "task__restore__factories": [other]},
            ),
            ("'other' is not among", {"stores__other__type": "rocksdb"}),
            ("written with the serde 'string'", {"stores__totals__value__serde": "json"}),
        ):
            (detail,) = opening(job.config, **changes)
            assert problem in str(detail)
        changed = JobConfig.from_mapping({**job.config.to_mapping(), "task.checkpoint.topic": "new"})
        with TopicAdmin(changed, SystemClock()) as admin:
            admin.create_missing([checkpoint_topic_spec(changed)])
        (detail,) = opening(changed, state__dir=str(tmp_path))
        assert ("the published blob" if factory == "blob-store" else "the changelog holds 1 records") in str(detail)


def test_a_first_checkpoint_behind_an_open_transaction_is_not_lost(
    servers: MemoryServers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its published blob is there, and whoever reads only what is settled does not see the checkpoint."""
    config = servers.on_disk(servers.config, "one")
    with TopicAdmin(config, SystemClock()) as admin:
        admin.create_missing([checkpoint_topic_spec(config)])
    other = MemoryProducer(servers.broker, {"transactional.id": "other"})
    other.init_transactions()
    look, tell = open_job.refuse_lost_job, _Reading.tell_waiting

    def publish_first(services: Services) -> None:
        monkeypatch.setattr(open_job, "refuse_lost_job", look)
        with servers.manager(config, "kafka-partition") as manager, manager.open_task(TASK) as task:
            other.begin_transaction()
            other.produce(config.checkpoint_topic, b"key", b"value", partition=0)
            task.store("totals").put(b"a", b"1")
            task.commit({"orders-0": 1})
        look(services)

    def end_it(self: _Reading, left_s: float) -> None:
        tell(self, left_s)
        other.abort_transaction()

    monkeypatch.setattr(open_job, "refuse_lost_job", publish_first)
    monkeypatch.setattr(_Reading, "tell_waiting", end_it)
    monkeypatch.setattr(reader, "_PATIENCE_S", 0.1)
    assert opening(config) == [None]


def test_a_blob_store_that_is_gone_holds_up_no_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is asked for signs of earlier state, once: a request of a job is repeated for minutes."""
    asked = []

    def fail(*_: object) -> None:
        asked.append(1)
        raise UnavailableError("gone", bucket="bucket")

    with JobTester(
        {"job.name": "orders", "task.inputs": ["orders"], "task.backup.factories": ["blob-store"]}, print
    ) as job:
        monkeypatch.setattr(MemoryBlobStore, "list", fail)
        (detail,) = opening(job.config, blob__store__uri="memory://gone")
    assert "UnavailableError" in str(detail)
    assert len(asked) == 1


def test_one_problem_makes_the_exit_status_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The JSON lists each problem as one object, and the text ends with their number."""
    (tmp_path / "job.toml").write_text('job.name = "orders"\n')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("statemgr.health.checks.check_java", lambda _report: None)
    result = CliRunner().invoke(cli, ["doctor", "--json"])
    assert result.exit_code == 1
    problems = [entry for entry in json.loads(result.stdout) if entry["status"] == "problem"]
    assert [entry["check"] for entry in problems] == ["kafka"]
    assert "kafka.bootstrap.servers" in problems[0]["detail"]
    people = CliRunner().invoke(cli, ["doctor"])
    assert people.output.rstrip().endswith("1 problem")


def test_the_guard_lets_other_errors_through() -> None:
    """Only typed errors become findings; an error in the program itself is raised."""
    with pytest.raises(ZeroDivisionError), Report().guarded("x"):
        raise ZeroDivisionError
