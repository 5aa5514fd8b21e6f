"""Every kind of local store passes the same suite: RocksDB, RocksDB that is open for a moment, and memory."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from statemgr.errors import ClosedError, ConfigError, CorruptError, InvalidError, RetryableError
from statemgr.local import bulk_writer, open_snapshot, open_store
from statemgr.local.memory import MemoryStore
from statemgr.local.trees import is_state
from statemgr.ports import LocalStore

MEBIBYTE = 1024 * 1024
Open = Callable[[Path], LocalStore]


@pytest.fixture(params=["rocksdb", "briefly", "memory"])
def way(request: pytest.FixtureRequest) -> str:
    """Return how stores are opened under test: by the name of their type, or those of RocksDB briefly."""
    return str(request.param)


@pytest.fixture
def kind(way: str) -> str:
    """Return the kind of store under test."""
    return "rocksdb" if way == "briefly" else way


@pytest.fixture
def open_at(kind: str, way: str) -> Iterator[Open]:
    """Return a function that opens stores of the kind. The fixture closes them at the end."""
    opened: list[LocalStore] = []

    def open_one(directory: Path) -> LocalStore:
        if way == "briefly" and not directory.exists():
            open_store(kind, directory, {}).close()  # a new store is opened for writing at once
        opened.append(open_store(kind, directory, {}, read_first=way == "briefly", briefly=way == "briefly"))
        return opened[-1]

    yield open_one
    for store in opened:
        store.close()


@pytest.fixture
def store(open_at: Open, tmp_path: Path) -> LocalStore:
    """Open an empty store."""
    return open_at(tmp_path / "live")


def test_put_get_delete(store: LocalStore) -> None:
    """A read returns the newest change of a key, within one write and across writes."""
    store.write([(b"a", b"1"), (b"b", b"2"), (b"a", b"3")])
    store.write([(b"b", None), (b"never", None)])
    assert store.get(b"a") == b"3"
    assert store.get(b"b") is None
    assert store.get_many([b"b", b"a", b"never", b"a"]) == [None, b"3", None, b"3"]
    assert store.get_many([]) == []


def test_writes_nothing_of_a_bad_batch(store: LocalStore) -> None:
    """A write is all or nothing: a value that is not bytes, or an iterator that fails, leaves no trace."""
    with pytest.raises(InvalidError, match="bytes"):
        store.write([(b"a", b"1"), (b"b", "text")])  # type: ignore[list-item]

    def failing() -> Iterator[tuple[bytes, bytes]]:
        yield b"c", b"1"
        raise RuntimeError("the source broke")

    with pytest.raises(RuntimeError, match="broke"):
        store.write(failing())
    assert list(store.scan(None, None)) == []


def test_scan_bounds_and_order(store: LocalStore) -> None:
    """A scan returns items in byte order. The start is inclusive, the end is exclusive, and None is an open end."""
    keys = [b"", b"\x00", b"a", b"a\x00", b"b", b"\xff", b"\xff\xff"]
    store.write([(key, key) for key in reversed(keys)])
    assert [key for key, _ in store.scan(None, None)] == keys
    assert [key for key, _ in store.scan(b"a", b"b")] == [b"a", b"a\x00"]
    assert [key for key, _ in store.scan(b"aa", None)] == [b"b", b"\xff", b"\xff\xff"]
    assert [key for key, _ in store.scan(None, b"a")] == [b"", b"\x00"]
    assert list(store.scan(b"b", b"b")) == []
    assert list(store.scan(b"b", b"a")) == []
    assert list(store.scan(None, b"")) == []


def test_scan_sees_the_moment_of_its_call(store: LocalStore) -> None:
    """A scan does not see writes after its call, even those before its first step."""
    store.write([(b"a", b"1"), (b"b", b"1")])
    scan = store.scan(None, None)
    store.write([(b"a", b"2"), (b"b", None), (b"c", b"2")])
    assert list(scan) == [(b"a", b"1"), (b"b", b"1")]
    assert list(store.scan(None, None)) == [(b"a", b"2"), (b"c", b"2")]


@pytest.mark.parametrize("flushed", [True, False])
@pytest.mark.parametrize(
    ("start", "end", "left"),
    [
        (b"a", b"b", [b"", b"\x00", b"b", b"\xff", b"\xff\xff"]),
        (None, b"b", [b"b", b"\xff", b"\xff\xff"]),
        (b"b", None, [b"", b"\x00", b"a", b"a\x00"]),
        (None, None, []),
        (b"b", b"a", [b"", b"\x00", b"a", b"a\x00", b"b", b"\xff", b"\xff\xff"]),
        (b"c", b"d", [b"", b"\x00", b"a", b"a\x00", b"b", b"\xff", b"\xff\xff"]),
    ],
)
def test_delete_range(
    store: LocalStore, open_at: Open, tmp_path: Path, start: bytes, end: bytes, left: list[bytes], flushed: bool
) -> None:
    """A delete removes a range, start included and end excluded. Later writes and a checkpoint work as usual."""
    store.write([(key, key) for key in (b"", b"\x00", b"a", b"a\x00", b"b", b"\xff", b"\xff\xff")])
    if flushed:
        store.flush()
    before = store.scan(None, None)
    store.delete_range(start, end)
    assert [key for key, _ in store.scan(None, None)] == left
    assert len(list(before)) == 7
    store.write([(b"a", b"again")])
    store.flush()
    store.checkpoint(tmp_path / "checkpoint")
    copy = open_at(tmp_path / "checkpoint")
    assert dict(copy.scan(None, None)) == {**{key: key for key in left}, b"a": b"again"}


def test_delete_range_of_an_empty_store(store: LocalStore) -> None:
    """Deleting any range of an empty store changes nothing."""
    for start, end in ((None, None), (b"a", None), (None, b"a"), (b"a", b"b")):
        store.delete_range(start, end)
    assert list(store.scan(None, None)) == []


def test_delete_range_is_a_write(store: LocalStore) -> None:
    """Deleting a range with keys raises the sequence number, so the store counts as changed."""
    store.write([(b"a", b"1"), (b"b", b"1")])
    before = store.sequence_number
    store.delete_range(b"a", None)
    assert store.sequence_number > before


def test_a_scan_can_be_closed(store: LocalStore) -> None:
    """A closed scan raises an error at its next step. A finished scan just stays at its end."""
    store.write([(b"a", b"1"), (b"b", b"2")])
    half, whole = store.scan(None, None), store.scan(None, None)
    assert next(half) == (b"a", b"1")
    half.close()
    half.close()
    with pytest.raises(ClosedError, match="scan"):
        next(half)
    assert len(list(whole)) == 2
    whole.close()
    assert list(whole) == []
    assert store.get(b"b") == b"2"


def test_statistics_are_numbers(store: LocalStore) -> None:
    """Every kind of store reports statistics as numbers, which change with the content."""
    before = dict(store.statistics())
    store.write([(b"%03d" % i, b"x" * 100) for i in range(500)])
    after = store.statistics()
    assert after.keys() == before.keys()
    assert all(isinstance(value, int | float) for value in after.values())
    grown = {"rocksdb.estimate-num-keys", "memory.keys"} & after.keys()
    assert [after[name] - before[name] for name in grown] == [500]


def test_a_gauge_is_one_of_the_statistics(kind: str, store: LocalStore) -> None:
    """Another thread gets a statistic without waiting, and nothing of a store that is closed or busy."""
    store.write([(b"%03d" % i, b"x" * 100) for i in range(500)])
    store.flush()
    names = ("rocksdb.live-sst-files-size", "rocksdb.size-all-mem-tables", "no such property")
    found = {name: store.gauge(name) for name in names}
    assert found == {name: store.statistics().get(name) for name in names}
    if kind == "rocksdb":
        assert found["rocksdb.live-sst-files-size"]
        with store._maintenance:  # type: ignore[attr-defined]
            assert store.gauge(names[0]) is None
    store.close()
    assert {store.gauge(name) for name in names} == {None}


def test_a_snapshot_is_only_read(kind: str, store: LocalStore, tmp_path: Path) -> None:
    """A snapshot reads like any store, rejects every write, and leaves the state in its directory unchanged."""
    content = [(b"%03d" % i, b"%d" % i) for i in range(100)]
    store.write(content)
    store.flush()
    store.checkpoint(tmp_path / "checkpoint")
    store.write([(b"000", b"later")])

    def state() -> dict[str, bytes]:
        directory = tmp_path / "checkpoint"
        return {p.name: p.read_bytes() for p in directory.iterdir() if is_state(p.name)}

    before = state()
    snapshots = [open_snapshot(kind, tmp_path / "checkpoint", {}) for _ in range(2)]
    for snapshot in snapshots:
        assert list(snapshot.scan(None, None)) == content
        assert list(snapshot.scan(b"098", None)) == content[98:]
        assert snapshot.get(b"000") == b"0"
        assert snapshot.get_many([b"nothing", b"099"]) == [None, b"99"]
        assert snapshot.statistics()
        number = snapshot.sequence_number
        with pytest.raises(InvalidError, match="only be read"):
            snapshot.write([(b"a", b"1")])
        with pytest.raises(InvalidError, match="only be read"):
            snapshot.delete_range(None, None)
        with pytest.raises(InvalidError, match="only be read"):
            snapshot.checkpoint(tmp_path / "another")
        snapshot.flush()
        assert not snapshot.compact_if_needed(1)
        assert snapshot.sequence_number == number
    for snapshot in snapshots:
        snapshot.close()
        with pytest.raises(ClosedError):
            snapshot.get(b"000")
    assert state() == before


@pytest.mark.parametrize("directory", ["missing", "empty", "foreign"])
def test_a_snapshot_is_never_made_up(kind: str, tmp_path: Path, directory: str) -> None:
    """Invariant 8: where there is no store, opening a snapshot raises CorruptError and creates nothing."""
    if directory != "missing":
        (tmp_path / directory).mkdir()
    if directory == "foreign":
        (tmp_path / directory / "file").write_bytes(b"x")
    with pytest.raises(CorruptError):
        open_snapshot(kind, tmp_path / directory, {})
    assert (tmp_path / directory).exists() == (directory != "missing")
    if directory != "missing":
        assert [p.name for p in (tmp_path / directory).iterdir()] == (["file"] if directory == "foreign" else [])


def test_scan_keeps_its_bounds(store: LocalStore) -> None:
    """A scan stops at its bound even after the bound's memory is released and reused."""
    keys = [b"%05d" % n for n in range(1000)]
    store.write([(key, b"") for key in keys])
    for n in range(990):
        scan = store.scan(b"%05d" % n, b"%05d" % (n + 10))
        others = [b"%05d" % (n + k % 3) for k in range(100)]
        assert [key for key, _ in scan] == keys[n : n + 10]
        assert len(others) == 100


def test_close_ends_scans_and_frees_the_directory(open_at: Open, tmp_path: Path) -> None:
    """A scan that is left half-way fails after the store is closed, and it does not keep the directory locked."""
    store = open_at(tmp_path / "live")
    store.write([(b"a", b"1"), (b"b", b"2")])
    store.flush()
    half, whole = store.scan(None, None), store.scan(None, None)
    assert next(half) == (b"a", b"1")
    assert len(list(whole)) == 2
    store.close()
    with pytest.raises(ClosedError):
        next(half)
    assert open_at(tmp_path / "live").get(b"b") == b"2"


@pytest.mark.parametrize("read_first", [False, True])
def test_closed_store_refuses(kind: str, store: LocalStore, tmp_path: Path, read_first: bool) -> None:
    """Every use after a close raises ClosedError, except a second close."""
    if read_first:
        store.flush()
        store.checkpoint(tmp_path / "copy")
        store.close()
        store = open_store(kind, tmp_path / "copy", {}, read_first=True)
    store.close()
    store.close()
    for use in (
        lambda: store.get(b"a"),
        lambda: store.get_many([b"a"]),
        lambda: store.write([(b"a", b"1")]),
        lambda: store.scan(None, None),
        lambda: store.sequence_number,
        store.flush,
        lambda: store.checkpoint(tmp_path / "checkpoint"),
        lambda: store.concurrent_checkpoint(tmp_path / "checkpoint"),
        store.statistics,
        lambda: store.delete_range(b"a", None),
    ):
        with pytest.raises(ClosedError):
            use()


def test_flushed_survives_reopening(open_at: Open, tmp_path: Path) -> None:
    """Flushed content survives a close and an open."""
    store = open_at(tmp_path / "live")
    store.write([(b"a", b"1"), (b"", b"empty key"), (b"empty value", b"")])
    store.flush()
    store.close()
    again = open_at(tmp_path / "live")
    assert list(again.scan(None, None)) == [(b"", b"empty key"), (b"a", b"1"), (b"empty value", b"")]


def test_large_values(store: LocalStore, open_at: Open, tmp_path: Path) -> None:
    """Invariant 13, fault 32: a checkpoint preserves a value of 64 MiB and a key of 1 MiB."""
    value, key = os.urandom(1024) * (64 * 1024), os.urandom(MEBIBYTE)
    assert len(value) == 64 * MEBIBYTE
    store.write([(b"big", value), (key, b"1")])
    store.flush()
    store.checkpoint(tmp_path / "checkpoint")
    copy = open_at(tmp_path / "checkpoint")
    assert copy.get(b"big") == value
    assert copy.get(key) == b"1"


def test_sequence_number_moves_with_writes_only(store: LocalStore, tmp_path: Path) -> None:
    """Equal sequence numbers mean equal content: writes raise the number, reads, flushes and checkpoints keep it."""
    store.write([(b"a", b"1")])
    first = store.sequence_number
    store.get(b"a")
    list(store.scan(None, None))
    store.flush()
    store.checkpoint(tmp_path / "checkpoint")
    assert store.sequence_number == first
    store.write([(b"a", b"1")])
    assert store.sequence_number > first


def test_checkpoint_is_a_copy(store: LocalStore, open_at: Open, tmp_path: Path) -> None:
    """A checkpoint keeps the content of the time when it was made, whatever happens to the store or to it later."""
    store.write([(b"a", b"1")])
    store.flush()
    store.checkpoint(tmp_path / "one")
    store.write([(b"a", b"2"), (b"b", b"2")])
    store.flush()
    store.checkpoint(tmp_path / "two")
    one = open_at(tmp_path / "one")
    assert list(one.scan(None, None)) == [(b"a", b"1")]
    one.write([(b"a", b"other")])
    one.flush()
    assert store.get(b"a") == b"2"
    assert list(open_at(tmp_path / "two").scan(None, None)) == [(b"a", b"2"), (b"b", b"2")]


def test_checkpoint_of_an_empty_store(store: LocalStore, open_at: Open, tmp_path: Path) -> None:
    """Fault 32: an empty store can make a checkpoint, which opens as an empty store."""
    store.flush()
    store.checkpoint(tmp_path / "checkpoint")
    assert list(open_at(tmp_path / "checkpoint").scan(None, None)) == []


def test_checkpoint_refuses_an_existing_directory(store: LocalStore, tmp_path: Path) -> None:
    """A checkpoint into an existing directory fails without overwriting it, and the store continues to work."""
    (tmp_path / "there").mkdir()
    with pytest.raises(InvalidError, match="exists"):
        store.checkpoint(tmp_path / "there")
    store.write([(b"a", b"1")])
    assert os.listdir(tmp_path / "there") == []


def test_foreign_directory_is_not_recreated(open_at: Open, tmp_path: Path) -> None:
    """Invariant 8: a directory with files but without a store is corrupt, and never opens as an empty store."""
    (tmp_path / "live").mkdir()
    (tmp_path / "live" / "000008.sst").write_bytes(b"x")
    with pytest.raises(CorruptError):
        open_at(tmp_path / "live")
    assert os.listdir(tmp_path / "live") == ["000008.sst"]


def test_bulk_load(kind: str, open_at: Open, tmp_path: Path) -> None:
    """A bulk load applies overwrites and deletes in order and leaves a closed, normal store."""
    with bulk_writer(kind, tmp_path / "store", {}) as writer:
        writer.write((b"%05d" % (i % 20_000), b"%d" % i) for i in range(45_000))
        writer.write((b"%05d" % i, None) for i in range(0, 20_000, 2))
        writer.write([])
    store = open_at(tmp_path / "store")
    expected = [(b"%05d" % i, b"%d" % (i + (40_000 if i < 5_000 else 20_000))) for i in range(1, 20_000, 2)]
    assert list(store.scan(None, None)) == expected
    store.write([(b"00001", b"after")])
    store.flush()
    store.checkpoint(tmp_path / "checkpoint")
    assert open_at(tmp_path / "checkpoint").get(b"00001") == b"after"


def test_bulk_load_that_fails_is_closed(kind: str, tmp_path: Path) -> None:
    """A failed bulk load passes on the block's error and leaves the directory unlocked."""

    def load() -> None:
        with bulk_writer(kind, tmp_path / "store", {}) as writer:
            writer.write([(b"a", b"1")])
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        load()
    for path in (tmp_path / "store").iterdir():
        path.unlink()
    with bulk_writer(kind, tmp_path / "store", {}) as writer:
        writer.write([(b"a", b"2")])


def test_unknown_kind(tmp_path: Path) -> None:
    """An unknown kind of store is a configuration error."""
    with pytest.raises(ConfigError, match="tape"):
        open_store("tape", tmp_path, {})
    with pytest.raises(ConfigError, match="tape"):
        bulk_writer("tape", tmp_path, {})
    with pytest.raises(ConfigError, match="tape"):
        open_snapshot("tape", tmp_path, {})


def test_a_checkpoint_in_the_middle_of_a_write(tmp_path: Path) -> None:
    """It has all of the write or nothing: equal numbers of a store in memory mean equal content."""
    halfway, go_on = threading.Event(), threading.Event()

    class Slow(bytes):
        def __hash__(self) -> int:
            halfway.set()
            assert go_on.wait(30)
            return super().__hash__()

    store = MemoryStore.open(tmp_path / "db")
    writer = threading.Thread(target=store.write, args=([(b"a", b"1"), (Slow(b"b"), b"2")],))
    writer.start()
    assert halfway.wait(30)
    beside = threading.Thread(target=store.concurrent_checkpoint, args=(tmp_path / "copy",))
    beside.start()
    beside.join(0.2)
    go_on.set()
    writer.join(30)
    beside.join(30)
    assert dict(MemoryStore.open(tmp_path / "copy").scan(None, None)) == {b"a": b"1", b"b": b"2"}
    store.close()


def test_a_checkpoint_made_concurrently(store: LocalStore, open_at: Open, tmp_path: Path) -> None:
    """B3: a checkpoint made during another thread's writes has all earlier content. The writer's own are exact."""
    value = bytes(20_000)
    seen: list[tuple[Path, int]] = []
    written, stop, failures = [0], threading.Event(), list[BaseException]()

    def snapshots() -> None:
        try:
            while not stop.is_set():
                directory, begun = tmp_path / f"beside-{len(seen)}", written[0]
                with suppress(RetryableError):  # one that is open for a moment has changes in memory only
                    store.concurrent_checkpoint(directory)
                    seen.append((directory, begun))
        except BaseException as error:
            failures.append(error)

    beside = threading.Thread(target=snapshots)
    beside.start()
    try:
        while (written[0] < 40 or len(seen) < 4) and beside.is_alive():
            number = written[0]
            store.write([(b"%d" % number, value)])
            written[0] = number + 1
            if number % 4 == 0:
                store.flush()
                store.checkpoint(tmp_path / f"own-{number}")
    finally:
        stop.set()
        beside.join(60)
    assert failures == []
    for number in range(0, written[0], 4):
        assert len(list(open_at(tmp_path / f"own-{number}").scan(None, None))) == number + 1
    for directory, begun in seen:
        found = {key for key, _ in open_at(directory).scan(None, None)}
        assert found == {b"%d" % number for number in range(len(found))}
        assert len(found) >= begun
