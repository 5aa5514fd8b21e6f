"""A read-only copy of a store of a running job, which follows the newest checkpoint without affecting the job."""

from __future__ import annotations

import itertools
import random
import shutil
from collections.abc import Sequence
from contextlib import closing
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import pytest
from click.testing import CliRunner

from statemgr import JobConfig, StateManager
from statemgr.cli.main import cli
from statemgr.errors import ConfigError, CorruptFile, DiskFull, MissingBlob, MissingState, UnavailableError
from statemgr.ids import task_name
from statemgr.kafka.checkpoint_topic import CheckpointTopic
from statemgr.local.machine import SystemClock
from statemgr.operations.standby import followed_store, standby
from statemgr.operations.standby.followed_store import FollowedStore
from statemgr.ports import LocalDirectories
from statemgr.services import Services
from statemgr.testing.memory_servers import MemoryServers
from statemgr.wiring import open_services
from tests.cli.test_running_job import write_toml
from tests.commits import TASK, commit
from tests.core.integration.test_local_loss import flip
from tests.jobs import ALL, SEGMENTS, job_mapping
from tests.kafka_jobs import wait_until
from tests.operations.rescale.test_rescale import fill, keys_of, some_state
from tests.servers import KafkaServer

pytestmark = pytest.mark.integration
CONFIG: dict[str, object] = {"job.name": "orders", "job.tasks": 2, "stores.totals.value.serde": "bytes"}


def follow(copy: FollowedStore, keys: Sequence[bytes], values: Sequence[bytes | None]) -> None:
    """Refresh until the copy has these values, because a commit returns before its transaction is settled on the
    topic."""

    def there() -> bool:
        copy.refresh()
        return copy.get_many(keys) == values

    wait_until(there)


@pytest.mark.parametrize(
    ("factory", "kind"), [pytest.param(*of, marks=pytest.mark.long if of == ALL[1] else ()) for of in ALL]
)
def test_values_follow_the_newest_checkpoint(kafka: KafkaServer, tmp_path: Path, factory: str, kind: str) -> None:
    """The copy follows new, changed, deleted and absent keys of both tasks after each commit, while the job commits."""
    config = JobConfig.from_mapping(
        job_mapping(kafka, tmp_path, tasks=2, backup=[factory], kind=kind, stores=["totals", "other"])
    )
    keys = [b"a", b"b", b"none", b"a"]
    with StateManager(config) as manager, FollowedStore(config, "totals") as copy:
        with pytest.raises(MissingState):
            copy.get_many(keys)
        tasks = [manager.open_task(f"Partition {i}") for i in range(2)]
        for number in range(4):
            tasks[0].store("totals").put(b"a", b"%d" % number)
            tasks[1].store("totals").put(b"b", b"%d" % number)
            if number == 3:
                tasks[1].store("totals").delete(b"b")
            for index, task in enumerate(tasks):
                task.commit({f"orders-{index}": number + 1})
            before = copy.get_many(keys) if number else None
            copy.refresh(older_than_s=3600 if number else 0)
            assert before is None or copy.get_many(keys) == before
            b = None if number == 3 else b"%d" % number
            follow(copy, keys, [b"%d" % number, b, None, b"%d" % number])
            assert copy.checkpoints == {f"Partition {i}": task.last_checkpoint for i, task in enumerate(tasks)}
        with FollowedStore(config, "totals", tasks=["Partition 1"]) as part:
            assert part.get_many(keys) == [None] * 4


def test_copies_share_files_that_may_vanish(kafka: KafkaServer, tmp_path: Path) -> None:
    """Two copies on a machine, one of them behind, lose their files. Both can still read and follow the job again."""
    config = JobConfig.from_mapping(job_mapping(kafka, tmp_path, kind=SEGMENTS))
    with (
        StateManager(config) as manager,
        FollowedStore(config, "totals") as one,
        FollowedStore(config, "totals") as two,
    ):
        task = manager.open_task("Partition 0")
        for number in range(3):
            task.store("totals").put(b"a", b"%d" % number)
            task.commit({"orders-0": number + 1})
            follow(one, [b"a"], [b"%d" % number])
            if number == 0:
                two.refresh()
        assert (one.get_many([b"a"]), two.get_many([b"a"])) == ([b"2"], [b"0"])
        shutil.rmtree(config.state_dir / ".copies")
        assert (one.get_many([b"a"]), two.get_many([b"a"])) == ([b"2"], [b"0"])
        for copy in (two, one):
            follow(copy, [b"a"], [b"2"])
        task.store("totals").put(b"a", b"3")
        task.commit({"orders-0": 4})
        for copy in (two, one):
            follow(copy, [b"a"], [b"3"])


def test_a_topic_that_was_created_again(servers: MemoryServers) -> None:
    """The layout has the same number. A task that has not committed since has no values any more."""
    config = servers.on_disk(servers.config, "disk")
    for number in range(2):
        with servers.manager(config, "kafka-partition") as manager, manager.open_task(task_name(number)) as task:
            task.store("totals").put(b"%d" % number, b"old")
            task.commit({f"orders-{number}": 1})
    with FollowedStore(config, "totals", services=servers.services) as followed:
        assert followed.get_many([b"0", b"1"]) == [b"old", b"old"]
        servers.broker.delete(config.checkpoint_topic)
        permitted: dict[str, Any] = {"allow_empty_start": True, "overwrite_changelog": True}
        with servers.manager(config, "kafka-partition") as manager, manager.open_task(TASK, **permitted) as task:
            task.store("totals").put(b"0", b"new")
            task.commit({"orders-0": 1})
        followed.refresh()
        assert followed.get_many([b"0", b"1"]) == [b"new", None]
        assert followed.checkpoints.keys() == {TASK}


def test_a_refresh_that_fails_is_not_tried_for_each_task(
    servers: MemoryServers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other job's blob store does not answer for two minutes. The timers of the other tasks of a loop get the same
    error, without a request. Without ``older_than_s``, and when the time has passed, a refresh asks again."""
    config, clock, turns = servers.on_disk(servers.config, "disk"), servers.clock, list[float]()
    with servers.manager(config, "kafka-partition") as manager, manager.open_task(TASK) as task:
        task.store("totals").put(b"a", b"1")
        task.commit({"orders-0": 1})

    def fail(self: standby.Follower) -> None:
        turns.append(clock.monotonic())
        clock.advance(120)
        raise UnavailableError("the blob store does not answer")

    with FollowedStore(config, "totals", services=servers.services) as followed:
        followed.refresh()
        clock.advance(60)
        with monkeypatch.context() as patched:
            patched.setattr(standby.Follower, "turn", fail)
            for asked, older_than_s in enumerate((30, 30, 30, 0, 30), 1):
                with pytest.raises(UnavailableError, match="does not answer"):
                    followed.refresh(older_than_s)
                assert len(turns) == (1 if asked <= 3 else 2)
            assert followed.get_many([b"a"]) == [b"1"]
        with pytest.raises(UnavailableError):
            followed.refresh(older_than_s=30)
        clock.advance(30)
        followed.refresh(older_than_s=30)
        followed.refresh(older_than_s=30)


@pytest.mark.parametrize("restarted", [False, True])
def test_a_damaged_file_is_fetched_again(servers: MemoryServers, restarted: bool) -> None:
    """A bit flips in the copies of both tasks. The read that meets it has the right values, also in a new process."""
    source = random.Random(1)
    state = {b"key-%05d" % number: source.randbytes(100) for number in range(4000)}
    with servers.manager(servers.on_disk(servers.config, "disk"), "kafka-partition") as manager:
        for number in range(2):
            with manager.open_task(task_name(number)) as task:
                task.store("totals").put_many({key: state[key] for key in state if key[-1] % 2 == number})
                task.commit({f"orders-{number}": 1})
    reader = servers.on_disk(servers.config, "reader")
    with FollowedStore(reader, "totals", services=servers.services) as followed:
        followed.refresh()
        copies = [path for path in reader.state_dir.rglob("*.sst") if path.parent.parent.name == "committed"]
        assert len(copies) >= 2
        for table in copies:
            flip(table)
        if not restarted:
            assert followed.get_many(list(state)) == list(state.values())
    with FollowedStore(reader, "totals", services=servers.services) as followed:
        assert followed.get_many(list(state)) == list(state.values())


def test_files_that_cannot_be_opened_are_checked_once(servers: MemoryServers, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their hashes are right, so fetching them again does not help."""
    opened: list[object] = []

    def refuse(*where: object) -> NoReturn:
        opened.append(where)
        raise CorruptFile("this version cannot read it")

    config = servers.on_disk(servers.config, "disk")
    with servers.manager(config, "kafka-partition") as manager, manager.open_task(TASK) as task:
        task.store("totals").put(b"a", b"1")
        task.commit({"orders-0": 1})
    monkeypatch.setattr(followed_store, "open_snapshot", refuse)
    reader = servers.on_disk(servers.config, "reader")
    with FollowedStore(reader, "totals", services=servers.services) as followed, pytest.raises(CorruptFile):
        followed.refresh()
    assert len(opened) == 2


def test_a_job_that_deletes_checkpoints_faster_than_they_are_fetched(
    servers: MemoryServers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is damaged, so a loop may go on with the values that it has."""
    with (
        servers.manager(servers.on_disk(servers.config, "one"), "kafka-partition") as manager,
        manager.open_task(TASK) as task,
        FollowedStore(servers.on_disk(servers.config, "other"), "totals", services=servers.services) as followed,
    ):
        numbers = itertools.count(1)

        def go_on() -> None:
            task.store("totals").put(b"a", b"%d" % next(numbers))
            task.commit({"orders-0": next(numbers)})

        def restore(*_: Any) -> NoReturn:
            for _more in range(2):  # as many as the job retains
                go_on()
            raise MissingBlob("the blob does not exist", blob="one")

        go_on()
        with monkeypatch.context() as patch:
            patch.setattr(standby, "restore_store", restore)
            with pytest.raises(UnavailableError, match=r"has deleted 5 checkpoints, each before .*blob=one"):
                followed.refresh()
        followed.refresh()
        assert followed.get_many([b"a"]) == [b"21"]


class _Failing:
    """Opens services whose local directories of ``task`` fail with ``error`` when they are cloned."""

    def __init__(self) -> None:
        self.task = ""
        self.error: BaseException = DiskFull("the disk is full")

    def __call__(self, config: JobConfig) -> Services:
        services = open_services(config)

        def directories(task: str, store: str) -> LocalDirectories:
            found = services.directories(task, store)
            return self._failing(found) if task == self.task else found

        return replace(services, directories=directories)

    def _failing(self, directories: LocalDirectories) -> LocalDirectories:
        failing = copy(directories)
        failing.clone = self._raise  # type: ignore[method-assign]
        return failing

    def _raise(self, committed: object) -> Path:
        raise self.error


@pytest.mark.parametrize("error", [DiskFull("the disk is full"), KeyboardInterrupt()])
def test_a_copy_that_cannot_be_opened(kafka: KafkaServer, tmp_path: Path, error: BaseException) -> None:
    """The disk is full when a task is opened, at first and at a newer checkpoint. The next call has the newest values,
    without another checkpoint."""
    config = JobConfig.from_mapping(job_mapping(kafka, tmp_path, tasks=2, kind=SEGMENTS))
    keys, failing = [b"0", b"1"], _Failing()
    failing.error = error
    with StateManager(config) as manager, FollowedStore(config, "totals", services=failing) as followed:
        tasks = [manager.open_task(f"Partition {i}") for i in range(2)]
        for number in range(2):
            for i, task in enumerate(tasks):
                task.store("totals").put(keys[i], b"%d" % number)
                task.commit({f"orders-{i}": number + 1})
            with FollowedStore(config, "totals") as other:
                follow(other, keys, [b"%d" % number] * 2)
            failing.task = "Partition 0"
            with pytest.raises(type(error)):
                followed.refresh()
            failing.task = ""
            if number:
                followed.refresh()
            assert followed.get_many(keys) == [b"%d" % number] * 2


@pytest.mark.parametrize("failing", [True, False])
def test_all_tasks_follow_a_rescale_or_none(
    kafka: KafkaServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: bool
) -> None:
    """Keys have moved between tasks. A task whose restore fails keeps its copy, so the others keep theirs. If the job
    is rescaled while a turn follows it, the next turn has all tasks of the new layout."""
    config = JobConfig.from_mapping(job_mapping(kafka, tmp_path, tasks=2, kind=SEGMENTS, backup=["blob-store"]))
    state = some_state(100)
    fill(config, state)
    write_toml(config, tmp_path / "job.toml")
    real = standby.restore_store

    def rescale() -> None:
        arguments = ["rescale", "--tasks", "3", "--write", "--config", str(tmp_path / "job.toml")]
        done = CliRunner().invoke(cli, arguments, catch_exceptions=False)
        assert done.exit_code == 0, done.output
        with closing(CheckpointTopic(config, SystemClock())) as log:
            wait_until(lambda: len(log.read(only_settled=True)) == 3)

    def restore(services: Services, task: str, *arguments: Any) -> Any:
        if task != "Partition 0":
            return real(services, task, *arguments)
        if not failing:
            monkeypatch.setattr(standby, "restore_store", real)
            rescale()
        raise UnavailableError("told to")

    with FollowedStore(config, "totals") as followed:
        follow(followed, list(state), list(state.values()))
        if failing:
            rescale()
        else:
            commit(config, keys_of(0, 2, state), 99)
        monkeypatch.setattr(standby, "restore_store", restore)
        if failing:
            with pytest.raises(UnavailableError):
                followed.refresh()
            assert followed.get_many(list(state)) == list(state.values())
            assert len(followed.checkpoints) == 2
            monkeypatch.setattr(standby, "restore_store", real)
        followed.refresh()
        assert followed.get_many(list(state)) == list(state.values())
        assert len(followed.checkpoints) == 3


def test_a_store_that_is_not_there(kafka: KafkaServer, tmp_path: Path) -> None:
    """A store that the job does not have is refused. A task without a checkpoint is missing state, not empty state."""
    config = JobConfig.from_mapping(job_mapping(kafka, tmp_path, tasks=2))
    with pytest.raises(ConfigError, match=r"no store 'sums'.*totals"):
        FollowedStore(config, "sums")
    with StateManager(config) as manager:
        task = manager.open_task("Partition 0")
        task.store("totals").put(b"a", b"1")
        task.commit({"orders-0": 1})
        with FollowedStore(config, "totals", tasks=["Partition 1"]) as copy, pytest.raises(MissingState):
            copy.get_many([b"a"])
