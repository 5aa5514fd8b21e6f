"""Retained and kept checkpoints survive a rescale and the way back, and garbage collection leaves what they need."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from statemgr import JobConfig, StateManager
from statemgr.cli.main import cli
from statemgr.ids import task_name
from statemgr.kafka.checkpoint_topic import CheckpointTopic
from statemgr.local.machine import SystemClock
from statemgr.model.checkpoint import Checkpoint
from tests.blob_ages import names, time_passes
from tests.cli.test_running_job import write_toml
from tests.commits import attempt, commit, current, totals
from tests.jobs import SEGMENTS
from tests.operations.rescale.test_rescale import State, commit_all, fill, job, keys_of, merged, some_state, written
from tests.servers import KafkaServer

BLOBS = ("blob-store",)


def command(*arguments: str, status: int = 0) -> Any:
    """Run a command with the job in `job.toml`. Returns: its JSON, or what it wrote to stderr if it must fail."""
    done = CliRunner().invoke(cli, [*arguments, "--json"], catch_exceptions=False)
    assert done.exit_code == status, done.output
    return done.stderr if status else json.loads(done.stdout)


@pytest.fixture
def config(kafka: KafkaServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> JobConfig:
    """A job of two tasks that retains three checkpoints, with `job.toml` in the current directory."""
    made = job(kafka, tmp_path, 2, backup=BLOBS, kind=SEGMENTS, task__checkpoint__retained=3)
    write_toml(made, tmp_path / "job.toml")
    monkeypatch.chdir(tmp_path)
    return made


def retained(config: JobConfig, task: str) -> list[Checkpoint]:
    """Return the checkpoints that a task retains, newest first."""
    record = current(config, task)
    assert record is not None
    return list(record.checkpoints)


def ids(checkpoints: list[Checkpoint]) -> list[str]:
    """Return their IDs."""
    return [str(checkpoint.checkpoint_id) for checkpoint in checkpoints]


def history(config: JobConfig) -> tuple[list[State], list[str]]:
    """Commit four states and keep the first one of each task. Returns: the states, and the kept IDs."""
    states = [{**some_state(60), b"at": b"%d" % number} for number in range(4)]
    fill(config, states[0])
    kept = [ids(retained(config, task_name(task)))[0] for task in range(config.tasks)]
    for one in kept:
        command("checkpoints", "tag", one, "--keep")
    for number, state in enumerate(states[1:], 1):
        fill(config, state, 7 + 10 * number)
    return states, kept


@pytest.mark.long
def test_undo_returns_with_all_retained_and_kept_checkpoints(
    config: JobConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After rescale and undo, the job can go back to each checkpoint that it could go back to before. Garbage
    collection leaves the replaced layout alone as long as it keeps a checkpoint."""
    states, kept = history(config)
    before = {task: retained(config, task) for task in map(task_name, range(2))}
    assert [len(found) for found in before.values()] == [4, 4], "three retained, and one kept"
    assert command("rescale", "--tasks", "3", "--write")["kept"] == sorted(kept)
    blobs = names(config)
    with monkeypatch.context() as later:
        time_passes(later)
        for _ in range(2):
            (layout,) = command("gc", "--write")["layouts"]
            assert (layout["collected"], layout["kept"]) == (False, sorted(kept))
    assert names(config) == blobs
    command("rescale", "--undo", "--write")
    back = written(tmp_path)
    for task, found in before.items():
        now = retained(back, task)
        assert ids(now)[1:] == ids(found), "the newest repeats the one before it"
        assert [one.published_ms for one in now[1:]] == [one.published_ms for one in found], "not the time of the undo"
    assert merged(totals(back, "blob-store")) == states[-1]
    for one, state in [(kept, states[0]), ([ids(found)[1] for found in before.values()], states[2])]:
        command("checkpoints", "rollback", *(word for at in one for word in ("--to", at)), "--write")
        assert merged(totals(back, "blob-store")) == state
    fill(back, states[3], 90)
    assert all(len(retained(back, task)) == 4 for task in before), "retention goes on as before"


@pytest.mark.long
def test_a_kept_checkpoint_of_an_older_layout_is_reached_and_released(
    config: JobConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After two rescales, --undo --checkpoint brings the layout of a kept checkpoint back. A release lets garbage
    collection collect the layout."""
    states, kept = history(config)
    command("rescale", "--tasks", "3", "--write")
    command("rescale", "--tasks", "4", "--write")
    listed = CliRunner().invoke(cli, ["checkpoints", "list"], catch_exceptions=False).output
    assert "--undo --checkpoint" in " ".join(listed.split())
    assert all(one in listed for one in kept)
    assert "retains checkpoint" in command("rescale", "--undo", "--checkpoint", "1700000000000-123456", status=4)
    assert command("rescale", "--undo", "--checkpoint", kept[0])["tasks"] == 2
    assert command("checkpoints", "tag", kept[0], "--drop") == [{"task": "Partition 0", "kept": []}]
    with monkeypatch.context() as later:
        time_passes(later)
        assert [layout["collected"] for layout in command("gc", "--write")["layouts"]] == [False, True], (
            "one task keeps one"
        )
    command("rescale", "--undo", "--checkpoint", kept[1], "--write")
    back = written(tmp_path)
    assert back.tasks == 2
    command("checkpoints", "rollback", "--to", kept[1], "--task", "1", "--write")
    assert totals(back, "blob-store")["Partition 1"] == keys_of(1, 2, states[0])
    command("rescale", "--tasks", "3", "--write")
    command("checkpoints", "tag", kept[1], "--drop")
    with monkeypatch.context() as later:
        time_passes(later)
        assert [layout["collected"] for layout in command("gc", "--write")["layouts"]] == [True, True]


@pytest.mark.long
def test_job_records_come_along(config: JobConfig, tmp_path: Path) -> None:
    """Tasks that were published together share a job record on the returned layout, too. Later publishes delete it with
    the last checkpoint that refers to it."""
    states = [{**some_state(60), b"at": b"%d" % number} for number in range(3)]
    with StateManager(config) as manager:
        made = [commit_all(config, manager, state, number) for number, state in enumerate(states)]
    command("rescale", "--tasks", "3", "--write")
    command("rescale", "--undo", "--write")
    back = written(tmp_path)
    assert ids(retained(back, "Partition 0"))[1:] == ids(retained(back, "Partition 1"))[1:] == made[::-1]
    command("checkpoints", "rollback", "--to", made[0], "--write")
    assert merged(totals(back, "blob-store")) == states[0]
    with StateManager(back) as manager:
        for number in range(3):
            commit_all(back, manager, states[number], 10 + number)
    with closing(CheckpointTopic(back, SystemClock())) as log:
        log.read()
        assert set(log.job_records()) == {one.sequence for one in retained(back, "Partition 0")}


@pytest.mark.long
def test_output_that_the_newer_layout_has_deleted(config: JobConfig, tmp_path: Path) -> None:
    """Output of a micro-batch in a blob: the new layout repeats it, and deletes it with its own. The checkpoints that
    come back with --undo name none that is gone, so that garbage collection finds nothing missing."""

    def publish(at: JobConfig, batches: range) -> None:
        with StateManager(at) as manager:
            epoch = manager.acquire()
            checkpoints = epoch.checkpoints
            for batch in batches:
                rows = {"output-0": b"%d" % batch * 300_000}
                prepared = [
                    attempt(
                        at, epoch, task_name(task), keys_of(task, at.tasks, some_state(60)), batch, rows, checkpoints
                    )
                    for task in range(at.tasks)
                ]
                checkpoints = manager.publish(prepared)
                epoch = epoch.after_publish()

    publish(config, range(3))
    command("rescale", "--tasks", "3", "--write")
    publish(written(tmp_path), range(3, 7))
    command("rescale", "--undo", "--write")
    back = written(tmp_path)
    outputs = [[a.name for a in one.attachments if a.blob is not None] for one in retained(back, "Partition 0")]
    assert outputs == [[], [], ["output-0"], ["output-0"]], "what only the old layout had is there"
    assert command("gc")["missing"] == []


def test_one_task_goes_back_alone_after_tasks_were_merged(kafka: KafkaServer, tmp_path: Path) -> None:
    """A merged task has several partitions of the old input, which no other task reads: it can go back alone. A
    checkpoint that only one task retains says how."""
    config = job(kafka, tmp_path, 4, backup=BLOBS, kind=SEGMENTS)
    fill(config, some_state(60))
    write_toml(config, tmp_path / "job.toml")
    at = ("--config", str(tmp_path / "job.toml"))
    command("rescale", "--tasks", "2", "--write", *at)
    merged_ = written(tmp_path)
    assert set(retained(merged_, "Partition 0")[0].input_offsets) == {"orders-0", "orders-2"}
    for number in range(2):
        offsets = {"orders-0": 7, "orders-2": 9, "new-0": number}
        commit(merged_, {b"at": b"%d" % number}, offsets, "Partition 0")
    target = ids(retained(merged_, "Partition 0"))[1]
    assert "--task" in command("checkpoints", "rollback", "--to", target, *at, status=4)
    command("checkpoints", "rollback", "--to", target, "--task", "0", "--write", *at)
    assert totals(merged_, "blob-store")["Partition 0"][b"at"] == b"0"
