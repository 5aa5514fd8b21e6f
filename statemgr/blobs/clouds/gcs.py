"""Blobs as objects of a Google Cloud Storage bucket, through its JSON interface. Touches one prefix of the bucket.

- "The name does not exist" is ``ifGenerationMatch=0``, and the checksum is a CRC-32C in the object's metadata, which
  the service compares.
- A TTL is the object's *custom time*, the moment from which the lifecycle rule of the bucket deletes it. The service
  takes only later times, and none away, so "no TTL" is the year 9999.

Sources: Cloud Storage's documentation of its JSON API, "Object metadata: Custom-Time", "Object Lifecycle Management",
"Resumable uploads" and "Batch requests".
"""

from __future__ import annotations

import io
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from typing import IO, Any, ClassVar, cast
from urllib.parse import quote, unquote, urlencode, urlsplit

import google.auth
import google.auth.exceptions
import google.auth.transport.urllib3
import google_crc32c

from statemgr.blobs.clouds.http import Answer, Damaged, Http, Lacking, Renewals, batch, batch_answers, loading
from statemgr.blobs.clouds.store import Checksum, CloudBlobStore, pieces, quoted
from statemgr.blobs.connections import body_refused, not_of_store
from statemgr.blobs.names import BlobExists, unique_name
from statemgr.config import JobConfig
from statemgr.config.units import DAY_MS
from statemgr.errors import AccessDenied, InvalidError, MissingBlob, StatemgrError, UnavailableError
from statemgr.ports import BlobInfo, BlobPage, BlobStore, Clock

_ENDPOINT = "https://storage.googleapis.com"
_SCOPE = "https://www.googleapis.com/auth/devstorage.full_control"
_FIELDS = "name,size,timeCreated,customTime"
#: The answer to a piece after which more of the blob is expected.
_INCOMPLETE = 308
#: No TTL, as a custom time.
_NEVER = "9999-01-01T00:00:00Z"
_KEYS_HINT = "check the application default credentials (GOOGLE_APPLICATION_CREDENTIALS, or the service account here)"
#: Reasons in a 403 that are no matter of rights.
_BUSY = {"rateLimitExceeded", "userRateLimitExceeded", "quotaExceeded", "backendError", "internalError"}
_RIGHTS = {
    "put": "storage.objects.create", "piece": "storage.objects.create", "get": "storage.objects.get",
    "stat": "storage.objects.get",
    "copy": "storage.objects.get", "list": "storage.objects.list", "delete": "storage.objects.delete",
    "batch": "storage.objects.delete", "update": "storage.objects.update",
    "rules": "storage.buckets.get", "fix": "storage.buckets.update",
}  # fmt: skip
_RIGHT = re.compile(r"storage\.[a-z]+\.[A-Za-z]+")
#: The rewriting service may not read the source, or does not have this request.
_CANNOT_COPY = (AccessDenied, InvalidError)


class GcsBlobStore(CloudBlobStore):
    """A blob store in a bucket, and its administration."""

    most_deletes: ClassVar[int] = 100
    listing_tells_ttl: ClassVar[bool] = True

    def __init__(
        self, http: Http, endpoint: str, bucket: str, prefix: str, *, clock: Clock, own: str, ttl_days: int
    ) -> None:
        super().__init__(http, prefix, own, ttl_days)
        self._endpoint = endpoint
        self._clock = clock
        self._bucket = bucket
        self._bucket_url = f"{endpoint}/storage/v1/b/{quoted(bucket)}"

    def _url(self, key: str) -> str:
        return f"{self._bucket_url}/o/{quoted(key)}"

    def _body_url(self, key: str) -> str:
        return f"{self._url(key)}?alt=media"

    # --- writing ---

    def _checksum(self) -> Checksum:
        checksum: Checksum = google_crc32c.Checksum()
        return checksum

    def _send(self, key: str, stream: IO[bytes], size: int, digest: str, ttl_days: int | None, blob_id: str) -> None:
        boundary = unique_name()
        begin = (
            f"--{boundary}\r\nContent-Type: application/json; charset=UTF-8\r\n\r\n"
            f"{self._resource(key, digest, ttl_days)}\r\n"
            f"--{boundary}\r\nContent-Type: application/octet-stream\r\n\r\n"
        ).encode()
        end = f"\r\n--{boundary}--\r\n".encode()
        body = _Framed(begin, stream, end)
        self._upload(
            "multipart", key, {"Content-Type": f"multipart/related; boundary={boundary}"}, cast("IO[bytes]", body),
            len(begin) + size + len(end), blob_id,
        )  # fmt: skip

    def _send_pieces(self, key: str, stream: IO[bytes], size: int, digest: str, ttl_days: int | None) -> None:
        blob = key.removeprefix(self._prefix)
        begun = self._upload(
            "resumable", key, {"Content-Type": "application/json; charset=UTF-8", "X-Upload-Content-Length": str(size)},
            self._resource(key, digest, ttl_days).encode(), None, blob,
        )  # fmt: skip
        # the session's own address may name a host that is not reachable from here
        session = re.search(r"[?&]upload_id=([^&]+)", begun.headers.get("Location", ""))
        if session is None:
            raise InvalidError("this GCS server does not begin uploads in pieces", bucket=self._bucket, blob=blob)
        url = f"{self._upload_url('resumable', key)}&upload_id={session[1]}"
        sent = 0
        for data in pieces(stream, size):
            headers = {"Content-Range": f"bytes {sent}-{sent + len(data) - 1}/{size}"}
            answer = self._http.ask("PUT", url, headers, data, what="piece", accept=(200, 201, _INCOMPLETE), blob=blob)
            sent += len(data)
            kept = answer.headers.get("Range")
            if answer.status == _INCOMPLETE and (sent == size or kept not in (None, f"bytes=0-{sent - 1}")):
                raise UnavailableError("the server has not stored all of the blob", bucket=self._bucket, blob=blob)

    def _upload(
        self, kind: str, key: str, headers: Mapping[str, str], body: bytes | IO[bytes], size: int | None, blob_id: str
    ) -> Answer:
        url = self._upload_url(kind, key)
        try:
            return self._http.ask("POST", url, headers, body, size=size, what="put", accept=(200, 201), blob=blob_id)
        except MissingBlob as missing:
            self._page(self._prefix + self._own, None, 1)  # tells a missing bucket from the answer of a proxy
            raise UnavailableError(
                "the server does not find a bucket that it has", bucket=self._bucket, blob=blob_id
            ) from missing

    def _upload_url(self, kind: str, key: str) -> str:
        query = urlencode({"uploadType": kind, "name": key, "ifGenerationMatch": 0, "fields": "size"})
        return f"{self._endpoint}/upload/storage/v1/b/{quoted(self._bucket)}/o?{query}"

    def _resource(self, key: str, digest: str | None, ttl_days: int | None) -> str:
        """The metadata of a new object, as JSON."""
        fields: dict[str, str] = {"name": key, "contentType": "application/octet-stream"}
        if digest is not None:
            fields["crc32c"] = digest
        if ttl_days is not None:
            fields["customTime"] = self._expires(ttl_days)
        return json.dumps(fields)

    def _expires(self, ttl_days: int) -> str:
        """A custom time, from the later of this machine's and the server's time: no slow clock makes a rule delete too
        early."""
        now_ms = self._clock.time_ns() // 1_000_000
        with suppress(InvalidError):
            now_ms = max(now_ms, self._http.time_ms())
        expires = datetime.fromtimestamp((now_ms + ttl_days * DAY_MS) / 1000, UTC)
        return expires.isoformat(timespec="milliseconds").replace("+00:00", "Z")

    def remove_ttl(self, blob_id: str) -> None:
        self._update(blob_id, _NEVER)

    def _update(self, blob_id: str, custom_time: str) -> None:
        body = json.dumps({"customTime": custom_time}).encode()
        headers = {"Content-Type": "application/json"}
        url = f"{self._url(self._key(blob_id))}?fields=name"
        self._http.ask("PATCH", url, headers, body, what="update", blob=blob_id)

    def copy_from(self, source: BlobStore, wanted: BlobInfo, blob_id: str, *, ttl_days: int) -> bool:
        """Between buckets, by the service. False from another service or with other credentials."""
        if not isinstance(source, GcsBlobStore) or source._endpoint != self._endpoint or not self.checks_uploads:
            return False
        key = self._key(blob_id)
        body = self._resource(key, None, ttl_days).encode()
        target = f"{source._url(source._key(wanted.blob_id))}/rewriteTo/b/{quoted(self._bucket)}/o/{quoted(key)}"
        token: dict[str, str] = {}
        while True:
            url = f"{target}?{urlencode({'ifGenerationMatch': 0, **token})}"
            try:
                answer = self._http.ask(
                    "POST", url, {"Content-Type": "application/json"}, body, what="copy", blob=wanted.blob_id
                )
            except BlobExists:
                raise
            except _CANNOT_COPY:
                return False
            with self._http.understood(blob=wanted.blob_id):
                progress = json.loads(answer.body)
                is_done, has_ttl = progress.get("done", True), "customTime" in progress.get("resource", {})
                token = {} if is_done else {"rewriteToken": progress["rewriteToken"]}
            if is_done:
                break
        if not has_ttl:  # a server that takes it only with an update
            self._update(blob_id, self._expires(ttl_days))
        return True

    def _delete_together(self, keys: Sequence[str]) -> Sequence[Answer]:
        kind, body = batch([("DELETE", urlsplit(self._url(key)).path, {}) for key in keys], "<blob-{}>")
        answer = self._http.ask(
            "POST", f"{self._endpoint}/batch/storage/v1", {"Content-Type": kind}, body, what="batch"
        )
        with self._http.understood():
            return batch_answers(answer, len(keys))

    # --- reading ---

    def stat(self, blob_id: str) -> BlobInfo:
        url = f"{self._url(self._key(blob_id))}?{urlencode({'fields': _FIELDS})}"
        try:
            answer = self._http.ask("GET", url, what="stat", blob=blob_id)
        except MissingBlob:
            self._page(self._prefix + self._own, None, 1)  # raises AccessDenied if there is no bucket
            raise
        with self._http.understood(blob=blob_id):
            return self._info(json.loads(answer.body))

    def _info(self, found: Mapping[str, Any]) -> BlobInfo:
        custom = found.get("customTime")
        expires = None if custom is None or custom.startswith(_NEVER[:4]) else _epoch_ms(custom)
        name = found["name"].removeprefix(self._prefix)
        return BlobInfo(name, int(found.get("size", 0)), _epoch_ms(found["timeCreated"]), expires)

    def _page(self, prefix: str, token: str | None, most: int) -> BlobPage:
        query = {"prefix": prefix, "maxResults": most, "fields": f"items({_FIELDS}),nextPageToken"}
        if token:
            query["pageToken"] = token
        answer = self._http.ask("GET", f"{self._bucket_url}/o?{urlencode(query, quote_via=quote)}", what="list")
        with self._http.understood():
            page = json.loads(answer.body)
            return BlobPage([self._info(found) for found in page.get("items") or ()], page.get("nextPageToken") or None)

    # --- administration ---

    def fix(self) -> Sequence[str]:
        """Add the lifecycle rule that deletes objects from their custom time on. The bucket's other rules stay.

        Raises: InvalidError if the server keeps no rules.
        """
        bucket = self._bucket_resource("fix")
        rules = bucket.get("lifecycle", {}).get("rule", [])
        if not any(_covers(rule, self._prefix) for rule in rules):
            condition: dict[str, Any] = {"daysSinceCustomTime": 1}
            if self._prefix:
                condition["matchesPrefix"] = [self._prefix]
            rule = {"action": {"type": "Delete"}, "condition": condition}
            match = {"ifMetagenerationMatch": bucket["metageneration"]} if "metageneration" in bucket else {}
            self._http.ask(
                "PATCH", f"{self._bucket_url}?{urlencode(match)}", {"Content-Type": "application/json"},
                json.dumps({"lifecycle": {"rule": [*rules, rule]}}).encode(), what="fix",
            )  # fmt: skip
            if self._rule_problem():
                raise InvalidError(
                    "this GCS server keeps no lifecycle rules", bucket=self._bucket,
                    hint="run `statemgr gc --write` regularly",
                )  # fmt: skip
        return ("the lifecycle rule is installed",)

    def _rule_problem(self) -> str | None:
        try:
            rules = self._bucket_resource("rules").get("lifecycle", {}).get("rule", [])
        except AccessDenied as error:
            return f"the bucket's lifecycle rules cannot be read: {error.message}; grant storage.buckets.get"
        if any(_covers(rule, self._prefix) for rule in rules):
            return None
        return (
            f"no lifecycle rule of bucket {self._bucket} deletes objects from their custom time on: "
            "what failed commits leave behind would stay for ever; `statemgr doctor --fix` installs the rule"
        )

    def _bucket_resource(self, what: str) -> dict[str, Any]:
        answer = self._http.ask("GET", f"{self._bucket_url}?fields=lifecycle,metageneration", what=what)
        with self._http.understood():
            return dict(json.loads(answer.body))


class _Framed(io.RawIOBase):
    """A stream between two texts. It is only read forward, and begins again at 0."""

    def __init__(self, begin: bytes, stream: IO[bytes], end: bytes) -> None:
        self._begin, self._end = begin, end
        self._stream = stream
        self.seek(0)

    def readable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._stream.seek(0)
        self._left: list[IO[bytes]] = [io.BytesIO(self._begin), self._stream, io.BytesIO(self._end)]
        return 0

    def read(self, size: int | None = -1) -> bytes:
        while self._left:
            if data := self._left[0].read(size if size is not None else -1):
                return data
            self._left.pop(0)
        return b""


@contextmanager
def _credentials_translated() -> Iterator[None]:
    try:
        yield
    except google.auth.exceptions.GoogleAuthError as error:
        behind: BaseException | None = error  # a refresh without an answer is a RefreshError too
        while behind is not None:
            if isinstance(behind, google.auth.exceptions.TransportError):
                text = "the service of Google's credentials does not answer"
                raise UnavailableError(text, hint=_KEYS_HINT) from error
            behind = behind.__cause__
        if error.retryable:
            raise UnavailableError(f"Google gives no token now: {type(error).__name__}") from error
        raise AccessDenied(f"there are no Google credentials: {type(error).__name__}", hint=_KEYS_HINT) from error


class _GoogleCredentials:
    """The application default credentials: a service account file, workload identity, or the machine's account."""

    def __init__(self, load: Callable[[], Any], request: Any) -> None:
        self._load = load
        self._request = request
        self._renewals = Renewals()
        self._loaded: Any = None

    @_credentials_translated()
    def _sign(self, method: str, url: str, headers: dict[str, str]) -> str:
        if self._loaded is None:
            with loading("Google", _KEYS_HINT, google.auth.exceptions.GoogleAuthError):
                self._loaded = self._load()
        self._loaded.before_request(self._request, method, url, headers)
        return url

    @_credentials_translated()
    def _renew(self) -> bool:
        self._loaded.refresh(self._request)
        return True

    def sign(self, method: str, url: str, headers: dict[str, str]) -> str:
        return self._renewals(lambda: self._sign(method, url, headers))

    def renew(self) -> bool:
        return self._renewals(self._renew)


def meaning(answer: Answer, what: str, where: Mapping[str, str]) -> StatemgrError:
    """The error for an answer of Cloud Storage. The only place that reads its reasons."""
    code, message = _reason(answer)  # the code is empty if the answer is not one of Cloud Storage
    text = f"GCS answered {answer.status} {code}: {message}".rstrip(": ")
    status = answer.status
    if status in (405, 501) or (status == 404 and what == "batch"):
        return Lacking(text, **where)
    if code in _BUSY or status in (408, 429) or status >= 500:
        return UnavailableError(text, **where)
    if status == 413:
        return body_refused(text, **where)
    if status == 401:
        return AccessDenied(text, hint=_KEYS_HINT, **where)
    if status == 403:
        found = _RIGHT.search(message)
        right = found[0] if found else _RIGHTS[what]
        hint = f"grant this account the rights in docs/security.md, or {_KEYS_HINT}"
        return AccessDenied(text, hint=hint, missing_right=right, **where)
    if status in (409, 412) and what in ("put", "copy", "piece"):
        return BlobExists("a blob of this name exists already", **where)
    if status in (409, 412):
        return UnavailableError(text, **where)  # somebody else changed the bucket
    if status in (404, 410):
        if what == "piece":  # the upload is gone, and begins again
            return UnavailableError(text, **where)
        if not code and what not in ("get", "put"):  # the answer to a GET is no JSON, and may be none to an upload
            return not_of_store("GCS", status, "blob.store.gcs.endpoint", **where)
        is_of_bucket = code and what in ("put", "list", "rules", "fix")
        if is_of_bucket or message.lower().startswith("the specified bucket"):
            return AccessDenied(text, hint="create the bucket, or correct blob.store.uri", **where)
        return MissingBlob("the blob does not exist", **where)
    if status == 400 and re.search(r"crc32c|md5|checksum|hash", message, re.IGNORECASE):
        return Damaged(text, **where)
    return InvalidError(text, **where)


def _reason(answer: Answer) -> tuple[str, str]:
    try:
        error = json.loads(answer.body)["error"]
        reasons = error.get("errors") or [{}]
        return str(reasons[0].get("reason") or error.get("status") or "error"), str(error.get("message", ""))[:200]
    except (ValueError, KeyError, TypeError, AttributeError, IndexError):
        return "", answer.body[:200].decode(errors="replace").strip()


def _covers(rule: Any, prefix: str) -> bool:
    condition = dict(rule.get("condition", {}))
    prefixes = condition.pop("matchesPrefix", [""])
    deletes = rule.get("action", {}).get("type") == "Delete"
    return deletes and condition == {"daysSinceCustomTime": 1} and any(prefix.startswith(one) for one in prefixes)


def _epoch_ms(text: str) -> int:
    return int(datetime.fromisoformat(text).timestamp() * 1000)


def open_store(uri: str, config: JobConfig, clock: Clock) -> GcsBlobStore:
    """The store of ``gs://bucket/prefix``. A server that is asked without TLS gets no credentials."""
    parts = urlsplit(uri)
    prefix = unquote(parts.path).strip("/")
    endpoint = str(config.blob_gcs.get("endpoint") or os.environ.get("STORAGE_EMULATOR_HOST") or _ENDPOINT)
    endpoint = (endpoint if "://" in endpoint else f"http://{endpoint}").rstrip("/")
    http = Http("GCS", 2 * config.parallelism + 2, clock, meaning, {}, bucket=parts.netloc)
    if not endpoint.startswith("http:"):
        request = google.auth.transport.urllib3.Request(http.pool(endpoint))
        http.credentials = _GoogleCredentials(lambda: google.auth.default(scopes=[_SCOPE], request=request)[0], request)
    return GcsBlobStore(
        http, endpoint, parts.netloc, f"{prefix}/" if prefix else "",
        clock=clock, own=f"{config.job_key}/", ttl_days=config.ttl_days,
    )  # fmt: skip
