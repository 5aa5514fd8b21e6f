"""The kafka-changelog backend on a real broker: a restore brings back exactly what the commits sent."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

import pytest
from confluent_kafka import TopicPartition

from statemgr.backends.changelog.backend import KafkaChangelogBackend
from statemgr.blobs import open_blob_store
from statemgr.config import JobConfig
from statemgr.errors import CorruptBlob, MissingBlob, MissingState, StatemgrError
from statemgr.kafka.changelog_topic import ChangelogTopics
from statemgr.kafka.transactions.publisher import TransactionalPublisher, task_transactional_id
from statemgr.local import open_store
from statemgr.local.directories import StoreDirectories
from statemgr.local.machine import SystemClock, moment, system_ids
from statemgr.model.checkpoint import BlobMarker, ChangelogMarker, Marker
from statemgr.model.commit import Change, PreparedChanges
from statemgr.phases import Phase, observed
from statemgr.ports import (
    BackupLost,
    Clock,
    CommittedDirectory,
    FinishedDirectory,
    PreparedBackup,
    Restored,
    RestoreRequest,
    StoreIdentity,
    StoreSnapshot,
)
from statemgr.services import Services
from statemgr.transfer.transfer import Transfer
from statemgr.wiring import open_services
from tests.change_lists import ChangeList
from tests.kafka_jobs import (
    EAGER,
    client,
    committed,
    job,
    make_topic,
    make_topics,
    recreate,
    send,
    state_of,
    wait_until,
)
from tests.servers import KafkaServer

_DAY_MS = 24 * 3600 * 1000
_Result = tuple[dict[bytes, bytes], Restored]


@dataclass
class _Job:
    """One task's side of the backend: its services, an owner, and a directory for its store."""

    services: Services
    publisher: TransactionalPublisher
    identity: StoreIdentity
    directory: Path

    @property
    def config(self) -> JobConfig:
        return self.services.config

    @property
    def topic(self) -> str:
        return self.config.stores["totals"].changelog_topic

    def backend(self, services: Services | None = None) -> KafkaChangelogBackend:
        return KafkaChangelogBackend(services or self.services)

    def snapshot(self, changes: tuple[Change, ...], whole: Mapping[bytes, bytes]) -> StoreSnapshot:
        directory = FinishedDirectory(self.directory, {})
        return StoreSnapshot(
            self.identity,
            "state",
            self.services.ids.attempt_id(),
            directory,
            ChangeList(changes),
            ChangeList(tuple(whole.items())),
        )

    def prepare(
        self,
        base: Marker | None,
        changes: tuple[Change, ...] = (),
        *,
        whole: Mapping[bytes, bytes] | None = None,
        portable: bool = False,
    ) -> PreparedBackup:
        return self.backend().backup_manager().prepare(self.snapshot(changes, whole or {}), base, portable=portable)

    def publish(self, changes: PreparedChanges | None, base: Marker | None) -> Marker:
        assert changes is not None
        manager = self.backend().backup_manager()
        if changes.fill:  # as an opening with permission does
            manager.guard_fill(self.identity, base, (), overwrite=True)
        staged = manager.stage(self.identity, changes, base)
        self.publisher.settle()
        self.publisher.confirmed()  # there is no other owner
        with self.publisher.transaction() as transaction:
            staged.send(transaction)
            return staged.marker(transaction.flush())

    def commit(self, base: Marker | None, *changes: Change, whole: Mapping[bytes, bytes] | None = None) -> Marker:
        return self.publish(self.prepare(base, changes, whole=whole).changes, base)

    def restore(self, marker: Marker, older: Sequence[_Local] = (), clock: Clock | None = None) -> _Result:
        staging = self.directory / f"staging-{self.services.ids.token()}"
        request = RestoreRequest(
            self.identity,
            marker,
            staging,
            [local.directory for local in older],
            lambda what, done, total: None,
            {local.directory.state_id: local.marker for local in older},
        )
        services = replace(self.services, clock=clock) if clock else self.services
        restored = self.backend(services).restore_manager().restore(request)
        config = self.config.stores["totals"]
        store = open_store(config.type, staging, config.rocksdb)
        try:
            return dict(store.scan(None, None)), restored
        finally:
            store.close()

    def keep(self, marker: Marker) -> _Local:
        """Restore a marker, which is the newest one, into a local directory."""
        as_of = moment(self.services.clock)
        directories = StoreDirectories(self.directory / "local", self.services.clock, self.services.ids)
        staging = directories.staging()
        request = RestoreRequest(self.identity, marker, staging, (), lambda what, done, total: None)
        restored = self.backend().restore_manager().restore(request)
        committed = directories.adopt(staging, f"state-{self.services.ids.token()}", restored.files, as_of)
        return _Local(committed, marker)


@dataclass(frozen=True)
class _Local:
    """A local directory of an older checkpoint."""

    directory: CommittedDirectory
    marker: Marker


class _Jumping(SystemClock):
    """A wall clock, and perhaps a monotonic one, that jumps two days ahead after its first reading."""

    def __init__(self, *, monotonic: bool = True) -> None:
        super().__init__()
        self._jumps = monotonic
        self._looks = 0

    def time_ns(self) -> int:
        self._looks += 1
        return super().time_ns() + (2 * _DAY_MS * 1_000_000 if self._looks > 1 else 0)

    def elapsed(self) -> float:
        return super().elapsed() + (2 * _DAY_MS / 1000 if self._jumps and self._looks > 0 else 0)


def _services(config: JobConfig) -> Iterator[Services]:
    clock, changelog = SystemClock(), ChangelogTopics(config, SystemClock(), system_ids(), stall_s=20)
    blobs = open_blob_store(config, clock)
    services = open_services(config)
    more = {"part_size": config.part_size, "ttl_days": config.ttl_days}
    transfer = Transfer(blobs, services.clock, services.executors, parallelism=2, **more)
    yield replace(services, blobs=lambda: blobs, transfer=lambda: transfer, changelog=lambda: changelog)
    services.close()
    transfer.close()
    blobs.close()


@pytest.fixture
def make_job(kafka: KafkaServer, tmp_path: Path) -> Iterator[Callable[..., _Job]]:
    """Makes jobs with an open owner; ``make_job(topics=False)`` leaves the topics to the test."""
    opened: list[Iterator[Services]] = []

    def make(*, topics: bool = True, **more: object) -> _Job:
        more = {"blob__store__uri": (tmp_path / "blobs").as_uri(), "state__dir": str(tmp_path / "state")} | more
        config = job(kafka, **more)
        if topics:
            make_topics(config)
        opened.append(_services(config))
        publisher = TransactionalPublisher(config, task_transactional_id(config, "Partition 0"), SystemClock())
        publisher.fence()
        identity = StoreIdentity(config.job_name, config.job_id, "Partition 0", "totals")
        return _Job(next(opened[-1]), publisher, identity, tmp_path)

    yield make
    for services in opened:
        assert next(services, None) is None


def _marker(marker: Marker) -> ChangelogMarker:
    assert isinstance(marker, ChangelogMarker)
    return marker


@pytest.mark.parametrize("kind", ["memory", "rocksdb"])
def test_what_was_committed_comes_back(make_job: Callable[..., _Job], kind: str) -> None:
    """After puts, deletes and overwrites over several commits, the last marker restores exactly its state."""
    here = make_job(stores__totals__type=kind)
    first = here.commit(None, whole={b"a": b"1", b"b": b"2"})
    second = here.commit(first, (b"a", b"3"), (b"b", None), (b"empty", b""))
    third = here.commit(second, (b"c", b"4"), (b"a", None), (b"a", b"5"))
    assert _marker(first).offset < _marker(second).offset < _marker(third).offset
    state, restored = here.restore(third)
    assert state == {b"a": b"5", b"c": b"4", b"empty": b""}
    assert (restored.records, restored.files) == (8, None)
    assert restored.bytes_fetched == sum(len(k or b"") + len(v or b"") for k, v in committed(here.config, here.topic))


def test_an_empty_store_comes_back_empty(make_job: Callable[..., _Job]) -> None:
    """The marker of a first commit without items is the start of the topic, and restores an empty store."""
    here = make_job()
    marker = here.commit(None)
    assert _marker(marker).offset == 0
    assert here.restore(marker)[0] == {}
    assert here.restore(here.commit(marker, (b"a", b"1")))[0] == {b"a": b"1"}


def test_a_commit_without_changes_keeps_its_marker(make_job: Callable[..., _Job]) -> None:
    """A commit without changes sends nothing and keeps its offset. An unchanged store carries its marker without a
    broker."""
    here = make_job()
    marker = here.commit(None, whole={b"a": b"1"})
    assert here.commit(marker) == marker
    silent = replace(here.services, changelog=_no_kafka)
    assert here.backend(silent).backup_manager().carry(here.identity, marker) == marker


def test_a_fill_deletes_what_the_state_lacks(make_job: Callable[..., _Job]) -> None:
    """When a backend is switched on again (fault 35), the fill deletes every key on the topic that is not in the
    state."""
    here = make_job()
    older = here.commit(None, whole={b"a": b"1", b"stale": b"x", b"gone": b"y"})
    here.commit(older, (b"gone", None))
    marker = here.commit(None, whole={b"a": b"2", b"new": b"3"})
    assert here.restore(marker)[0] == {b"a": b"2", b"new": b"3"}
    assert state_of(committed(here.config, here.topic)) == {b"a": b"2", b"new": b"3"}


def test_a_fill_with_nothing_empties_the_changelog(make_job: Callable[..., _Job]) -> None:
    """If the state is empty, the fill sends a tombstone for every key, and its marker restores an empty store."""
    here = make_job()
    here.commit(None, whole={b"a": b"1"})
    marker = here.commit(None)
    assert here.restore(marker)[0] == {}


def test_a_commit_that_fails_leaves_the_state_at_its_base(make_job: Callable[..., _Job]) -> None:
    """After the transaction is aborted, the old marker still restores, and the next commit sends the changes."""
    here = make_job()
    base = here.commit(None, whole={b"a": b"1"})
    manager = here.backend().backup_manager()
    changes = here.prepare(base, ((b"a", b"lost"),)).changes
    assert changes is not None
    staged = manager.stage(here.identity, changes, base)
    with contextlib.suppress(ZeroDivisionError), here.publisher.transaction() as transaction:
        staged.send(transaction)
        transaction.flush()
        raise ZeroDivisionError
    assert here.restore(base)[0] == {b"a": b"1"}
    assert not manager.has_tail(here.identity, base)
    assert here.restore(here.publish(changes, base))[0] == {b"a": b"lost"}


def _no_kafka() -> NoReturn:
    raise AssertionError("an executor asked for Kafka")


@pytest.mark.parametrize(("size", "where"), [(10, "inline"), (200_000, "blob")])
def test_a_portable_commit_needs_no_broker_where_it_is_made(
    make_job: Callable[..., _Job], size: int, where: str
) -> None:
    """An executor prepares such a commit without Kafka, with small changes inline and large ones in a blob. Another
    process publishes it, and no scratch file remains."""
    here = make_job()
    base = here.commit(None, whole={b"a": b"1"})
    executor = here.backend(replace(here.services, changelog=_no_kafka)).backup_manager()
    value = bytes(range(256)) * (size // 256 + 1)
    noise = tuple((b"k%d" % n, here.services.ids.token().encode() * 20 + value) for n in range(size // 1000))
    snapshot = here.snapshot(((b"a", b"2"), (b"gone", None), *noise), {})
    prepared = executor.prepare(snapshot, base, portable=True)
    assert prepared.changes is not None
    assert prepared.added_blobs == ()
    assert (prepared.changes.inline is not None, prepared.changes.blob is not None) == (
        where == "inline",
        where == "blob",
    )
    marker = here.publish(prepared.changes, base)
    assert here.restore(marker)[0] == {b"a": b"2", **dict(noise)}
    assert [p.name for p in here.services.scratch().glob("*")] == []
    filled = executor.prepare(here.snapshot((), {b"only": b"1"}), None, portable=True)
    assert here.restore(here.publish(filled.changes, None))[0] == {b"only": b"1"}


@pytest.mark.parametrize(("spoil", "kind"), [("altered", CorruptBlob), ("gone", MissingBlob)])
def test_a_spoilt_segment_is_refused_before_anything_is_sent(
    make_job: Callable[..., _Job], spoil: str, kind: type[StatemgrError]
) -> None:
    """For an altered or missing blob, staging raises a typed error and the topic stays untouched."""
    here = make_job()
    noise = {here.services.ids.token().encode(): here.services.ids.token().encode() * 9 for _ in range(500)}
    prepared = here.prepare(None, whole=noise, portable=True)
    assert prepared.changes is not None
    assert prepared.changes.blob is not None
    (path,) = (here.directory / "blobs").rglob("changes-totals-kafka-changelog")
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.unlink()
    if spoil == "altered":
        path.write_bytes(data)
    with pytest.raises(kind):
        here.publish(prepared.changes, None)
    assert committed(here.config, here.topic) == []


def test_a_changelog_made_anew_is_filled_or_refused(make_job: Callable[..., _Job]) -> None:
    """A changelog that was deleted and created again (faults 17, 21) serves no restore and takes no incremental commit.
    The next commit fills it."""
    here = make_job()
    base = here.commit(None, whole={b"a": b"1"})
    portable = here.prepare(base, ((b"b", b"2"),), portable=True).changes
    recreate(here.config, here.topic)
    with pytest.raises(MissingState, match="created again"):
        here.restore(base)
    with pytest.raises(BackupLost, match="created again"):
        here.publish(portable, base)
    assert committed(here.config, here.topic) == []
    with pytest.raises(MissingState, match="created again"):
        here.backend().backup_manager().has_tail(here.identity, base)
    refilled = here.prepare(None, ((b"b", b"2"),), whole={b"a": b"1", b"b": b"2"}).changes
    assert refilled is not None
    assert refilled.fill
    assert here.restore(here.publish(refilled, None))[0] == {b"a": b"1", b"b": b"2"}


def test_a_changelog_that_lost_records_takes_no_commit(make_job: Callable[..., _Job]) -> None:
    """If the changelog ends before the base's offset (an unclean election), the transaction is refused and nothing is
    published."""
    here = make_job()
    base = _marker(here.commit(None, whole={b"a": b"1"}))
    ahead = replace(base, offset=base.offset + 100)
    with pytest.raises(BackupLost, match="lost records"):
        here.commit(ahead, (b"b", b"2"))
    assert state_of(committed(here.config, here.topic)) == {b"a": b"1"}


def test_markers_that_the_changelog_cannot_serve_are_refused(make_job: Callable[..., _Job]) -> None:
    """A marker beyond the end, of another partition or backend, or of a topic that is gone (fault 21) is refused."""
    here = make_job()
    marker = _marker(here.commit(None, whole={b"a": b"1"}))
    others: list[Marker] = [
        replace(marker, offset=marker.offset + 2),
        replace(marker, partition=1),
        replace(marker, topic="no-such-topic"),
        BlobMarker(inline=b""),
    ]
    for other in others:
        with pytest.raises(MissingState):
            here.restore(other)


def test_deleted_records_are_never_a_smaller_state(make_job: Callable[..., _Job]) -> None:
    """Records removed from the start of the topic (fault 21) cause an error, not a smaller state."""
    here = make_job(topics=False)
    make_topic(here.config, here.topic, cleanup__policy="compact,delete")
    marker = here.commit(None, whole={b"a": b"1", b"b": b"2"})
    place = TopicPartition(here.topic, 0, 1)
    admin = client(here.config)
    admin.delete_records([place])[place].result(30)
    with pytest.raises(MissingState, match="records were deleted"):
        here.restore(marker)


def test_a_version_one_marker_is_accepted_by_name(make_job: Callable[..., _Job]) -> None:
    """Markers of older software have no topic ID. The marker of the next commit has one."""
    here = make_job()
    marker = _marker(here.commit(None, whole={b"a": b"1"}))
    old = replace(marker, topic_id=None)
    assert here.restore(old)[0] == {b"a": b"1"}
    assert _marker(here.commit(old, (b"b", b"2"))).topic_id == marker.topic_id


def test_an_adopted_tail_is_left_out_and_overwritten(make_job: Callable[..., _Job]) -> None:
    """With records beyond the marker (fault 20), the restored state is the marker's, and a fill brings the topic back
    to it."""
    here = make_job()
    marker = here.commit(None, whole={b"a": b"1", b"b": b"2"})
    manager = here.backend().backup_manager()
    assert not manager.has_tail(here.identity, marker)
    send(here.config, here.topic, [(b"a", b"tail"), (b"new", b"tail"), (b"b", None)])
    assert manager.has_tail(here.identity, marker)
    state, _ = here.restore(marker)
    assert state == {b"a": b"1", b"b": b"2"}
    here.publish(PreparedChanges(fill=True, local=ChangeList(tuple(state.items()))), None)
    assert state_of(committed(here.config, here.topic)) == state


def test_an_old_tail_cannot_be_rewound_exactly(make_job: Callable[..., _Job]) -> None:
    """For a tail older than the compaction lag (fault 20), the error says that it cannot be rewound. It suggests no
    blob store to a job that has none."""
    here = make_job(stores__totals__changelog__min__compaction__lag__ms=3_600_000)
    marker = here.commit(None, whole={b"a": b"1"})
    now_ms = here.services.clock.time_ns() // 1_000_000
    send(here.config, here.topic, [(b"a", b"tail")], timestamp_ms=now_ms - 3_600_000)
    with pytest.raises(MissingState, match="exact rewind is impossible") as refused:
        here.restore(marker)
    assert "newer checkpoint" in str(refused.value.hint)


def test_the_replay_is_announced_and_reports_progress(make_job: Callable[..., _Job]) -> None:
    """Crash tests and progress bars can follow the replay, which reaches its total."""
    here = make_job()
    marker = _marker(here.commit(None, whole={b"a": b"1"}))
    phases: list[tuple[Phase, str]] = []
    seen: list[tuple[str, int, int]] = []
    request = RestoreRequest(here.identity, marker, here.directory / "staging", (), lambda *step: seen.append(step))
    with observed(lambda phase, subject: phases.append((phase, subject))):
        here.backend().restore_manager().restore(request)
    assert phases == [(Phase.REPLAY, "Partition 0/totals")]
    assert seen[-1] == ("replay totals", marker.offset, marker.offset)


def test_compaction_changes_nothing_that_a_marker_restores(make_job: Callable[..., _Job]) -> None:
    """After many commits over the same keys, with deletes, and a run of the cleaner, the last marker restores its exact
    state."""
    here = make_job(topics=False)
    make_topic(here.config, here.topic, **EAGER)
    marker: Marker | None = None
    expected: dict[bytes, bytes] = {}
    sent = 0

    def commit(number: int) -> None:
        nonlocal marker, sent
        filled = marker is None
        changes: list[Change] = [(b"k%d" % n, b"%d" % number * 300) for n in range(number % 7, 300)]
        changes += [(b"k%d" % n, None) for n in range(number % 5)]
        for key, value in changes:
            if value is None:
                expected.pop(key, None)
            else:
                expected[key] = value
        sent += len(expected) if filled else len(changes)
        marker = here.commit(marker, *changes, whole=expected)

    def cleaned() -> bool:
        time.sleep(0.6)  # a later record closes the active segment once it is older than segment.ms
        commit(sent)
        return len(committed(here.config, here.topic)) < sent

    for number in range(5):
        commit(number)
    wait_until(cleaned)
    assert marker is not None
    state, restored = here.restore(marker)
    assert state == expected
    assert restored.records < sent


@pytest.mark.parametrize("kind", ["memory", "rocksdb"])
def test_a_replay_continues_the_newest_local_directory(make_job: Callable[..., _Job], kind: str) -> None:
    """The replay reads only the records after an older local checkpoint, and overwrites and deletes are exact."""
    here = make_job(stores__totals__type=kind)
    first = here.commit(None, whole={b"k%d" % n: b"1" for n in range(100)})
    second = here.commit(first, (b"k1", None), (b"k2", b"2"))
    older = [here.keep(first), here.keep(second)]
    third = here.commit(second, (b"k3", None), (b"k2", None), (b"k1", b"3"), (b"new", b"3"))
    state, restored = here.restore(third, older)
    whole, replayed = here.restore(third)
    assert state == whole
    assert {key: state.get(key) for key in (b"k1", b"k2", b"k3", b"new")} == {
        b"k1": b"3",
        b"k2": None,
        b"k3": None,
        b"new": b"3",
    }
    assert (restored.records, replayed.records) == (4, 106)
    assert restored.bytes_reused == sum(size for size, _ in older[1].directory.files.values())
    assert here.restore(first, older)[1].records == 0
    assert here.restore(second, older[:1])[1].records == 2


def test_what_a_replay_continues_stays_as_it_was(make_job: Callable[..., _Job]) -> None:
    """A replay that continues an older directory leaves that directory's own state as it was."""
    here = make_job(stores__totals__type="rocksdb")
    first = here.commit(None, whole={b"a": b"1", b"b": b"1"})
    older = here.keep(first)
    second = here.commit(first, (b"a", None))
    assert here.restore(second, [older])[0] == {b"b": b"1"}
    assert here.restore(first, [older]) == ({b"a": b"1", b"b": b"1"}, Restored(None, bytes_reused=_size(older)))


def _size(local: _Local) -> int:
    return sum(size for size, _ in local.directory.files.values())


def test_a_delete_that_was_compacted_away_is_not_brought_back(make_job: Callable[..., _Job]) -> None:
    """A directory older than the topic keeps deletes is not continued, since that would bring back deleted keys."""
    here = make_job(topics=False)
    make_topic(here.config, here.topic, **EAGER)
    base = here.commit(None, whole={b"a": b"1", b"b": b"1"})
    older = here.keep(base)
    marker = here.commit(base, (b"a", None))

    def gone() -> bool:
        nonlocal marker
        time.sleep(0.6)  # a later record closes the active segment once it is older than segment.ms
        marker = here.commit(marker, (b"b", b"2"))
        return b"a" not in dict(committed(here.config, here.topic))

    wait_until(gone)
    state, restored = here.restore(marker, [older])
    assert state == {b"b": b"2"}
    assert restored.bytes_reused == 0


@pytest.mark.parametrize("monotonic", [True, False])
def test_a_replay_that_takes_too_long_starts_anew(make_job: Callable[..., _Job], monotonic: bool) -> None:
    """The horizon is checked at the end of the replay, because the cleaner works meanwhile. A wall clock that was set
    meanwhile contradicts the monotonic one, and also rules out the shortcut (FAULT 54)."""
    here = make_job()
    base = here.commit(None, whole={b"a": b"1", b"b": b"1"})
    older = here.keep(base)
    marker = here.commit(base, (b"a", None))
    state, restored = here.restore(marker, [older], clock=_Jumping(monotonic=monotonic))
    assert state == {b"b": b"1"}
    assert (restored.records, restored.bytes_reused) == (3, 0)


@pytest.mark.parametrize("spoil", ["CURRENT", "all"])
def test_a_local_directory_that_is_damaged_is_replayed_over(make_job: Callable[..., _Job], spoil: str) -> None:
    """If a directory cannot be continued, the restore replays everything instead and succeeds."""
    here = make_job(stores__totals__type="rocksdb")
    base = here.commit(None, whole={b"a": b"1", b"b": b"1"})
    marker = here.commit(base, (b"a", None))
    older = here.keep(base)
    for path in older.directory.path.iterdir():
        if spoil == "all":
            path.unlink()
        elif path.name == spoil:
            path.write_bytes(b"no such manifest\n")
    state, restored = here.restore(marker, [older])
    assert state == {b"b": b"1"}
    assert (restored.records, restored.bytes_reused) == (3, 0)
