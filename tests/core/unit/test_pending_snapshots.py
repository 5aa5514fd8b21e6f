"""local_notes: a pending snapshot on this machine is used only by the histories that it fits."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import pytest

from statemgr.backends.blobs.local_notes import PendingNote
from statemgr.backends.blobs.snapshots import Snapshots
from statemgr.backends.blobs.writer_state import REUSE_S, PendingSnapshot
from statemgr.config import JobConfig
from statemgr.engine.task import Task
from statemgr.errors import UnavailableError
from statemgr.model.chain import ChainSegment, ChainSnapshot, SegmentChain, history_of
from statemgr.model.checkpoint import BlobRef
from statemgr.model.hashing import content_hash
from statemgr.ports import Moment, StoreIdentity, StoreSnapshot
from statemgr.testing.memory_servers import MemoryServers
from statemgr.wiring import open_services
from tests.commits import TASK
from tests.kafka_jobs import wait_until


def at(seconds: float) -> Moment:
    """Return a moment in one run of the machine."""
    return Moment("run", float(seconds), int(seconds * 1000))


BASE, MADE = BlobRef("j/1/a/index", 1, bytes(16)), BlobRef("j/1/b/index", 2, b"1" * 16, 7)
SEGMENTS = tuple(
    ChainSegment(first, first + 10, BlobRef(f"j/1/{first}", 1, content_hash(b"%d" % first), 5))
    for first in (100, 110, 120)
)
CHAIN = SegmentChain("j", "1", "Partition 0", "s", "id", "a", "l", 0, ChainSnapshot(BASE, "snap", 100), SEGMENTS)
PENDING = PendingSnapshot(
    ChainSnapshot(MADE, "newer", 115), BASE, ("j/1/b/x", "j/1/b/index"), at(1000), reach=120,
    history=history_of(SEGMENTS[:2]),
)  # fmt: skip
IDENTITY = StoreIdentity("j", "1", "Partition 0", "s")


def test_a_pending_snapshot_fits_every_chain_that_has_what_it_has() -> None:
    """Later segments do not matter, nor does the place where the segments are stored."""
    assert PENDING.fits(CHAIN, at(1000))
    assert PENDING.fits(replace(CHAIN, segments=SEGMENTS[:2]), at(1000 + REUSE_S - 1))
    inline = replace(SEGMENTS[0], blob=None, inline=b"100")
    assert PENDING.fits(replace(CHAIN, segments=(inline, *SEGMENTS[1:])), at(1000))


@pytest.mark.parametrize(
    ("chain", "now"),
    [
        (CHAIN, at(1000 + REUSE_S)),
        (CHAIN, replace(at(2000), wall_ms=1_000_000 + 3 * 24 * 3_600_000)),
        (CHAIN, replace(at(2000), boot="another")),
        (replace(CHAIN, snapshot=ChainSnapshot(MADE, "newer", 120)), at(1000)),
        (replace(CHAIN, segments=SEGMENTS[:1]), at(1000)),
        (replace(CHAIN, segments=()), at(1000)),
        (
            replace(CHAIN, segments=(SEGMENTS[0], replace(SEGMENTS[1], blob=BlobRef("j/1/110", 1, bytes(16), 5)))),
            at(1000),
        ),
        (replace(CHAIN, segments=(SEGMENTS[0], ChainSegment(110, 115, SEGMENTS[1].blob))), at(1000)),
    ],
    ids=[
        "too old",
        "the clock was set",
        "another run of the machine",
        "another snapshot",
        "older",
        "nothing",
        "other content",
        "other numbers",
    ],
)
def test_a_pending_snapshot_of_another_history_is_not_used(chain: SegmentChain, now: Moment) -> None:
    """After a rollback, the same numbers may refer to other changes."""
    assert not PENDING.fits(chain, now)


def test_notes_are_found_by_every_process_and_damaged_ones_by_none(tmp_path: Path) -> None:
    """One process at a time writes a note, and any process reads it. The newest counts; damaged ones do not."""
    config = {
        "job.name": "j",
        "state.dir": str(tmp_path),
        "kafka.bootstrap.servers": "none:1",
        "stores.s.type": "memory",
    }
    services = [open_services(JobConfig.from_mapping(config)) for _ in range(2)]
    note, other = (PendingNote(one, IDENTITY) for one in services)
    assert other.find(CHAIN, at(1000)) is None
    with note.making() as is_free, other.making() as is_free_too:
        assert (is_free, is_free_too) == (True, False)
        note.write(replace(PENDING, base=MADE))
        note.write(PENDING)
    assert other.find(CHAIN, at(1000)) == PENDING
    assert PendingNote(services[1], replace(IDENTITY, store="t")).find(CHAIN, at(1000)) is None
    [path] = (p for p in tmp_path.rglob("snapshot.pending*") if p.suffix == ".pending")
    whole = path.read_bytes()
    for damaged in (b"", whole[:-1], whole.replace(b"115", b"110"), whole[40:], b"{}", b"\n{}"):
        path.write_bytes(damaged)
        assert other.find(CHAIN, at(1000)) is None


def test_a_snapshot_is_not_left_while_its_number_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    """A commit begins to fill the backend again while a snapshot is made, because damage was found, and fails. The
    snapshot has no later change: the next owner on the machine does not take it for one that has them."""
    store, made = Snapshots.store, list[int]()
    taken, go_on, full = threading.Event(), threading.Event(), threading.Event()

    def slow(self: Snapshots, snapshot: StoreSnapshot, base: BlobRef | None) -> object:
        if "snapshot" in threading.current_thread().name:  # in the background
            taken.set()
            go_on.wait(30)
        elif full.is_set():
            raise UnavailableError("no answer")
        return store(self, snapshot, base)

    monkeypatch.setattr(Snapshots, "store", slow)
    config = {
        "job.name": "orders", "task.inputs": ["orders"], "task.backup.factories": ["blob-store"],
        "task.commit.snapshot.interval": "2 commits", "stores.totals.value.serde": "bytes",
    }  # fmt: skip
    servers = MemoryServers(config)
    servers.open()

    def commit(task: Task, key: bytes) -> None:
        task.store("totals").put(key, b"value" * 400)
        made.append(1)
        task.commit({"orders-0": len(made)})

    here = servers.on_disk(servers.config, "here")
    with servers.manager(here, "kafka-partition") as manager, manager.open_task(TASK) as task:
        while not taken.wait(0.2):
            commit(task, b"%d" % len(made))
        commit(task, b"later")
        task.damage.found("blob-store", "totals", "a blob is lost")
        full.set()
        with pytest.raises(UnavailableError):
            commit(task, b"never")
        go_on.set()
        wait_until(lambda: not task.owner.snapshots.worker.busy)
    full.clear()
    with servers.manager(here, "kafka-partition") as manager, manager.open_task(TASK) as task:
        commit(task, b"last")
    with (
        servers.manager(servers.on_disk(servers.config, "there"), "kafka-partition") as manager,
        manager.open_task(TASK) as task,
    ):
        assert {b"later", b"last"} <= {key for key, _ in task.store("totals").range()}
    servers.close()
