"""`statemgr permit` writes one-shot permissions to the checkpoint topic, and the next opening uses them up."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from statemgr import JobConfig, StateManager
from statemgr.cli.main import cli
from statemgr.errors import PermissionNeeded, UnavailableError
from statemgr.model.jobs.permissions import Permissions
from statemgr.phases import Phase
from tests.commits import attempt, commit, failing, totals
from tests.jobs import job_mapping, with_changes
from tests.kafka_jobs import delete_records, make_topics, wait_until
from tests.loop_members import make_topic, member, produce
from tests.servers import KafkaServer

TASKS = ("Partition 0", "Partition 1")
Permit = Callable[..., Result]


@pytest.fixture
def config(kafka: KafkaServer, tmp_path: Path) -> JobConfig:
    """Create a job of two tasks with one checkpoint each."""
    found = JobConfig.from_mapping(job_mapping(kafka, tmp_path, tasks=2))
    for number, task in enumerate(TASKS):
        commit(found, {b"a": b"1"}, {f"orders-{number}": 1}, task)
    return found


@pytest.fixture
def permit(config: JobConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Permit:
    """Run `statemgr permit` for the job."""
    lines = [f"{json.dumps(key)} = {json.dumps(value)}" for key, value in config.to_mapping().items()]
    (tmp_path / "job.toml").write_text("\n".join(lines))
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> Result:
        result = CliRunner().invoke(cli, ["permit", *arguments], catch_exceptions=False)
        assert result.exit_code == 0, result.output
        return result

    return run


def waiting(permit: Permit) -> dict[str, list[str]]:
    """Return the permissions that no opening has used up, by task."""
    return {entry["task"]: entry["permissions"] for entry in json.loads(permit("--list", "--json").stdout)}


def with_extra(config: JobConfig) -> JobConfig:
    """Add a store that the checkpoints do not list."""
    return with_changes(config, stores__extra__value__serde="bytes")


def test_a_task_uses_its_permission_up_without_input(config: JobConfig, permit: Permit) -> None:
    """FAULT 31, protocol 6: the owner continues while the permission is given. The next opening commits immediately and
    uses the permission up."""
    more = with_extra(config)
    with StateManager(config) as manager, manager.open_task(TASKS[0]) as running:
        given = json.loads(permit("--task", TASKS[0], "--allow-new-stores", "--json").stdout)
        assert [(entry["task"], entry["permissions"]) for entry in given] == [(TASKS[0], ["allow_new_stores"])]
        running.store("totals").put(b"b", b"2")
        running.commit({"orders-0": 2})  # the owner was not fenced, and uses nothing up
    assert waiting(permit) == {TASKS[0]: ["allow_new_stores"]}
    with StateManager(more) as manager:
        with pytest.raises(PermissionNeeded):
            manager.open_task(TASKS[1])
        with failing(Phase.SEND_CHECKPOINT), pytest.raises(UnavailableError):
            manager.open_task(TASKS[0])
        assert waiting(permit) == {TASKS[0]: ["allow_new_stores"]}  # only a commit uses it up
        with manager.open_task(TASKS[0]) as task:
            assert dict(task.store("extra").range()) == {}
    assert waiting(permit) == {}
    with StateManager(more) as manager, manager.open_task(TASKS[0]) as task:
        assert task.last_checkpoint is not None
        assert task.last_checkpoint.input_offsets == {"orders-0": 2}
    assert totals(config, "blob-store")[TASKS[0]] == {b"a": b"1", b"b": b"2"}


def test_a_loop_skips_lost_input_with_a_permission_on_the_topic(
    config: JobConfig, permit: Permit, kafka: KafkaServer
) -> None:
    """FAULT 51: the input at the checkpoint's offset is deleted. The loop goes on after it with the permission."""
    topic, seen = kafka.fresh_name("in"), list[int]()
    make_topic(kafka, topic, 2)
    produce(kafka, topic, 1, range(20))
    commit(config, {b"b": b"2"}, {f"{topic}-0": 3})
    delete_records(config, topic, 15)
    permit("--task", "0", "--allow-skipped-input")
    stop, errors = member(
        config, kafka.fresh_name("group"), topic, lambda _, message: seen.append(message.offset() or 0)
    )
    wait_until(lambda: len(seen) == 5 or bool(errors))
    stop()
    assert not errors
    assert seen == [*range(15, 20)]


def test_a_whole_job_uses_permissions_up_with_its_first_publish(config: JobConfig, permit: Permit) -> None:
    """FAULT 31: every task has its own permission, and the first publish of the job uses all of them up."""
    more = with_extra(config)
    permit("--task", "0", "--allow-new-stores")
    with StateManager(more) as manager, pytest.raises(PermissionNeeded) as caught:
        manager.acquire()
    assert caught.value.where["task"] == TASKS[1]
    permit("--allow-new-stores")
    with StateManager(more) as manager:
        epoch = manager.acquire()
        assert len(waiting(permit)) == 2
        manager.publish([attempt(more, epoch, task, {b"b": b"2"}, 2) for task in TASKS])
    assert waiting(permit) == {}
    with StateManager(more) as manager:
        manager.acquire()


def test_no_permission_for_a_task_that_the_job_does_not_have(permit: Permit) -> None:
    """It would wait, unseen, for a later layout that has such a task."""
    refused = CliRunner().invoke(cli, ["permit", "--task", "40", "--allow-new-stores"])
    assert refused.exit_code == 2
    assert "so there is no 'Partition 40'" in refused.stderr
    assert waiting(permit) == {}


def test_a_permission_is_taken_back(config: JobConfig, permit: Permit) -> None:
    """--revoke takes back the permissions that wait for the given tasks."""
    permit("--allow-removed-stores", "--allow-new-stores")
    assert waiting(permit) == {task: ["allow_new_stores", "allow_removed_stores"] for task in TASKS}
    assert "revoked" in permit("--task", "1", "--revoke").stdout
    assert list(waiting(permit)) == [TASKS[0]]
    with StateManager(with_extra(config)) as manager, pytest.raises(PermissionNeeded):
        manager.open_task(TASKS[1])


def test_a_permission_of_newer_software(config: JobConfig, permit: Permit, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is refused by an opening of its task alone, which would use it up, and can be taken back."""
    with monkeypatch.context() as newer:
        newer.setattr(Permissions, "names", property(lambda given: ("allow_other_planets",)))
        permit("--allow-new-stores", "--task", TASKS[0])
    assert waiting(permit) == {TASKS[0]: ["allow_other_planets"]}
    commit(config, {b"a": b"2"}, {"orders-1": 2}, TASKS[1])
    with pytest.raises(PermissionNeeded, match="allow_other_planets"):
        commit(config, {b"a": b"2"}, {"orders-0": 2}, TASKS[0])
    permit("--revoke", "--task", TASKS[0])
    commit(config, {b"a": b"2"}, {"orders-0": 2}, TASKS[0])


def test_a_permission_of_a_task_that_the_configuration_has_no_more(permit: Permit) -> None:
    """It can be listed and revoked, so that it does not wait, unseen, for a later layout. A task that never had one is
    a mistake."""
    permit("--task", "1", "--allow-new-stores")
    fewer = ("--set", "job.tasks=1")
    assert TASKS[1] in permit(*fewer, "--list").stdout
    refused = CliRunner().invoke(cli, ["permit", *fewer, "--list", "--task", "40"])
    assert "so there is no 'Partition 40'" in refused.stderr
    assert "revoked" in permit(*fewer, "--revoke", "--task", "1").stdout
    assert waiting(permit) == {}


def test_an_empty_start_is_permitted(config: JobConfig, permit: Permit, kafka: KafkaServer) -> None:
    """FAULT 17, A16: one task may start empty although its state on this machine shows that it had some."""
    other = with_changes(config, task__checkpoint__topic=f"{config.job_name}-other")
    make_topics(other)
    with StateManager(other) as manager:
        with pytest.raises(PermissionNeeded):
            manager.open_task(TASKS[0])
        permit(
            "--set", f"task.checkpoint.topic={other.checkpoint_topic}", "--allow-empty-start", "--overwrite-changelog"
        )
        with manager.open_task(TASKS[0]) as task:
            assert dict(task.store("totals").range()) == {}
    assert totals(other, "kafka-changelog")[TASKS[0]] == {}


def test_what_the_command_refuses(config: JobConfig, permit: Permit) -> None:
    """The command refuses to run without a permission to give, or with two requests at once."""
    for arguments in ([], ["--list", "--revoke"], ["--list", "--allow-new-stores"]):
        assert CliRunner().invoke(cli, ["permit", *arguments]).exit_code == 2
