"""A state is read while most of it is still in the blob store. Needs no broker."""

from __future__ import annotations

import os
import random
import shutil
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from statemgr import JobConfig
from statemgr.backends.blobs import by_need, partial_table, partial_tables, snapshots
from statemgr.backends.blobs.partial_tables import PartialTables
from statemgr.backends.blobs.tables import replay
from statemgr.errors import (
    ClosedError,
    CorruptBlob,
    CorruptFile,
    DiskFull,
    MissingBlob,
    RetryableError,
    StatemgrError,
    StateUnreachable,
    UnavailableError,
)
from statemgr.local.rocksdb import partial
from statemgr.local.rocksdb.options import BRIEF
from statemgr.local.rocksdb.partial import Hole, PartialStore
from statemgr.local.rocksdb.table_format import tail_offsets
from statemgr.local.sparse_file import SparseFile
from statemgr.model.checkpoint import BlobRef, Marker
from statemgr.model.hashing import content_hash
from statemgr.model.snapshot import FileIndex, Tail
from statemgr.ports import RestoreRequest, no_progress
from statemgr.transfer.downloads import Downloads
from statemgr.wiring import open_services
from tests.by_need import (
    ROCKSDB,
    State,
    check,
    fetched_sizes,
    index_of,
    key,
    large_state,
    opened,
    partial_state,
    publish,
)
from tests.jobs import with_changes
from tests.kafka_jobs import wait_until
from tests.segment_tasks import FACTORY, STORE, config_of


@pytest.fixture(autouse=True, scope="module")
def small_states_count() -> Iterator[None]:
    """Let small states be read by need, too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(snapshots, "_LARGE", 8 * 1024)
        yield


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> tuple[JobConfig, Marker, State]:
    """A state of a snapshot of several tables and two segments: one of records, and one with a table."""
    directory = tmp_path_factory.mktemp("published")
    return publish(config_of(directory, **ROCKSDB), large_state(1))


def test_every_answer_is_that_of_the_whole_state(published: tuple[JobConfig, Marker, State], tmp_path: Path) -> None:
    """Values, deletes and absent keys, one by one, in groups and in ranges: of the snapshot and of the segments."""
    config, marker, state = published
    with opened(config, marker, tmp_path) as store:
        check(store, state)


@pytest.mark.parametrize("foot", [0, 100])
def test_a_table_whose_foot_is_not_in_the_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, foot: int) -> None:
    """It has many deletes of ranges, say. RocksDB asks for one tail after the other, and gets ever more at once."""
    monkeypatch.setattr(snapshots, "_FOOT", foot)
    config, marker, state = publish(config_of(tmp_path, **ROCKSDB), large_state(2), tables=9)
    calls: list[int] = []
    fetch = partial_tables.PartialTables._fetch_tails

    def counted(self: partial_tables.PartialTables, tables: list[Any], *arguments: Any) -> None:
        calls.append(len(tables))
        fetch(self, tables, *arguments)

    monkeypatch.setattr(partial_tables.PartialTables, "_fetch_tails", counted)
    with opened(config, marker, tmp_path / "other") as store:
        assert sum(calls) > len(calls) > 1
        check(store, state)


def test_a_store_of_many_tables_opens_few_of_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """RocksDB opens the others when a read looks into them."""
    monkeypatch.setattr(snapshots, "_FOOT", 0)
    config, marker, state = publish(config_of(tmp_path, **ROCKSDB), large_state(2), tables=30)
    fetched: list[Any] = []
    fetch = partial_tables.PartialTables._fetch_tail

    def counted(self: partial_tables.PartialTables, table: Any) -> None:
        fetched.append(table)
        fetch(self, table)

    monkeypatch.setattr(partial_tables.PartialTables, "_fetch_tail", counted)
    opening: list[int] = []
    monkeypatch.setattr(by_need, "replay", lambda *arguments: (opening.append(len(fetched)), replay(*arguments))[1])
    with opened(config, marker, tmp_path / "other") as store:
        check(store, state)
    assert opening == [min(opening[0], 20)]
    assert len(fetched) >= 30


@pytest.mark.parametrize("known", ["nothing", "table"])
def test_a_text_that_says_less_costs_more_and_changes_no_answer(
    published: tuple[JobConfig, Marker, State], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, known: str
) -> None:
    """The place of a hole is in the text of RocksDB's error. Another version may have another text."""
    exact = partial.hole_in
    monkeypatch.setattr(partial, "hole_in", lambda text: Hole(exact(text).table) if known == "table" else Hole())
    config, marker, state = published
    with opened(config, marker, tmp_path) as store:
        check(store, state)


def test_the_text_of_an_error_names_the_block(tmp_path: Path) -> None:
    """If this fails, RocksDB has another text: read by need then fetches whole tables (partial.hole_in)."""
    text = (
        "cannot read: Corruption: block checksum mismatch: stored(context removed) = 3393258002, computed = 1484225410"
        ", type = 4  in sp/000008.sst offset 4096 size 3984"
    )
    assert partial.hole_in(text) == Hole("000008.sst", 4096, 3984)
    magic = (
        "cannot open the store: Corruption: Bad table magic number: expected 9, found 0 in sp/000012.sst  The file …"
    )
    assert partial.hole_in(magic) == Hole("000012.sst")


def test_what_the_disk_cannot_read_is_no_hole(tmp_path: Path) -> None:
    """Nothing is fetched for it: the bytes in the blob store are not to blame."""
    text = "cannot read: IO error: While pread offset 0 len 9: sp/000008.sst: Input/output error"
    supplied: list[Hole] = []
    with pytest.raises(CorruptFile):
        partial._supplied(lambda hole, _: not supplied.append(hole), CorruptFile(text), Counter())
    assert not supplied


def test_one_key_costs_little(
    published: tuple[JobConfig, Marker, State], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the opening, a value that is there costs one small request, and hardly any absent key costs one."""
    sizes = fetched_sizes(monkeypatch)
    config, marker, state = published
    with opened(config, marker, tmp_path) as store:
        # what the index lacks is read where the table of a segment is taken in
        assert sum(sizes) < sum(map(len, state.values())) / 10
        sizes.clear()
        assert store.get(key(16_000)) == state[key(16_000)]
        assert len(sizes) == 1
        assert sizes[0] <= 2 * partial_tables.CHUNK
        sizes.clear()
        absent = [key(number) for number in range(3_001, 24_000, 42)]
        assert store.get_many(absent) == [None] * len(absent)
        assert len(sizes) < len(absent) / 20


def test_threads_that_need_the_same_tail_fetch_it_once(
    published: tuple[JobConfig, Marker, State], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch of keys looks into the same table at once. If the tail cannot be fetched, all of them say so."""
    asked: list[int] = []
    read = Downloads.get_range

    def slow(self: Downloads, ref: Any, offset: int, size: int) -> memoryview:
        asked.append(offset)
        time.sleep(0.2)
        return read(self, ref, offset, size)

    def unreachable(*_: object) -> memoryview:
        time.sleep(0.2)
        return _unreachable()

    config, marker, _ = published
    with opened(config, marker, tmp_path) as store, ThreadPoolExecutor(8) as threads:
        tables = store.supply.__self__  # type: ignore[attr-defined]
        name, table = next(iter(tables._tables.items()))
        hole = Hole(name, table.tail.offset, 100)
        table.has_tail = False
        monkeypatch.setattr(Downloads, "get_range", unreachable)
        failed = [one.exception(20) for one in [threads.submit(store.supply, hole, 1) for _ in range(8)]]
        assert {type(error) for error in failed} == {StateUnreachable}
        monkeypatch.setattr(Downloads, "get_range", slow)
        assert [one.result(20) for one in [threads.submit(store.supply, hole, 1) for _ in range(8)]] == [True] * 8
    assert len(asked) == 1


def test_nothing_is_made_from_a_store_with_holes(published: tuple[JobConfig, Marker, State], tmp_path: Path) -> None:
    """It cannot become a local copy, a snapshot, or anything that another process could take for whole."""
    config, marker, _ = published
    with opened(config, marker, tmp_path) as store:
        for make in (store.checkpoint, store.concurrent_checkpoint):
            with pytest.raises(RetryableError, match="not here"):
                make(tmp_path / "checkpoint")
        with pytest.raises(RetryableError, match="not here"):
            store.compact()
    assert not (tmp_path / "checkpoint").exists()


def test_compressed_parts(tmp_path: Path) -> None:
    """A part that is stored as a frame is fetched whole, and verified by its hash."""
    config = config_of(tmp_path, **ROCKSDB, blob__store__compression="zstd", blob__store__part__size=1024 * 1024)
    source = random.Random(5)
    state = {name: bytes([source.randrange(256)]) * 200 for name in large_state(1)}
    config, marker, state = publish(config, state, tables=1)
    services = open_services(config)
    index = index_of(services, marker)
    services.close()
    assert any(any(file.frames) for file in index.root.files)
    with opened(config, marker, tmp_path / "other") as store:
        check(store, state)


def test_every_table_has_a_tail(published: tuple[JobConfig, Marker, State]) -> None:
    """The tails are in the index, and are what the tables have from there on."""
    config, marker, _ = published
    services = open_services(config)
    index = index_of(services, marker)
    tables = [file for file in index.root.files if file.name.endswith(".sst") and not file.inline]
    assert len(tables) > 1
    for file in tables:
        assert file.tail is not None
        assert 0 < file.tail.offset < file.size
        assert file.size - file.tail.offset < file.size / 5
        assert 500 < len(file.tail.foot) < 3000
    services.close()


@pytest.mark.parametrize("content", [b"", b"x", bytes(53), bytes(200), b"\xff" * 200])
def test_what_is_no_table_has_no_tail(tmp_path: Path, content: bytes) -> None:
    """Neither an error nor a wrong place."""
    path = tmp_path / "000001.sst"
    path.write_bytes(content)
    assert tail_offsets(path) is None


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("region", ["data", "filter", "index", "footer"])
def test_damage_gives_an_exact_answer_or_a_typed_error(
    published: tuple[JobConfig, Marker, State], tmp_path: Path, region: str, when: str
) -> None:
    """Each table in turn has wrong bytes, before or after the store is opened. No key is silently absent or wrong."""
    config, marker, state = published
    services = open_services(config)
    index = index_of(services, marker)
    services.close()
    tables = [file for file in index.root.files if file.tail is not None]
    source = random.Random(f"{region} {when}")
    failures, named = 0, []
    for number, file in enumerate(tables):
        assert file.tail is not None
        tail = file.size - file.tail.offset
        place = {
            "data": source.randrange(file.tail.offset),
            "filter": file.tail.offset + source.randrange(tail // 3),
            "index": file.size - 1500 - source.randrange(500),
            "footer": file.size - 1 - source.randrange(40),
        }[region]
        part = file.parts[0]
        path = blob_path(config, part.blob_id)
        whole = path.read_bytes()
        at = (part.offset or 0) + place
        damaged = whole[:at] + bytes([whole[at] ^ 0x10]) + whole[at + 1 :]
        try:
            if when == "before":
                path.write_bytes(damaged)
            with opened(config, marker, tmp_path / str(number)) as store:
                path.write_bytes(damaged)
                failures += answers(store, state)
        except CorruptBlob as error:
            failures += 1
            named.append(error.where["blob"] == part.blob_id)
        finally:
            path.write_bytes(whole)
    assert all(named)
    # the index has the foot that a table is opened with, and a tail that was verified is not read again
    assert failures or region == "footer" or (when == "after" and region != "data")


def blob_path(config: JobConfig, blob_id: str) -> Path:
    """The file of a blob."""
    return Path(config.state_dir).parent / "blobs" / blob_id


def answers(store: PartialStore, state: State) -> int:
    """Read everything key by key. Returns: for how many keys there was an error."""
    failures = 0
    for number in range(0, 24_010, 31):
        found: bytes | None = None
        try:
            found = store.get(key(number))
        except CorruptBlob:
            failures += 1
        else:
            assert found == state.get(key(number))
    items: list[tuple[bytes, bytes]] = []
    try:
        items.extend(store.scan(None, None))
    except CorruptBlob:
        failures += 1
    assert items == sorted(state.items())[: len(items)]
    assert failures or len(items) == len(state)
    return failures


def test_a_store_that_cannot_be_reached_is_asked_again(
    published: tuple[JobConfig, Marker, State], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A read says what it cannot reach, and the same read succeeds later."""
    config, marker, state = published
    with opened(config, marker, tmp_path) as store:
        with monkeypatch.context() as cut:
            cut.setattr(Downloads, "get_range", _unreachable)
            with pytest.raises(UnavailableError):
                store.get(key(16_000))
            with pytest.raises(UnavailableError):
                list(store.scan(key(15_000), key(17_000)))
        check(store, state)


def test_a_blob_that_is_gone_is_named(published: tuple[JobConfig, Marker, State], tmp_path: Path) -> None:
    """A part that somebody deleted while the store is open is named, and is read again when it is back."""
    config, marker, state = published
    services = open_services(config)
    file = next(file for file in index_of(services, marker).root.files if file.tail is not None)
    services.close()
    path = blob_path(config, file.parts[0].blob_id)
    content = path.read_bytes()
    try:
        with opened(config, marker, tmp_path) as store:
            path.unlink()
            with pytest.raises(MissingBlob) as caught:
                dict(store.scan(None, None))
            assert caught.value.where["blob"] == file.parts[0].blob_id
            assert "no longer retains the checkpoint, open the store again" in str(caught.value.hint)
            path.write_bytes(content)
            check(store, state)
    finally:
        path.write_bytes(content)


def _unreachable(*_: object) -> memoryview:
    raise UnavailableError("no answer", blob="any")


def test_a_block_whose_checksum_is_in_the_next_chunk(
    published: tuple[JobConfig, Marker, State], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """RocksDB names a block without its trailer. With chunks that are so small, many trailers lie in two of them."""
    monkeypatch.setattr(partial_table, "CHUNK", 64)
    monkeypatch.setattr(partial_tables, "CHUNK", 64)
    config, marker, state = published
    with opened(config, marker, tmp_path) as store:
        wanted = [key(number) for number in range(0, 24_010, 31)]
        random.Random(3).shuffle(wanted)
        assert {name: store.get(name) for name in wanted} == {name: state.get(name) for name in wanted}


def test_a_scan_is_as_of_its_call(
    published: tuple[JobConfig, Marker, State], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is written behind its place between two holes is not in it. After an error, its next step tries again."""
    config, marker, state = published
    with opened(config, marker, tmp_path) as store:
        scan = store.scan(None, None)
        found = [next(scan)]
        store.write([(key(20_001), b"later"), (key(20_002), None)])
        with monkeypatch.context() as cut:
            cut.setattr(Downloads, "get_range", _unreachable)
            with pytest.raises(UnavailableError):
                found.extend(scan)
        assert len(found) < len(state)
        found.extend(scan)
        assert found == sorted(state.items())
        scan = store.scan(None, None)
        next(scan)
    with pytest.raises(ClosedError):
        next(scan)


def test_two_threads_meet_the_same_hole(published: tuple[JobConfig, Marker, State], tmp_path: Path) -> None:
    """What one of them has fetched is no damage to the other one, which failed before and asks after it."""
    config, marker, _ = published
    with opened(config, marker, tmp_path) as store:
        name = next((tmp_path / "parts").glob("*.sst")).name
        size = (tmp_path / "parts" / name).stat().st_size
        for hole in (Hole(name, 0, 4000), Hole(name, size - 100, 50), Hole(name), Hole()):
            assert [store.supply(hole, 1), store.supply(hole, 1)] == [True, True]
        # but a file that is not one of the snapshot's has no holes
        assert not store.supply(Hole("999999.sst", 0, 4000), 2)


def test_a_late_read_does_not_damage_a_verified_file(
    published: tuple[JobConfig, Marker, State], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A read by need gets wrong bytes, and writes them after the fill has verified the file."""
    config, marker, _ = published
    services = open_services(with_changes(config, state__dir=str(tmp_path / "state")))
    parts = tmp_path / "parts"
    request = RestoreRequest(services.identity("Partition 0", STORE), marker, parts, (), no_progress)
    state = services.restore_manager(FACTORY).open_by_need(request, 1)
    assert state is not None
    assert isinstance(state.store, PartialStore)
    store, names, fetch_part = state.store, [path.name for path in parts.glob("*.sst")], Downloads.fetch_part
    get_range, wrong = Downloads.get_range, list[bytes]()

    def get(self: Downloads, ref: BlobRef, offset: int, size: int) -> memoryview:
        if offset < partial_tables.CHUNK:
            wrong.append(ref.hash)
            return memoryview(bytes(size))
        return get_range(self, ref, offset, size)

    def late(self: Downloads, *arguments: Any) -> None:
        fetch_part(self, *arguments)
        own, before = arguments[0].parts[arguments[1]].hash, list(wrong)
        store.supply(Hole(arguments[2].path.name, 0, 4000), 1)  # the fill has written it already
        assert wrong.count(own) == before.count(own)
        if own not in before:  # as a read does that has failed twice
            store.supply(Hole(arguments[2].path.name, 0, 4000), 2)

    monkeypatch.setattr(Downloads, "get_range", get)
    monkeypatch.setattr(Downloads, "fetch_part", late)
    state.fetch_rest(lambda: None)
    assert wrong
    for name in names:  # nor is a file written to that is whole
        store.supply(Hole(name, 0, 4000), 2)
    hashes = {file.name: file.hash for file in index_of(services, marker).root.files}
    for name in names:
        assert name not in hashes or content_hash((parts / name).read_bytes()) == hashes[name]
    store.close()
    services.close()


def test_everything_is_deleted_behind_a_hole(published: tuple[JobConfig, Marker, State], tmp_path: Path) -> None:
    """A deletion without an end looks for the last key."""
    config, marker, _ = published
    with opened(config, marker, tmp_path) as store:
        store.delete_range(key(0), None)
        assert dict(store.scan(key(0), None)) == {}


@pytest.mark.parametrize(
    ("text", "kind"),
    [("IO error: No space left on device: 1.sst", DiskFull), ("IO error: Too many open files: 1.sst", RetryableError)],
)
def test_a_store_that_cannot_write_goes_on_when_it_is_whole(
    published: tuple[JobConfig, Marker, State], tmp_path: Path, text: str, kind: type[StatemgrError]
) -> None:
    """Until then each write says why. It is opened again with the options of a store as any other."""
    config, marker, state = published
    services = open_services(with_changes(config, state__dir=str(tmp_path / "state")))
    request = RestoreRequest(services.identity("Partition 0", STORE), marker, tmp_path / "parts", (), no_progress)
    found = services.restore_manager(FACTORY).open_by_need(request, 1)
    assert found is not None
    assert isinstance(found.store, PartialStore)
    with pytest.raises(kind) as failed, found.store._writing("cannot flush the store"):
        raise Exception(text)
    with pytest.raises(kind, match="wait until all") as refused:
        found.store.write([(b"a", b"1")])
    assert failed.value.message in refused.value.message
    assert refused.value.hint == failed.value.hint
    found.fetch_rest(lambda: None)
    found.store.write([(b"a", b"1")])
    assert dict(found.store.scan(None, None)) == {**state, b"a": b"1"}
    assert BRIEF not in found.store._values
    found.store.close()
    services.close()


def test_no_write_waits_when_a_store_becomes_whole(published: tuple[JobConfig, Marker, State], tmp_path: Path) -> None:
    """While parts are missing, nothing is compacted, so then level 0 has many files."""
    config, marker, state = published
    config = with_changes(config, **{f"stores__{STORE}__rocksdb__level0__compaction__trigger": 4})
    with partial_state(config, marker, tmp_path) as found:
        store = found.store
        for number in range(170):
            store.write([(b"more-%03d" % number, b"1")])
            store.flush()
        found.fetch_rest(lambda: None)
        assert not store.gauge("rocksdb.is-write-stopped")
        store.write([(b"more-last", b"1")])
        wait_until(lambda: (store.gauge("rocksdb.num-files-at-level0") or 0) < 64)
        assert len(dict(store.scan(b"more", b"more."))) == 171
        assert store.get(key(6_000)) == state[key(6_000)]


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("spare", [-8192, 8192])
def test_what_an_earlier_opening_left_needs_no_space_again(
    published: tuple[JobConfig, Marker, State], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: bool, spare: int
) -> None:
    """What counts is what the files that are taken over have on the disk. Holes and files of another size are none."""
    config, marker, state = published
    with partial_state(config, marker, tmp_path) as found:
        assert found.store.get(key(6_000)) == state[key(6_000)]
        sizes = {name: size for name, (size, _) in found.files.items()}
    left = tmp_path / "left"
    (tmp_path / "parts").rename(left)
    unusable = max(sizes, key=lambda name: (left / name).stat().st_blocks)
    os.truncate(left / unusable, sizes[unusable] - 1)
    here = sum((left / name).stat().st_blocks * 512 for name in sizes if name != unusable)
    assert 0 < here < sum(sizes.values()) / 2
    services = open_services(with_changes(config, state__dir=str(tmp_path / "state")))
    manager, identity = services.restore_manager(FACTORY), services.identity("Partition 0", STORE)
    request = RestoreRequest(identity, marker, tmp_path / "parts", (), no_progress, leftovers=[left])
    again = None if whole else manager.open_by_need(request, 1)
    if again is not None:  # it has written a little more
        before, here = here, sum((tmp_path / "parts" / name).stat().st_blocks * 512 for name in sizes)
        assert before <= here < sum(sizes.values()) / 2
    free = sum(sizes.values()) - here + spare
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
    with pytest.raises(DiskFull, match="only") if spare < 0 else nullcontext():
        if again is not None:
            again.check_space()
        else:
            manager.restore(request)
    if again is not None:
        again.store.close()
    services.close()


def test_a_fill_that_ends_leaves_the_count_of_another(tmp_path: Path) -> None:
    """While two fills write the same part, the end of the first does not hide what the second has written."""
    ref = BlobRef("blob", 8, content_hash(b""))
    file = FileIndex("1.sst", 8, content_hash(b""), parts=(ref,))
    local = SparseFile(tmp_path / "1.sst", 8)
    table = partial_table.Table(file, Tail(8, content_hash(b"")), local, bytearray(1))
    first = table.filled(table.parts[0])
    first.__enter__()
    with table.filled(table.parts[0]) as coming:
        coming.add(8)
        first.__exit__(None, None, None)
        assert table.is_written(0, 8)
    assert not table.is_written(0, 8)


def test_the_parts_of_the_hottest_table_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault during the fill changes the order, and no part takes a look at all tables."""
    looks, order = 0, list[str]()

    class Watched(SimpleNamespace):
        @property
        def faults(self) -> int:
            nonlocal looks
            looks += 1
            return int(self.count)

    names = [f"{number:04}.sst" for number in range(1000)]
    tables = PartialTables.__new__(PartialTables)
    part = SimpleNamespace(ref=SimpleNamespace(size=1))
    tables._tables = {
        name: Watched(file=SimpleNamespace(name=name), waiting=[part, part], count=0)  # type: ignore[misc]
        for name in names
    }
    tables._lock, tables._faulted = threading.Lock(), []

    def fetch(table: Any, *_: object) -> None:
        order.append(table.file.name)
        if len(order) == 1:
            tables._tables[names[500]].count = 1  # type: ignore[attr-defined]
            tables._faulted.append(names[500])

    jobs: list[Any] = []
    batch = SimpleNamespace(submit=lambda job, *_: jobs.append(job), check=lambda: None)
    tables._transfer = SimpleNamespace(batch=lambda _: nullcontext(batch))  # type: ignore[assignment]
    monkeypatch.setattr(tables, "_fetch_part", fetch)
    tables._fetch_parts(list(tables._tables.values()))
    for job in jobs:
        job()
    assert order[:4] == [names[0], names[500], names[500], names[0]]
    assert sorted(order) == sorted(names * 2)
    assert looks < 2 * len(names)
