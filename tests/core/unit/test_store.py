"""A store as an application sees it: its write buffer, deleted ranges, scans, serdes and statistics."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from statemgr import JobConfig
from statemgr.errors import ClosedError, CorruptError, DiskFull, InvalidError
from statemgr.local.change_buffer import ChangeBuffer, _Generation
from statemgr.local.rocksdb.store import RocksDbStore
from statemgr.model.commit import Change
from statemgr.model.segment import MAX_VALUE_SIZE
from statemgr.serdes import SERDES, Serde
from statemgr.stores import open_store
from statemgr.stores.store import Store
from statemgr.stores.write_buffer import BATCH_BYTES
from statemgr.wiring import open_services
from tests.open_stores import CommittedStore

Open = Callable[..., CommittedStore]


@pytest.fixture
def open_one(tmp_path: Path) -> Iterator[Open]:
    """Opens stores, with a changelog unless ``track`` is false, and closes them at the end."""
    opened: list[CommittedStore] = []

    def make(*, track: bool = True, **settings: object) -> CommittedStore:
        names = {name.replace("_", "."): value for name, value in settings.items()}
        opened.append(CommittedStore(tmp_path / str(len(opened)), track=track, settings=names))
        return opened[-1]

    yield make
    for job in opened:
        job.close()


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch) -> list[list[Change]]:
    """Every batch that reaches RocksDB."""
    seen: list[list[Change]] = []
    write = RocksDbStore.write

    def noting(self: RocksDbStore, changes: list[Change]) -> None:
        write(self, changes)
        seen.append(list(changes))

    monkeypatch.setattr(RocksDbStore, "write", noting)
    return seen


# --- the write buffer ----------------------------------------------------------------------------------------------


def test_writes_are_gathered_and_read_back(open_one: Open, batches: list[list[Change]]) -> None:
    """Many calls become one batch with the newest change of each key. Reads see them before the batch is written."""
    job = open_one()
    for i in range(500):
        job.store.put(b"%d" % (i % 50), b"%d" % i)
    job.store.delete(b"7")
    assert job.store.get(b"8") == b"458"
    assert job.store.get_many([b"7", b"8", b"never"]) == [None, b"458", None]
    assert batches == []
    assert job.opened.changed
    assert job.store.statistics()["pending.changes"] == 50
    job.publish(job.freeze())
    assert [len(batch) for batch in batches] == [50]
    assert job.changelog == {b"%d" % i: b"%d" % (450 + i) for i in range(50) if i != 7}
    assert job.store.statistics()["pending.changes"] == 0


def test_the_buffer_is_bounded_by_number_and_bytes(open_one: Open, batches: list[list[Change]]) -> None:
    """Invariant 13: the buffer holds at most the configured number of changes and 4 MiB. Larger calls pass at once."""
    job = open_one(write_batch_size=10)
    for i in range(25):
        job.store.put(b"%d" % i, b"x")
    assert [len(batch) for batch in batches] == [10, 10]
    job.store.put_many([(b"%d" % i, b"y") for i in range(30)])
    assert [len(batch) for batch in batches] == [10, 10, 5, 30]
    large = open_one()
    for i in range(9):
        large.store.put(b"%d" % i, bytes(BATCH_BYTES // 5))
    assert [len(batch) for batch in batches[4:]] == [4, 4]
    large.store.put_many([(b"huge %d" % i, bytes(BATCH_BYTES // 5)) for i in range(6)])
    assert [len(batch) for batch in batches[4:]] == [4, 4, 1, 6]


def test_a_scan_sees_what_is_gathered_and_no_later_write(open_one: Open) -> None:
    """A range shows the state at the time of the call, even before its first step. Writes may continue meanwhile."""
    job = open_one()
    job.store.put_many({b"a": b"1", b"b": b"2"})
    items = job.store.range()
    job.store.put(b"c", b"3")
    job.store.delete(b"a")
    assert [(key, job.store.put(key, b"new")) for key, _ in items] == [(b"a", None), (b"b", None)]
    assert dict(job.store.range()) == {b"a": b"new", b"b": b"new", b"c": b"3"}


def test_leaving_the_block_closes_a_scan(open_one: Open) -> None:
    """A scan ends when its ``with`` block ends or when its store is closed."""
    job = open_one()
    job.store.put_many({b"a": b"1", b"ab": b"2", b"b": b"3"})
    with job.store.prefix(b"a") as items:
        assert next(items) == (b"a", b"1")
    with pytest.raises(ClosedError):
        next(items)
    half = job.store.range()
    next(half)
    job.opened.close()
    with pytest.raises(ClosedError):
        next(half)


@pytest.mark.parametrize("kind", ["rocksdb", "memory"])
@pytest.mark.parametrize("odd", ["a", bytearray(b"a"), 5])
def test_bounds_that_are_not_bytes_are_refused(open_one: Open, kind: str, odd: Any) -> None:
    """In each kind of store, and nothing is deleted."""
    store = open_one(type=kind).store
    store.put(b"a", b"1")
    for call in (store.range, store.delete_range):
        for bounds in ((odd, None), (None, odd)):
            with pytest.raises(InvalidError, match="not bytes"):
                call(*bounds)
    for prefix in (odd, None):
        with pytest.raises(InvalidError, match="a prefix is bytes"):
            store.prefix(prefix)
    assert store.get(b"a") == b"1"


def test_a_batch_with_something_wrong_is_not_gathered(open_one: Open) -> None:
    """If one key or value of a call has a wrong type, the call fails and none of its changes is stored."""
    job = open_one()
    job.store.put(b"a", b"1")
    with pytest.raises(InvalidError, match=r"a value is not bytes, but int .*store=totals.*stores.totals.value.serde"):
        job.store.put_many([(b"b", b"2"), (b"c", 3)])
    with pytest.raises(InvalidError, match=r"a key is not bytes, but str .*store=totals.*stores.totals.key.serde"):
        job.store.put("key", b"1")
    with pytest.raises(InvalidError, match=r"a key is not bytes, but NoneType.*message without a key"):
        job.store.get(None)
    with pytest.raises(InvalidError, match="a key is not bytes, but list"):
        job.store.delete_many([b"a", []])
    with pytest.raises(InvalidError, match="bytes"):
        job.store.put_many([(b"%d" % n, b"2") for n in range(8_000)] + [(b"c", 3)])
    with pytest.raises(InvalidError, match="bytes"):
        job.store.put_many([(bytearray(b"b"), b"2")])
    with pytest.raises(TypeError, match="delete"):
        job.store.put(b"a", None)
    with pytest.raises(TypeError, match="delete_many"):
        job.store.put_many({b"b": b"2", b"a": None})
    assert dict(job.store.range()) == {b"a": b"1"}


def test_a_closed_store_refuses(open_one: Open) -> None:
    """Every use after the close raises ClosedError, even if nothing would have been written yet."""
    job = open_one()
    job.store.put(b"a", b"1")
    job.opened.close()
    for use in (
        lambda: job.store.put(b"b", b"1"),
        lambda: job.store.delete_range(),
        lambda: job.store.get(b"a"),
        lambda: job.store.range(),
        lambda: job.store.statistics(),
    ):
        with pytest.raises(ClosedError):
            use()


def test_a_full_disk_loses_nothing_that_was_gathered(open_one: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault 24: a full disk raises DiskFull. All gathered changes stay, and are written when there is space again."""
    job = open_one(write_batch_size=3)
    for key in (b"a", b"b", b"c"):
        job.store.put(key, b"1")

    def full(*_: object) -> None:
        raise DiskFull("no space")

    with monkeypatch.context() as patch:
        patch.setattr(RocksDbStore, "write", full)
        for _ in range(2):
            with pytest.raises(DiskFull):
                job.store.put(b"d", b"1")
        with pytest.raises(DiskFull):
            job.freeze()
        assert job.store.get_many([b"a", b"b", b"c", b"d"]) == [b"1", b"1", b"1", None]
    job.store.put(b"d", b"1")
    job.publish(job.freeze())
    assert job.changelog == dict(job.store.range()) == dict.fromkeys((b"a", b"b", b"c", b"d"), b"1")


@pytest.mark.parametrize("owner", [RocksDbStore, ChangeBuffer])
def test_a_signal_in_a_write_leaves_no_difference(
    open_one: Open, monkeypatch: pytest.MonkeyPatch, owner: type[RocksDbStore | ChangeBuffer]
) -> None:
    """Invariant 4: a signal's exception that ends a write after the database has the batch does not keep it from the
    changelog."""
    job = open_one(write_batch_size=100)
    name = "write" if owner is RocksDbStore else "extend"
    step = getattr(owner, name)

    def interrupted(self: object, changes: object) -> None:
        if owner is RocksDbStore:
            step(self, changes)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, interrupted)
        with pytest.raises(KeyboardInterrupt):
            job.store.put_many([(b"%d" % i, b"1") for i in range(200)])
    assert job.opened.changed
    assert job.store.get(b"7") == b"1"
    job.publish(job.freeze())
    assert job.changelog == dict(job.store.range())
    assert len(job.changelog) == 200


# --- deleted ranges ------------------------------------------------------------------------------------------------


def test_a_producer_that_takes_more_than_a_segment_raises_no_limit(tmp_path: Path) -> None:
    """A store that feeds a changelog refuses what no segment takes, before it is a change of the next commit."""
    config = JobConfig.from_mapping(
        {
            "job.name": "orders",
            "state.dir": str(tmp_path),
            "kafka.producer.message.max.bytes": 100_000_000,
            "stores.totals.type": "memory",
            "stores.totals.backup.factories": ["kafka-changelog"],
        }
    )
    services = open_services(config)
    settings, identity = config.stores["totals"], services.identity("Partition 0", "totals")
    opened = open_store.OpenStore(services, identity, settings, None, None, track_changes=True)
    with pytest.raises(InvalidError, match=r"larger than the 67108864 bytes.*split it"):
        opened.content.put(b"big", bytes(MAX_VALUE_SIZE))
    opened.content.put(b"key", b"value")
    assert dict(opened.content.scan(None, None)) == {b"key": b"value"}
    opened.close()
    services.close()


def test_a_store_without_a_place_for_its_changes_stays_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its database is closed, and its directory is gone."""
    closed: list[RocksDbStore] = []
    close = RocksDbStore.close
    monkeypatch.setattr(RocksDbStore, "close", lambda self: (close(self), closed.append(self))[0])

    def refused(*_: object) -> object:
        raise DiskFull("full")

    monkeypatch.setattr(open_store, "ChangeBuffer", refused)
    with pytest.raises(DiskFull):
        CommittedStore(tmp_path, track=True, settings={})
    assert len(closed) == 1
    assert not list(tmp_path.rglob("live/*"))


def test_a_deleted_range_reaches_the_changelog_key_by_key(open_one: Open, batches: list[list[Change]]) -> None:
    """Invariant 4: the changelog gets a tombstone for every key of the range, in batches, including gathered keys."""
    job = open_one()
    job.store.put_many({b"%05d" % i: b"x" for i in range(5_000)})
    job.publish(job.freeze())
    job.store.put(b"02500x", b"gathered")
    batches.clear()
    job.store.delete_range(b"01000", b"04000")
    assert [len(batch) for batch in batches] == [1, 1000, 1000, 1000, 1]
    frozen = job.freeze()
    assert frozen.changes is not None
    assert sorted(frozen.changes) == sorted([(b"%05d" % i, None) for i in range(1000, 4000)] + [(b"02500x", None)])
    job.publish(frozen)
    assert job.changelog == dict(job.store.range())
    assert len(job.changelog) == 2_000


def test_a_deleted_range_needs_bounded_memory(open_one: Open, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Invariant 13: the tombstones of a large range go to files, so that memory stays near the budget."""
    budget = 200_000
    monkeypatch.setattr(open_store, "CHANGE_BUDGET", budget)
    highest = 0
    extend = _Generation.extend

    def measuring(self: _Generation, changes: Mapping[bytes, bytes | None]) -> int:
        nonlocal highest
        size = extend(self, changes)
        highest = max(highest, self.memory)
        return size

    monkeypatch.setattr(_Generation, "extend", measuring)
    job = open_one(write_batch_size=500)
    for start in range(0, 20_000, 500):
        job.store.put_many({b"%06d" % i: os.urandom(10) for i in range(start, start + 500)})
    job.publish(job.freeze())
    job.store.delete_range()
    # one batch above the budget, until it is spilled
    assert highest < 2 * budget
    assert list((tmp_path / "0").rglob("changes-*.segment"))
    job.publish(job.freeze())
    assert job.changelog == dict(job.store.range()) == {}


def test_a_deleted_range_without_a_changelog_is_one_tombstone(open_one: Open) -> None:
    """If only snapshots are backed up, the store neither reads nor writes single keys of the range."""
    job = open_one(track=False)
    job.store.put_many({b"%05d" % i: b"x" for i in range(5_000)})
    job.publish(job.freeze())
    before = job.opened.local.sequence_number
    job.store.delete_range(b"01000")
    assert job.opened.local.sequence_number == before + 1
    assert job.opened.changed
    job.publish(job.freeze())
    job.reopen()
    assert len(list(job.store.range())) == 1_000


def test_a_range_that_fails_half_way_is_the_same_in_both(open_one: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """Invariant 4: after an error between two batches, the store and the changelog have the same keys."""
    job = open_one()
    job.store.put_many({b"%05d" % i: b"x" for i in range(2_500)})
    job.publish(job.freeze())
    write = RocksDbStore.write
    left = 1

    def failing(self: RocksDbStore, changes: list[Change]) -> None:
        nonlocal left
        if not left:
            raise DiskFull("no space")
        left -= 1
        write(self, changes)

    with monkeypatch.context() as patch:
        patch.setattr(RocksDbStore, "write", failing)
        with pytest.raises(DiskFull):
            job.store.delete_range(None, b"02400")
    job.publish(job.freeze())
    assert job.changelog == dict(job.store.range())
    assert len(job.changelog) == 1_500
    job.store.delete_range(None, b"02400")
    job.publish(job.freeze())
    assert job.changelog == dict(job.store.range()) == {b"%05d" % i: b"x" for i in range(2_400, 2_500)}


# --- serdes --------------------------------------------------------------------------------------------------------


def test_a_store_of_integers_and_avro_values(open_one: Open) -> None:
    """With these serdes, keys are in numerical order, and a newer schema reads existing values."""
    fields = [{"name": "count", "type": "int"}]
    first = {"type": "record", "name": "Total", "fields": fields}
    second = {**first, "fields": [*fields, {"name": "note", "type": "string", "default": ""}]}
    settings = {"key.serde": "integer", "value.serde": "avro", "value.avro.schemas": [json.dumps(first)]}
    job = open_one(**settings)
    job.store.put_many({300: {"count": 3}, -1: {"count": 1}, 2: {"count": 2}})
    assert [key for key, _ in job.store.range(0, None)] == [2, 300]
    written = job.opened.local
    newer = open_one(**{**settings, "value.avro.schemas": json.dumps([first, second])})
    newer.opened.content.write(list(written.scan(None, None)))
    assert newer.store.get(2) == {"count": 2, "note": ""}
    newer.store.put(2, {"count": 9, "note": "x"})
    assert [value["count"] for _, value in newer.store.range()] == [1, 9, 3]
    newer.store.delete_range(0)
    assert [key for key, _ in newer.store.range()] == [-1]


def test_the_error_of_a_serde_says_what_is_wrong(open_one: Open) -> None:
    """It says whether the key or the value does not fit, of which store, and what to do."""
    store = open_one(**{"key.serde": "string", "value.serde": "integer"}).store
    refused: Sequence[tuple[Callable[[], object], str]] = [
        (lambda: store.put(5, 1), "key"),
        (lambda: store.put("a", "1"), "value"),
        (lambda: store.get(b"a"), "key"),
    ]
    for call, part in refused:
        with pytest.raises(InvalidError) as error:
            call()
        assert error.value.where == {"task": "Partition 0", "store": "totals", "part": part}
        assert f"set stores.totals.{part}.serde" in str(error.value.hint)
    store.raw.put(b"a", b"short")
    with pytest.raises(CorruptError) as damaged:
        store.get("a")
    assert damaged.value.where == {"task": "Partition 0", "store": "totals", "part": "value"}


def test_a_serde_that_returns_none_deletes_nothing(open_one: Open) -> None:
    """A put with a serde that returns None is refused, and the key keeps its value."""
    job = open_one()
    job.store.put(b"a", b"1")
    nothing: Serde[bytes] = Serde(lambda value: None, bytes)  # type: ignore[arg-type,return-value]
    by_value, by_key = Store(job.opened, SERDES["bytes"], nothing), Store(job.opened, nothing, SERDES["bytes"])
    for store, what in ((by_value, "value"), (by_key, "key")):
        for put in (lambda store=store: store.put(b"a", b"2"), lambda store=store: store.put_many({b"a": b"2"})):
            with pytest.raises(InvalidError, match=f"the {what} serde of the store returned None.*store=totals"):
                put()
    assert job.store.get(b"a") == b"1"
