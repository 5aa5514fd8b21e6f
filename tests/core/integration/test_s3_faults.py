"""S3 faults: a proxy in front of the real server spoils answers, and the store above it stays correct."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from statemgr.blobs import open_blob_store, reading
from statemgr.blobs.retrying import RetryingBlobStore
from statemgr.blobs.s3 import client
from statemgr.config import JobConfig
from statemgr.errors import AccessDenied, CorruptBlob, InvalidError, MissingBlob, StatemgrError, UnavailableError
from statemgr.local.machine import SystemClock, Threads
from statemgr.model.hashing import content_hash
from statemgr.ports import list_blobs
from statemgr.transfer.downloads import Fetch
from statemgr.transfer.transfer import Transfer, Upload
from tests.blob_faults import watch_sends
from tests.core.integration.s3_proxy import PAGE, Fault, S3Proxy
from tests.servers import S3Server


@pytest.fixture
def proxy(s3: S3Server) -> Iterator[S3Proxy]:
    """Start the proxy, without faults at first."""
    with S3Proxy(s3.endpoint) as running:
        yield running


@pytest.fixture
def settings(s3: S3Server, proxy: S3Proxy) -> dict[str, object]:
    """Return the settings of a job whose blobs go through the proxy, with short waits."""
    return {
        "job.name": "orders",
        "blob.store.uri": f"s3://{s3.bucket}/{s3.fresh_prefix('faults')}",
        "blob.store.s3.endpoint": proxy.endpoint,
        "blob.store.s3.region": s3.region,
        "blob.store.s3.access.key": s3.access_key,
        "blob.store.s3.secret.key": s3.secret_key,
        "blob.store.s3.path.style": True,
        "blob.store.retry.policy.max.retries": 3,
        "blob.store.retry.policy.backoff.delay.millis": 1,
    }


@pytest.fixture
def store(settings: dict[str, object]) -> Iterator[RetryingBlobStore]:
    """Open the job's blob store, and find out what the server checks before there is any fault."""
    opened = open_blob_store(JobConfig.from_mapping(settings), SystemClock())
    opened.put("warm/up", b"x", ttl_days=None)
    yield opened
    opened.close()


def read(store: RetryingBlobStore, blob_id: str) -> bytes:
    """Return the bytes of a blob."""
    found, buffer = bytearray(), memoryview(bytearray(65536))
    with store.get(blob_id) as reader:
        while size := reader.readinto(buffer):
            found += buffer[:size]
    return bytes(found)


BUSY = [
    Fault("PUT", answer=(500, "InternalError")),
    Fault("PUT", answer=(503, "SlowDown")),
    Fault("PUT", answer=(503, "SlowDown"), lands=True),
    Fault("PUT", answer=(500, "InternalError"), lands=True),
    Fault("PUT", answer=(429, "TooManyRequests")),
    Fault("PUT", answer=(409, "ConditionalRequestConflict")),
    Fault("PUT", answer=(400, "RequestTimeout")),
    Fault("PUT", answer=(400, "BadDigest")),
    Fault("PUT", reset=True),
]


@pytest.mark.parametrize("fault", BUSY, ids=lambda f: f"{f.answer}-{'landed' if f.lands else 'lost'}")
def test_a_put_is_repeated_until_it_lands(store: RetryingBlobStore, proxy: S3Proxy, fault: Fault) -> None:
    """A34, FAULTS 8: the store retries after busy answers and lost connections. A PUT that had landed counts."""
    data = bytes(range(256)) * 1000
    proxy.faults = [Fault(**{**vars(fault), "times": 2})]
    store.put("a/b", data, ttl_days=30)
    assert read(store, "a/b") == data
    assert store.stat("a/b").expires_ms is not None


@pytest.mark.parametrize("method", ["GET", "HEAD", "DELETE"])
def test_other_calls_are_repeated(store: RetryingBlobStore, proxy: S3Proxy, method: str) -> None:
    """A34: the store also retries GET, STAT, LIST, REMOVE_TTL and DELETE."""
    store.put("a/b", b"data", ttl_days=30)
    proxy.faults = [Fault(method, times=2, answer=(503, "SlowDown")), Fault(method, reset=True)]
    calls: dict[str, Callable[[], object]] = {
        "GET": lambda: (read(store, "a/b"), list(list_blobs(store, "a/"))),
        "HEAD": lambda: store.stat("a/b"),
        "DELETE": lambda: (store.remove_ttl("a/b"), store.delete("a/b")),
    }
    calls[method]()
    assert not any(fault.times for fault in proxy.faults)


def test_many_are_deleted_with_one_request(store: RetryingBlobStore, proxy: S3Proxy) -> None:
    """A clean-up of many blobs is one request. A server without that request gets one for each blob from then on."""
    names = [f"a/{n}" for n in range(30)]
    for answer, requests in ((None, 1), ((501, "NotImplemented"), 31), (None, 30)):
        for name in names:
            store.put(name, b"x", ttl_days=30)
        proxy.requests.clear()
        proxy.faults = [Fault("POST", answer=answer)] if answer else []
        assert store.delete_many(names) == {}
        assert len(proxy.requests) == requests
        assert list(list_blobs(store, "a/")) == []


def test_a_server_that_stays_busy_is_a_typed_error(store: RetryingBlobStore, proxy: S3Proxy) -> None:
    """A35, FAULTS 8: after the last retry, UnavailableError names the blob and the server's answer."""
    proxy.faults = [Fault("PUT", times=100, answer=(503, "SlowDown"))]
    with pytest.raises(UnavailableError, match="503 SlowDown") as caught:
        store.put("a/b", b"data", ttl_days=30)
    assert caught.value.where["blob"] == "a/b"
    assert caught.value.where["attempts"] == 4
    with pytest.raises(MissingBlob):
        store.stat("a/b")


@pytest.mark.parametrize(
    ("answer", "hint"),
    [((403, "AccessDenied"), "rights"), ((403, "ExpiredToken"), "session.token"), ((400, "ExpiredToken"), "token")]
    + [((403, "RequestTimeTooSkewed"), "clock"), ((404, "NoSuchBucket"), "create the bucket")]
    + [((301, "PermanentRedirect"), "region"), ((401, "Unauthorized"), "rights")],
)
def test_what_no_retry_can_mend_is_not_repeated(
    store: RetryingBlobStore, proxy: S3Proxy, answer: tuple[int, str], hint: str
) -> None:
    """FAULTS 10: a 403, expired credentials and a missing bucket lead to one request and a hint."""
    proxy.requests.clear()
    proxy.faults = [Fault("PUT", times=9, answer=answer)]
    with pytest.raises(AccessDenied) as caught:
        store.put("a/b", b"data", ttl_days=30)
    assert hint in str(caught.value.hint)
    # the SDK itself asks for the region of a redirected bucket, once
    assert sum(method == "PUT" for method, _ in proxy.requests) == (2 if answer[0] == 301 else 1)


def delete_all(store: RetryingBlobStore, *names: str) -> None:
    """Delete blobs together. Raises: the first failure."""
    for error in store.delete_many(names).values():
        raise error


@pytest.mark.parametrize("operation", ["put", "get", "stat", "remove_ttl", "delete", "delete_many", "copy"])
def test_a_page_of_an_ingress_says_nothing_about_a_blob(
    store: RetryingBlobStore, proxy: S3Proxy, operation: str
) -> None:
    """FAULTS 8: an ingress whose server is away answers 404 with a page of its own. Nobody takes a blob for missing: a
    request waits for the server, and a blob loses its TTL or is deleted when the server is back."""
    for name in ("a/b", "a/c", "a/d"):
        store.put(name, b"data", ttl_days=30)
    found = store.stat("a/b")
    calls: dict[str, Callable[[], object]] = {
        "put": lambda: store.put("a/new", b"data", ttl_days=30),
        "get": lambda: read(store, "a/b"),
        "stat": lambda: store.stat("a/b"),
        "remove_ttl": lambda: store.remove_ttl("a/b"),
        "delete": lambda: store.delete("a/c"),
        "delete_many": lambda: delete_all(store, "a/c", "a/d"),
        "copy": lambda: store.copy_from(store, found, "a/copy", ttl_days=30),
    }
    methods = ("PUT", "GET", "HEAD", "DELETE", "POST")
    proxy.faults = [Fault(method, times=99, answer=(404, PAGE)) for method in methods]
    with pytest.raises(UnavailableError, match="404") as caught:
        calls[operation]()
    assert "blob.store.s3.endpoint" in str(caught.value.hint)
    proxy.faults = [Fault(method, answer=(404, PAGE)) for method in methods]
    calls[operation]()
    proxy.faults = []
    names = {blob.blob_id for blob in list_blobs(store, "a/")}
    gone = {"delete": {"a/c"}, "delete_many": {"a/c", "a/d"}}.get(operation, set())
    made = {"put": {"a/new"}, "copy": {"a/copy"}}.get(operation, set())
    assert names == ({"a/b", "a/c", "a/d"} | made) - gone
    assert (store.stat("a/b").expires_ms is None) == (operation == "remove_ttl")


def test_a_truncated_body_is_read_on(store: RetryingBlobStore, proxy: S3Proxy) -> None:
    """FAULTS 11: when a body ends early, a new request continues from there. The reader never sees a shorter blob."""
    data = bytes(i % 251 for i in range(1_000_000))
    store.put("a/b", data, ttl_days=None)
    proxy.faults = [Fault("GET", truncate=300_000), Fault("GET", truncate=0), Fault("GET", truncate=100_001)]
    proxy.requests.clear()
    assert read(store, "a/b") == data
    assert len(proxy.requests) == 4


def test_a_body_that_is_always_truncated_is_an_error(store: RetryingBlobStore, proxy: S3Proxy) -> None:
    """FAULTS 11: the reader gets a typed error, and never a shorter blob."""
    store.put("a/b", b"x" * 100_000, ttl_days=None)
    proxy.faults = [Fault("GET", times=100, truncate=0)]
    with pytest.raises(UnavailableError):
        read(store, "a/b")


def test_a_body_without_a_length_is_read(store: RetryingBlobStore, proxy: S3Proxy) -> None:
    """FAULTS 11: a proxy sends bodies in chunks, without a length. The store reads them to the end, even after a
    cut."""
    data = bytes(i % 251 for i in range(100_000))
    store.put("a/b", data, ttl_days=None)
    proxy.faults = [Fault("GET", times=2, chunked=True)]
    assert read(store, "a/b") == data
    proxy.faults = [Fault("GET", chunked=True, truncate=30_000)]
    assert read(store, "a/b") == data


@pytest.mark.long
def test_a_body_below_the_floor_ends_at_the_deadline(
    settings: dict[str, object], store: RetryingBlobStore, proxy: S3Proxy
) -> None:
    """FAULT 59: at one byte a second, a download ends at the deadline with UnavailableError. A faster one succeeds."""
    store.put("a/b", bytes(range(256)) * 1000, ttl_days=None)
    deadline = {"blob.store.retry.policy.max.retry.duration.millis": 4_000}
    hurried = open_blob_store(JobConfig.from_mapping(settings | deadline), SystemClock())
    proxy.faults = [Fault("GET", times=9, trickle=1)]
    begun = time.monotonic()
    with pytest.raises(UnavailableError, match="bytes a second") as caught:
        read(hurried, "a/b")
    assert 4 <= time.monotonic() - begun < 12
    assert caught.value.where["blob"] == "a/b"
    # slow at first: the store tries another connection before the deadline
    proxy.faults = [Fault("GET", trickle=1)]
    assert read(hurried, "a/b") == bytes(range(256)) * 1000
    # slow, but above the floor
    proxy.faults = [Fault("GET", trickle=40_000)]
    assert read(hurried, "a/b") == bytes(range(256)) * 1000
    hurried.close()


def test_a_fast_body_that_begins_to_trickle_is_read_on_in_another_connection(
    monkeypatch: pytest.MonkeyPatch, store: RetryingBlobStore, proxy: S3Proxy
) -> None:
    """FAULT 59: in the middle of a large read, the body slows down to a byte a second. The store stops that request and
    continues with another one."""
    monkeypatch.setattr(reading, "_MOST_S", 1.0)
    data = bytes(range(256)) * 8192
    store.put("a/b", data, ttl_days=None)
    proxy.faults = [Fault("GET", trickle=1, after=1_000_000)]
    begun, before = time.monotonic(), len(proxy.requests)
    assert read(store, "a/b") == data
    assert time.monotonic() - begun < 20
    assert len(proxy.requests) == before + 2


def test_412_for_every_put_is_told_from_a_blob_that_exists(store: RetryingBlobStore, proxy: S3Proxy) -> None:
    """A server answers 412 although nothing is there. The store raises an InvalidError that says so."""
    proxy.faults = [Fault("PUT", times=9, answer=(412, "PreconditionFailed"))]
    with pytest.raises(InvalidError, match="reports that it does not exist"):
        store.put("a/b", b"data", ttl_days=30)


@pytest.mark.parametrize("status", [400, 401, 403])
def test_expired_credentials_at_a_head(store: RetryingBlobStore, proxy: S3Proxy, status: int) -> None:
    """FAULTS 10: the answer to a HEAD has no body, and so no code. The store raises AccessDenied without retries."""
    store.put("a/b", b"data", ttl_days=30)
    proxy.faults = [Fault("HEAD", times=9, answer=(status, "ExpiredToken"))]
    proxy.requests.clear()
    with pytest.raises(AccessDenied) as caught:
        store.stat("a/b")
    assert "session.token" in str(caught.value.hint)
    # after a bare 400, the SDK itself asks whether the bucket is elsewhere
    assert len(proxy.requests) <= 2


def test_a_missing_bucket_has_no_time(settings: dict[str, object], proxy: S3Proxy) -> None:
    """FAULTS 10: one request finds out, and the hint says what to do. The answer to a HEAD could also be a proxy's."""
    missing = open_blob_store(
        JobConfig.from_mapping(settings | {"blob.store.uri": "s3://missing-bucket/x"}), SystemClock()
    )
    with pytest.raises(AccessDenied, match="NoSuchBucket") as caught:
        missing.administration.time_ms()
    assert "create the bucket" in str(caught.value.hint)
    assert len(proxy.requests) == 1
    missing.close()


def make_transfer(store: RetryingBlobStore) -> Transfer:
    """Create a transfer over the store."""
    return Transfer(store, SystemClock(), Threads(), parallelism=4, part_size=100_000, ttl_days=30)


def flip(body: bytes) -> bytes:
    """Flip one bit."""
    return body[:-1] + bytes([body[-1] ^ 4])


@pytest.mark.parametrize("times", [1, 2])
def test_altered_bytes_are_found(store: RetryingBlobStore, proxy: S3Proxy, tmp_path: Path, times: int) -> None:
    """FAULTS 12: bytes that are altered in transit once are fetched again; after the second time, CorruptBlob names the
    blob."""
    data = bytes(i % 241 for i in range(450_000))
    (tmp_path / "f").write_bytes(data)
    transfer = make_transfer(store)
    [file] = transfer.upload_files([Upload(tmp_path / "f", len(data), content_hash(data), "orders/1/x/f")])
    proxy.faults = [Fault("GET", path="f.2", times=times, alter=flip)]
    if times == 1:
        transfer.fetch_files([Fetch(file, tmp_path / "back")])
        assert (tmp_path / "back").read_bytes() == data
    else:
        with pytest.raises(CorruptBlob, match=r"orders/1/x/f\.2"):
            transfer.fetch_files([Fetch(file, tmp_path / "back")])
    transfer.close()


def test_an_upload_through_a_bad_network_comes_back(store: RetryingBlobStore, proxy: S3Proxy, tmp_path: Path) -> None:
    """FAULTS 8 and 11 together: through many parts and many faults, the same bytes come back."""
    data = bytes(i % 239 for i in range(3_000_000))
    (tmp_path / "f").write_bytes(data)
    transfer = make_transfer(store)
    for n in range(0, 30, 3):
        proxy.faults += [
            Fault("PUT", path=f"f.{n}?", answer=(503, "SlowDown"), lands=n % 2 == 0),
            Fault("PUT", path=f"f.{n + 1}", reset=True),
            Fault("GET", path=f"f.{n + 1}", truncate=50_000),
            Fault("GET", path=f"f.{n + 2}", alter=flip),
        ]
    [file] = transfer.upload_files([Upload(tmp_path / "f", len(data), content_hash(data), "orders/1/x/f")])
    transfer.fetch_files([Fetch(file, tmp_path / "back")])
    assert (tmp_path / "back").read_bytes() == data
    transfer.close()


def test_a_server_that_hangs_meets_its_time_limit(
    settings: dict[str, object], store: RetryingBlobStore, proxy: S3Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FAULTS 9: a call without an answer ends by itself, and the next try succeeds."""
    monkeypatch.setattr(client, "TIMEOUT_S", 1)
    hurried = open_blob_store(JobConfig.from_mapping(settings), SystemClock())
    proxy.faults = [Fault("PUT", wait=60), Fault("GET", wait=60)]
    hurried.put("a/b", b"data", ttl_days=30)
    assert read(hurried, "a/b") == b"data"
    hurried.close()


def test_a_proxy_that_takes_only_small_requests(store: RetryingBlobStore, proxy: S3Proxy) -> None:
    """FAULTS 10: nginx refuses larger ones with 413 and a page, which is no answer of S3. The hint says what to set."""
    proxy.requests.clear()
    proxy.faults = [Fault("PUT", times=9, answer=(413, PAGE))]
    with pytest.raises(InvalidError, match="413") as caught:
        store.put("a/b", b"data", ttl_days=30)
    assert "client_max_body_size" in str(caught.value.hint)
    assert len(proxy.requests) == 1


def test_an_upload_may_pause_as_long_as_an_answer(
    settings: dict[str, object], s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FAULTS 9: a server with a busy disk stops reading for a while. On a new connection and on one that is used again,
    the time-out of sending is not that of connecting."""
    direct = open_blob_store(JobConfig.from_mapping({**settings, "blob.store.s3.endpoint": s3.endpoint}), SystemClock())
    sent = watch_sends(monkeypatch)
    for number in range(3):
        direct.put(f"a/{number}", bytes(100_000), ttl_days=30)
    assert {seconds for _, seconds in sent} == {30}
    direct.close()


def test_a_server_that_is_not_there(settings: dict[str, object], store: RetryingBlobStore) -> None:
    """FAULTS 8: an endpoint where nothing listens raises UnavailableError with a hint, after all retries."""
    gone = {**settings, "blob.store.s3.endpoint": "http://127.0.0.1:9"}
    unreachable = open_blob_store(JobConfig.from_mapping(gone), SystemClock())
    with pytest.raises(UnavailableError, match="not be reached") as caught:
        read(unreachable, "a/b")
    assert "endpoint" in str(caught.value.hint)
    unreachable.close()


def test_removing_the_ttl_fails_while_writing_works(store: RetryingBlobStore, proxy: S3Proxy) -> None:
    """FAULTS 34: a refused REMOVE_TTL is reported for its blob, which keeps its TTL until one succeeds."""
    transfer = make_transfer(store)
    transfer.put("a/b", b"data")
    proxy.faults = [Fault("DELETE", answer=(403, "AccessDenied"))]
    failed = transfer.remove_ttl_all(["a/b"])
    assert isinstance(failed["a/b"], AccessDenied)
    assert store.stat("a/b").expires_ms is not None
    assert transfer.remove_ttl_all(["a/b"]) == {}
    assert store.stat("a/b").expires_ms is None
    transfer.close()


def test_no_secret_in_any_error(settings: dict[str, object], proxy: S3Proxy, s3: S3Server) -> None:
    """FAULTS 30: no error contains a key, whatever fails."""
    wrong = {**settings, "blob.store.s3.secret.key": "wr0ng-s3cret-key-of-the-test"}
    store = open_blob_store(JobConfig.from_mapping(wrong), SystemClock())
    proxy.faults = [Fault("GET", times=9, reset=True)]
    texts: list[str] = []
    for call in (lambda: store.put("a/b", b"x", ttl_days=1), lambda: read(store, "a/b")):
        try:
            call()
        except StatemgrError as error:
            texts.append(f"{error} {error!r} {error.__cause__!r} {error.to_json()}")
    assert texts
    assert not any("wr0ng" in text or s3.secret_key in text for text in texts)
    store.close()
