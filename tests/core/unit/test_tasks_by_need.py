"""A task works while most of its state is still in the blob store. Needs no broker."""

from __future__ import annotations

import os
import random
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from statemgr import JobConfig, StateManager, Task, reader
from statemgr.backends.blobs import snapshots
from statemgr.backends.blobs.partial_tables import PartialTables
from statemgr.blobs.counting import counts_of
from statemgr.errors import (
    AccessDenied,
    ClosedError,
    CorruptBlob,
    DiskFull,
    LocalStateLost,
    MissingFile,
    StatemgrError,
    StateUnreachable,
    UnavailableError,
)
from statemgr.flows.opening import by_need as flow
from statemgr.flows.opening import open_job, restore
from statemgr.model.checkpoint import BlobRef
from statemgr.ports import BlobInfo, BlobStore, list_blobs
from statemgr.reader import JobReader
from statemgr.stores import open_store
from statemgr.testing.memory_servers import MemoryServers
from statemgr.transfer.downloads import Downloads
from tests.by_need import SMALL_STORES, Gate, State, fetched_sizes, key
from tests.commits import TASK
from tests.jobs import with_changes
from tests.kafka_jobs import wait_until

CONFIG = SMALL_STORES


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    """Let small tables be fetched by need, and hold the rest back."""
    monkeypatch.setattr(snapshots, "_LARGE", 4 * 1024)
    return Gate(monkeypatch)


@contextmanager
def opened(servers: MemoryServers, disk: str, config: JobConfig | None = None) -> Iterator[tuple[StateManager, Task]]:
    """The task on a machine. It closes without a commit."""
    with servers.manager(servers.on_disk(config or servers.config, disk), "kafka-partition") as manager:
        yield manager, manager.open_task(TASK)


def publish(servers: MemoryServers, count: int = 6_000) -> State:
    """Commit a first state, from a machine that is then gone."""
    source = random.Random(count)
    state = {key(number): source.randbytes(100) for number in range(count)}
    with opened(servers, "first") as (_, task):
        store = task.store("totals")
        for name, value in state.items():
            store.put(name, value)
        task.commit({"orders-0": 1})
        store.put(key(7), b"seven")
        store.delete(key(8))
        task.commit({"orders-0": 2})
    state[key(7)] = b"seven"
    del state[key(8)]
    servers.lose_disk()
    return state


def is_whole(task: Task) -> bool:
    """Whether all of the task's files are here."""
    return all(store.is_whole for store in task._stores.values())


def content(task: Task) -> State:
    """Everything in the store."""
    return dict(task.store("totals").range())


def test_a_task_reads_writes_and_commits_before_its_state_is_here(servers: MemoryServers, gate: Gate) -> None:
    """Another owner finds what was committed meanwhile. When everything is here, the task leaves a local copy."""
    state = publish(servers)
    with opened(servers, "second") as (manager, task):
        (restored,) = task.restored
        assert restored.factory == "blob-store"
        assert restored.bytes_to_come > restored.bytes_fetched
        assert "to come" in restored.story()
        store = task.store("totals")
        assert not is_whole(task)
        assert store.get(key(100)) == state[key(100)]
        assert store.get(b"absent") is None
        seen = {one.name: one.value for family in manager.metrics.registry.collect() for one in family.samples}
        assert seen["statemgr_restore_bytes_to_come"] > 100_000
        assert seen["statemgr_restore_faults_total"] > 0
        assert store.get(key(7)) == b"seven"
        for number in range(0, 300, 3):
            store.put(key(number), b"new")
            state[key(number)] = b"new"
        store.delete(key(4_000))
        del state[key(4_000)]
        task.commit({"orders-0": 3})
        assert not is_whole(task)
        assert content(task) == state
    before = counts_of(servers.config.job_key).read().get(("restored", "blob-store"), 0)
    with opened(servers, "third") as (manager, task):
        state_by_need = task._stores["totals"].by_need
        assert state_by_need is not None
        assert not is_whole(task)
        assert content(task) == state
        gate.open.set()
        wait_until(lambda: is_whole(task))
        registry, labels = manager.metrics.registry, {"job": "orders", "backend": "blob-store"}
        fetched = partial(registry.get_sample_value, "statemgr_restore_bytes_total", labels)
        wait_until(lambda: fetched() == before + state_by_need.fetched)
        assert content(task) == state
        task.store("totals").put(b"last", b"1")
        task.commit({"orders-0": 4})
    state[b"last"] = b"1"
    with opened(servers, "third") as (_, task):
        assert [one.factory for one in task.restored] == ["local"]
        assert content(task) == state


def test_an_opening_that_fails_late_leaves_no_store_open(
    servers: MemoryServers, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rest of a store that is open cannot be fetched."""
    publish(servers)
    closed: list[str] = []
    close = open_store.OpenStore.close

    def fail(*_: object) -> None:
        raise UnavailableError("told to")

    monkeypatch.setattr(restore, "fetch_rest", fail)
    monkeypatch.setattr(
        open_store.OpenStore, "close", lambda self: (close(self), closed.append(self.identity.store))[0]
    )
    with (
        servers.manager(servers.on_disk(servers.config, "second"), "kafka-partition") as manager,
        pytest.raises(UnavailableError, match="told to"),
    ):
        manager.open_task(TASK)
    assert closed == ["totals"]


def test_a_store_that_was_not_whole_is_no_local_copy(
    servers: MemoryServers, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next task on the machine reads by need, too. It takes over the parts that are right, and no others."""
    state = publish(servers)
    sizes, fetch_part = fetched_sizes(monkeypatch), Downloads.fetch_part
    for _ in range(3):
        with opened(servers, "second") as (_, task):
            assert [one.factory for one in task.restored] == ["blob-store"]
            assert task.store("totals").get(key(1_000)) == state[key(1_000)]
    assert len(sizes) == 2  # a tail and a block: what was left is not fetched again
    parts: list[tuple[str, int]] = []
    asked = count()

    def failing(*arguments: Any) -> None:
        if next(asked) >= 2:  # several threads fetch
            raise AccessDenied("refused")
        fetch_part(*arguments)
        parts.append((arguments[3].path.name, arguments[4]))

    def noted(*arguments: Any) -> None:
        parts.append((arguments[3].path.name, arguments[4]))
        fetch_part(*arguments)

    monkeypatch.setattr(Downloads, "fetch_part", failing)
    gate.open.set()
    with opened(servers, "second") as (_, task):
        wait_until(lambda: len(parts) >= 2)
        assert not is_whole(task)
    (left,) = Path(servers.on_disk(servers.config, "second").state_dir).rglob("staging/*.left")
    damaged, before = parts[0], set(parts)
    data = bytearray((left / damaged[0]).read_bytes())
    data[damaged[1]] ^= 1
    (left / damaged[0]).write_bytes(data)
    parts.clear()
    monkeypatch.setattr(Downloads, "fetch_part", noted)
    with opened(servers, "second") as (_, task):
        wait_until(lambda: is_whole(task))
        assert content(task) == state
    assert before & set(parts) == {damaged}
    assert set(parts) - before


def test_a_task_that_fails_when_its_state_is_here_fetches_it_once(
    servers: MemoryServers, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is no local copy yet. The next opening takes the files over, and what was not committed is not in them."""
    state = publish(servers)
    gate.open.set()
    sizes: list[int] = []
    fetch_part = Downloads.fetch_part

    def counted(*arguments: Any) -> None:
        sizes.append(arguments[1].parts[arguments[2]].size)
        fetch_part(*arguments)

    monkeypatch.setattr(Downloads, "fetch_part", counted)
    for _ in range(3):
        with opened(servers, "second") as (_, task):
            wait_until(lambda: is_whole(task))
            assert content(task) == state
            for number in range(100):
                task.store("totals").put(key(number), b"not committed")
            task._stores["totals"].content.flush()
            task._stores["totals"].local.flush()
    assert sum(sizes) < 1.2 * sum(map(len, [*state.keys(), *state.values()]))


def test_what_expires_is_deleted_when_everything_is_here(servers: MemoryServers, gate: Gate) -> None:
    """A walk over all keys would read everything by need, on the task's thread. Reads hide what has expired."""
    servers.reconfigure({"stores.totals.ttl.ms": 3_600_000})
    publish(servers)
    with opened(servers, "second") as (_, task):
        store, inside = task.store("totals"), task._stores["totals"]
        servers.clock.advance(3_700)
        to_come = inside.by_need
        assert to_come is not None
        fetched = to_come.fetched
        task.run_timers()
        assert to_come.fetched == fetched
        assert store.get(key(100)) is None
        gate.open.set()
        wait_until(lambda: is_whole(task))
        servers.clock.advance(2)
        task.run_timers()
        assert not list(inside.content.scan(None, None))


def test_two_owners_on_one_machine(servers: MemoryServers, gate: Gate) -> None:
    """The newer one does not take over the files of the older one, which is fenced and still reads. When the older one
    closes, the newer one loses nothing."""
    state = publish(servers)
    with opened(servers, "second") as (_, older), opened(servers, "second") as (_, newer):
        assert older.store("totals").get(key(100)) == state[key(100)]
        assert content(newer) == state
        assert content(older) == state
    with opened(servers, "second") as (_, older):
        assert older.store("totals").get(key(100)) == state[key(100)]
        with opened(servers, "second") as (_, newer):
            older.close()
            assert newer.store("totals").get(key(3_000)) == state[key(3_000)]
            gate.open.set()
            wait_until(lambda: is_whole(newer))
            assert content(newer) == state


def test_a_commit_that_needs_everything_waits_for_it(servers: MemoryServers, gate: Gate) -> None:
    """A backend turns out to need a directory while parts of the store are missing."""
    state = publish(servers)
    with opened(servers, "second") as (_, task):
        task._stores["totals"].directory_needed = True
        assert not is_whole(task)
        task.store("totals").put(b"more", b"1")
        threading.Timer(0.2, gate.open.set).start()
        task.commit({"orders-0": 3})
        assert is_whole(task)
        assert content(task) == {**state, b"more": b"1"}


BOTH = {"task.backup.factories": ["blob-store", "kafka-changelog"], "task.restore.factories": ["blob-store"]}


def test_a_job_that_gets_a_backend_restores_the_whole_state(servers: MemoryServers, gate: Gate) -> None:
    """The first commit fills it, and waits for nothing."""
    state = publish(servers)
    servers.reconfigure(BOTH)
    with opened(servers, "second") as (_, task):
        assert is_whole(task)
        task.store("totals").put(b"more", b"1")
        checkpoint = task.commit({"orders-0": 3})
        assert checkpoint.marker("kafka-changelog", "totals") is not None
    state[b"more"] = b"1"
    servers.lose_disk()
    servers.reconfigure({"task.restore.factories": ["kafka-changelog"]})
    with opened(servers, "third") as (_, task):
        assert [one.factory for one in task.restored] == ["kafka-changelog"]
        assert content(task) == state


def test_a_changelog_that_is_filled_again_needs_the_whole_state(
    servers: MemoryServers, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The opening itself fills it. If the changelog has what the checkpoint says, the task opens by need."""
    servers.reconfigure(BOTH)
    state = publish(servers)
    with opened(servers, "second") as (_, task):
        assert not is_whole(task)
    with monkeypatch.context() as patch:
        patch.setattr(open_job, "_has_tail", lambda *asked: asked[3] == "kafka-changelog")
        with opened(servers, "third") as (_, task):
            assert is_whole(task)
            assert content(task) == state


@pytest.mark.parametrize(
    "changes", [{"task__restore__by__need__bytes": 0}, {"task__commit__snapshot__interval": "1 commit"}]
)
def test_when_a_state_is_restored_as_a_whole(servers: MemoryServers, gate: Gate, changes: dict[str, object]) -> None:
    """If it is switched off, or if every commit needs all files."""
    state = publish(servers)
    with opened(servers, "second", with_changes(servers.config, **changes)) as (_, task):
        assert is_whole(task)
        assert [one.bytes_to_come for one in task.restored] == [0]
        assert content(task) == state


def test_a_store_that_cannot_be_reached(servers: MemoryServers, gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    """A read says so, what is here can be read and committed, and nothing is lost when the store is back."""
    state = publish(servers)
    with opened(servers, "second") as (_, task):
        store = task.store("totals")
        assert store.get(key(5)) == state[key(5)]
        with monkeypatch.context() as cut:
            cut.setattr(Downloads, "get_range", _unreachable)
            with pytest.raises(StateUnreachable, match="no answer"):
                store.get(key(5_000))
            assert store.get(key(5)) == state[key(5)]
            store.put(key(6), b"six")
        assert store.get(key(5_000)) == state[key(5_000)]
        task.commit({"orders-0": 3})
        gate.open.set()
        wait_until(lambda: is_whole(task))
        assert content(task) == {**state, key(6): b"six"}


@pytest.mark.parametrize("found_by", ["read", "rest"])
def test_damage_leads_to_a_restore_of_the_whole_state(servers: MemoryServers, gate: Gate, found_by: str) -> None:
    """A part of the snapshot is damaged after the task was opened: it is opened again, and that says which blob."""
    state = publish(servers)
    services = servers.services(servers.config)
    blobs = services.blobs()
    with opened(servers, "second") as (manager, task):
        names = [found.blob_id for found in _all_blobs(blobs) if found.blob_id.endswith(".0") and found.size > 100_000]
        assert names
        for name in names:
            with blobs.get(name) as reader:
                data = bytearray(10_000_000)
                size = reader.readinto(memoryview(data))
            data = data[:size]
            data[size // 2] ^= 1
            data[100] ^= 1
            blobs.delete(name)
            blobs.put(name, bytes(data), ttl_days=1)
        if found_by == "rest":
            gate.open.set()
            wait_until(lambda: any(store.lost is not None for store in task._stores.values()))
        with pytest.raises(LocalStateLost):
            _use(task, state)
        task.close()
        with pytest.raises(StatemgrError) as caught:
            manager.open_task(TASK)
        assert any(str(caught.value.where.get("blob", caught.value)).find(name) >= 0 for name in names)
    services.close()


def test_the_rest_is_tried_again_after_any_error_that_may_pass(
    servers: MemoryServers, gate: Gate, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Credentials that are refused for a while do not leave the store without its rest for ever. The log has the trace
    of an error that nobody expects."""
    state = publish(servers)
    monkeypatch.setattr(flow, "_PAUSE_S", 0.01)
    fetch_rest = PartialTables.fetch_rest
    failures = [OSError("no descriptors"), AccessDenied("refused"), KeyError("a mistake")]

    def refused(tables: PartialTables, check: Callable[[], None]) -> None:
        if failures:
            raise failures.pop()
        fetch_rest(tables, check)

    monkeypatch.setattr(PartialTables, "fetch_rest", refused)
    gate.open.set()
    with opened(servers, "second") as (_, task):
        wait_until(lambda: is_whole(task))
        assert content(task) == state
    lines = [record for record in caplog.records if "cannot be fetched now" in record.message]
    assert [bool(line.exc_info) for line in lines] == [True, False, False]


def test_a_task_that_closes_has_lost_nothing(
    servers: MemoryServers, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fill notices that files are removed. That is no damage, after which other local copies would be in doubt."""
    publish(servers)
    ended = threading.Event()

    def removed(_: PartialTables, check: Callable[[], None]) -> None:
        try:
            while True:
                check()
                time.sleep(0.01)
        except ClosedError:
            threading.Timer(0.1, ended.set).start()
            raise MissingFile("a file is gone") from None

    monkeypatch.setattr(PartialTables, "fetch_rest", removed)
    with opened(servers, "second") as (_, task):
        store = task._stores["totals"]
    assert ended.wait(5)
    assert store.lost is None


def test_a_task_that_closes_while_a_request_hangs_leaves_its_files(
    servers: MemoryServers, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody takes them over before the request has ended. Then the next opening does."""
    state = publish(servers)
    monkeypatch.setattr(flow, "_END_S", 0.01)
    gate.open.set()
    fetch_rest, hangs, answered = PartialTables.fetch_rest, threading.Event(), threading.Event()

    def late(tables: PartialTables, check: Callable[[], None]) -> None:
        hangs.set()
        assert answered.wait(30)
        check()
        fetch_rest(tables, check)

    monkeypatch.setattr(PartialTables, "fetch_rest", late)
    with servers.manager(servers.on_disk(servers.config, "second"), "kafka-partition") as manager:
        task = manager.open_task(TASK)
        store = task._stores["totals"]
        assert task.store("totals").get(key(1_000)) == state[key(1_000)]
        assert hangs.wait(30)
        task.close()
        assert store.live.exists()
        assert not store.directories.leftovers()
        answered.set()
        wait_until(lambda: len(store.directories.leftovers()) == 1)
    fetched: list[object] = []
    get_range = Downloads.get_range
    monkeypatch.setattr(Downloads, "get_range", lambda *asked: (fetched.append(asked), get_range(*asked))[1])
    monkeypatch.setattr(PartialTables, "fetch_rest", fetch_rest)
    with opened(servers, "second") as (_, task):
        assert task.store("totals").get(key(1_000)) == state[key(1_000)]
        assert not fetched
        wait_until(lambda: is_whole(task))
        assert content(task) == state


def test_an_opening_that_fails_late_leaves_its_files(
    servers: MemoryServers, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next one takes them over."""
    state = publish(servers)

    def refused(*_: object) -> object:
        raise DiskFull("full")

    with servers.manager(servers.on_disk(servers.config, "second"), "kafka-partition") as manager:
        with monkeypatch.context() as patch:
            patch.setattr(open_store, "ChangeBuffer", refused)
            with pytest.raises(DiskFull):
                manager.open_task(TASK)
        assert len(manager._services.directories(TASK, "totals").leftovers()) == 1
        assert content(manager.open_task(TASK)) == state


def test_a_task_opens_only_if_there_is_room_for_everything(
    servers: MemoryServers, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the opening says so, and keeps what is here."""
    state = publish(servers)
    with servers.manager(servers.on_disk(servers.config, "second"), "kafka-partition") as manager:
        with monkeypatch.context() as patch:
            patch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=200_000))
            with pytest.raises(DiskFull, match="only 200000 are free"):
                manager.open_task(TASK)
        assert len(manager._services.directories(TASK, "totals").leftovers()) == 1
        assert content(manager.open_task(TASK)) == state


def test_a_reader_fetches_what_it_reads(servers: MemoryServers, gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    """As ``statemgr store get`` does; ``store count`` fetches the whole state first."""
    state = publish(servers)
    monkeypatch.setattr(reader, "_WORTH", 1)
    fetched = fetched_sizes(monkeypatch)
    config = servers.on_disk(servers.config, "reader")
    with JobReader(config, services=servers.services) as jobs:
        with jobs.open_store(TASK, "totals") as store:
            assert store.get(key(3_000)) == state[key(3_000)]
            assert store.get(key(7)) == b"seven"
            assert store.get(key(8)) is None
            assert 0 < sum(fetched) < 0.2 * sum(map(len, state.values()))
            first, last = key(100), key(200)
            wanted = {name: value for name, value in state.items() if first <= name < last}
            assert dict(store.scan(first, last)) == wanted
        fetched.clear()
        with jobs.open_store(TASK, "totals", whole=True) as store:
            assert dict(store.scan(None, None)) == state
        assert not fetched


class Faults:
    """Lost, short and damaged answers to reads by need, for a share of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, source: random.Random) -> None:
        self.share = 0.0
        get_range = Downloads.get_range

        def faulty(downloads: Downloads, ref: BlobRef, offset: int, size: int) -> memoryview:
            data = get_range(downloads, ref, offset, size)
            if source.random() >= self.share:
                return data
            kind = source.randrange(3)
            if kind == 0:
                raise UnavailableError("no answer", blob=ref.blob_id)
            if kind == 1:
                raise CorruptBlob("the blob ends too early", blob=ref.blob_id)
            data[source.randrange(size)] ^= 1 << source.randrange(8)
            return data

        monkeypatch.setattr(Downloads, "get_range", faulty)


#: Seeds of histories: four, or a tenth of ``STATEMGR_TEST_EXAMPLES``, or what `make test-by-need` asks for.
_COUNT = int(os.environ.get("STATEMGR_TEST_HISTORIES", "0")) or int(os.environ.get("STATEMGR_TEST_EXAMPLES", "0")) // 10
_FIRST = int(os.environ.get("STATEMGR_TEST_SEED") or 0)
SEEDS = range(_FIRST, _FIRST + max(4, _COUNT))


@pytest.mark.property
@pytest.mark.parametrize("seed", SEEDS)
def test_random_histories(servers: MemoryServers, gate: Gate, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Reads, writes, commits, closes with and without a commit, lost disks, wrong answers of the blob store, and rests
    that come early, late or never: each read is what a dict has, or a typed error."""
    source = random.Random(seed)
    faults = Faults(monkeypatch, random.Random(seed))
    published = publish(servers, 2_000)
    offset = 2
    for _ in range(8):
        gate.open.clear()
        if source.random() < 0.4:
            servers.lose_disk()
        with opened(servers, source.choice(["one", "two"])) as (_, task), suppress(LocalStateLost):
            faults.share = source.choice([0.0, 0.0, 0.1, 0.5])
            state, store = dict(published), task.store("totals")
            for _ in range(source.randrange(60)):
                with suppress(StateUnreachable):
                    step, name = source.random(), key(source.randrange(2_200))
                    if step < 0.3:
                        assert store.get(name) == state.get(name)
                    elif step < 0.4:
                        names = [key(source.randrange(2_200)) for _ in range(20)]
                        assert store.get_many(names) == [state.get(one) for one in names]
                    elif step < 0.5:
                        end = key(int(name[-5:]) + source.randrange(200))
                        wanted = {one: value for one, value in sorted(state.items()) if name <= one < end}
                        assert dict(store.range(name, end)) == wanted
                    elif step < 0.75:
                        state[name] = source.randbytes(80)
                        store.put(name, state[name])
                    elif step < 0.9:
                        store.delete(name)
                        state.pop(name, None)
                    elif step < 0.97:
                        offset += 1
                        task.commit({"orders-0": offset})
                        published = dict(state)
                    else:
                        gate.open.set()
            faults.share = 0.0
            assert content(task) == state


def _use(task: Task, state: State) -> None:
    for name, value in state.items():
        assert task.store("totals").get(name) == value
    task.store("totals").put(b"x", b"y")
    task.commit({"orders-0": 3})


def _all_blobs(blobs: BlobStore) -> list[BlobInfo]:
    return list(list_blobs(blobs, "orders/1/"))


def _unreachable(*_: object) -> memoryview:
    raise UnavailableError("no answer", blob="any")
