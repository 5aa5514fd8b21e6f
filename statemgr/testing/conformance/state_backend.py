"""What every state backend does: a job commits with it and gets the same state back, on any machine.

A backend of your own passes these tests as a subclass in a test module, which pytest collects::

    class TestMyBackend(StateBackendSuite):
        @pytest.fixture
        def settings(self, tmp_path: Path) -> Mapping[str, object]:
            return {
                "job.name": f"proof-{uuid4().hex}",
                "kafka.bootstrap.servers": "localhost:9092",
                "task.backup.factories": ["my_package.MyBackend"],
                "task.restore.factories": ["my_package.MyBackend"],
            }
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from statemgr.config import JobConfig
from statemgr.engine.task import Task
from statemgr.errors import UnavailableError
from statemgr.ids import task_name
from statemgr.manager import StateManager
from statemgr.phases import Phase, observed
from statemgr.ports import list_blobs
from statemgr.reader import JobReader
from statemgr.wiring import open_services

OnMachine = Callable[..., JobConfig]
Opened = Callable[..., AbstractContextManager[Task]]
_STORES = ("totals", "names")


class StateBackendSuite:
    """Each test gets a new job from the fixture ``settings``; state directories and stores are added to it."""

    @pytest.fixture
    def settings(self) -> Mapping[str, object]:
        """Keys of a job that has never run: its name, its servers, and the backend. Override it."""
        raise NotImplementedError

    @pytest.fixture
    def on_machine(self, settings: Mapping[str, object], tmp_path: Path) -> OnMachine:
        """The job's configuration on the machine of a number; ``changed``: keys that differ."""

        def config(machine: int, tasks: int = 1, changed: Mapping[str, object] | None = None) -> JobConfig:
            own = {"job.tasks": tasks, "task.checkpoint.retained": 2, "state.dir": str(tmp_path / f"machine-{machine}")}
            stores = {f"stores.{store}.value.serde": "bytes" for store in _STORES}
            return JobConfig.from_mapping({**settings, **own, **stores, **(changed or {})})

        return config

    @pytest.fixture
    def opened(self, on_machine: OnMachine) -> Opened:
        """Opens a task of the job on the machine of a number."""

        @contextmanager
        def open_(
            machine: int, number: int = 0, tasks: int = 1, changed: Mapping[str, object] | None = None
        ) -> Iterator[Task]:
            config = on_machine(machine, tasks, changed)
            with StateManager(config) as manager, manager.open_task(task_name(number)) as task:
                yield task

        return open_

    @pytest.mark.parametrize("machine", [0, 1])
    def test_what_was_committed_comes_back(self, opened: Opened, machine: int) -> None:
        """Every store, on the same machine and on another one, with the input offsets of the commit."""
        with opened(0) as task:
            task.store("totals").put_many({b"a": b"1", b"b": b"2"})
            task.store("names").put(b"a", b"x" * 100_000)
            task.commit({"orders-0": 7})
        with opened(machine) as task:
            assert task.last_checkpoint is not None
            assert task.last_checkpoint.input_offsets == {"orders-0": 7}
            assert contents(task) == {"totals": {b"a": b"1", b"b": b"2"}, "names": {b"a": b"x" * 100_000}}

    def test_what_was_not_committed_is_gone(self, opened: Opened) -> None:
        """Changes after the last commit do not come back."""
        with opened(0) as task:
            task.store("totals").put(b"a", b"committed")
            task.commit({"orders-0": 1})
            task.store("totals").put_many({b"a": b"lost", b"b": b"lost"})
        for machine in (0, 1):
            with opened(machine) as task:
                assert contents(task)["totals"] == {b"a": b"committed"}

    def test_a_commit_that_was_not_published_is_gone(self, opened: Opened) -> None:
        """What a commit has prepared replaces nothing if its process dies before the publish."""
        with opened(0) as task:
            task.store("totals").put_many({b"a": b"committed", b"b": b"committed"})
            task.commit({"orders-0": 1})
            task.store("totals").put(b"a", b"lost")
            task.store("totals").delete(b"b")
            with observed(_die), pytest.raises(UnavailableError, match="died"):
                task.commit({"orders-0": 2})
        with opened(1) as task:
            assert contents(task)["totals"] == {b"a": b"committed", b"b": b"committed"}

    def test_a_commit_after_one_that_failed_has_the_changes_of_both(self, opened: Opened) -> None:
        """What was prepared in vain is part of nothing, so the next commit of the same task contains it again."""
        with opened(0) as task:
            task.store("totals").put_many({b"a": b"1", b"b": b"1"})
            task.commit({"orders-0": 1})
            task.store("totals").put(b"c", b"2")
            task.store("totals").delete(b"b")
            with observed(_die), pytest.raises(UnavailableError, match="died"):
                task.commit({"orders-0": 2})
            task.store("totals").put(b"d", b"3")
            task.commit({"orders-0": 3})
        with opened(1) as task:
            assert contents(task)["totals"] == {b"a": b"1", b"c": b"2", b"d": b"3"}

    def test_a_backend_that_is_switched_on_gets_the_whole_state(
        self, settings: Mapping[str, object], on_machine: OnMachine, opened: Opened, tmp_path: Path
    ) -> None:
        """The first commit fills it, also with the state of earlier commits, which only another backend has."""
        own = on_machine(0).stores["totals"].backup_factories
        other = next((name for name in ("blob-store", "kafka-changelog") if name not in own), None)
        if other is None:
            pytest.skip("the settings have every backend that could have the state before")
        blobs = {"blob.store.uri": settings.get("blob.store.uri", f"file://{tmp_path}/blobs")}
        alone = {**blobs, "task.backup.factories": [other], "task.restore.factories": [other]}
        both = {**alone, "task.backup.factories": [other, *own]}
        with opened(0, changed=alone) as task:
            task.store("totals").put_many({b"a": b"1", b"b": b"1"})
            task.store("names").put(b"a", b"1")
            task.commit({"orders-0": 1})
        with opened(0, changed=both) as task:
            task.store("totals").put(b"c", b"2")
            task.commit({"orders-0": 2})
        with opened(1, changed={**both, "task.restore.factories": [*own]}) as task:
            assert contents(task) == {"totals": {b"a": b"1", b"b": b"1", b"c": b"2"}, "names": {b"a": b"1"}}

    def test_what_expires_and_what_gc_deletes_is_not_needed(self, opened: Opened, on_machine: OnMachine) -> None:
        """The blobs of retained checkpoints have no TTL, and ``referenced_blobs`` names them. Without a blob store,
        it may also return None."""
        with opened(0) as task:
            for number in range(2):
                task.store("totals").put(b"%d" % number, b"x" * 10_000)
                task.commit({"orders-0": number})
        config = on_machine(1)
        services = open_services(config)
        try:
            with JobReader(config) as reader:
                retained = reader.records()[task_name(0)].checkpoints
            named: set[str] = set()
            for checkpoint in retained:
                for factory, markers in checkpoint.state_checkpoint_markers.items():
                    for name, marker in markers.items():
                        identity = services.identity(task_name(0), name)
                        found = services.backup_manager(factory).referenced_blobs(identity, marker)
                        if config.blob_uri is not None:
                            hint = "write referenced_blobs, or `statemgr gc` refuses to run for the job"
                            assert found is not None, hint
                        named.update(found or ())
            if config.blob_uri is not None:
                blobs = services.blobs()
                for blob in list(list_blobs(blobs, f"{config.job_key}/")):
                    if blob.blob_id not in named or blobs.stat(blob.blob_id).expires_ms is not None:
                        blobs.delete(blob.blob_id)
        finally:
            services.close()
        with opened(1) as task:
            assert contents(task)["totals"] == {b"0": b"x" * 10_000, b"1": b"x" * 10_000}
        older = str(retained[1].checkpoint_id)
        with JobReader(on_machine(2)) as reader, reader.open_store(task_name(0), "totals", older) as store:
            assert store.get(b"0") == b"x" * 10_000

    def test_an_older_checkpoint_comes_back(self, opened: Opened, on_machine: OnMachine) -> None:
        """Commits and their clean-up leave what the retained checkpoints name."""
        with opened(0) as task:
            for number in range(4):
                task.store("totals").put(b"a", b"%d" % number)
                task.commit({"orders-0": number})
        with JobReader(on_machine(1)) as reader:
            _, older = reader.records()[task_name(0)].checkpoints
            with reader.open_store(task_name(0), "totals", str(older.checkpoint_id)) as store:
                assert (older.input_offsets, store.get(b"a")) == ({"orders-0": 2}, b"2")

    def test_each_task_has_its_own_state(self, opened: Opened) -> None:
        """Stores of the same name in two tasks have nothing in common."""
        for number in range(2):
            with opened(0, number, tasks=2) as task:
                task.store("totals").put(b"%d" % number, b"x")
                task.commit({f"orders-{number}": 1})
        for number in range(2):
            with opened(1, number, tasks=2) as task:
                assert contents(task)["totals"] == {b"%d" % number: b"x"}

    def test_changes_of_many_commits_add_up(self, opened: Opened) -> None:
        """Overwritten, deleted and untouched keys are as after the last commit, whichever machine went on."""
        expected: dict[bytes, bytes] = {}
        for number in range(6):
            with opened(number % 2) as task:
                assert contents(task)["totals"] == expected
                for commit in range(3):
                    changes = {b"%d" % (n * (number + 1)): b"%d-%d" % (number, commit) for n in range(20)}
                    expected |= changes
                    task.store("totals").put_many(changes)
                    deleted = sorted(expected)[commit]
                    task.store("totals").delete(deleted)
                    del expected[deleted]
                    task.commit({"orders-0": 3 * number + commit})
        with opened(2) as task:
            assert contents(task)["totals"] == expected

    def test_a_range_that_was_deleted_stays_deleted(self, opened: Opened) -> None:
        """Also when all keys were in it."""
        with opened(0) as task:
            task.store("totals").put_many({b"%03d" % n: b"x" for n in range(500)})
            task.commit({"orders-0": 1})
            task.store("totals").delete_range(b"100", None)
            task.commit({"orders-0": 2})
            task.store("names").put(b"a", b"x")
            task.store("names").delete_range(None, None)
            task.commit({"orders-0": 3})
        with opened(1) as task:
            assert contents(task) == {"totals": {b"%03d" % n: b"x" for n in range(100)}, "names": {}}

    def test_commits_without_changes(self, opened: Opened) -> None:
        """An empty store, and a commit that changed nothing, come back like any other."""
        with opened(0) as task:
            for number in range(3):
                task.commit({"orders-0": number})
        with opened(1) as task:
            assert contents(task) == {"totals": {}, "names": {}}
            task.store("totals").put(b"a", b"")
            task.commit({"orders-0": 3})
            task.commit({"orders-0": 4})
        with opened(2) as task:
            assert contents(task) == {"totals": {b"a": b""}, "names": {}}
            assert task.last_checkpoint is not None
            assert task.last_checkpoint.input_offsets == {"orders-0": 4}

    def test_keys_and_values_are_any_bytes(self, opened: Opened) -> None:
        """Every byte, the empty value, a long key and a large value."""
        expected = {bytes([n]): bytes([255 - n]) for n in range(256)}
        expected |= {b"empty": b"", b"k" * 5_000: b"long key", b"large": bytes(range(256)) * 3_000}
        with opened(0) as task:
            task.store("totals").put_many(expected)
            task.commit({"orders-0": 1})
        with opened(1) as task:
            assert contents(task)["totals"] == expected

    def test_a_commit_next_to_writes_is_exact(self, opened: Opened) -> None:
        """What is written while a commit is in progress belongs to the next one."""
        with opened(0) as task:
            task.store("totals").put(b"a", b"1")
            first = task.commit_async({"orders-0": 1})
            task.store("totals").put(b"a", b"2")
            first.result(60)
        with opened(1) as task:
            assert contents(task)["totals"] == {b"a": b"1"}


def _die(phase: Phase, subject: str) -> None:
    if phase is Phase.PREPARED:
        raise UnavailableError("the process died")


def contents(task: Task) -> dict[str, dict[bytes, bytes]]:
    """Everything in a task's stores."""
    return {store: dict(task.store(store).range()) for store in _STORES}
