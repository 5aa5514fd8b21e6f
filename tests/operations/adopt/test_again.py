"""``statemgr adopt`` after it has published: a second run, a lost acknowledgement, and an old job that goes on."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from statemgr import StateManager
from statemgr.cli.main import cli
from statemgr.errors import PermissionNeeded
from statemgr.operations.adopt import adopt as flow
from statemgr_tools.dev.kafka import KafkaBroker
from tests.core.integration.test_faults_outcomes import NEVER_ABORTS, before_commit
from tests.old_jobs import Adopter, commit, make, state, write
from tests.servers import KafkaServer

TOTALS = {b"a": b"1", b"b": b"2"}
TASKS = ("Partition 0", "Partition 1")


def stopped(kafka: KafkaServer, directory: Path, name: str) -> Adopter:
    """An old job whose group has read ten of twenty rows in each of two partitions."""
    make(kafka, f"{name}-totals", min__compaction__lag__ms="14400000")
    make(kafka, f"{name}-in", cleanup__policy="delete")
    for partition in (0, 1):
        write(kafka, f"{name}-totals", partition, list(TOTALS.items()))
        write(kafka, f"{name}-in", partition, [(b"a", b"row")] * 20)
    commit(kafka, name, {(f"{name}-in", 0): 10, (f"{name}-in", 1): 10})
    return Adopter(kafka, directory, "--from", "raw", "--job", name, "--changelog", f"totals={name}-totals")


@pytest.fixture
def name(kafka: KafkaServer) -> str:
    """The name of the old job."""
    return kafka.fresh_name("old")


@pytest.mark.parametrize("in_place", [False, pytest.param(True, marks=pytest.mark.long)], ids=["copied", "in-place"])
def test_a_second_run_reports_the_first(kafka: KafkaServer, name: str, tmp_path: Path, in_place: bool) -> None:
    """The same run again, also after the new job has gone on in the old one's group, says that the job is
    adopted. Other options, another old job, and an old job that has gone on are refused."""
    how = ("--in-place",) if in_place else ()
    old = stopped(kafka, tmp_path, name)
    config = old.init(f"{name}-new", *how)
    first = old.json("--write", *how)
    assert first["already_adopted"] is False
    again = old.json("--write", *how)
    assert again == old.json(*how)
    assert (again["already_adopted"], again["published"]) == (True, first["published"])
    with StateManager(config) as manager, manager.open_task("Partition 0") as task:
        task.store("totals").put(b"c", b"3")
        task.commit({f"{name}-in-0": 15})
    commit(kafka, name, {(f"{name}-in", 0): 15})
    assert "already adopted: checkpoint" in old.run("--write", *how)
    other = old.run("--write", *({"--in-place"} - set(how)), status=2)
    assert f"adopted from job {name}" in other
    assert "two jobs must never write to one changelog" in other
    commit(kafka, f"{name}-2", {(f"{name}-in", 0): 10})
    another = [f"{name}-2" if one == name else one for one in old.old]
    assert f"adopted from job {name}" in old.run("--write", *how, old=another, status=2)
    commit(kafka, name, {(f"{name}-in", 1): 12})
    assert f"the old job has gone on to offset 12 of {name}-in-1" in old.run("--write", *how, status=2)


def test_a_job_with_state_of_its_own_is_not_adopted_into(kafka: KafkaServer, name: str, tmp_path: Path) -> None:
    """The dry run says so, too."""
    old = stopped(kafka, tmp_path, name)
    config = old.init(f"{name}-new")
    with StateManager(config) as manager, manager.open_task("Partition 0") as task:
        task.store("totals").put(b"own", b"1")
        task.commit({f"{name}-in-0": 1})
    for write_it in ((), ("--write",)):
        assert "has checkpoints already: Partition 0 has" in old.run(*write_it, status=2)


@pytest.mark.parametrize("how", ["offset", "changelog"])
def test_the_old_job_goes_on_before_the_new_one_begins(kafka: KafkaServer, name: str, tmp_path: Path, how: str) -> None:
    """A task that has not committed since the adoption does not open if the old job has processed its input or
    written a changelog, until somebody permits it; that holds for one opening."""
    old = stopped(kafka, tmp_path, name)
    config = old.init(f"{name}-new")
    assert f"give the new job another consumer group than {name}" in old.run("--write")
    if how == "offset":
        commit(kafka, name, {(f"{name}-in", 0): 12})
    else:
        write(kafka, f"{name}-totals", 0, [(b"a", b"2")])
    with StateManager(config) as manager:
        if how == "offset":
            manager.open_task("Partition 1").close()
        with pytest.raises(PermissionNeeded, match="both would process the same input"):
            manager.open_task("Partition 0")
        given = CliRunner().invoke(cli, ["permit", "--config", str(old.file), "--allow-repeated-input"])
        assert given.exit_code == 0, given.output
    assert state(config) == ([{"totals": TOTALS}] * 2, [{f"{name}-in-{n}": 10} for n in (0, 1)])
    assert state(config)[0] == [{"totals": TOTALS}] * 2


def test_the_old_job_is_started_during_the_copy(
    kafka: KafkaServer, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second look finds it. What happens between that look and the publish is said afterwards, and by the
    first opening."""
    old = stopped(kafka, tmp_path, name)
    config = old.init(f"{name}-new")
    commits, look = flow._commits, flow.look

    def goes_on(*arguments: object) -> object:
        commit(kafka, name, {(f"{name}-in", 0): 11})
        return commits(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(flow, "_commits", goes_on)
    assert "its offsets or topics have changed during the copy" in old.run("--write", status=2)
    monkeypatch.undo()

    def then_goes_on(*arguments: object, again: bool = False, **more: object) -> object:
        found = look(*arguments, again=again, **more)  # type: ignore[arg-type]
        if again:
            commit(kafka, name, {(f"{name}-in", 0): 12})
        return found

    monkeypatch.setattr(flow, "look", then_goes_on)
    said = old.run("--write")
    assert f"before the adoption was published: the old job has gone on to offset 12 of {name}-in-0" in said
    monkeypatch.undo()
    with StateManager(config) as manager:
        with pytest.raises(PermissionNeeded, match="offset 12"):
            manager.open_task("Partition 0")
        with manager.open_task("Partition 0", allow_repeated_input=True) as task:
            assert task.start_offsets == {f"{name}-in-0": 11}


@pytest.mark.long
def test_a_lost_acknowledgement(
    own_kafka: Callable[..., KafkaBroker], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The broker hangs at the commit of the adoption. The run finds out whether it was published."""
    broker = own_kafka(**NEVER_ABORTS)
    assert broker.process is not None
    kafka = KafkaServer(bootstrap_servers=broker.bootstrap_servers, kind="local")
    old = stopped(kafka, tmp_path, "old")
    config = old.init("new", "--set", "task.commit.timeout.ms=3000")
    publish = flow.publish_now
    timers = []

    def hang() -> None:
        broker.process.suspend()  # type: ignore[union-attr]
        timers.append(threading.Timer(5, broker.process.resume))  # type: ignore[union-attr]
        timers[0].start()

    def at_last(*arguments: object) -> None:
        before_commit(monkeypatch, hang)
        publish(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(flow, "publish_now", at_last)
    try:
        said = json.loads(old.run("--write", "--json"))
    finally:
        timers[0].join()
    assert list(said["published"]) == list(TASKS)
    assert state(config)[0] == [{"totals": TOTALS}] * 2
    assert "already adopted" in old.run("--write")
