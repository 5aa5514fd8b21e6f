"""Stores of every kind through commits and restores: which are backed up, what comes back, and what it costs."""

from __future__ import annotations

import random
import threading
from pathlib import Path

import pytest

from statemgr import JobConfig, StateManager
from statemgr.blobs.file import FileBlobStore
from statemgr.errors import MissingState, PermissionNeeded, StatemgrError, UnavailableError
from statemgr.phases import Phase, observed
from tests.commits import TASK, blob_files, commit, current, published, referenced, totals, write
from tests.jobs import DUAL, elsewhere, job_mapping, with_changes
from tests.kafka_jobs import client
from tests.servers import KafkaServer


def job(kafka: KafkaServer, directory: Path, **more: object) -> JobConfig:
    """Create a dual-commit job on a directory of blobs."""
    return JobConfig.from_mapping(job_mapping(kafka, directory, **more))  # type: ignore[arg-type]


def test_every_kind_of_store_is_backed_up_as_configured(kafka: KafkaServer, tmp_path: Path) -> None:
    """A6, A17, A19, A21: stores are persistent or in memory, and backed up or not. Each comes back complete, or empty
    if it has no backup."""
    stores = ("disk", "memory", "scratch", "scratch-memory")
    config = job(
        kafka,
        tmp_path,
        stores=stores,
        stores__memory__type="memory",
        stores__scratch__backup__factories=[],
        **{"stores.scratch-memory.type": "memory", "stores.scratch-memory.backup.factories": []},
    )
    items = {b"a": b"1", b"": b"", b"large": random.Random(1).randbytes(100_000)}
    commit(config, dict(items), 1)
    record = current(config)
    assert record is not None
    assert set(record.current.stores) == {"disk", "memory"}, "what is not backed up is not listed"
    for factory in DUAL:
        assert set(record.current.state_checkpoint_markers[factory]) == {"disk", "memory"}
        with (
            StateManager(elsewhere(config, tmp_path / factory, factory)) as manager,
            manager.open_task(TASK) as task,
        ):
            found = {store: dict(task.store(store).range()) for store in stores}
            assert found == {"disk": items, "memory": items, "scratch": {}, "scratch-memory": {}}
            assert {r.store: r.factory for r in task.restored} == {
                "disk": factory,
                "memory": factory,
                "scratch": "empty",
                "scratch-memory": "empty",
            }
    assert not [name for name in blob_files(tmp_path) if "scratch" in name]
    topics = client(config).list_topics(timeout=60).topics
    assert not [topic for topic in topics if topic.startswith(config.job_name) and "scratch" in topic]


def test_a_live_directory_is_replaced_never_merged(kafka: KafkaServer, tmp_path: Path) -> None:
    """A20, A25, invariant 9: whatever is in the local directories, the restored state is exactly the checkpoint's."""
    config = job(kafka, tmp_path, backup=("blob-store",))
    commit(config, {b"a": b"1", b"b": b"1"}, 1)
    behind = elsewhere(config, tmp_path / "behind", "blob-store")
    commit(behind, {b"b": None, b"c": b"2"}, 2)
    # the first machine has the older state, a live directory of a dead owner, and files that belong to no state
    root = tmp_path / "state" / config.job_name / config.job_id / "Partition_0" / "totals"
    for directory in [path for path in root.rglob("*") if path.is_dir()]:
        for name in ("LOG", "LOG.old.1", "LOCK", "OFFSET"):
            if not (directory / name).exists():
                (directory / name).write_bytes(b"no state")
    with StateManager(config) as manager, manager.open_task(TASK) as task:
        assert dict(task.store("totals").range()) == {b"a": b"1", b"c": b"2"}
        write(task, {b"d": b"3"})
        task.commit({"orders-0": 3})
    assert totals(config, "blob-store")[TASK] == {b"a": b"1", b"c": b"2", b"d": b"3"}
    assert not [name for name in blob_files(tmp_path) if name.rpartition("/")[2].startswith(("LOG", "LOCK", "OFFSET"))]


@pytest.mark.parametrize("spoil", ["identical", "one-file-altered", "one-file-gone", "absent"])
def test_a_local_directory_is_used_as_far_as_it_is_right(kafka: KafkaServer, tmp_path: Path, spoil: str) -> None:
    """A22, A40, invariant 10: a local directory is identical, differs in one file, or is absent. The state is right in
    all cases, and only an identical directory needs no fetch."""
    config = job(kafka, tmp_path, backup=("blob-store",))
    commit(config, {b"%04d" % n: random.Random(n).randbytes(500) for n in range(400)}, 1)
    commit(config, {b"more": random.Random(7).randbytes(50_000)}, 2)
    model = totals(config, "blob-store")[TASK]
    root = tmp_path / "state" / config.job_name / config.job_id / "Partition_0" / "totals"
    tables = sorted(root.rglob("*.sst"), key=lambda path: path.stat().st_size)
    assert tables
    if spoil == "one-file-altered":
        data = bytearray(tables[0].read_bytes())
        data[len(data) // 2] ^= 1
        tables[0].write_bytes(data)
    elif spoil == "one-file-gone":
        tables[0].unlink()
    elif spoil == "absent":
        config = elsewhere(config, tmp_path / "other", "blob-store")
    with StateManager(config) as manager, manager.open_task(TASK) as task:
        assert dict(task.store("totals").range()) == model
        restored = task.restored[0]
    assert restored.factory == ("local" if spoil == "identical" else "blob-store")
    assert (restored.bytes_fetched == 0) == (spoil == "identical")


def test_each_index_is_read_once_and_nothing_is_listed(
    kafka: KafkaServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A17, A24, A29, invariant 1: a restore fetches all stores' indexes at once, each only once, and lists nothing."""
    stores = ("a", "b", "c")
    config = job(kafka, tmp_path, backup=("blob-store",), stores=stores)
    commit(config, {b"k": random.Random(3).randbytes(50_000)}, 1)
    got: list[str] = []
    get = FileBlobStore.get
    all_asked = threading.Barrier(len(stores), timeout=30)

    def watched(self: FileBlobStore, blob_id: str, offset: int, length: int | None) -> object:
        if length != 0:  # after an opening, a check reads no bytes, only whether each blob exists
            got.append(blob_id)
            if blob_id.endswith("/index"):
                all_asked.wait()
        return get(self, blob_id, offset, length)

    def listed(self: FileBlobStore, prefix: str, token: str | None = None) -> object:
        raise AssertionError("a restore lists nothing")

    monkeypatch.setattr(FileBlobStore, "get", watched)
    monkeypatch.setattr(FileBlobStore, "list", listed)
    moved = elsewhere(config, tmp_path / "other", "blob-store")
    with StateManager(moved) as manager, manager.open_task(TASK) as task:
        assert all(dict(task.store(store).range()) for store in stores)
    indexes = [name for name in got if name.endswith("/index")]
    assert len(indexes) == len(set(indexes)) == 3
    assert len(got) == len(set(got)), "no blob is fetched twice"


def test_failures_of_a_restore_surface_with_their_place(
    kafka: KafkaServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A18, A30: an error at the start or in the middle of a stream stops the opening. It names the task, the store and
    the blob, and has a hint."""
    config = job(
        kafka, tmp_path, backup=("blob-store",), blob__store__retry__policy__max__retries=0, stores=("totals", "index")
    )
    commit(config, {b"k": random.Random(3).randbytes(300_000)}, 1)
    get = FileBlobStore.get
    moved = elsewhere(config, tmp_path / "other", "blob-store")

    class Broken:
        def __init__(self, blob_id: str) -> None:
            self._blob_id = blob_id

        def __enter__(self) -> Broken:
            return self

        def __exit__(self, *exc: object) -> None: ...

        def copy_to(self, fd: int, offset: int, size: int) -> int | None:
            """Leave the copy to the caller."""
            return None

        def readinto(self, buffer: memoryview) -> int:
            raise UnavailableError("told to", blob=self._blob_id, hint="wait")

    def at_once(self: FileBlobStore, blob_id: str, *args: int) -> object:
        if blob_id.endswith("/index"):
            raise UnavailableError("told to", blob=blob_id, hint="wait")
        return get(self, blob_id, *args)

    def in_the_middle(self: FileBlobStore, blob_id: str, *args: int) -> object:
        return get(self, blob_id, *args) if blob_id.endswith("/index") else Broken(blob_id)

    for fault in (at_once, in_the_middle):
        monkeypatch.setattr(FileBlobStore, "get", fault)
        with StateManager(moved) as manager, pytest.raises(StatemgrError, match="told to") as caught:
            manager.open_task(TASK)
        assert {"task", "store", "blob"} <= set(caught.value.where)
        assert caught.value.hint
    monkeypatch.setattr(FileBlobStore, "get", get)
    assert published(config, "blob-store")[TASK]["index"]
    with StateManager(moved) as manager, manager.open_task(TASK) as task:
        assert dict(task.store("totals").range()) == published(config, "blob-store")[TASK]["totals"]


def test_no_entry_for_a_backend_or_for_one_store_of_it(kafka: KafkaServer, tmp_path: Path) -> None:
    """A23, A31, A46: one store lacks a marker that another has. The restore uses the list's next factory, or fails."""
    config = job(kafka, tmp_path, stores=("one", "two"), backup=("kafka-changelog",))
    commit(config, {b"a": b"1"}, 1)
    dual = with_changes(config, stores__one__backup__factories=list(DUAL))
    commit(dual, {b"b": b"2"}, 2)
    blobs_only = with_changes(
        dual, stores__one__restore__factories=["blob-store"], stores__two__restore__factories=["blob-store"]
    )
    with (
        StateManager(elsewhere(blobs_only, tmp_path / "x", "blob-store")) as manager,
        pytest.raises(MissingState) as caught,
    ):
        manager.open_task(TASK)
    assert caught.value.where["store"] == "two"
    both = with_changes(
        dual,
        stores__one__restore__factories=["blob-store", "kafka-changelog"],
        stores__two__restore__factories=["blob-store", "kafka-changelog"],
        state__dir=str(tmp_path / "y"),
    )
    with StateManager(both) as manager, manager.open_task(TASK) as task:
        assert {r.store: r.factory for r in task.restored} == {"one": "blob-store", "two": "kafka-changelog"}
        assert dict(task.store("two").range()) == {b"a": b"1", b"b": b"2"}


def test_a_renamed_store_needs_both_permissions(kafka: KafkaServer, tmp_path: Path) -> None:
    """A3, A12, protocol 6: a renamed store is one removed and one new store. The publish deletes the old one's
    blobs."""
    config = job(kafka, tmp_path, backup=("blob-store",), task__checkpoint__retained=1)
    commit(config, {b"a": b"1"}, 1)
    old = blob_files(tmp_path)
    mapping = {k: v for k, v in config.to_mapping().items() if not k.startswith("stores.totals")}
    renamed = JobConfig.from_mapping({**mapping, "stores.sums.value.serde": "bytes"})
    for new, removed in ((False, False), (True, False), (False, True)):
        with StateManager(renamed) as manager, pytest.raises(PermissionNeeded):
            manager.open_task(TASK, allow_new_stores=new, allow_removed_stores=removed)
    assert blob_files(tmp_path) == old, "a refusal deletes nothing"
    commit(renamed, {b"b": b"2"}, 2, allow_new_stores=True, allow_removed_stores=True)
    assert published(renamed, "blob-store") == {TASK: {"sums": {b"b": b"2"}}}
    assert not old & blob_files(tmp_path)
    assert blob_files(tmp_path) == referenced(renamed)


def test_a_clean_up_that_a_dead_owner_left_is_finished_at_the_open(kafka: KafkaServer, tmp_path: Path) -> None:
    """A13, A14, A40 (clean-up commit), FAULT 5: the next owner removes TTLs and deletes superseded blobs. The same
    holds if another owner follows."""
    config = job(kafka, tmp_path, backup=("blob-store",), task__checkpoint__retained=1)
    commit(config, {b"a": random.Random(1).randbytes(50_000)}, 1)

    def die(phase: Phase, subject: str) -> None:
        if phase is Phase.REMOVE_TTL:
            raise KeyboardInterrupt

    manager = StateManager(config)
    task = manager.open_task(TASK)
    write(task, {b"a": random.Random(2).randbytes(50_000)})
    with observed(die), pytest.raises(KeyboardInterrupt):
        task.commit({"orders-0": 2})
    left = blob_files(tmp_path)
    assert blob_files(tmp_path, expiring=True)
    for machine in ("one", "two"):
        with StateManager(elsewhere(config, tmp_path / machine, "blob-store")) as other, other.open_task(TASK) as task:
            assert task.last_checkpoint is not None
            assert task.last_checkpoint.input_offsets == {"orders-0": 2}
        assert blob_files(tmp_path) == blob_files(tmp_path, expiring=False) == referenced(config) < left
    manager.close()


def test_a_permission_is_used_up_although_no_input_follows(kafka: KafkaServer, tmp_path: Path) -> None:
    """FAULT 31, protocol 6: an opening with a permission commits immediately, and the next opening needs none."""
    config = job(kafka, tmp_path)
    commit(config, {b"a": b"1"}, 1)
    renamed = JobConfig.from_mapping(
        {key.replace("stores.totals.", "stores.counts."): value for key, value in config.to_mapping().items()}
    )
    with StateManager(renamed) as manager, manager.open_task(TASK, allow_new_stores=True, allow_removed_stores=True):
        pass
    with StateManager(renamed) as manager, manager.open_task(TASK) as task:
        assert dict(task.store("counts").range()) == {}
        assert task.last_checkpoint is not None
        assert task.last_checkpoint.input_offsets == {"orders-0": 1}
