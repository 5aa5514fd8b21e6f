"""Segments that are tables: how a restore handles them together with records, damaged, or after a crash. Needs no
broker."""

from __future__ import annotations

import io
import json
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from statemgr import JobConfig
from statemgr.backends.blobs import tables
from statemgr.backends.blobs.segment_cache import LocalSegment
from statemgr.backends.blobs.tables import SegmentReplay
from statemgr.errors import CorruptBlob, CorruptFile, DiskFull
from statemgr.local import open_store, write_table
from statemgr.local.machine import moment
from statemgr.local.rocksdb.store import RocksDbStore
from statemgr.model.chain import ChainSegment, SegmentChain
from statemgr.model.checkpoint import BlobMarker, BlobRef, Marker
from statemgr.model.codecs import encode_chain
from statemgr.model.commit import Change
from statemgr.model.hashing import content_hash
from statemgr.model.segment import encode_segment, is_table
from statemgr.ports import Restored, RestoreRequest, no_progress
from statemgr.services import Services
from statemgr.wiring import open_services
from tests.jobs import with_changes
from tests.segment_tasks import FACTORY, STORE, SegmentTask, config_of

#: A value that makes a segment too large to be inline.
BIG = random.Random(0).randbytes(2500)


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Services]:
    """A job with a RocksDB store, whose segments of three or more changes are tables."""
    monkeypatch.setattr(tables, "_FEWEST", 3)
    services = open_services(rocksdb_config(tmp_path))
    yield services
    services.close()


def rocksdb_config(directory: Path) -> JobConfig:
    """Return the configuration of a job with a RocksDB store that makes no snapshots."""
    more = {f"stores__{STORE}__type": "rocksdb", "task__commit__snapshot__interval": ["1000000 commits"]}
    return config_of(directory, blob__store__retry__policy__max__retries=0, **more)


def restored(services: Services, marker: Marker | None, directory: Path, *older: Marker) -> Restored:
    """Restore on another machine, below ``directory``, into ``directory / "staging"``."""
    assert marker is not None
    other = open_services(with_changes(services.config, state__dir=str(directory / "state")))
    identity = other.identity("Partition 0", STORE)
    request = RestoreRequest(identity, marker, directory / "staging", (), no_progress, retained=older)
    try:
        return other.restore_manager(FACTORY).restore(request)
    finally:
        assert not list(other.scratch().iterdir())
        other.close()


def content(directory: Path) -> dict[bytes, bytes]:
    """Return the content of the store in a directory."""
    store = open_store("rocksdb", directory, {})
    try:
        return dict(store.scan(None, None))
    finally:
        store.close()


def chain_of(services: Services, marker: Marker | None) -> SegmentChain:
    """Return the chain of a marker."""
    manager = services.backup_manager(FACTORY)
    chain: SegmentChain = manager._catalogue.chain(services.identity("Partition 0", STORE), marker)  # type: ignore
    return chain


def bytes_of(services: Services, segment: ChainSegment) -> bytes:
    """Return a stored segment."""
    return segment.inline or services.transfer().get_bytes(segment.blob, segment.size)  # type: ignore[arg-type]


def applied(state: dict[bytes, bytes], changes: Mapping[bytes, bytes | None] | Sequence[Change]) -> dict[bytes, bytes]:
    """Return a state after changes."""
    after = dict(state)
    for key, value in dict(changes).items():
        if value is None:
            after.pop(key, None)
        else:
            after[key] = value
    return after


def test_large_segments_are_tables_and_small_ones_records(job: Services, tmp_path: Path) -> None:
    """A chain of tables and records restores puts, overwrites, deletes and repeated puts of a deleted key exactly."""
    commits: list[dict[bytes, bytes | None]] = [
        {b"start": b"1"},
        {b"a": BIG, b"b": b"1", b"c": b"1", b"": b"empty key"},
        {b"a": b"2", b"b": None},
        {b"b": BIG, b"c": None, b"d": b"", b"absent": None},
        {b"start": None, b"a": BIG},
        {b"a": None, b"e": BIG, b"f": b"1"},
        {b"c": b"again", b"a": b"3", b"d": None},
    ]
    task, state = SegmentTask(job, 0), dict[bytes, bytes]()
    reached: list[tuple[Marker, dict[bytes, bytes]]] = []
    for number, items in enumerate(commits):
        marker = task.commit(items).marker(FACTORY, STORE)
        assert marker is not None
        state = applied(state, items)
        reached.append((marker, state))
        found = restored(job, marker, tmp_path / str(number))
        assert content(tmp_path / str(number) / "staging") == state
        assert found.records == sum(map(len, commits[1 : number + 1]))
    task.close()
    bodies = [is_table(io.BytesIO(bytes_of(job, segment))) for segment in chain_of(job, marker).segments]
    assert bodies == [True, False, True, False, True, False]
    for at, (older, before) in enumerate(reached):
        for newer, after in reached[at:]:
            assert changed(job, before, older, newer) == after
        assert at == 0 or changed(job, before, older, reached[at - 1][0]) is None, "backwards"
    first, *others = chain_of(job, reached[2][0]).segments
    lost = replace(chain_of(job, reached[2][0]), segments=(replace(first, blob=None, inline=b"others"), *others))
    assert changed(job, {}, BlobMarker(inline=encode_chain(lost)), marker) is None, "others with the same numbers"


def changed(services: Services, state: dict[bytes, bytes], older: Marker, newer: Marker) -> dict[bytes, bytes] | None:
    """Return a state after the backend's changes between two markers, or None if the backend lacks them."""
    manager = services.restore_manager(FACTORY)
    identity, now = services.identity("Partition 0", STORE), moment(services.clock)
    found = manager.changes_between(identity, older, newer, now)
    if found is None:
        return None
    for batch in found:
        state = applied(state, dict(batch))
    return state


changes_of = st.lists(
    st.tuples(st.sampled_from([b"", *(b"%d" % n for n in range(8))]), st.none() | st.binary(max_size=3)),
    min_size=1,
    max_size=60,
)


@given(changes_of, st.data())
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_chain_gives_the_state_of_its_changes(
    tmp_path_factory: pytest.TempPathFactory, changes: list[Change], data: st.DataObject
) -> None:
    """Overlapping tables and records give the state of a dict, even if the store already has some of the changes. So a
    restore may ingest a complete table."""
    directory = tmp_path_factory.mktemp("chain")
    start = data.draw(st.integers(0, len(changes) - 1), label="start")
    has = data.draw(st.integers(start, len(changes)), label="has")
    store = RocksDbStore.open(directory / "store", {})
    store.write(dict(changes[:has]).items())
    replay, reached = SegmentReplay(store), start
    try:
        while reached < len(changes):
            first = data.draw(st.integers(0, reached), label="first")
            end = data.draw(st.integers(reached + 1, len(changes)), label="end")
            replay.apply(local(directory, changes[first:end], first, table=data.draw(st.booleans())), reached)
            reached = end
        replay.finish()
        assert replay.changes == len(changes) - start
        store.flush()
        assert dict(store.scan(None, None)) == applied({}, changes)
    finally:
        store.close()


def local(directory: Path, changes: Sequence[Change], first: int, *, table: bool) -> LocalSegment:
    """Return a local segment with either body."""
    segment, data = ChainSegment(first, first + len(changes)), encode_segment(changes, first)
    path = directory / f"{segment.end}.sst"
    if table:
        write_table(path, changes, {})
    return LocalSegment(segment, 0, lambda: io.BytesIO(data), path if table else None)


@pytest.mark.parametrize("part", ["header", "table", "end", "cut"])
def test_a_damaged_table_is_refused_before_anything_is_ingested(job: Services, tmp_path: Path, part: str) -> None:
    """B9, FAULT 12: a changed byte anywhere in the stored blob is an error that names the blob."""
    task = SegmentTask(job, 0)
    task.commit({b"before": b"1"})
    marker = task.commit({b"a": BIG, b"b": BIG, b"before": None}).marker(FACTORY, STORE)
    task.close()
    (segment,) = chain_of(job, marker).segments
    assert segment.blob is not None
    path = tmp_path / "blobs" / segment.blob.blob_id
    data, begin, end = path.read_bytes(), segment.blob.offset or 0, (segment.blob.offset or 0) + segment.size
    places = {"header": range(begin, begin + 14), "end": range(end - 29, end), "cut": [begin, begin + 100, end - 1]}
    for number, at in enumerate(places.get(part, range(begin + 14, end - 29, 997))):
        flipped = data[:at] + bytes([data[at] ^ 0x20]) + data[at + 1 :]
        path.write_bytes(data[:at] if part == "cut" else flipped)
        with pytest.raises(CorruptBlob) as caught:
            restored(job, marker, tmp_path / f"{part}-{number}")
        assert caught.value.where["blob"] == segment.blob.blob_id
    path.write_bytes(data)
    restored(job, marker, tmp_path / "whole")
    assert content(tmp_path / "whole" / "staging") == {b"a": BIG, b"b": BIG}


def refused_by_rocksdb(path: Path, changes: object, options: object) -> list[bytes]:
    """Write a file that is not a table, as another version of RocksDB might."""
    path.write_bytes(b"not a table at all" * 200)
    return []


def test_a_table_that_rocksdb_refuses_is_a_corrupt_blob(
    job: Services, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If RocksDB refuses a table with correct checksums, the error names its blob, even among several tables."""
    task = SegmentTask(job, 0)
    task.commit({b"before": b"1"})
    good: dict[bytes, bytes | None] = {b"a": BIG, b"b": BIG, b"before": None}
    task.commit(good)
    with monkeypatch.context() as patch:
        patch.setattr(tables, "write_table", refused_by_rocksdb)
        task.commit({b"a": b"2", b"c": BIG, b"d": BIG})
    marker = task.commit(good).marker(FACTORY, STORE)
    task.close()
    chain = chain_of(job, marker)
    bad = chain.segments[1]
    assert bad.blob is not None
    with pytest.raises(CorruptBlob, match="cannot use its table") as caught:
        restored(job, marker, tmp_path / "refused")
    assert caught.value.where["blob"] == bad.blob.blob_id
    # an older retained chain of the lineage has the same changes in another blob, which the restore uses
    data = encode_segment({b"a": b"2", b"c": BIG, b"d": BIG}.items(), bad.first)
    job.transfer().put(elsewhere := chain.snapshot.index.blob_id + "-again", data)
    other = replace(bad, blob=BlobRef(elsewhere, len(data), content_hash(data)))
    older = BlobMarker(inline=encode_chain(replace(chain, segments=(chain.segments[0], other))))
    found = restored(job, marker, tmp_path / "other-way", older)
    assert found.damage is not None
    assert bad.blob.blob_id in found.damage
    assert content(tmp_path / "other-way" / "staging") == {b"a": BIG, b"b": BIG, b"c": BIG, b"d": BIG}


def test_a_store_that_fails_is_not_a_damaged_segment(
    job: Services, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the tables can be read, the error is about local files and stays a CorruptFile."""

    def broken(store: RocksDbStore, paths: object) -> None:
        raise CorruptFile("a file of the store is damaged")

    task = SegmentTask(job, 0)
    task.commit({b"before": b"1"})
    marker = task.commit({b"a": BIG, b"b": BIG, b"before": None}).marker(FACTORY, STORE)
    task.close()
    monkeypatch.setattr(RocksDbStore, "ingest", broken)
    with pytest.raises(CorruptFile):
        restored(job, marker, tmp_path / "other")


def test_without_room_for_a_table_the_segment_is_records(
    job: Services, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A commit whose changes fit into memory needs no disk space, and leaves no scratch files."""

    def full(path: Path, changes: object, options: object) -> None:
        path.write_bytes(b"half")
        raise DiskFull("no space")

    task = SegmentTask(job, 0)
    task.commit({b"before": b"1"})
    with monkeypatch.context() as patch:
        patch.setattr(tables, "write_table", full)
        marker = task.commit({b"a": BIG, b"b": BIG, b"before": None}).marker(FACTORY, STORE)
    task.close()
    assert not list(job.scratch().iterdir())
    (segment,) = chain_of(job, marker).segments
    assert not is_table(io.BytesIO(bytes_of(job, segment)))
    restored(job, marker, tmp_path / "other")
    assert content(tmp_path / "other" / "staging") == {b"a": BIG, b"b": BIG}


@pytest.mark.parametrize(("changes", "most", "most_bytes"), [(2, 10, 10**9), (11, 10, 10**9), (5, 10, 5 * len(BIG))])
def test_few_and_very_many_changes_are_records(
    job: Services, monkeypatch: pytest.MonkeyPatch, changes: int, most: int, most_bytes: int
) -> None:
    """Invariant 13: a table's keys are sorted in memory, so their number and their bytes have limits."""
    monkeypatch.setattr(tables, "_MOST", most)
    monkeypatch.setattr(tables, "_MOST_BYTES", most_bytes)
    task = SegmentTask(job, 0)
    task.commit({b"before": b"1"})
    marker = task.commit({b"%d" % number: BIG for number in range(changes)}).marker(FACTORY, STORE)
    task.close()
    (segment,) = chain_of(job, marker).segments
    assert not is_table(io.BytesIO(bytes_of(job, segment)))


def test_a_store_of_very_many_tables_takes_writes_at_once(
    job: Services, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Invariant 13: after 150 commits with tables, few files wait for compaction, and no write has to wait for it."""
    task, state = SegmentTask(job, 0), dict[bytes, bytes]()
    task.commit({b"before": b"1"})
    for number in range(150):
        items: dict[bytes, bytes | None] = {b"same": b"%d" % number, b"%d" % number: BIG, b"before": None}
        marker = task.commit(items).marker(FACTORY, STORE)
        state = applied(state, items)
    task.close()
    restored(job, marker, tmp_path / "other")
    store = RocksDbStore.open(tmp_path / "other" / "staging", {})
    assert dict(store.scan(None, None)) == state
    assert store.statistics()["rocksdb.num-files-at-level0"] < 80
    written(store)
    store.close()


def test_as_many_files_as_a_restore_may_leave_do_not_stop_writes(tmp_path: Path) -> None:
    """RocksDB's default limits would stop the writes, for ever if nothing is compacted."""
    directory = tmp_path / "store"
    store = open_store("rocksdb", directory, {}, briefly=True)
    for number in range(tables._FILES - 1):
        store.write([(b"key", b"%d" % number)])
        store.flush()
    paths = [tmp_path / f"{number}.sst" for number in range(tables._GROUP)]
    for number, path in enumerate(paths):
        write_table(path, [(b"key", b"%d" % number), (b"%d" % number, BIG)], {})
    store.ingest(paths)
    store.flush()
    store.close()
    store = open_store("rocksdb", directory, {}, briefly=True)
    assert store.statistics()["rocksdb.num-files-at-level0"] == tables._FILES - 1 + tables._GROUP
    assert store.get(b"key") == b"%d" % (tables._GROUP - 1)
    assert store.statistics()["rocksdb.actual-delayed-write-rate"] == 0
    written(store)
    store.close()


def written(store: object) -> None:
    """Write to a store. The write must not wait."""
    done = threading.Thread(target=store.write, args=([(b"new", BIG)],), daemon=True)  # type: ignore[attr-defined]
    done.start()
    done.join(5)
    assert not done.is_alive()
    assert store.get(b"new") == BIG  # type: ignore[attr-defined]


#: A restore that is killed just before or after it ingests the tables.
KILLED = """
import json, os, signal, sys
from pathlib import Path
from statemgr import JobConfig
from statemgr.local.rocksdb.store import RocksDbStore
from statemgr.model.checkpoint import BlobMarker
from statemgr.ports import RestoreRequest, no_progress
from statemgr.wiring import open_services
config, marker, staging, when = sys.argv[1:]
ingest = RocksDbStore.ingest
def dying(store, paths):
    if when == "after":
        ingest(store, paths)
    os.kill(os.getpid(), signal.SIGKILL)
RocksDbStore.ingest = dying
services = open_services(JobConfig.from_mapping(json.loads(config)))
request = RestoreRequest(
    services.identity("Partition 0", "totals"), BlobMarker(inline=bytes.fromhex(marker)), Path(staging), (), no_progress
)
services.restore_manager("blob-store").restore(request)
"""


@pytest.mark.parametrize("when", ["before", "after"])
def test_killed_while_tables_are_ingested(job: Services, tmp_path: Path, when: str) -> None:
    """FAULT 7: the next restore on the machine is complete, and removes the scratch files of the dead process."""
    task = SegmentTask(job, 0)
    task.commit({b"before": b"1"})
    for number in range(5):
        marker = task.commit({b"a": b"%d" % number, b"%d" % number: BIG, b"before": None}).marker(FACTORY, STORE)
    task.close()
    inline = BlobMarker(inline=encode_chain(chain_of(job, marker)))
    moved = with_changes(job.config, state__dir=str(tmp_path / "moved" / "state"))
    arguments = [json.dumps(moved.to_mapping()), (inline.inline or b"").hex(), str(tmp_path / "died"), when]
    run = subprocess.run([sys.executable, "-c", KILLED, *arguments], timeout=600)
    assert run.returncode == -signal.SIGKILL
    left = [path for path in (tmp_path / "moved").rglob("*.sst") if path.is_file()]
    assert len(left) == (5 if when == "before" else 0)
    restored(job, inline, tmp_path / "moved")
    assert content(tmp_path / "moved" / "staging") == {b"a": b"4", **{b"%d" % number: BIG for number in range(5)}}
    assert not list((tmp_path / "moved" / "state").rglob("*.sst"))
