"""Uploads that a commit waits for: how many bytes may be in flight, and what happens to a slow upload."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from statemgr.errors import RetryableError
from statemgr.local.machine import SystemClock, Threads
from statemgr.ports import list_blobs
from statemgr.transfer import transfer
from statemgr.transfer.transfer import Transfer
from tests.blob_faults import FaultyBlobStore
from tests.kafka_jobs import wait_until

LIMIT_S = 20
Open = Callable[..., Transfer]


class Gate:
    """A fault that delays one PUT after the blob is stored."""

    def __init__(self) -> None:
        self.reached, self.open = threading.Event(), threading.Event()

    def __call__(self, _: str) -> None:
        self.reached.set()
        assert self.open.wait(LIMIT_S)


@pytest.fixture
def blobs() -> FaultyBlobStore:
    """The store that receives the segments."""
    return FaultyBlobStore()


@pytest.fixture
def open_uploads(blobs: FaultyBlobStore, monkeypatch: pytest.MonkeyPatch) -> Iterator[Open]:
    """Opens engines that hedge, with room for 1000 bytes."""
    monkeypatch.setattr(transfer, "_HEDGED_BYTES", 1000)
    opened: list[Transfer] = []

    def make(patience_s: float | None = None) -> Transfer:
        engine = Transfer(
            blobs, SystemClock(), Threads(),
            parallelism=1, part_size=1000, ttl_days=30, hedged=True, patience_s=patience_s,
        )  # fmt: skip
        opened.append(engine)
        return engine

    yield make
    for engine in opened:
        engine.close()


def test_too_many_bytes_wait_for_those_on_their_way(blobs: FaultyBlobStore, open_uploads: Open) -> None:
    """C7: at the limit of bytes in flight an upload waits, and starts as soon as another one ends."""
    uploads, gates = open_uploads(), [Gate(), Gate()]
    blobs.faults["put"] = [*gates]
    with ThreadPoolExecutor(3) as pool:
        running = [pool.submit(uploads.put_hedged, name, bytes(400)) for name in ("a", "b")]
        for gate in gates:
            assert gate.reached.wait(LIMIT_S)
        waiting = pool.submit(uploads.put_hedged, "c", bytes(400))
        wait_until(lambda: uploads.hedged_bytes.waited == 1)
        assert blobs.count("put") == 2
        gates[0].open.set()
        assert waiting.result(LIMIT_S) == "c"
        gates[1].open.set()
        assert {upload.result(LIMIT_S) for upload in running} == {"a", "b"}
    assert uploads.put_hedged("larger than all room", bytes(2000)) == "larger than all room"
    assert uploads.hedged_bytes.waited == 1


def test_small_uploads_do_not_keep_a_large_one_out(blobs: FaultyBlobStore, open_uploads: Open) -> None:
    """C7: who waits first goes first. Otherwise the uploads of other tasks could take all room as it becomes free."""
    uploads, gate = open_uploads(), Gate()
    blobs.faults["put"] = [gate]
    with ThreadPoolExecutor(3) as pool:
        first = pool.submit(uploads.put_hedged, "first", bytes(400))
        assert gate.reached.wait(LIMIT_S)
        large = pool.submit(uploads.put_hedged, "large", bytes(1000))
        wait_until(lambda: uploads.hedged_bytes.waited == 1)
        small = pool.submit(uploads.put_hedged, "small", bytes(10))
        wait_until(lambda: uploads.hedged_bytes.waited == 2)
        assert blobs.count("put") == 1
        gate.open.set()
        assert [one.result(LIMIT_S) for one in (first, large, small)] == ["first", "large", "small"]


def test_no_room_in_time_is_an_error(blobs: FaultyBlobStore, open_uploads: Open) -> None:
    """C7, invariant 13: an upload that finds no room in time sends nothing and is an error, so commits end."""
    uploads, gate = open_uploads(patience_s=1.0), Gate()
    blobs.faults["put"] = [gate]
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(uploads.put_hedged, "a", bytes(900))
        assert gate.reached.wait(LIMIT_S)
        with pytest.raises(RetryableError, match="900 bytes"):
            uploads.put_hedged("b", bytes(900))
        assert blobs.count("put") == 1
        gate.open.set()
        running.result(LIMIT_S)
    assert uploads.put_hedged("b", bytes(900)) == "b"


def test_the_blob_of_a_slow_upload_goes(blobs: FaultyBlobStore, open_uploads: Open) -> None:
    """C8: a second attempt under another name overtakes a slow one. The slow one's blob is deleted when it ends."""
    uploads, gate = open_uploads(), Gate()
    names = [uploads.put_hedged(f"quick-{number}", b"x") for number in range(20)]  # to learn the delay
    blobs.faults["put"] = [gate]
    assert uploads.put_hedged("slow", b"x") == "slow-1"
    assert {info.blob_id for info in list_blobs(blobs, "")} == {*names, "slow", "slow-1"}
    gate.open.set()
    uploads.close()
    assert {info.blob_id for info in list_blobs(blobs, "")} == {*names, "slow-1"}
    hedger = uploads.hedged_puts
    assert hedger is not None
    assert (hedger.first, hedger.extra, hedger.lost) == (21, 1, 1)
