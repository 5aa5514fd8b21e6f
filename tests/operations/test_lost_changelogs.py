"""Changelogs that are cut, deleted or created again: owners notice it, write the whole state again, and say so."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from click.testing import CliRunner

from statemgr import JobConfig, StateManager
from statemgr.cli.main import cli
from statemgr.engine import coordinator
from statemgr.engine.task import Task
from statemgr.errors import MissingState, RetryableError
from statemgr.model.checkpoint import ChangelogMarker, Checkpoint
from statemgr.operations.standby.followed_store import FollowedStore
from statemgr.phases import Phase
from tests.commits import TASK, failing, write
from tests.jobs import contents, elsewhere, job_mapping
from tests.kafka_jobs import client, delete_records, recreate, wait_until
from tests.servers import KafkaServer

CHANGELOG = "kafka-changelog"
STATE = {b"%03d" % number: b"value" for number in range(200)}


@pytest.fixture
def config(kafka: KafkaServer, tmp_path: Path) -> JobConfig:
    """Return a job that has its state in a changelog alone."""
    mapping = job_mapping(kafka, tmp_path, backup=[CHANGELOG])
    del mapping["blob.store.uri"]
    return JobConfig.from_mapping(mapping)


def topic_of(config: JobConfig) -> str:
    """Return the changelog."""
    return config.stores["totals"].changelog_topic


def filled(task: Task) -> int:
    """Return where the last fill of the changelog began."""
    checkpoint = task.last_checkpoint
    marker = checkpoint.marker(CHANGELOG, "totals") if checkpoint else None
    assert isinstance(marker, ChangelogMarker)
    return marker.start


def committed(config: JobConfig) -> None:
    """Commit the state, and close the task."""
    with StateManager(config) as manager, manager.open_task(TASK) as task:
        write(task, STATE)
        task.commit({"orders-0": 1})


def assert_restorable(config: JobConfig, directory: Path, state: dict[bytes, bytes]) -> None:
    """Another machine restores exactly this state."""
    assert contents(elsewhere(config, directory, CHANGELOG))[0] == {"totals": state}


def test_a_cut_changelog_is_written_again_at_an_opening(
    config: JobConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Most of the changelog is deleted while the local copy is whole: the opening says so and writes the whole state
    again, so that the state outlives the machine."""
    committed(config)
    delete_records(config, topic_of(config), 150)
    with StateManager(config) as manager, manager.open_task(TASK) as task:
        assert filled(task) > 150
        assert "records were deleted, and not by compaction" in caplog.text
        write(task, {b"more": b"value"})
        task.commit({"orders-0": 2})
        assert filled(task) > 150
    shutil.rmtree(config.state_dir)
    assert_restorable(config, tmp_path / "elsewhere", {**STATE, b"more": b"value"})


def test_without_a_local_copy_the_hint_is_for_this_job(config: JobConfig, tmp_path: Path) -> None:
    """A job without a blob store gets no advice to use one."""
    committed(config)
    delete_records(config, topic_of(config), 150)
    with (
        StateManager(elsewhere(config, tmp_path / "elsewhere", CHANGELOG)) as manager,
        pytest.raises(MissingState, match="records were deleted") as refused,
    ):
        manager.open_task(TASK)
    assert refused.value.hint
    assert "blob-store" not in refused.value.hint
    assert "local copy" in refused.value.hint


def cut(config: JobConfig) -> None:
    """Delete the first records."""
    delete_records(config, topic_of(config), 150)


def recreated(config: JobConfig) -> None:
    """Delete the changelog and create it again."""
    recreate(config, topic_of(config))


def deleted(config: JobConfig) -> None:
    """Delete the changelog."""
    admin = client(config)
    admin.delete_topics([topic_of(config)])[topic_of(config)].result(30)
    wait_until(lambda: topic_of(config) not in admin.list_topics(timeout=60).topics)


@pytest.mark.parametrize("harm", [cut, recreated, pytest.param(deleted, marks=pytest.mark.long)])
def test_a_running_owner_notices_and_repairs(
    config: JobConfig,
    tmp_path: Path,
    harm: Callable[[JobConfig], None],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """An idle owner looks from time to time, says what the changelog has lost, and writes the whole state again."""
    monkeypatch.setattr(coordinator, "LOOK_S", 0.2)
    with StateManager(config) as manager, manager.open_task(TASK) as task:
        write(task, STATE)
        before = task.commit({"orders-0": 1})
        harm(config)
        wait_until(lambda: task.last_checkpoint is not before and not task.damage.pairs)
        errors = [one.getMessage() for one in caplog.records if one.levelno == logging.ERROR]
        assert any(topic_of(config) in message and "has lost state" in message for message in errors), errors
    assert_restorable(config, tmp_path / "elsewhere", STATE)


@pytest.mark.parametrize("changes", [1, pytest.param(1000, marks=pytest.mark.long)])
def test_a_changelog_made_anew_under_a_committing_owner(config: JobConfig, tmp_path: Path, changes: int) -> None:
    """However many changes a commit has, it is refused, and the next one writes the whole state."""
    more = {b"more-%d" % number: b"value" for number in range(changes)}
    with StateManager(config) as manager, manager.open_task(TASK) as task:
        write(task, STATE)
        task.commit({"orders-0": 1})
        recreate(config, topic_of(config))
        write(task, more)
        with pytest.raises(RetryableError, match="created again"):
            task.commit({"orders-0": 2})
        task.commit({"orders-0": 2})
        for number in range(3, 6):
            write(task, {b"last": b"%d" % number})
            task.commit({"orders-0": number})
    state = {**STATE, **more, b"last": b"5"}
    assert contents(config)[0] == {"totals": state}  # its own records are not foreign
    assert_restorable(config, tmp_path / "elsewhere", state)


def test_an_empty_changelog_made_anew_under_a_living_owner(config: JobConfig, tmp_path: Path) -> None:
    """The first records of a changelog have the same offsets as those of another one. The commit that writes them is
    refused, and the one after it writes the whole state: no opening takes the job's own records for foreign ones."""
    with StateManager(config) as manager, manager.open_task(TASK) as task:
        task.commit({"orders-0": 1})
        recreate(config, topic_of(config))
        write(task, STATE)
        with pytest.raises(RetryableError):
            task.commit({"orders-0": 2})
        task.commit({"orders-0": 2})
    with StateManager(config) as manager:
        manager.open_task(TASK)
    assert_restorable(config, tmp_path / "elsewhere", STATE)


def test_a_cut_after_an_aborted_commit(config: JobConfig, tmp_path: Path) -> None:
    """The next commit cannot find out what the deleted records were. It is refused, and the one after it writes the
    whole state."""
    with StateManager(config) as manager, manager.open_task(TASK) as task:
        write(task, STATE)
        task.commit({"orders-0": 1})
        write(task, {b"more": b"value"})
        with failing(Phase.SEND_CHECKPOINT), pytest.raises(RetryableError):
            task.commit({"orders-0": 2})
        delete_records(config, topic_of(config), len(STATE) + 3)  # with the ends of two transactions
        with pytest.raises(RetryableError):
            task.commit({"orders-0": 2})
        task.commit({"orders-0": 2})
    assert_restorable(config, tmp_path / "elsewhere", {**STATE, b"more": b"value"})


def test_a_check_finds_what_a_commit_does_not(config: JobConfig, tmp_path: Path) -> None:
    """`check_up` asks the brokers, also about a store that does not change."""
    with StateManager(config) as manager, manager.open_task(TASK) as task:
        write(task, STATE)
        task.commit({"orders-0": 1})
        cut(config)
        task.damage.suspect()
        wait_until(task.check_up)
        assert filled(task) > 150
    assert_restorable(config, tmp_path / "elsewhere", STATE)


def test_every_command_that_looks_names_a_cut_changelog(
    config: JobConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`top`, `doctor` and `snapshots verify` name the task, the store and what was lost, and after the repair they do
    not."""
    monkeypatch.chdir(tmp_path)
    lines = [f"{json.dumps(key)} = {json.dumps(value)}" for key, value in config.to_mapping().items()]
    (tmp_path / "job.toml").write_text("\n".join(lines))

    def lost() -> dict[str, list[str]]:
        """Run each command. Returns: what it says about lost records."""
        top = json.loads(CliRunner().invoke(cli, ["top", "--json"]).stdout)
        doctor = json.loads(CliRunner().invoke(cli, ["doctor", "--json"]).stdout)
        verified = CliRunner().invoke(cli, ["snapshots", "verify", "--json"])
        assert verified.exit_code == (4 if json.loads(verified.stdout)["lost"] else 0)
        return {
            "top": [f"{one['part']}: {one['detail']}" for one in top["problems"] if one["fault"] == "topic-damaged"],
            "doctor": [one["detail"] for one in doctor if (one["check"], one["status"]) == ("changelogs", "problem")],
            "verify": [f"{one['task']} {one['store']} {one['problem']}" for one in json.loads(verified.stdout)["lost"]],
        }

    committed(config)
    assert not any(lost().values())
    cut(config)
    for name, found in lost().items():
        assert len(found) == 1, name
        assert TASK in found[0]
        assert "totals" in found[0]
        assert "records were deleted, and not by compaction" in found[0]
    with StateManager(config) as manager:
        manager.open_task(TASK)
    assert not any(lost().values())


def test_a_copy_of_before_a_cut_is_not_continued(config: JobConfig) -> None:
    """The fill after a cut has no delete for a key whose records are gone, so no replay begins on an older copy."""
    with StateManager(config) as manager, manager.open_task(TASK) as task, FollowedStore(config, "totals") as copy:

        def follow(checkpoint: Checkpoint) -> None:
            def there() -> bool:
                with suppress(MissingState):
                    copy.refresh()
                return copy.checkpoints.get(TASK) == checkpoint

            wait_until(there)

        write(task, STATE)
        follow(task.commit({"orders-0": 1}))
        delete_records(config, topic_of(config), len(STATE))
        write(task, {b"000": None})
        task.damage.found(CHANGELOG, "totals", "it was cut")
        follow(task.commit({"orders-0": 2}))
        assert copy.get_many([b"000", b"001"]) == [None, b"value"]
