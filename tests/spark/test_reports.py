"""Every number in a batch report is right for a known input, wherever a user reads it."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pyspark.sql import DataFrame, Row
from pyspark.sql.streaming import StatefulProcessor

from spark_integration import BatchReport, RunningQuery, StatefulQueryListener
from spark_integration.observing import Observers
from spark_integration.reports import TaskReport
from statemgr.local.machine import SystemClock
from statemgr.telemetry.metrics import Metrics
from tests.jobs import DUAL
from tests.spark.conftest import Pipeline
from tests.spark.processors import Comparison

COUNTS = "id string, count bigint"
WATERMARKS = [None, 1_704_067_210_000, 1_704_067_230_000]  # 2024-01-01, 10 and 30 seconds after midnight


class CountingOnce(StatefulProcessor):
    """Counts a key's rows with one look-up and one change per key. The first row with n = 99 fails once."""

    def __init__(self, failed: Path) -> None:
        self.failed = failed

    def init(self, handle: Any) -> None:
        self.state = handle.getValueState("count", "count bigint")

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Row]:  # noqa: N802, N803
        numbers = [row.n for row in rows]
        if 99 in numbers and not self.failed.exists():
            self.failed.touch()
            raise ValueError("once")
        before = self.state.get()
        count = (before[0] if before else 0) + len(numbers)
        self.state.update((count,))
        yield Row(id=key[0], count=count)


def a_report_and_its_observers() -> tuple[TaskReport, Observers, Metrics]:
    """Return a task's report, the observers of a query, and their metrics."""
    task = TaskReport("Partition 0", 0, 1, 0, 1, 1, 1, 1, 10, 1024, 1, 0, 0.0, 0.0, 0.0, 0.0, ())
    metrics = Metrics("j", "j/of-this-test", None, SystemClock())
    return task, Observers(SimpleNamespace(metrics=metrics, clock=SystemClock()), None), metrics  # type: ignore[arg-type]


def test_snapshots_of_executors_are_counted() -> None:
    """The report of an attempt has the snapshots that its process has made or failed to make since the last one."""
    task, observers, metrics = a_report_and_its_observers()
    ended = (("Partition 0", "totals", 1.5, None), ("Partition 1", "totals", None, "DiskFull"))
    task = TaskReport.from_json(replace(task, snapshots=ended).to_json())
    observers.observe(BatchReport("j", 0, 0, False, 0, None, 0.0, 0.0, 0.0, {}, (task,)))
    number = metrics.registry.get_sample_value
    for outcome in ("made", "failed"):
        assert number("statemgr_materializations_total", {"job": "j", "outcome": outcome}) == 1
    assert number("statemgr_failures_total", {"job": "j", "kind": "DiskFull"}) == 1
    seconds = {"job": "j", "task": "Partition 0", "store": "totals"}
    assert number("statemgr_materialization_seconds", seconds) == 1.5
    metrics.close()


def test_reports_of_many_tasks_are_few() -> None:
    """The reports that are kept have a bounded number of tasks. The last one is always there."""
    task, observers, _ = a_report_and_its_observers()
    observers._measure = lambda report: None  # type: ignore[method-assign]
    kept = []
    for number, tasks in enumerate([1] * 200 + [8_000] * 4 + [30_000, 0]):
        observers.observe(BatchReport("j", number, number, False, 0, None, 0.0, 0.0, 0.0, {}, (task,) * tasks))
        kept.append(len(observers.recent))
        assert observers.recent[-1].batch_id == number
    assert kept[199:] == [100, 100, 100, 2, 2, 1, 1]


class Kept(StatefulQueryListener):
    """Keeps the reports that it gets, and fails at the first one."""

    def __init__(self) -> None:
        self.reports: list[BatchReport] = []

    def onBatch(self, report: BatchReport) -> None:  # noqa: N802
        self.reports.append(report)
        if len(self.reports) == 1:
            raise ValueError("a listener that fails")


def tables(state: Path, which: Callable[[Iterable[Path]], Path]) -> int:
    """Return the bytes of the table files in one local copy of each task.

    ``min`` selects the copies with which the last attempts began, ``max`` the ones that they left.
    """
    copies = [which(copy for copy in of.iterdir() if copy.is_dir()) for of in state.rglob("committed")]
    return sum(table.stat().st_size for copy in copies for table in copy.glob("*.sst"))


def test_every_number_of_a_batch(
    pipeline: Callable[..., Pipeline], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Every number is right in the list, at a listener, in the metrics and in the log.

    The batches: a plain one; one whose task ran twice; and one with late rows, restored on another machine from the
    second factory, which also fills the first.
    """
    job = pipeline(tasks=2, partitions=1, backup=["kafka-changelog"])
    comparison = Comparison(job, watermark="0 seconds")
    times = [(10, "a"), (10, "a"), (10, "b"), (10, "c"), (30, "b"), (11, "b"), (12, "b"), (13, "d")]
    times += [(10, "a"), (5, "b"), (40, "b"), (11, "c")]
    rows = [
        {"id": key, "n": 99 if number == 4 else 0, "t": f"2024-01-01T00:00:{second:02}Z"}
        for number, (second, key) in enumerate(times)
    ]
    processor = CountingOnce(tmp_path / "failed")
    caplog.set_level(logging.INFO, logger="spark_integration")
    listener, removed, added = Kept(), Kept(), threading.Event()

    def started(running: RunningQuery) -> None:
        for one in (listener, removed):
            running.addListener(one)
        running.removeListener(removed)
        added.set()

    def write(df: DataFrame, sequence: int) -> None:
        assert added.wait(60)

    comparison.produce(rows[:8])
    first = comparison.run(processor, COUNTS, "EventTime", write=write, started=started)
    assert first.lastBatch is first.recentBatches[1]
    comparison.produce(rows[8:])
    changes = {
        "state.dir": str(tmp_path / "elsewhere"),
        "task.backup.factories": list(DUAL),
        "task.restore.factories": ["blob-store", "kafka-changelog"],
    }
    config = type(job.config).from_mapping({**job.config.to_mapping(), **changes})
    second = comparison.run(processor, COUNTS, "EventTime", config=config)
    reports = first.recentBatches + second.recentBatches

    def each(name: str) -> list[Any]:
        return [getattr(report, name) for report in reports]

    assert each("job") == [job.config.job_name] * 3
    assert [(report.batch_id, report.sequence, report.replayed) for report in reports] == [
        (0, 1, False), (1, 2, False), (2, 3, False),
    ]  # fmt: skip
    assert [list(report.input_offsets.values()) for report in reports] == [[4], [8], [12]]
    assert each("watermark_ms") == WATERMARKS
    assert each("input_rows") == [4, 4, 4]
    assert each("late_rows") == [0, 0, 2]
    assert each("output_rows") == each("keys_read") == each("keys_written") == [3, 2, 2]
    assert each("keys_estimated")[0] == 3
    assert 4 <= each("keys_estimated")[2] <= 6
    assert each("retries") == [0, 1, 0]
    assert each("commit_requests") == [0, 0, 2]
    blobs = [path.stat().st_size for path in (tmp_path / "blobs").rglob("*") if path.is_file()]
    assert each("commit_bytes") == [0, 0, sum(blobs)]
    assert len(blobs) == 2
    assert min(each("inline_bytes")) > 0
    assert each("state_bytes")[1] == tables(tmp_path / "state", min)
    assert each("state_bytes")[2] == tables(tmp_path / "elsewhere", max), "a backend was filled from a directory"
    for report in reports:
        assert [task.task for task in report.tasks] == ["Partition 0", "Partition 1"]
        assert report.slowest is max(report.tasks, key=lambda task: task.seconds)
        assert 0 < report.slowest.seconds <= report.stage_seconds
        assert min(report.publish_seconds, report.output_seconds) > 0
        for task in report.tasks:
            assert min(task.input_seconds, task.open_seconds, task.process_seconds, task.prepare_seconds) > 0
    factories = [[one.factory for one in report.restored] for report in reports]
    assert factories == [["empty"] * 2, ["local"] * 2, ["kafka-changelog"] * 2]
    assert sum(one.records for one in reports[2].restored) == 5
    assert [(list(one.reasons), one.bytes_reused) for one in reports[2].restored] == [(["blob-store"], 0)] * 2
    assert (listener.reports, removed.reports) == (list(first.recentBatches), [])
    shown = json.loads(json.dumps(reports[1].to_dict()))
    assert (shown["retries"], shown["tasks"][1]["restored"][0]["factory"]) == (1, "local")
    assert shown["slowest"] == reports[1].slowest.task  # type: ignore[union-attr]

    lines = [record.getMessage() for record in caplog.records if getattr(record, "event", None) == "committed"]
    job_name = job.config.job_name
    assert [lines[0], lines[-1]] == [str(reports[0]), str(reports[2])]
    assert all(line.startswith(f"{job_name}: batch ") for line in lines)  # the second, after 30 s or at the close
    assert "4 rows in (2 late), 2 out; 2 keys read, 2 written" in lines[-1]
    assert [record.getMessage() for record in caplog.records if "Kept failed" in record.getMessage()]
    values = [metrics_of(running) for running in (first, second)]
    assert values[0] | {"seconds": None} == {
        "batches/published": 2, "batches/replayed": 0,
        "batch_rows/input": 8, "batch_rows/late": 0, "batch_rows/output": 5,
        "batch_keys/read": 5, "batch_keys/written": 5, "batch_retries": 1, "watermark_seconds": 1_704_067_210,
        "restores/empty/new": 2, "restores/local/local-copy": 2, "commit_changes": 2, "commit_requests": 0,
        "commit_uploaded_bytes": 0, "state_keys": reports[1].keys_estimated, "state_bytes": reports[1].state_bytes,
        "seconds": None,
    }  # fmt: skip
    assert values[0]["seconds"] == {"stage", "publish", "output", "open", "process", "prepare"}
    assert values[1]["commit_uploaded_bytes"] == sum(blobs)
    assert (values[1]["restores/kafka-changelog/absent"], values[1]["batch_rows/late"]) == (2, 2)
    same_names_as_a_consumer_loop(second)


def same_names_as_a_consumer_loop(running: RunningQuery) -> None:
    """Check that the driver also has metrics for tasks, their age, and the blob requests of executors. With the trigger
    `availableNow`, it says that it ends by itself."""
    registry = running._manager.metrics.registry
    found = {sample.name: sample.labels for metric in registry.collect() for sample in metric.samples}
    wanted = {
        "statemgr_tasks", "statemgr_last_commit_timestamp_seconds", "statemgr_restore_progress_ratio",
        "statemgr_blob_requests_total", "statemgr_blob_bytes_total", "statemgr_publish_seconds_count",
        "statemgr_ends_by_itself",
    }  # fmt: skip
    assert wanted <= found.keys()
    put = {"job": running._manager.config.job_name, "operation": "put", "outcome": "ok"}
    assert registry.get_sample_value("statemgr_blob_requests_total", put) == 2
    assert registry.get_sample_value("statemgr_tasks", {"job": put["job"]}) == 2


def metrics_of(running: RunningQuery) -> dict[str, Any]:
    """Return name and kind → value, summed over the tasks. ``seconds`` holds the phases that took more than 0 s."""
    found: dict[str, Any] = {"seconds": set()}
    names = ("batch", "state_", "watermark", "restores", "commit_")
    for metric in running._manager.metrics.registry.collect():
        name = metric.name.removeprefix("statemgr_")
        for sample in metric.samples:
            if not name.startswith(names) or sample.name.endswith("_created"):
                continue
            if name in ("batch_seconds", "commit_seconds"):
                found["seconds"] |= {sample.labels["phase"]} if sample.value > 0 else set()
                continue
            kinds = [value for label, value in sample.labels.items() if label not in ("job", "task")]
            if name == "restores" and not sample.value:
                continue
            key = "/".join([name, *kinds])
            found[key] = found.get(key, 0) + sample.value
    return {name: value for name, value in found.items() if not name.startswith(("commit_blocked", "commits"))}
