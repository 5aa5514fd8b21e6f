"""A warm standby keeps up with an owner, disturbs nobody, and makes a takeover local."""

from __future__ import annotations

import json
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from statemgr import JobConfig, StateManager
from statemgr.cli.main import cli
from statemgr.engine import open_attempt
from statemgr.errors import MissingError, MissingState
from statemgr.operations.standby import standby as flow
from statemgr.operations.standby.process import Standby
from statemgr.operations.standby.standby import Followed
from statemgr.phases import Phase, observed
from tests.cli.test_running_job import write_toml
from tests.commits import TASK, blob_files, commit, write
from tests.core.crash.model import STORES, state
from tests.core.crash.test_kill import ROOT, start
from tests.jobs import ALL, DUAL, contents, elsewhere, job_mapping, with_changes
from tests.kafka_jobs import wait_until
from tests.servers import KafkaServer

#: Too large to be inlined, so that a restore fetches blobs.
LARGE = {b"%03d" % n: random.Random(n).randbytes(3000) for n in range(100)}


class Follow:
    """``statemgr standby`` in a separate process, and the lines that it has printed."""

    def __init__(self, config: JobConfig, file: Path) -> None:
        write_toml(config, file)
        command = [sys.executable, "-m", "statemgr", "standby", "--config", str(file), "--json"]
        self._process = subprocess.Popen([*command, "--interval", "0.1"], cwd=ROOT, stdout=subprocess.PIPE, text=True)
        self.lines: list[dict[str, Any]] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                self.lines.append(json.loads(line))

    def has(self, sequence: int) -> bool:
        """Whether the standby has caught up with the checkpoint of this sequence number."""
        return any(line["sequence"] == sequence and line["error"] is None for line in self.lines)

    def stop(self) -> int:
        """Send SIGTERM. Returns: the exit status."""
        self._process.send_signal(signal.SIGTERM)
        status = self._process.wait(60)
        self._reader.join(10)
        return status


@contextmanager
def running(standby: Standby) -> Iterator[list[Followed]]:
    """Follow in a thread. Yields: the reports so far."""
    reports: list[Followed] = []
    thread = threading.Thread(target=standby.run, args=(reports.append, 0.05), daemon=True)
    thread.start()
    try:
        yield reports
    finally:
        standby.stop()
        thread.join(60)
        assert not thread.is_alive()


def brought(turn: list[Followed]) -> Followed:
    """Return the only task's part of a turn, after a check that it has not failed."""
    [followed] = turn
    assert followed.error is None
    return followed


@pytest.mark.parametrize(
    ("factory", "kind"), [pytest.param(*of, marks=pytest.mark.long if of == ALL[1] else ()) for of in ALL]
)
def test_a_killed_owner_is_taken_over_without_fetching(
    kafka: KafkaServer, tmp_path: Path, factory: str, kind: str
) -> None:
    """The standby's machine has the complete last checkpoint, so a takeover opens the local directories."""
    mapping = job_mapping(kafka, tmp_path, backup=(factory,), kind=kind, stores=STORES)
    config = JobConfig.from_mapping(mapping)
    other = with_changes(config, state__dir=str(tmp_path / "other"))
    following = Follow(other, tmp_path / "job.toml")
    child = start(mapping, 99, Phase.FLUSH, 13)  # with two stores, this is in the seventh commit
    assert child.wait(120) == -signal.SIGKILL
    wait_until(lambda: following.has(6))
    assert following.stop() == 0
    with StateManager(other) as manager, manager.open_task(TASK) as task:
        assert {(restored.factory, restored.bytes_fetched) for restored in task.restored} == {("local", 0)}
        assert task.last_checkpoint is not None
        assert task.last_checkpoint.input_offsets == {"input-0": 6}
        for store in STORES:
            assert dict(task.store(store).range()) == state(store, 6)


def test_only_new_blobs_are_fetched(kafka: KafkaServer, tmp_path: Path) -> None:
    """From one checkpoint to the next, the standby links files that it already has, and deletes older states."""
    config = JobConfig.from_mapping(job_mapping(kafka, tmp_path, backup=("blob-store",)))
    other = elsewhere(config, tmp_path / "other", "blob-store")
    with StateManager(config) as manager, manager.open_task(TASK) as task, Standby(other) as standby:
        write(task, LARGE)
        first_checkpoint = task.commit({"orders-0": 1})
        [first] = brought(standby.once()).stores
        assert first.factory == "blob-store"
        assert standby.once() == [], "nothing is new"
        write(task, {b"one": b"more"})
        second_checkpoint = task.commit({"orders-0": 2})
        followed = brought(standby.once())
        [second] = followed.stores
        assert followed.checkpoint == second_checkpoint
        assert second.bytes_reused > 0
        assert second.bytes_fetched < first.bytes_fetched / 2
        committed = {path.name for path in (tmp_path / "other").rglob("committed/*") if path.is_dir()}
        assert committed == {second_checkpoint.stores["totals"]}
        assert first_checkpoint.stores["totals"] not in committed
        assert (
            standby.metrics.registry.get_sample_value(
                "statemgr_standby_sequence", {"job": config.job_name, "task": TASK}
            )
            == second_checkpoint.sequence
        )
        task.commit({"orders-0": 3})  # the standby fenced nobody
    assert contents(other)[0]["totals"] == {**LARGE, b"one": b"more"}


def test_an_executor_on_the_same_machine_fetches_nothing(kafka: KafkaServer, tmp_path: Path) -> None:
    """An attempt at a micro-batch finds what the standby has fetched."""
    config = JobConfig.from_mapping(job_mapping(kafka, tmp_path, backup=("blob-store",)))
    commit(config, dict(LARGE), 1)
    other = elsewhere(config, tmp_path / "other", "blob-store")
    with Standby(other) as standby:
        brought(standby.once())
    with StateManager(config) as manager:
        epoch = manager.acquire()
        with open_attempt(other, TASK, epoch.checkpoints[TASK], epoch) as opened:
            assert [(restored.factory, restored.bytes_fetched) for restored in opened.restored] == [("local", 0)]
            assert opened.stores["totals"].get(b"042") == LARGE[b"042"]


def test_a_clean_up_during_a_fetch_is_no_error(kafka: KafkaServer, tmp_path: Path) -> None:
    """The blobs of a checkpoint are deleted while the standby fetches them. It continues with the newer checkpoint, and
    does not try the next factory, which would replay the complete changelog for a state that nobody needs."""
    config = JobConfig.from_mapping(job_mapping(kafka, tmp_path, backup=DUAL, task__checkpoint__retained=1))
    other = elsewhere(config, tmp_path / "other", ["blob-store", "kafka-changelog"])
    phases: list[Phase] = []
    with StateManager(config) as manager, manager.open_task(TASK) as task, Standby(other) as standby:
        write(task, LARGE)
        task.commit({"orders-0": 1})
        first = blob_files(tmp_path)

        def meanwhile(phase: Phase, subject: str) -> None:
            if phase is Phase.FETCH and Phase.FETCH not in phases:
                for number in range(2, 50):  # until a compaction has replaced the first commit's file
                    write(task, {key: value[::-1] for key, value in LARGE.items()})
                    task.commit({"orders-0": number})
                    if not first & blob_files(tmp_path):
                        break
            phases.append(phase)

        with observed(meanwhile):
            followed = brought(standby.once())
        assert followed.checkpoint == task.last_checkpoint
        assert [restored.factory for restored in followed.stores] == ["blob-store"]
        assert phases.count(Phase.FETCH) == 2
        assert Phase.REPLAY not in phases


def test_beside_the_owner_on_the_same_directories(kafka: KafkaServer, tmp_path: Path) -> None:
    """Neither the owner nor a standby removes what the other needs: the directory of a commit in progress, or what was
    just fetched."""
    config = JobConfig.from_mapping(job_mapping(kafka, tmp_path, backup=("blob-store",)))
    go_on = threading.Event()
    held = threading.Event()

    def hold(phase: Phase, subject: str) -> None:
        if phase is Phase.BEGIN:
            held.set()
            assert go_on.wait(30)

    with StateManager(config) as manager, manager.open_task(TASK) as task, Standby(config) as standby:
        write(task, LARGE)
        task.commit({"orders-0": 1})
        write(task, {b"a": b"1"})
        with observed(hold):
            future = task.commit_async({"orders-0": 2})
            assert held.wait(30)
            [first] = brought(standby.once()).stores  # it tidies up, and knows only the first commit
            assert first.factory == "local"
            go_on.set()
            second = future.result(30)
        committed = tmp_path / "state" / config.job_name / "1"
        assert [path.parent.name for path in committed.rglob(second.stores["totals"])] == ["committed"]
        with Standby(config) as another, running(standby) as reports, running(another) as more:
            for number in range(3, 13):
                write(task, {b"%03d" % number: b"x" * number})
                last = task.commit({"orders-0": number})
            wait_until(lambda: all(any(r.checkpoint == last for r in found) for found in (reports, more)))
            assert [report.error for report in (*reports, *more) if report.error is not None] == []
    with StateManager(config) as manager, manager.open_task(TASK) as task:
        assert [restored.factory for restored in task.restored] == ["local"]
        assert task.store("totals").get(b"012") == b"x" * 12


def test_two_standbys_on_the_same_directories(kafka: KafkaServer, tmp_path: Path) -> None:
    """Both standbys keep up. Each finds what the other has fetched, and neither removes it."""
    config = JobConfig.from_mapping(job_mapping(kafka, tmp_path, backup=("blob-store",)))
    other = elsewhere(config, tmp_path / "other", "blob-store")
    with StateManager(config) as manager, manager.open_task(TASK) as task, Standby(other) as one, Standby(other) as two:
        with running(one) as reports, running(two) as more:
            for number in range(10):
                write(task, LARGE if number == 0 else {b"%03d" % number: b"new"})
                last = task.commit({"orders-0": number})
            wait_until(lambda: all(any(r.checkpoint == last for r in found) for found in (reports, more)))
        assert [report.error for report in (*reports, *more) if report.error is not None] == []
    with StateManager(other) as manager, manager.open_task(TASK) as task:
        assert [restored.factory for restored in task.restored] == ["local"]
        assert len(list(task.store("totals").range())) == 100


def test_what_vanishes_is_fetched_again(kafka: KafkaServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Local directories are a cache. The standby checks them again, even without a new checkpoint."""
    config = JobConfig.from_mapping(job_mapping(kafka, tmp_path, backup=("blob-store",)))
    commit(config, dict(LARGE), 1)
    other = elsewhere(config, tmp_path / "other", "blob-store")
    monkeypatch.setattr(flow, "_LOOK_AGAIN_S", 0.0)
    with Standby(other) as standby:
        brought(standby.once())
        assert standby.once() == [], "all is there"
        shutil.rmtree(tmp_path / "other")
        [again] = brought(standby.once()).stores
        assert again.factory == "blob-store"


def test_errors_are_shown_and_tried_again(kafka: KafkaServer, tmp_path: Path) -> None:
    """The job does not exist yet, or blobs are lost. The standby reports it, and continues when they are there."""
    config = JobConfig.from_mapping(job_mapping(kafka, tmp_path, backup=("blob-store",), tasks=2))
    other = elsewhere(config, tmp_path / "other", "blob-store")
    with Standby(other) as standby, running(standby) as reports:
        wait_until(lambda: bool(reports))
        assert reports[0].task is None
        assert isinstance(reports[0].error, MissingState)
        checkpoint = commit(config, dict(LARGE), 1)
        wait_until(lambda: any(report.checkpoint == checkpoint for report in reports))
        (tmp_path / "blobs").rename(tmp_path / "away")
        (tmp_path / "blobs" / config.job_name).mkdir(parents=True)  # empty, it would be a disk that is not mounted
        shutil.rmtree(tmp_path / "other")
    with Standby(other) as standby, running(standby) as reports:
        wait_until(lambda: bool(reports))
        assert reports[0].task == TASK
        assert isinstance(reports[0].error, MissingError)
        shutil.rmtree(tmp_path / "blobs")
        (tmp_path / "away").rename(tmp_path / "blobs")
        wait_until(lambda: reports[-1].error is None)
        failures = {"job": config.job_name}
        assert (
            standby.metrics.registry.get_sample_value("statemgr_standby_failures_total", failures) == len(reports) - 1
        )
    assert contents(other)[0]["totals"] == LARGE


def test_a_stop_breaks_off_what_is_under_way(kafka: KafkaServer, tmp_path: Path) -> None:
    """The standby reports nothing, and commits nothing that is half fetched. The next start goes on, and tidies up."""
    config = JobConfig.from_mapping(job_mapping(kafka, tmp_path, backup=("blob-store",)))
    commit(config, dict(LARGE), 1)
    other = elsewhere(config, tmp_path / "other", "blob-store")
    reports: list[Followed] = []
    with Standby(other) as standby:

        def stop(phase: Phase, subject: str) -> None:
            if phase is Phase.FETCH:
                standby.stop()

        with observed(stop):
            standby.run(reports.append, 60.0)
    assert reports == []
    assert list((tmp_path / "other").rglob("committed/*")) == []
    with Standby(other) as standby:
        assert brought(standby.once()).stores[0].factory == "blob-store"
    assert list((tmp_path / "other").rglob("staging/*")) == []


@pytest.mark.parametrize("signals", [[signal.SIGTERM], [signal.SIGINT], [signal.SIGTERM, signal.SIGINT]])
def test_signals_end_it_while_no_broker_answers(tmp_path: Path, signals: list[signal.Signals]) -> None:
    """A service manager waits some seconds, and a person presses Ctrl-C again: the second signal does not wait."""
    config = {"job.name": "orders", "kafka.bootstrap.servers": "127.0.0.1:1", "stores.totals.type": "memory"}
    write_toml(JobConfig.from_mapping({**config, "state.dir": str(tmp_path)}), tmp_path / "job.toml")
    patient = "from statemgr.operations.standby import command; command._LAST_LOOKS = 10_000;" if signals[1:] else ""
    program = f"{patient}from statemgr.cli.main import cli; cli.main()"
    command = [sys.executable, "-c", program, "standby", "--config", str(tmp_path / "job.toml")]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert "following the job" in process.stderr.readline()
        for number in signals:
            time.sleep(0.5)
            process.send_signal(number)
        try:
            assert process.wait(10) == 0
        finally:
            process.kill()


def test_the_command_fetches_once(kafka: KafkaServer, tmp_path: Path) -> None:
    """``--once`` fetches the current checkpoint and ends, with output for people or for machines. A task that has not
    committed is no failure in either."""
    config = JobConfig.from_mapping(job_mapping(kafka, tmp_path, backup=("blob-store",), tasks=2))
    commit(config, dict(LARGE), 1)
    write_toml(elsewhere(config, tmp_path / "other", "blob-store"), tmp_path / "job.toml")

    def run(*arguments: str) -> Any:
        command = ["standby", "--config", str(tmp_path / "job.toml"), "--once", *arguments]
        return CliRunner().invoke(cli, command, catch_exceptions=False)

    result = run("--json", "--task", "0")
    assert result.exit_code == 0
    line = json.loads(result.stdout)
    assert (line["task"], line["sequence"], line["error"]) == (TASK, 1, None)
    assert line["stores"]["totals"]["from"] == "blob-store"
    assert line["stores"]["totals"]["bytes_fetched"] > 0
    result = run()
    assert result.exit_code == 0
    assert "0 bytes fetched" in result.stdout
    assert "(local)" in result.stdout
    result = run("--task", "1")
    assert result.exit_code == 0
    assert "no checkpoint of the task yet" in result.stderr
    result = run("--task", "1", "--json")
    assert result.exit_code == 0
    line = json.loads(result.stdout)
    assert (line["task"], line["checkpoint_id"], line["error"]) == ("Partition 1", None, None)
