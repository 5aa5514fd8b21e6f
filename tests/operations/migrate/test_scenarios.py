"""Moves between backends: older software in between, both lists changed at once, and interrupted dual commits."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from statemgr import JobConfig, StateManager
from statemgr.cli.main import cli
from statemgr.errors import MissingState, UnavailableError
from statemgr.phases import Phase
from tests.commits import TASK, blob_files, commit, current, failing, referenced, totals
from tests.core.integration.test_scenarios_versions import older_software
from tests.jobs import DUAL, job_mapping, with_changes
from tests.kafka_jobs import committed, state_of
from tests.servers import KafkaServer

CHANGELOG, BLOBS = "kafka-changelog", "blob-store"


def migrate(config: JobConfig, directory: Path, command: str) -> tuple[int, dict[str, Any]]:
    """Run a ``statemgr migrate`` command for a job. Returns: its exit status and its JSON."""
    file = directory / "job.toml"
    file.write_text("\n".join(f"{json.dumps(k)} = {json.dumps(v)}" for k, v in config.to_mapping().items()))
    result = CliRunner().invoke(cli, ["migrate", command, "--config", str(file), "--json"], catch_exceptions=False)
    return result.exit_code, json.loads(result.stdout)


def test_an_upgrade_and_a_way_back_to_older_software(kafka: KafkaServer, tmp_path: Path) -> None:
    """A43: the job writes both versions, so software that knows only changelogs can continue. The upgrade then fills
    the blobs again, and both backends hold what the older software wrote."""
    mapping = job_mapping(kafka, tmp_path, task__checkpoint__write__versions=[1, 2])
    config = JobConfig.from_mapping(mapping)
    commit(config, {b"a": b"1", b"b": b"1"}, 1)
    older_software(config, b"a", b"older", 2)
    assert migrate(config, tmp_path, "verify")[0] == 1, "the blobs do not have what older software wrote"
    commit(config, {b"c": b"3"}, 3)
    for backend in DUAL:
        assert totals(config, backend)[TASK] == {b"a": b"older", b"b": b"1", b"c": b"3"}
    assert migrate(config, tmp_path, "verify")[0] == 0


@pytest.mark.parametrize("backup", [DUAL, (BLOBS,)], ids=["dual commit", "blobs alone"])
def test_both_lists_at_once_are_refused(kafka: KafkaServer, tmp_path: Path, backup: tuple[str, ...]) -> None:
    """A44, invariant 8: a first deployment that restores from blobs alone has nothing to restore from. The plan says so
    before the job does, nothing is written, and the old configuration still works."""
    config = JobConfig.from_mapping(job_mapping(kafka, tmp_path, backup=(CHANGELOG,)))
    commit(config, {b"a": b"1"}, 1)
    at_once = with_changes(config, task__backup__factories=list(backup), task__restore__factories=[BLOBS])
    status, plan = migrate(at_once, tmp_path, "plan")
    assert status == 1
    unmet = {one["name"]: one["fix"] for one in plan["preconditions"] if not one["met"]}
    assert "restore" in unmet
    before = current(config)
    with StateManager(at_once) as manager, pytest.raises(MissingState, match="no restore factory") as refused:
        manager.open_task(TASK)
    assert refused.value.hint
    assert CHANGELOG in refused.value.hint
    assert current(config) == before
    commit(config, {b"b": b"2"}, 2)
    assert totals(config, CHANGELOG)[TASK] == {b"a": b"1", b"b": b"2"}


@pytest.mark.parametrize(
    "phase", [Phase.SEND_CHECKPOINT, pytest.param(Phase.REMOVE_TTL, marks=pytest.mark.long), Phase.DELETE_BLOBS]
)
def test_a_dual_commit_that_is_cut_off(kafka: KafkaServer, tmp_path: Path, phase: Phase) -> None:
    """A45: a job with a transactional changelog and blobs fails during a commit or its clean-up. Neither backend has
    part of a failed commit, and the next owner finishes the clean-up."""
    config = JobConfig.from_mapping(job_mapping(kafka, tmp_path, task__checkpoint__retained=1))
    commit(config, {b"a": b"1"}, 1)
    with StateManager(config) as manager, manager.open_task(TASK) as task:
        task.store("totals").put(b"a", b"2")
        with failing(phase), suppress(UnavailableError):
            task.commit({"orders-0": 2})
    expected = {b"a": b"1" if phase is Phase.SEND_CHECKPOINT else b"2"}
    assert state_of(committed(config, config.stores["totals"].changelog_topic)) == expected
    assert migrate(config, tmp_path, "verify")[0] == 0
    with StateManager(config) as manager, manager.open_task(TASK) as task:
        assert dict(task.store("totals").range()) == expected
    assert blob_files(tmp_path, expiring=False) == referenced(config)
    assert migrate(config, tmp_path, "verify")[0] == 0
