"""The retrying decorator: what it retries, for how long, and what it does not retry."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from statemgr.blobs import names
from statemgr.blobs.retrying import RetryingBlobStore
from statemgr.blobs.verifying import VerifyingBlobStore
from statemgr.config import RetryPolicy
from statemgr.errors import AccessDenied, DiskFull, MissingBlob, StatemgrError, UnavailableError
from statemgr.ports import BlobReader, list_blobs
from tests.blob_faults import FaultyBlobStore, ManualClock

POLICY = RetryPolicy(
    max_retries=5, max_duration_ms=60_000, backoff_ms=100, backoff_max_ms=1_000, factor=2.0, jitter=0.5
)


def make(policy: RetryPolicy = POLICY, uniform: float = 0.0) -> tuple[RetryingBlobStore, FaultyBlobStore, ManualClock]:
    """Return a retrying store around a faulty one, and its clock."""
    clock = ManualClock()
    inner = FaultyBlobStore(clock)
    return RetryingBlobStore(inner, policy, clock, lambda: uniform), inner, clock


def drain(store: RetryingBlobStore, blob_id: str, step: int = 3, offset: int = 0, length: int | None = None) -> bytes:
    """Return a blob's bytes."""
    found, buffer = bytearray(), memoryview(bytearray(step))
    with store.get(blob_id, offset, length) as reader:
        while size := reader.readinto(buffer):
            found += buffer[:size]
    return bytes(found)


def test_unavailable_is_tried_again_with_growing_waits() -> None:
    """A34, FAULTS 8: each wait is the last one times the factor, up to the maximum."""
    store, inner, clock = make()
    inner.put("a", b"x", ttl_days=None)
    inner.faults["remove_ttl"] = [UnavailableError("503")] * 5
    store.remove_ttl("a")
    assert inner.count("remove_ttl") == 6
    assert clock.sleeps == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.0])


def test_jitter_shortens_waits_by_its_share() -> None:
    """Jitter shortens each wait by up to its share, so that clients do not return at the same time."""
    store, inner, clock = make(uniform=1.0)
    inner.put("a", b"x", ttl_days=None)
    inner.faults["remove_ttl"] = [UnavailableError("503")] * 2
    store.remove_ttl("a")
    assert clock.sleeps == pytest.approx([0.05, 0.1])


def test_retries_end_with_the_stores_error() -> None:
    """A35: after the last retry its typed error is raised, with the number of attempts."""
    store, inner, _ = make()
    inner.put("a", b"x", ttl_days=None)
    inner.faults["remove_ttl"] = [UnavailableError(f"try {n}", blob="a") for n in range(20)]
    with pytest.raises(UnavailableError, match="try 5") as caught:
        store.remove_ttl("a")
    assert caught.value.where == {"blob": "a", "attempts": 6}


def test_the_deadline_ends_retries_before_their_number() -> None:
    """Invariant 13: no wait starts that would end after the deadline."""
    policy = replace(POLICY, max_retries=-1, max_duration_ms=2_000, jitter=0.0)
    store, inner, clock = make(policy)
    inner.put("a", b"x", ttl_days=None)
    inner.faults["remove_ttl"] = [UnavailableError("503")] * 1000
    with pytest.raises(UnavailableError):
        store.remove_ttl("a")
    assert clock.sleeps == pytest.approx([0.1, 0.2, 0.4, 0.8])


def test_a_slow_call_counts_towards_the_deadline() -> None:
    """The time that the calls take counts towards the deadline."""
    store, inner, clock = make()
    inner.put("a", b"x", ttl_days=None)

    def hang(blob_id: str) -> None:
        clock.now += 40
        raise UnavailableError("timed out")

    inner.faults["remove_ttl"] = [hang] * 10
    with pytest.raises(UnavailableError):
        store.remove_ttl("a")
    assert inner.count("remove_ttl") == 2


@pytest.mark.parametrize("error", [AccessDenied("403"), MissingBlob("404"), DiskFull("full")])
def test_what_a_retry_cannot_mend_surfaces_at_once(error: StatemgrError) -> None:
    """A34, FAULTS 10 and 13: an error that a retry cannot fix is raised at once."""
    store, inner, clock = make()
    inner.faults["delete"] = [error]
    with pytest.raises(type(error)):
        store.delete("a")
    assert (inner.count("delete"), clock.sleeps) == (1, [])


def test_a_get_that_breaks_off_goes_on_in_a_new_stream() -> None:
    """A34, FAULTS 11: the bytes already read stay, and a new GET at that offset supplies the rest."""
    store, inner, _ = make()
    inner.put("a", b"0123456789abcdef", ttl_days=None)
    inner.breaks = [5, 4, 0, None]
    assert drain(store, "a") == b"0123456789abcdef"
    assert inner.ranges == [(0, None), (5, None), (9, None), (9, None)]


def test_a_range_that_breaks_off_keeps_its_end() -> None:
    """The new GET of a broken range requests only the rest of the range."""
    store, inner, _ = make()
    inner.put("a", b"0123456789abcdef", ttl_days=None)
    inner.breaks = [4, None]
    assert drain(store, "a", offset=2, length=10) == b"23456789ab"
    assert inner.ranges == [(2, 10), (6, 6)]


def test_opening_a_get_is_tried_again() -> None:
    """A GET that cannot be opened is retried, but not the GET of a missing blob."""
    store, inner, clock = make()
    inner.put("a", b"data", ttl_days=None)
    inner.faults["get"] = [UnavailableError("503"), UnavailableError("503")]
    assert drain(store, "a") == b"data"
    assert len(clock.sleeps) == 2
    with pytest.raises(MissingBlob):
        drain(store, "none")
    assert len(clock.sleeps) == 2


def test_a_get_that_always_breaks_off_ends() -> None:
    """A35: a stream that always breaks at the same place ends with a typed error."""
    store, inner, _ = make()
    inner.put("a", b"0123456789", ttl_days=None)
    inner.breaks = [4] + [0] * 100
    with pytest.raises(UnavailableError):
        drain(store, "a", step=4)


def test_a_put_that_landed_though_it_failed() -> None:
    """FAULTS 8: a PUT answered with 500 may have landed. The store finds the same bytes and does not repeat it."""
    clock = ManualClock()
    inner = FaultyBlobStore(clock)
    store = RetryingBlobStore(VerifyingBlobStore(inner), POLICY, clock)
    inner.faults["put"] = [UnavailableError("500")]
    store.put("a", b"data", ttl_days=30)
    assert inner.count("put") == 1
    assert drain(store, "a") == b"data"


def test_an_interrupted_listing_is_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """A page that fails is requested again. Each name is listed once, and none waits for a later page."""
    monkeypatch.setattr(names, "_PAGE", 3)
    store, inner, clock = make()
    for number in range(8):
        inner.put(f"a/{number}", b"", ttl_days=None)
    broke = UnavailableError("broke off")
    inner.faults["list"] = [None, broke, broke, None, broke]
    listing = list_blobs(store, "a/")
    assert [next(listing).blob_id for _ in range(3)] == ["a/0", "a/1", "a/2"]
    assert clock.sleeps == [], "the first page does not wait for the others"
    assert [info.blob_id for info in listing] == [f"a/{number}" for number in range(3, 8)]
    assert [token for method, token in inner.calls if method == "list"] == ["", *["a/2"] * 3, *["a/5"] * 2]


def test_a_listing_that_always_breaks_off_ends() -> None:
    """A35: a listing whose page always fails ends with a typed error."""
    store, inner, _ = make()
    inner.put("a/1", b"", ttl_days=None)
    inner.faults["list"] = [UnavailableError("broke off")] * 100
    with pytest.raises(UnavailableError):
        list(list_blobs(store, "a/"))
    assert inner.count("list") == 6


def test_a_long_back_off_does_not_overflow() -> None:
    """Thousands of retries with a growing wait do not overflow."""
    policy = replace(POLICY, max_retries=3_000, max_duration_ms=10**12, backoff_ms=1, backoff_max_ms=5, factor=10.0)
    store, inner, clock = make(policy)
    inner.put("a", b"x", ttl_days=None)
    inner.faults["remove_ttl"] = [UnavailableError("503")] * 2_000
    store.remove_ttl("a")
    assert max(clock.sleeps) <= 0.005


def test_deletes_together_try_again_what_was_not_reached() -> None:
    """Blobs whose delete fails temporarily are retried. The errors of the others are returned."""
    store, inner, _ = make()
    refused = AccessDenied("403")
    for name in ("j/a", "j/b", "j/c"):
        inner.put(name, b"x", ttl_days=None)
    inner.faults["delete"] = [None, UnavailableError("503"), refused]
    assert store.delete_many(["j/a", "j/b", "j/c"]) == {"j/c": refused}
    assert [blob for method, blob in inner.calls if method == "delete"] == ["j/a", "j/b", "j/c", "j/b"]
    inner.faults["delete"] = [UnavailableError("503")] * 100
    assert isinstance(store.delete_many(["j/c"])["j/c"], UnavailableError)


class SlowBlobStore(FaultyBlobStore):
    """Bodies whose reads take ``seconds`` and return one byte, for each connection in turn. Later ones are fast."""

    def __init__(self, clock: ManualClock, seconds: list[float]) -> None:
        super().__init__(clock)
        self._manual, self._slow = clock, seconds

    @contextmanager
    def get(self, blob_id: str, offset: int = 0, length: int | None = None) -> Iterator[BlobReader]:
        with super().get(blob_id, offset, length) as reader:
            yield self._slowed(reader, self._slow.pop(0)) if self._slow else reader

    def _slowed(self, inner: BlobReader, seconds: float) -> BlobReader:
        manual = self._manual

        class Slow:
            def readinto(self, buffer: memoryview) -> int:
                manual.now += seconds
                return inner.readinto(buffer[:1])

            def copy_to(self, fd: int, offset: int, size: int) -> int | None:
                return None

        return Slow()


@pytest.mark.parametrize("seconds", [1.0, 3.0, 30.0])
def test_a_slow_body_is_read_on_in_another_connection_before_it_fails(seconds: float) -> None:
    """FAULT 59: another connection supplies the rest, even after one very slow read. A second slow one fails."""
    policy, data = replace(POLICY, max_duration_ms=4_000), bytes(range(256)) * 100
    clock = ManualClock()
    inner = SlowBlobStore(clock, [seconds])
    store = RetryingBlobStore(inner, policy, clock, lambda: 0.0)
    inner.put("a", data, ttl_days=None)
    assert drain(store, "a") == data
    assert inner.count("get") == 2
    inner = SlowBlobStore(clock, [seconds, seconds])
    store = RetryingBlobStore(inner, policy, clock, lambda: 0.0)
    inner.put("a", data, ttl_days=None)
    with pytest.raises(UnavailableError, match="bytes a second"):
        drain(store, "a")
    assert inner.count("get") == 2
