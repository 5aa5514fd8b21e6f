"""What the stores on Google Cloud Storage and Azure have of their own, on real servers and with the vendors' errors."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import logging
import os
import re
import socket
import threading
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import quote

import pytest
from azure.core.exceptions import ClientAuthenticationError, ServiceRequestError
from azure.identity import CredentialUnavailableError
from google.auth.exceptions import RefreshError, TransportError

from statemgr.blobs import BlobExists, open_blob_store, open_raw_blob_store
from statemgr.blobs.clouds import azure, gcs, store
from statemgr.blobs.clouds.azure import AzureBlobStore
from statemgr.blobs.clouds.azure_credentials import Token
from statemgr.blobs.clouds.http import Answer, Damaged, Http
from statemgr.blobs.clouds.store import CloudBlobStore
from statemgr.blobs.retrying import RetryingBlobStore, undecorated
from statemgr.config import JobConfig
from statemgr.errors import AccessDenied, ConfigError, InvalidError, MissingBlob, StatemgrError, UnavailableError
from statemgr.local.machine import SystemClock
from statemgr.ports import BlobInfo, FileSlice, list_blobs
from statemgr.testing.conformance.blob_store import read
from tests.blob_faults import ManualClock, watch_sends
from tests.core.integration.s3_proxy import PAGE, Fault, S3Proxy
from tests.servers import CloudServer

pytestmark = pytest.mark.integration
MIB = 1024 * 1024


def opened(cloud: CloudServer, **more: object) -> RetryingBlobStore:
    """Open a store of its own."""
    settings = {"job.name": "orders", "blob.store.retry.policy.backoff.delay.millis": 1, **cloud.settings()}
    return open_blob_store(JobConfig.from_mapping({**settings, **more}), SystemClock())


@pytest.fixture
def blobs(cloud: CloudServer) -> Iterator[RetryingBlobStore]:
    """Open an empty store with a job's decorators."""
    opened_store = opened(cloud)
    yield opened_store
    opened_store.close()


def test_put_read_and_delete(blobs: RetryingBlobStore) -> None:
    """A blob has exactly the bytes that were put, is never overwritten, and has a TTL until it is removed."""
    blobs.put("a/b c%+.1", b"0123456789", ttl_days=30)
    assert read(blobs, "a/b c%+.1", 3, 4) == b"3456"
    assert read(blobs, "a/b c%+.1", 10) == b""
    with pytest.raises(BlobExists):
        blobs.put("a/b c%+.1", b"other", ttl_days=None)
    found = blobs.stat("a/b c%+.1")
    assert found.expires_ms is not None
    assert abs(found.expires_ms - found.modified_ms - 30 * 86_400_000) < 60_000
    blobs.remove_ttl("a/b c%+.1")
    assert blobs.stat("a/b c%+.1").expires_ms is None
    assert [info.blob_id for info in list_blobs(blobs, "a/")] == ["a/b c%+.1"]
    blobs.delete("a/b c%+.1")
    with pytest.raises(MissingBlob):
        blobs.stat("a/b c%+.1")


def test_a_damaged_upload_is_refused_by_the_server(blobs: RetryingBlobStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server compares the checksum of a PUT with what has arrived, and keeps nothing that differs."""
    raw = undecorated(blobs)
    assert isinstance(raw, CloudBlobStore)
    assert raw.checks_uploads
    wrong = raw._digest(FileLike(b"other"))  # type: ignore[arg-type]
    monkeypatch.setattr(raw, "_digest", lambda _: wrong)
    with pytest.raises(Damaged):
        raw.put("a", b"x", ttl_days=None)
    assert list(list_blobs(blobs, "")) == []


class FileLike:
    """A body that is read once."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def read(self, _: int) -> bytes:
        """Return everything, then nothing."""
        data, self._data = self._data, b""
        return data


def test_large_bodies_are_sent_in_pieces(
    blobs: RetryingBlobStore, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An upload in pieces is whole, does not overwrite, and has its TTL; one that breaks off leaves no blob."""
    for name in ("PIECE", "WHOLE"):
        monkeypatch.setattr(store, name, MIB)
    data = os.urandom(3 * MIB + 17)
    path = tmp_path_factory.mktemp("large") / "file"
    path.write_bytes(b"before" + data + b"after")
    body = FileSlice(path, 6, len(data))
    blobs.put("large", body, ttl_days=7)
    assert read(blobs, "large", step=MIB) == data
    assert blobs.stat("large").expires_ms is not None
    with pytest.raises(BlobExists):
        blobs.put("large", b"x" * (2 * MIB), ttl_days=None)
    with pytest.raises(StatemgrError):
        blobs.put("short", FileSlice(path, 6, 9 * MIB), ttl_days=None)
    assert [info.blob_id for info in list_blobs(blobs, "")] == ["large"]
    assert list(blobs.administration.unfinished("")) == []


def test_an_upload_that_the_server_calls_incomplete_has_failed(
    blobs: RetryingBlobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Google answers the last piece with 308 if it has not stored all of the blob, which then does not exist."""
    raw = undecorated(blobs)
    if not isinstance(raw, gcs.GcsBlobStore):
        pytest.skip("only Google's servers answer so")
    for name in ("PIECE", "WHOLE"):
        monkeypatch.setattr(store, name, MIB)
    real = raw._http.ask

    def ask(method: str, *given: Any, **more: Any) -> Any:
        answer = real(method, *given, **more)
        return replace(answer, status=308) if method == "PUT" else answer

    monkeypatch.setattr(raw._http, "ask", ask)
    with pytest.raises(UnavailableError, match="not stored all"):
        raw.put("large", bytes(2 * MIB), ttl_days=None)


def test_many_are_deleted_with_one_request(cloud: CloudServer) -> None:
    """A clean-up sends one request for many blobs, and one that does not exist is no error."""
    with through(cloud) as (proxy, blobs):
        for number in range(5):
            blobs.put(f"d/{number}", b"x", ttl_days=None)
        proxy.requests.clear()
        assert blobs.delete_many([f"d/{number}" for number in range(6)]) == {}
        assert len(proxy.requests) == 1, proxy.requests
        assert list(list_blobs(blobs, "d/")) == []


def test_the_server_copies(blobs: RetryingBlobStore, cloud: CloudServer) -> None:
    """A copy is made by the server, also into another prefix, and has its own TTL."""
    blobs.put("a/source", b"copied", ttl_days=None)
    other = opened(cloud)
    for target in (blobs, other):
        assert target.copy_from(blobs, blobs.stat("a/source"), "b/target", ttl_days=3)
        assert read(target, "b/target") == b"copied"
        assert target.stat("b/target").expires_ms is not None
    assert blobs.stat("a/source").expires_ms is None
    other.close()


def test_a_bucket_that_does_not_exist(cloud: CloudServer) -> None:
    """A missing bucket or container is no missing blob: the error says what to correct."""
    blobs = opened(replace(cloud, bucket="missing-bucket"))
    calls: list[Callable[[], object]] = [
        lambda: blobs.stat("a"),
        lambda: blobs.put("a", b"x", ttl_days=3),
        lambda: list(list_blobs(blobs, "")),
    ]
    for call in calls:
        with pytest.raises(AccessDenied, match=r"create the (bucket|container)"):
            call()
    blobs.close()


@pytest.mark.parametrize("cloud", ["gcs"], indirect=True)
def test_an_upload_to_a_missing_bucket_is_answered_without_json(
    cloud: CloudServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Google's endpoint of uploads may answer in plain text, as an ingress does. A listing tells them apart."""
    with through(cloud) as (proxy, _):
        blobs = opened(replace(cloud, endpoint=proxy.endpoint, bucket="missing-bucket"))
        proxy.faults = [Fault("POST", answer=(404, PAGE), times=9)]
        for whole in (store.WHOLE, 0):
            monkeypatch.setattr(store, "WHOLE", whole)
            proxy.requests.clear()
            with pytest.raises(AccessDenied, match="create the bucket"):
                undecorated(blobs).put("a", b"x", ttl_days=3)
            assert [method for method, _ in proxy.requests] == ["POST", "GET"]
        blobs.close()


def test_what_a_closed_store_says(cloud: CloudServer) -> None:
    """A request after the close fails at once."""
    blobs = opened(cloud, **{"blob.store.retry.policy.max.retries": 0})
    blobs.put("a", b"x", ttl_days=None)
    blobs.close()
    with pytest.raises(UnavailableError):
        blobs.stat("a")


# --- vendors' errors ---


class Vendor(S3Proxy):
    """A proxy whose answers have the vendor's own bodies."""

    def __init__(self, upstream: str, kind: str) -> None:
        super().__init__(upstream)
        self.kind = kind
        self.refuse_tags = False
        #: The lifecycle rules of the bucket, which fake-gcs-server does not keep. None passes requests on.
        self.rules: list[object] | None = None

    def forward(
        self, method: str, path: str, headers: Mapping[str, str], data: bytes
    ) -> tuple[int, list[tuple[str, str]], bytes]:
        """Refuse tags as an account with a hierarchical namespace does, or keep rules."""
        if self.refuse_tags and "x-ms-tags" in {name.lower() for name in headers}:
            code = "FeatureNotYetSupportedForHierarchicalNamespaceAccounts"
            return 409, *self.error(409, code)
        answer = super().forward(method, path, headers, data)
        if self.rules is None or not re.match(r"/storage/v1/b/[^/?]+\?", path):
            return answer
        if method == "PATCH":
            self.rules = json.loads(data)["lifecycle"]["rule"]
        found = {**json.loads(answer[2]), "lifecycle": {"rule": self.rules}}
        return 200, [("Content-Type", "application/json")], json.dumps(found).encode()

    def error(self, status: int, code: str) -> tuple[list[tuple[str, str]], bytes]:
        """The headers and the body of an error."""
        if self.kind == "gcs":
            error = {"domain": "usageLimits", "reason": code, "message": MESSAGES.get(code, "told to")}
            body = {"error": {"code": status, "message": error["message"], "errors": [error]}}
            return [("Content-Type", "application/json; charset=UTF-8")], json.dumps(body).encode()
        message = f"{MESSAGES.get(code, 'told to')}\nRequestId:0\nTime:2026-01-01T00:00:00Z"
        error_text = f"<Error><Code>{code}</Code><Message>{message}</Message></Error>"
        text = f'\ufeff<?xml version="1.0" encoding="utf-8"?>{error_text}'
        return [("Content-Type", "application/xml"), ("x-ms-error-code", code)], text.encode()


#: Documented messages.
MESSAGES = {
    "forbidden": "me@x.iam.gserviceaccount.com does not have storage.objects.create access to the Google Cloud Storage "
    "object. Permission 'storage.objects.create' denied on resource (or it may not exist).",
    "rateLimitExceeded": "The object exceeded the rate limit for object mutation operations.",
    "authError": "Invalid Credentials",
    "ServerBusy": "The server is currently unable to receive requests. Please retry your request.",
    "AuthorizationPermissionMismatch": "This request is not authorized to perform this operation using this "
    "permission.",
    "InvalidAuthenticationInfo": "Server failed to authenticate the request. Please refer to the information in the "
    "www-authenticate header.",
    "AuthenticationFailed": "Server failed to authenticate the request. Make sure the value of Authorization header is "
    "formed correctly including the signature.",
}


class through:  # noqa: N801 - a context
    """A store behind a proxy, and the proxy."""

    def __init__(self, cloud: CloudServer, **more: object) -> None:
        upstream = cloud.endpoint or f"http://{cloud.connection_string.rpartition('http://')[2].partition('/')[0]}"
        self._proxy = Vendor(upstream, cloud.kind)
        self._cloud, self._upstream, self._more = cloud, upstream, more

    def __enter__(self) -> tuple[Vendor, RetryingBlobStore]:
        self._proxy.__enter__()
        there = self._proxy.endpoint
        cloud = replace(
            self._cloud,
            endpoint=there,
            connection_string=self._cloud.connection_string.replace(self._upstream, there),
        )
        self._blobs = opened(cloud, **{"blob.store.retry.policy.max.retries": 2, **self._more})
        self._blobs.put("warm/up", b"x", ttl_days=None)
        return self._proxy, self._blobs

    def __exit__(self, *_: object) -> None:
        self._blobs.close()
        self._proxy.__exit__()


#: Method of a PUT per cloud.
PUT = {"gcs": "POST", "azure": "PUT"}
BUSY = {
    "gcs": [(429, "rateLimitExceeded"), (403, "userRateLimitExceeded"), (503, "backendError"), (408, "")],
    "azure": [(503, "ServerBusy"), (500, "OperationTimedOut"), (500, "InternalError"), (429, "TooManyRequests")],
}
REFUSED = {
    "gcs": [(401, "authError", None), (403, "forbidden", "storage.objects.create")],
    "azure": [
        (401, "InvalidAuthenticationInfo", None),
        (403, "AuthenticationFailed", None),
        (
            403,
            "AuthorizationPermissionMismatch",
            "Microsoft.Storage/storageAccounts/blobServices/containers/blobs/write",
        ),
    ],
}


def test_throttling_is_waited_for(cloud: CloudServer) -> None:
    """A busy server is asked again, also if the PUT that it complains about has landed; the blob is whole."""
    with through(cloud) as (proxy, blobs):
        for number, answer in enumerate(BUSY[cloud.kind]):
            for lands in (False, True):
                proxy.faults = [Fault(PUT[cloud.kind], answer=answer, lands=lands)]
                blobs.put(f"a/{number}-{lands}", b"bytes", ttl_days=None)
                proxy.faults = [Fault("GET", answer=answer)]
                assert read(blobs, f"a/{number}-{lands}") == b"bytes"
        proxy.faults = [Fault(PUT[cloud.kind], answer=BUSY[cloud.kind][0], times=9)]
        with pytest.raises(UnavailableError) as caught:
            blobs.put("a/never", b"bytes", ttl_days=None)
        assert caught.value.where["attempts"] == 3


def test_an_upload_may_pause_as_long_as_an_answer(cloud: CloudServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server with a busy disk stops reading for a while. On a new connection and on one that is used again, each
    block of a body has as long as an answer, and not the time to connect."""
    for name in ("PIECE", "WHOLE"):
        monkeypatch.setattr(store, name, 2 * MIB)
    blobs = opened(cloud)
    sent = watch_sends(monkeypatch)
    for size in (MIB, 2 * MIB, 5 * MIB):
        blobs.put(f"a/{size}", bytes(size), ttl_days=3)
    assert {seconds for _, seconds in sent} == {30}
    assert max(size for size, _ in sent) < MIB
    blobs.close()


def delete_all(blobs: RetryingBlobStore, *names: str) -> None:
    """Delete blobs together. Raises: the first failure."""
    for error in blobs.delete_many(names).values():
        raise error


def test_a_page_of_an_ingress_says_nothing_about_a_blob(cloud: CloudServer) -> None:
    """An ingress whose server is away answers 404 with a page of its own. A request waits for the server, and a blob
    loses its TTL or is deleted when the server is back."""
    methods = ("PUT", "GET", "HEAD", "DELETE", "POST", "PATCH")
    with through(cloud, **{"blob.store.retry.policy.max.retries": 5}) as (proxy, blobs):
        for name in ("a/b", "a/c", "a/d", "a/e"):
            blobs.put(name, b"data", ttl_days=30)
        found = blobs.stat("a/b")
        calls: list[Callable[[], object]] = [
            lambda: blobs.put("a/new", b"data", ttl_days=30),
            lambda: read(blobs, "a/b"),
            lambda: blobs.stat("a/b"),
            lambda: blobs.copy_from(blobs, found, "a/copy", ttl_days=30),
            lambda: blobs.remove_ttl("a/b"),
            lambda: blobs.delete("a/c"),
            lambda: delete_all(blobs, "a/d", "a/e"),
            lambda: list(list_blobs(blobs, "a/")),
        ]
        for call in calls:
            proxy.faults = [Fault(method, times=99, answer=(404, PAGE)) for method in methods]
            with pytest.raises(UnavailableError, match="404 without") as caught:
                call()
            assert "endpoint" in str(caught.value.hint)
            proxy.faults = [Fault(method, answer=(404, PAGE)) for method in methods]
            call()
        proxy.faults = []
        assert [blob.blob_id for blob in list_blobs(blobs, "a/")] == ["a/b", "a/copy", "a/new"]
        assert blobs.stat("a/b").expires_ms is None
        proxy.requests.clear()
        assert blobs.delete_many(["a/copy", "a/new"]) == {}
        assert len(proxy.requests) == 1, "the server still deletes many with one request"


def test_a_missing_right_is_named_as_the_vendor_names_it(cloud: CloudServer) -> None:
    """Expired tokens and missing rights are not repeated, and the error names the right."""
    for status, code, right in REFUSED[cloud.kind]:
        with through(cloud) as (proxy, blobs):
            proxy.requests.clear()
            proxy.faults = [Fault(PUT[cloud.kind], answer=(status, code), times=9)]
            with pytest.raises(AccessDenied, match=str(status)) as caught:
                blobs.put("a/b", b"bytes", ttl_days=None)
            assert caught.value.where.get("missing_right") == right
            assert len(proxy.requests) == 1


def test_bodies_that_break_off_and_connections_that_are_reset(cloud: CloudServer) -> None:
    """A GET goes on where it broke off, and a PUT whose connection was reset is repeated."""
    data = os.urandom(300_000)
    with through(cloud) as (proxy, blobs):
        proxy.faults = [Fault(PUT[cloud.kind], reset=True)]
        blobs.put("a/b", data, ttl_days=None)
        proxy.faults = [Fault("GET", truncate=100_000), Fault("GET", reset=True), Fault("GET", chunked=True)]
        assert read(blobs, "a/b", step=65536) == data


class Renewing:
    """Credentials whose first token the server refuses."""

    def __init__(self, inner: object) -> None:
        self.inner, self.renewed = inner, 0

    def sign(self, method: str, url: str, headers: dict[str, str]) -> str:
        """Sign as the inner ones."""
        return self.inner.sign(method, url, headers)  # type: ignore[attr-defined,no-any-return]

    def renew(self) -> bool:
        """Count."""
        self.renewed += 1
        return True


def test_an_expired_token_is_renewed_once(cloud: CloudServer) -> None:
    """A 401 renews the token and repeats the request, body and all; a second 401 is an error."""
    expired = (401, "authError" if cloud.kind == "gcs" else "InvalidAuthenticationInfo")
    with through(cloud) as (proxy, blobs):
        raw = undecorated(blobs)
        assert isinstance(raw, CloudBlobStore)
        raw._http.credentials = renewing = Renewing(raw._http.credentials)
        proxy.faults = [Fault(PUT[cloud.kind], answer=expired)]
        blobs.put("a/b", b"bytes", ttl_days=None)
        assert read(blobs, "a/b") == b"bytes"
        assert renewing.renewed == 1
        proxy.faults = [Fault("GET", answer=expired, times=2)]
        with pytest.raises(AccessDenied):
            read(blobs, "a/b")


# --- of one cloud ---


def only(cloud: CloudServer, kind: str) -> None:
    """Skip the other cloud."""
    if cloud.kind != kind:
        pytest.skip(f"of {kind} alone")


@pytest.mark.parametrize("cloud", ["azure"], indirect=True)
def test_an_account_without_tags(cloud: CloudServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where tags are refused, a probe finds out, and TTLs are metadata. The blobs of both kinds lose their TTLs."""
    monkeypatch.setattr(azure, "_HAS_TAGS", {})
    with through(cloud) as (proxy, blobs):
        raw = undecorated(blobs)
        assert isinstance(raw, AzureBlobStore)
        blobs.put("a/tagged", b"1", ttl_days=5)
        assert raw._head("a/tagged")["x-ms-tag-count"] == "1"
        proxy.refuse_tags = True
        blobs.put("a/plain", b"2", ttl_days=5)
        assert raw._head("a/plain")["x-ms-meta-statemgr_ttl"] == "5"
        assert not raw._has_tags
        assert any("no blob index tags" in problem for problem in blobs.administration.probe())
        for name in ("a/tagged", "a/plain"):
            assert blobs.stat(name).expires_ms is not None
            blobs.remove_ttl(name)
            assert blobs.stat(name).expires_ms is None
        assert {info.blob_id for info in list_blobs(blobs, "")} == {"a/tagged", "a/plain", "warm/up"}


@pytest.mark.parametrize("cloud", ["azure"], indirect=True)
def test_a_shared_access_signature(cloud: CloudServer, caplog: pytest.LogCaptureFixture) -> None:
    """A signature for the container is enough for a job, and is in no log line and no error."""
    fields = dict(part.partition("=")[::2] for part in cloud.connection_string.split(";"))
    signature = container_signature(fields["AccountName"], fields["AccountKey"], cloud.bucket)
    caplog.set_level(logging.DEBUG)
    text = f"BlobEndpoint={fields['BlobEndpoint']};SharedAccessSignature={signature}"
    blobs = opened(replace(cloud, connection_string=text))
    blobs.put("a/b", b"signed", ttl_days=3)
    assert read(blobs, "a/b") == b"signed"
    blobs.remove_ttl("a/b")
    assert blobs.delete_many(["a/b", "a/c"]) == {}
    with pytest.raises(MissingBlob) as caught:
        blobs.stat("a/b")
    secret = signature.rpartition("sig=")[2]
    assert secret not in caplog.text
    assert secret not in repr(caught.value) + str(caught.value)
    blobs.close()


def container_signature(account: str, key: str, container: str) -> str:
    """A service SAS for all that a job does. Source: "Create a service SAS", version 2020-12-06."""
    ends = (datetime.now(UTC) + timedelta(hours=1)).strftime("%Y-%m-%dT%H:%M:%SZ")
    rights, version = "racwdxltmeop", "2020-12-06"
    fields = [rights, "", ends, f"/blob/{account}/{container}", "", "", "", version, "c", "", "", "", "", "", "", ""]
    digest = hmac.digest(base64.b64decode(key), "\n".join(fields).encode(), hashlib.sha256)
    return f"sp={rights}&se={quote(ends)}&sv={version}&sr=c&sig={quote(base64.b64encode(digest).decode(), safe='')}"


@pytest.mark.parametrize("cloud", ["gcs"], indirect=True)
def test_the_lifecycle_rule_is_installed_next_to_others(cloud: CloudServer) -> None:
    """`doctor --fix` adds one rule, and the bucket's other rules stay. The server keeps no rules, so the proxy does."""
    with through(cloud) as (proxy, blobs):
        other = {"action": {"type": "Delete"}, "condition": {"age": 3000, "matchesPrefix": ["elsewhere/"]}}
        proxy.rules = [other]
        assert any("doctor --fix" in problem for problem in blobs.administration.probe())
        for _ in range(2):
            assert blobs.administration.fix() == ("the lifecycle rule is installed",)
        prefix = str(undecorated(blobs)._prefix)  # type: ignore[attr-defined]
        mine = {"action": {"type": "Delete"}, "condition": {"daysSinceCustomTime": 1, "matchesPrefix": [prefix]}}
        assert proxy.rules == [other, mine]
        assert blobs.administration.probe() == []


def test_what_each_answer_means() -> None:
    """Codes that the emulators never send, with the bodies of the vendors' documentation."""
    deleted = Answer(409, {"x-ms-error-code": "ContainerBeingDeleted"}, b"")
    assert isinstance(azure.meaning(deleted, "put", {}), UnavailableError)
    disabled = Answer(403, {"x-ms-error-code": "AccountIsDisabled"}, b"")
    assert isinstance(azure.meaning(disabled, "put", {}), AccessDenied)
    proxy = Answer(502, {"Content-Type": "text/html"}, b"<html>Bad Gateway</html>")
    small = Answer(413, {"Content-Type": "text/html"}, b"<html>Request Entity Too Large</html>")
    for meaning in (azure.meaning, gcs.meaning):
        assert isinstance(meaning(proxy, "get", {}), UnavailableError)
        assert "client_max_body_size" in str(meaning(small, "put", {}).hint)
    quota = json.dumps({"error": {"code": 403, "message": "Quota", "errors": [{"reason": "quotaExceeded"}]}}).encode()
    assert isinstance(gcs.meaning(Answer(403, {}, quota), "put", {}), UnavailableError)
    missing = Answer(404, {}, b"No such object: my-bucket/orders/1/a-bucket/index")
    assert isinstance(gcs.meaning(missing, "get", {}), MissingBlob)
    assert isinstance(azure.meaning(Answer(404, {"x-ms-error-code": "BlobNotFound"}, b""), "stat", {}), MissingBlob)
    assert isinstance(gcs.meaning(missing, "piece", {}), UnavailableError)
    no_bucket = Answer(404, {}, json.dumps({"error": {"message": "The specified bucket does not exist."}}).encode())
    assert isinstance(gcs.meaning(no_bucket, "get", {}), AccessDenied)


@pytest.mark.parametrize("scheme", ["https", "http"])
def test_a_proxy_gets_its_password(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """If it refuses it, no retry helps, and the password is in no message."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        asked = list[bytes]()

        def refuse() -> None:
            connection, _ = server.accept()
            with connection:
                asked.append(connection.recv(4096))
                connection.sendall(b"HTTP/1.1 407 Proxy Authentication Required\r\nContent-Length: 0\r\n\r\n")

        thread = threading.Thread(target=refuse)
        thread.start()
        proxy = f"http://me:p%40ss@127.0.0.1:{server.getsockname()[1]}"
        monkeypatch.setattr(urllib.request, "getproxies", lambda: {scheme: proxy})
        monkeypatch.setattr(urllib.request, "proxy_bypass", lambda _: False)
        http = Http("GCS", 1, SystemClock(), gcs.meaning, {})
        with pytest.raises(AccessDenied, match="HTTPS_PROXY") as caught:
            http.ask("GET", f"{scheme}://storage.invalid/b", what="list")
        thread.join()
        http.close()
    assert f"proxy-authorization: basic {base64.b64encode(b'me:p@ss').decode()}".lower() in asked[0].decode().lower()
    assert "ss@" not in str(caught.value)


def test_an_answer_of_something_else_is_a_typed_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A page to log in, an answer without its headers, and a batch whose parts have other numbers."""
    places: list[tuple[type[CloudBlobStore], Any]] = [(gcs.GcsBlobStore, gcs.meaning), (AzureBlobStore, azure.meaning)]
    one = "--x\r\nContent-ID: {}\r\n\r\nHTTP/1.1 202 Accepted\r\n\r\n\r\n"
    parts = Answer(
        202, {"Content-Type": "multipart/mixed; boundary=x"}, f"{one.format(1)}{one.format(2)}--x--".encode()
    )
    for kind, meaning in places:
        http = Http("the cloud", 1, SystemClock(), meaning, {})
        blobs = kind(http, "http://x", "b", "", clock=SystemClock(), own="j/", ttl_days=1)  # type: ignore[call-arg]
        monkeypatch.setattr(http, "ask", lambda *_, **__: Answer(200, {}, b"<html>Log in"))
        for call in (lambda blobs=blobs: blobs.stat("a"), lambda blobs=blobs: blobs.list("")):
            with pytest.raises(InvalidError, match="is not one of the cloud"):
                call()
        monkeypatch.setattr(http, "ask", lambda *_, **__: parts)
        with pytest.raises(InvalidError):
            blobs._delete_together(["a", "b"])


@pytest.mark.parametrize(
    ("status", "code", "gives_up"),
    [
        (405, "UnsupportedHttpVerb", True),
        (501, "", True),
        (404, "", True),
        (401, "InvalidAuthenticationInfo", False),
        (403, "AuthorizationFailure", False),
        (400, "InvalidInput", False),
    ],
)
@pytest.mark.parametrize("kind", [gcs.GcsBlobStore, AzureBlobStore])
def test_only_a_server_without_batches_is_sent_none(
    kind: type[CloudBlobStore], status: int, code: str, gives_up: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A refusal that has another cause is over some time. The blobs that it concerns are deleted one by one."""
    meaning = gcs.meaning if kind is gcs.GcsBlobStore else azure.meaning
    http = Http("the cloud", 1, SystemClock(), meaning, {})
    blobs = kind(http, "http://x", "b", "", clock=SystemClock(), own="j/", ttl_days=1)  # type: ignore[call-arg]
    sent, names = list[str](), ["a", "b", "c"]

    def ask(method: str, *_: object, what: str, **__: object) -> Answer:
        sent.append(method)
        if method == "POST":
            raise meaning(Answer(status, {"x-ms-error-code": code}, b""), what, {})
        return Answer(204, {}, b"")

    monkeypatch.setattr(http, "ask", ask)
    for _ in range(2):
        assert blobs.delete_many(names) == {}
    one_by_one = ["DELETE"] * len(names)
    assert sent == ["POST", *one_by_one, *([] if gives_up else ["POST"]), *one_by_one]


def test_deletes_that_are_refused_one_by_one_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no delete is allowed, that is one error, and nobody tries each blob."""
    http, sent = Http("the cloud", 1, SystemClock(), gcs.meaning, {}), list[str]()
    blobs = gcs.GcsBlobStore(http, "http://x", "b", "", clock=SystemClock(), own="j/", ttl_days=1)

    def ask(method: str, *_: object, **__: object) -> Answer:
        sent.append(method)
        raise AccessDenied("403")

    monkeypatch.setattr(http, "ask", ask)
    with pytest.raises(AccessDenied):
        blobs.delete_many(["a", "b", "c"])
    assert sent == ["POST", "DELETE"]


def test_the_servers_time_does_not_leap_when_work_is_given_up() -> None:
    """A deadline then leaps, and the clock that TTLs come from does not."""
    clock = SystemClock()
    http = Http("GCS", 1, clock, gcs.meaning, {})
    clock.give_up()
    http._notice_time("Fri, 27 Nov 2026 15:02:16 GMT")
    assert http.time_ms() // 3_600_000 == int(datetime(2026, 11, 27, 15, tzinfo=UTC).timestamp()) // 3600


def refusing(error: Exception) -> Callable[..., object]:
    """A service of credentials that raises the error."""

    def refuse(*_: object) -> object:
        raise error

    return refuse


def test_an_outage_of_the_service_of_googles_credentials_is_repeated() -> None:
    """A refresh that got no answer is unavailable; one that was refused is not."""
    lost, refused = RefreshError("metadata"), RefreshError("invalid_grant")  # type: ignore[no-untyped-call]
    lost.__cause__ = TransportError("connection refused")  # type: ignore[no-untyped-call]
    for error, kind in ((lost, UnavailableError), (refused, AccessDenied)):
        loaded = SimpleNamespace(before_request=refusing(error))
        with pytest.raises(kind, match="check the application default credentials"):
            gcs._GoogleCredentials(lambda loaded=loaded: loaded, None).sign("GET", "https://x", {})


@pytest.mark.parametrize(
    ("uri", "variables"),
    [
        ("gs://bucket1", {"GOOGLE_APPLICATION_CREDENTIALS": "/"}),
        ("gs://bucket1", {"GOOGLE_APPLICATION_CREDENTIALS": "list"}),
        ("az://bucket1", {"AZURE_CLIENT_CERTIFICATE_PATH": "missing"}),
        ("az://bucket1", {"AZURE_CLIENT_SECRET": "s3cret", "AZURE_TENANT_ID": "t\n"}),
        ("az://bucket1", {"AZURE_CLIENT_SECRET": "s3cret", "AZURE_AUTHORITY_HOST": "http://x"}),
    ],
)
def test_credentials_that_cannot_be_read(
    uri: str, variables: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The vendors' libraries raise what is not theirs, such as IsADirectoryError for a secret that is mounted as a
    directory. The error says what to check."""
    (tmp_path / "list").write_text("[]")
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith(("AZURE_", "GOOGLE_", "STORAGE_"))]:
        monkeypatch.delenv(name)
    for name, value in {"AZURE_CLIENT_ID": "c", "AZURE_TENANT_ID": "t", **variables}.items():
        monkeypatch.setenv(name, value)
    more = {"blob.store.azure.account": "acc1"} if uri.startswith("az") else {}
    config = JobConfig.from_mapping({"job.name": "orders", "blob.store.uri": uri, **more})
    blobs = open_raw_blob_store(config, SystemClock())
    with pytest.raises(AccessDenied, match="credentials cannot be read") as caught:
        blobs.stat("a")
    assert re.search("GOOGLE_|AZURE_", str(caught.value.hint))
    assert "s3cret" not in str(caught.value)
    blobs.close()


@pytest.mark.parametrize("proxy", ["socks5://me:p4ss@localhost:1", "http://me:p4ss@localhost:abc", "http://[x"])
@pytest.mark.parametrize("uri", ["gs://bucket1", "az://bucket1"])
def test_a_proxy_that_cannot_be_used(uri: str, proxy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is mistyped, and not unavailable. Its password is in no message."""
    monkeypatch.setenv("HTTPS_PROXY", proxy)
    monkeypatch.delenv("STORAGE_EMULATOR_HOST", raising=False)
    more = {"blob.store.azure.connection.string": "AccountName=acc1;AccountKey=a2V5"} if uri.startswith("az") else {}
    config = JobConfig.from_mapping({"job.name": "orders", "blob.store.uri": uri, **more})
    with pytest.raises(ConfigError, match="HTTPS_PROXY") as caught:
        open_raw_blob_store(config, SystemClock()).stat("a")
    assert "p4ss" not in str(caught.value)


@pytest.mark.parametrize("endpoint", ["http://host:abc", "http://[x"])
def test_an_endpoint_that_is_no_address(endpoint: str) -> None:
    """It is mistyped, and not unavailable."""
    given = f"AccountName=acc1;AccountKey=a2V5;BlobEndpoint={endpoint}"
    settings = {"blob.store.uri": "az://bucket1", "blob.store.azure.connection.string": given}
    with pytest.raises(ConfigError, match="the endpoint"):
        open_raw_blob_store(JobConfig.from_mapping({"job.name": "orders", **settings}), SystemClock()).stat("a")


def test_an_outage_of_the_service_of_azures_credentials_is_repeated() -> None:
    """Once there was a token, only a refusal is no reason to ask again."""
    loaded = SimpleNamespace(get_token=refusing(CredentialUnavailableError("no response from the IMDS endpoint")))
    credentials = Token(lambda: loaded, SystemClock())
    with pytest.raises(AccessDenied):
        credentials.sign("GET", "https://x", {})
    loaded.get_token, silent = lambda *_: SimpleNamespace(token="t"), loaded.get_token
    credentials.sign("GET", "https://x", {})
    loaded.get_token = silent
    with pytest.raises(UnavailableError, match=r"check blob\.store\.azure"):
        credentials.sign("GET", "https://x", {})
    refused = ClientAuthenticationError("revoked")
    refused.response = SimpleNamespace(status_code=401)  # type: ignore[assignment]
    loaded.get_token = refusing(refused)
    with pytest.raises(AccessDenied):
        credentials.sign("GET", "https://x", {})


class _Announced:
    """A lock that says how many threads have come to it."""

    def __init__(self) -> None:
        self._lock, self.came = threading.Lock(), threading.Semaphore(0)

    def __enter__(self) -> None:
        self.came.release()
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


@pytest.mark.parametrize("vendor", ["google", "azure"])
def test_threads_that_wait_for_a_token_do_not_ask_one_after_the_other(vendor: str) -> None:
    """Invariant 13: a service that does not answer costs each of them one time-out, and not one for each thread before
    it. A later request asks again."""
    lock, asked = _Announced(), list[int]()

    def silent(*_: object) -> object:
        asked.append(1)
        for _ in range(4 if len(asked) == 1 else 1):
            assert lock.came.acquire(timeout=30)  # until all wait
        if vendor == "google":
            raise TransportError("timed out")  # type: ignore[no-untyped-call]
        raise ServiceRequestError("timed out")

    loaded = SimpleNamespace(get_token=silent, before_request=silent)
    credentials: Any = gcs._GoogleCredentials(lambda: loaded, None) if vendor == "google" else None
    credentials = credentials or Token(lambda: loaded, SystemClock())
    credentials._renewals.lock = lock

    def ask(_: int) -> None:
        with pytest.raises(UnavailableError, match="does not answer"):
            credentials.sign("GET", "https://x", {})

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(ask, range(4)))
    assert len(asked) == 1
    ask(4)
    assert len(asked) == 2


def test_the_service_of_azures_credentials_has_short_time_outs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Invariant 13: by its defaults, the SDK waits for 300 seconds, and repeats that."""
    given: dict[str, object] = {}
    monkeypatch.setattr("azure.identity.DefaultAzureCredential", lambda **more: given.update(more))
    azure._default_credential()
    assert given == {"connection_timeout": 5, "read_timeout": 30, "retry_connect": 0, "retry_read": 0}


@pytest.mark.parametrize(
    ("uri", "more", "message"),
    [
        ("az://container/x", {}, "account of the Azure container is not known"),
        ("az://container/x", {"connection.string": "AccountName=a;BlobEndpoint=http://h/a"}, "without TLS"),
        (
            "abfss://c123@acc1.dfs.core.windows.net/x",
            {"connection.string": "AccountName=acc2;AccountKey=a2V5"},
            "another",
        ),
        (
            "abfss://c123@acc1.dfs.core.windows.net/x",
            {"connection.string": "BlobEndpoint=https://acc2.blob.core.windows.net/;SharedAccessSignature=sig=a"},
            "acc1",
        ),
        (
            "az://container/x",
            {"account": "acc1", "connection.string": "AccountName=acc2;AccountKey=a2V5"},
            "acc1",
        ),
        (
            "az://container/x",
            {"account": "acc1", "connection.string": "BlobEndpoint=https://acc2.blob.core.windows.net"},
            "acc1",
        ),
        ("az://container/x", {"connection.string": "nonsense"}, "without '='"),
        ("az://container/x", {"connection.string": "AccountName=a;AccountKey=a2V5abcde"}, "is not Base64"),
        ("az://container/x", {"connection.string": "AccountName=a;AccountKey=a2V5ä"}, "is not Base64"),
        (
            "az://container/x",
            {"connection.string": "AccountName=a;AccountKey=a2V5;BlobEndpoint=host:1"},
            "without http",
        ),
    ],
)
def test_contradictory_settings(uri: str, more: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A configuration that cannot work is refused before any request, and without its secrets."""
    for name in ("AZURE_STORAGE_CONNECTION_STRING", "AZURE_STORAGE_ACCOUNT"):
        monkeypatch.delenv(name, raising=False)
    given = {f"blob.store.azure.{name}": value for name, value in more.items()}
    config = JobConfig.from_mapping({"job.name": "orders", "blob.store.uri": uri, **given})
    with pytest.raises(ConfigError, match=message) as caught:
        open_raw_blob_store(config, SystemClock())
    assert "a2V5" not in str(caught.value)
    assert not more or more["connection.string"] not in repr(config)


@pytest.mark.parametrize(
    "endpoint",
    [
        "http://azurite.blob.svc.cluster.local:10000/acc1",
        "https://eu.blob.example.com",
        "https://acc1.blob.core.windows.net/",
        "https://ACC1.blob.core.windows.net",
        "https://acc1.z01.blob.storage.azure.net",
        "https://acc1-secondary.blob.core.windows.net",
    ],
)
@pytest.mark.parametrize("name", ["acc1", "ACC1"])
def test_an_endpoint_that_is_not_of_another_account(endpoint: str, name: str) -> None:
    """The host of a domain or an emulator says nothing about the account. Names have no case, and an account has an
    endpoint for reading in its second region."""
    for uri in ("az://container/x", "abfss://c123@acc1.dfs.core.windows.net/x"):
        for given in (f"AccountName={name};AccountKey=a2V5", "SharedAccessSignature=sig=a"):
            settings = {
                "blob.store.uri": uri,
                "blob.store.azure.connection.string": f"{given};BlobEndpoint={endpoint}",
                "blob.store.azure.account": name,
            }
            blobs = open_raw_blob_store(JobConfig.from_mapping({"job.name": "orders", **settings}), SystemClock())
            assert isinstance(blobs, AzureBlobStore)
            assert blobs._url("x").startswith(endpoint)
            blobs.close()


def test_a_proxy_without_a_scheme_is_asked_by_http(monkeypatch: pytest.MonkeyPatch) -> None:
    """The S3 client takes it like this, too."""
    monkeypatch.setenv("HTTPS_PROXY", "user:pass@127.0.0.1:3128")
    pool = Http("GCS", 1, SystemClock(), gcs.meaning, {}).pool("https://storage.googleapis.com")
    assert str(pool.proxy) == "http://user:pass@127.0.0.1:3128"
    assert "proxy-authorization" in pool.proxy_headers


def test_a_copy_that_does_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Invariant 13: the copy of a server that reports no end is an error, and not waited for any longer."""
    account = "AccountName=acc1;AccountKey=a2V5"
    uri, key = "abfss://c123@acc1.dfs.core.windows.net/a", "blob.store.azure.connection.string"
    config = JobConfig.from_mapping({"job.name": "orders", "blob.store.uri": uri, key: account})
    blobs = open_raw_blob_store(config, ManualClock())
    assert isinstance(blobs, AzureBlobStore)
    monkeypatch.setattr(blobs, "_checks", True)
    pending = SimpleNamespace(headers={"x-ms-copy-status": "pending"})
    monkeypatch.setattr(blobs._http, "ask", lambda *_, **__: pending)
    with pytest.raises(UnavailableError, match="did not end a copy"):
        blobs.copy_from(blobs, BlobInfo("source", 1, 0), "copy", ttl_days=1)
    blobs.close()


def test_the_address_of_an_abfss_uri() -> None:
    """Spark's form names the container and the account; blobs are under the account's blob endpoint."""
    uri = "abfss://c123@acc1.dfs.core.windows.net/a/b"
    config = JobConfig.from_mapping({"job.name": "orders", "blob.store.uri": uri})
    blobs = open_raw_blob_store(config, SystemClock())
    assert isinstance(blobs, AzureBlobStore)
    assert blobs._url(blobs._key("x")) == "https://acc1.blob.core.windows.net/c123/a/b/x"
    blobs.close()
