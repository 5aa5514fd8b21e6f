"""A job's problems: their names, the parts that they blame, and how long statemgr waits for a read of a server."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from statemgr.config import JobConfig
from statemgr.errors import (
    AccessDenied,
    CorruptBlob,
    CorruptRecord,
    DiskFull,
    FencedError,
    MissingBlob,
    MissingState,
    StatemgrError,
    UnavailableError,
)
from statemgr.health.checks import Report, check_disk
from statemgr.health.problems import (
    MOST,
    Fault,
    Pace,
    Point,
    Problem,
    in_order,
    late_ms,
    may_follow,
    of_error,
    of_pace,
    of_report,
    pace_of,
)
from statemgr.health.slow_reads import Patient
from statemgr.ids import CheckpointId
from statemgr.local.machine import SystemClock
from statemgr.model.checkpoint import Checkpoint, CheckpointRecord, Layout
from tests.jobs import with_changes

CONFIG = JobConfig.from_mapping(
    {
        "job.name": "orders",
        "kafka.bootstrap.servers": "one:9092,two:9092",
        "kafka.sasl.password": "hunter2",
        "blob.store.uri": "s3://bucket/prefix",
        "blob.store.s3.endpoint": "http://s3:9000",
        "state.dir": "/data/state",
    }
)
STORE = "s3://bucket/prefix at http://s3:9000"


@pytest.mark.parametrize(
    ("error", "fault", "part"),
    [
        (UnavailableError("away"), Fault.BROKER_GONE, "brokers one:9092,two:9092"),
        (UnavailableError("it has no leader", topic="in", partition=3), Fault.BROKER_GONE, "in-3"),
        (UnavailableError("away", bucket="bucket"), Fault.BLOB_STORE_GONE, STORE),
        (AccessDenied("gone", hint="create it, or correct blob.store.uri"), Fault.BLOB_STORE_GONE, STORE),
        (DiskFull("full", path=Path("/data/x")), Fault.DISK_FULL, "/data/x"),
        (DiskFull("full", bucket="bucket"), Fault.DISK_FULL, STORE),
        (AccessDenied("no", missing_right="Read on topic in"), Fault.MISSING_RIGHTS, "Read on topic in"),
        (
            AccessDenied("no", missing_right="s3:GetObject", bucket="bucket"),
            Fault.MISSING_RIGHTS,
            f"s3:GetObject on {STORE}",
        ),
        (AccessDenied("wrong password"), Fault.MISSING_RIGHTS, "brokers one:9092,two:9092"),
        (AccessDenied("S3 answered 403 RequestTimeTooSkewed"), Fault.WRONG_CLOCK, "this machine's clock"),
        (CorruptRecord("?", topic="t", partition=0, offset=7), Fault.CORRUPT_RECORD, "t-0 offset 7"),
        (CorruptBlob("?", blob="a/b"), Fault.CORRUPT_BLOB, "a/b"),
        (MissingBlob("?", blob="a/b"), Fault.CORRUPT_BLOB, "a/b"),
        (MissingState("?", topic="t"), Fault.OTHER, "t"),
        (FencedError("?"), Fault.OTHER, "orders/1"),
    ],
)
def test_an_error_names_the_fault_and_the_part(error: StatemgrError, fault: Fault, part: str) -> None:
    """The kind of an error and its fields decide both."""
    found = of_error(error, CONFIG)
    assert (found.fault, found.part) == (fault, part)


def test_no_secret_is_in_a_problem() -> None:
    """Messages of other software may repeat a password, so problems hide it."""
    found = of_error(UnavailableError("hunter2 was refused", topic="hunter2", partition=0), CONFIG)
    assert "hunter2" not in found.part + found.detail


def test_causes_come_before_effects_and_long_rows_are_cut() -> None:
    """A thousand late tasks take a few lines, below the missing broker that may be their cause."""
    late = [Problem(Fault.MEMBER_STUCK, f"Partition {number}", "late") for number in range(1000)]
    gone = Problem(Fault.BROKER_GONE, "broker 1", "no answer")
    again = Problem(Fault.BROKER_GONE, "broker 1", "still no answer")
    found = in_order([*late, gone, again])
    assert found[:2] == [gone, late[0]]
    assert found[-1].part == f"{1000 - MOST} more"
    assert len(found) == MOST + 2
    assert may_follow(late[0], found)
    assert not may_follow(gone, found)
    assert not may_follow(late[0], late)


def test_a_lag_grows_only_if_more_arrives_than_is_processed_and_much_waits() -> None:
    """A job that catches up, a short burst and a task that stands still are not reported."""
    assert list(of_pace("Partition 0", ["in-0"], Pace(lag=10_000, arrive=200.0, process=50.0)))
    assert not list(of_pace("Partition 0", ["in-0"], Pace(lag=1_000_000, arrive=10.0, process=50.0)))
    assert not list(of_pace("Partition 0", ["in-0"], Pace(lag=100, arrive=200.0, process=50.0)))
    assert not list(of_pace("Partition 0", ["in-0"], Pace(lag=10_000, arrive=200.0, process=0.0)))


@pytest.mark.parametrize(("gap_ms", "late"), [(1_000, 180_000), (600_000, 1_800_000)])
def test_a_task_is_late_after_three_of_its_intervals(gap_ms: int, late: int) -> None:
    """The interval is task.commit.ms, or the real time between commits if that is longer, as with micro-batches."""
    checkpoints = tuple(
        Checkpoint(CheckpointId(number * gap_ms, number), number, 1, {}, {}, {}, published_ms=number * gap_ms)
        for number in (3, 2, 1)
    )
    record = CheckpointRecord("orders", "1", "Partition 0", Layout(0, 1, "kafka-partition"), checkpoints)
    assert late_ms(record, CONFIG) == late


def test_what_doctor_finds_is_in_the_list() -> None:
    """A typed error names its problem; otherwise the check names it. Notes are left out."""
    report = Report()
    with report.guarded("blob put"):
        raise UnavailableError("no", bucket="bucket")
    report.problem("clock", "the broker's clock is 60 s behind this machine's")
    report.note("disk", "500 MiB free")
    check_disk(report, with_changes(CONFIG, state__dir="/dev/null/state"))
    assert [(one.fault, one.part) for one in of_report(report, CONFIG, "host")] == [
        (Fault.BLOB_STORE_GONE, STORE),
        (Fault.WRONG_CLOCK, "clock on host"),
        (Fault.MISSING_RIGHTS, "directory on host"),
    ], "a directory that cannot be written is no full disk"


def test_a_read_that_hangs_is_waited_for_only_so_long() -> None:
    """A caller gets the waiting time instead of an answer. Later callers get the answer until it is old."""
    release, calls = threading.Event(), []

    def read() -> int:
        calls.append(1)
        release.wait(30)
        return len(calls)

    patient = Patient(read, SystemClock(), fresh_s=3600)
    assert patient.ask(0).value is None
    assert patient.ask(0).waiting_s is not None
    release.set()
    assert (patient.ask(30).value, patient.ask(30).waiting_s) == (1, None)
    assert len(calls) == 1, "a fresh answer is given again"
    again = Patient(read, SystemClock(), fresh_s=-1)
    assert [again.ask(30).value, again.ask(30).value] == [2, 3]


@pytest.mark.parametrize("make", [lambda: UnavailableError("away"), lambda: ZeroDivisionError("bug")])
def test_a_read_that_fails_gives_its_error(make: Callable[[], Exception]) -> None:
    """An error of another library becomes a StatemgrError with the name of its class."""

    def read() -> int:
        raise make()

    error = Patient(read, SystemClock(), fresh_s=0).ask(30).error
    assert isinstance(error, StatemgrError)
    assert error.message in ("away", "ZeroDivisionError: bug")


def test_the_runbook_has_a_section_for_each_fault_in_its_order_and_names_what_exists() -> None:
    """The page and alerts link to the runbook's sections, and the runbook names only metrics of the monitoring page."""
    docs = Path(__file__).parents[2] / "docs"
    runbook = (docs / "runbook.md").read_text()
    assert re.findall(r"^## (.+)$", runbook, re.MULTILINE) == [fault.title for fault in Fault]
    known = set(re.findall(r"^\| `(statemgr_\w+)`", (docs / "monitoring.md").read_text(), re.MULTILINE))
    assert set(re.findall(r"`(statemgr_\w+)", runbook)) <= known
    for section in runbook.split("\n## ")[1:-1]:
        assert "\nWhat to do:\n\n1. " in section
        for row in ("page", "log", "metrics", "commands"):
            assert f"\n| {row} | " in section


def test_a_lag_grows_only_if_it_has_grown_all_the_time() -> None:
    """Two checkpoints, three that are close together, a burst, and a task that catches up, tell nothing."""

    def points(*seconds_lags: tuple[int, int]) -> list[Point]:
        return [Point(at * 1000, at * 10, at * 10 + lag) for at, lag in reversed(seconds_lags)]

    grows = pace_of(points((0, 0), (15, 1500), (30, 3000)))
    assert grows == Pace(lag=3000, arrive=110.0, process=10.0)
    assert pace_of(points((0, 0), (30, 3000))) is None, "two points"
    assert pace_of(points((0, 0), (1, 100), (2, 200))) is None, "no window"
    assert pace_of(points((0, 0), (15, 9), (30, 3000))) is None, "a burst just now"
    assert pace_of(points((0, 3000), (15, 2000), (30, 1000))) is None, "it catches up"
    assert pace_of(points((0, 0), (10, 5000), (20, 4000), (30, 3000), (40, 2000))) is None, (
        "it catches up after a burst"
    )
