"""Blobs of a container of Azure Blob Storage, through its REST interface. Touches one prefix of the container.

- "The name does not exist" is ``If-None-Match: *``, and the checksum is an MD5, which the service compares.
- A TTL is the tag ``statemgr-ttl=<days>`` of the blob's index tags, for which a lifecycle rule of the account can look.
  Accounts with a hierarchical namespace (``abfss``) have no tags, and a role may lack the right to set them. There the
  TTL is the blob's metadata ``statemgr_ttl``, and only ``statemgr gc`` deletes what failed commits left behind.

Sources: Azure Storage's documentation of its REST API, "Put Blob", "Put Block List", "Set Blob Tags", "Blob Batch",
"Copy Blob" and "Status and error codes".
"""

from __future__ import annotations

import base64
import hashlib
import io
import os
import re
import xml.etree.ElementTree as ET
from collections.abc import Mapping, Sequence
from datetime import datetime
from email.utils import parsedate_to_datetime
from typing import IO, Any, ClassVar
from urllib.parse import quote, unquote, urlencode, urlsplit

from statemgr.blobs.clouds.azure_credentials import KEYS_HINT, SharedKey, Signature, Token, connection, secrets_of
from statemgr.blobs.clouds.http import Answer, Damaged, Http, Lacking, batch, batch_answers
from statemgr.blobs.clouds.store import Checksum, CloudBlobStore, pieces
from statemgr.blobs.connections import body_refused, hide, not_of_store
from statemgr.blobs.names import BlobExists, unique_name
from statemgr.config import JobConfig
from statemgr.config.units import DAY_MS
from statemgr.errors import (
    AccessDenied,
    ConfigError,
    DiskFull,
    InvalidError,
    MissingBlob,
    StatemgrError,
    UnavailableError,
)
from statemgr.ports import BlobInfo, BlobPage, BlobStore, Clock

TTL_TAG, _TTL_FIELD = "statemgr-ttl", "x-ms-meta-statemgr_ttl"
_NO_TAGS = b'<?xml version="1.0" encoding="utf-8"?><Tags><TagSet></TagSet></Tags>'
#: The account has no tags, or this identity no right to set them.
_TAGS_REFUSED = {
    "AuthorizationFailure", "AuthorizationPermissionMismatch", "AuthorizationResourceTypeMismatch",
    "BlobTagsNotSupportedForAccountType", "FeatureNotYetSupportedForHierarchicalNamespaceAccounts",
    "FeatureNotSupportedForAccount", "UnsupportedHeader",
}  # fmt: skip
_BUSY = {
    "ContainerBeingDeleted", "InternalError", "InvalidBlockList", "OperationTimedOut", "ServerBusy",
    "SystemInUse", "TooManyRequests",
}  # fmt: skip
_DAMAGED = {"Md5Mismatch", "Crc64Mismatch", "InvalidMd5"}
_RIGHTS = {"put": "write", "get": "read", "stat": "read", "list": "read", "delete": "delete", "batch": "delete",
           "update": "write", "tags": "tags/write", "read-tags": "tags/read"}  # fmt: skip
_ACTION = "Microsoft.Storage/storageAccounts/blobServices/containers/blobs/"
_VERSION = "2021-12-02"
#: Seconds between two looks at a copy in progress, and that it may take.
_LOOK_S, _COPY_S = 0.5, 600.0

#: Endpoint and container → whether TTLs are tags there. Tried once per process.
_HAS_TAGS: dict[str, bool] = {}


class AzureBlobStore(CloudBlobStore):
    """A blob store in a container, and its administration."""

    most_deletes: ClassVar[int] = 256
    #: A listing has the tags only for those with the right to read them.
    listing_tells_ttl: ClassVar[bool] = False

    def __init__(
        self, http: Http, endpoint: str, container: str, prefix: str, *, clock: Clock, own: str, ttl_days: int
    ) -> None:
        super().__init__(http, prefix, own, ttl_days)
        self._clock = clock
        self._endpoint = endpoint
        self._container_url = f"{endpoint}/{quote(container)}"

    def _url(self, key: str) -> str:
        return f"{self._container_url}/{quote(key, safe='/~')}"

    def _body_url(self, key: str) -> str:
        return self._url(key)

    # --- writing ---

    def _checksum(self) -> Checksum:
        return hashlib.md5(usedforsecurity=False)

    def _send(self, key: str, stream: IO[bytes], size: int, digest: str, ttl_days: int | None, blob_id: str) -> None:
        headers = {"x-ms-blob-type": "BlockBlob", "Content-Type": "application/octet-stream", "Content-MD5": digest}
        self._put_new(self._url(key), headers, stream, size, ttl_days, blob_id)

    def _send_pieces(self, key: str, stream: IO[bytes], size: int, digest: str, ttl_days: int | None) -> None:
        blob = key.removeprefix(self._prefix)
        upload, names = unique_name(), list[str]()
        for number, data in enumerate(pieces(stream, size)):
            # of its own names, so that two writers of a blob do not mix their pieces
            name = base64.b64encode(f"{upload}-{number:06}".encode()).decode()
            checked = self._digest(io.BytesIO(data))
            url = f"{self._url(key)}?{urlencode({'comp': 'block', 'blockid': name})}"
            self._http.ask("PUT", url, {"Content-MD5": checked}, data, what="put", accept=(201,), blob=blob)
            names.append(name)
        listed = "".join(f"<Uncommitted>{name}</Uncommitted>" for name in names)
        body = f'<?xml version="1.0" encoding="utf-8"?><BlockList>{listed}</BlockList>'.encode()
        headers = {"Content-Type": "application/xml", "x-ms-blob-content-md5": digest}
        self._put_new(f"{self._url(key)}?comp=blocklist", headers, body, len(body), ttl_days, blob)

    def _put_new(
        self, url: str, headers: Mapping[str, str], body: Any, size: int, ttl_days: int | None, blob_id: str
    ) -> None:
        known = {**headers, "If-None-Match": "*"}
        if ttl_days is None:
            self._http.ask("PUT", url, known, body, size=size, what="put", accept=(201,), blob=blob_id)
            return

        def send(tags: bool) -> None:
            fields = {**known, **_ttl_fields(ttl_days, tags=tags)}
            self._http.ask("PUT", url, fields, body, size=size, what="put", accept=(201,), blob=blob_id)

        if not self._has_tags:
            send(tags=False)
            return
        try:
            send(tags=True)
        except (AccessDenied, InvalidError) as refusal:
            if refusal.where.get("code") not in _TAGS_REFUSED or not self._learn_tags():
                raise
            send(tags=False)

    @property
    def _has_tags(self) -> bool:
        return _HAS_TAGS.get(self._container_url, True)

    def _learn_tags(self) -> bool:
        """Try a blob without and with a tag, after one with a tag was refused. Returns: whether only tags are refused.

        Raises: StatemgrError.
        """
        fields = {"x-ms-blob-type": "BlockBlob"}
        for tags in (False, True):
            key = self.probe_key()
            try:
                self._http.ask(
                    "PUT", self._url(key), {**fields, **_ttl_fields(1, tags=tags)}, b"probe", what="put", accept=(201,)
                )
            except (AccessDenied, InvalidError) as refusal:
                if not tags or refusal.where.get("code") not in _TAGS_REFUSED:
                    raise
                _HAS_TAGS[self._container_url] = False
                return True
            self.forget_probe(key)
        return False

    def remove_ttl(self, blob_id: str) -> None:
        """Removes what the blob has: another process may have found tags where this one finds none."""
        head, url = self._head(blob_id), self._url(self._key(blob_id))
        if head.get("x-ms-tag-count", "0") != "0":
            self._http.ask(
                "PUT", f"{url}?comp=tags", {"Content-Type": "application/xml; charset=utf-8"}, _NO_TAGS, what="tags",
                accept=(204,), blob=blob_id,
            )  # fmt: skip
        if _TTL_FIELD in head:
            self._http.ask("PUT", f"{url}?comp=metadata", what="update", blob=blob_id)

    def copy_from(self, source: BlobStore, wanted: BlobInfo, blob_id: str, *, ttl_days: int) -> bool:
        """Within an account, by the service. False where this identity may not read the source like this."""
        if not isinstance(source, AzureBlobStore) or source._endpoint != self._endpoint or not self.checks_uploads:
            return False
        url = self._url(self._key(blob_id))
        origin = self._http.credentials.sign("GET", source._url(source._key(wanted.blob_id)), {})
        headers = {"x-ms-copy-source": origin, "If-None-Match": "*", **_ttl_fields(ttl_days, tags=self._has_tags)}
        try:
            answer = self._http.ask("PUT", url, headers, what="get", accept=(202,), blob=wanted.blob_id)
        except BlobExists:
            raise
        except (AccessDenied, InvalidError):
            return False  # a PUT of the blob then finds out whether tags are refused
        status: str | None = answer.headers.get("x-ms-copy-status")
        until = self._clock.monotonic() + _COPY_S
        while status == "pending":
            if self._clock.monotonic() >= until:
                raise UnavailableError(
                    f"the Azure server did not end a copy in {_COPY_S:.0f} s", blob=blob_id,
                    hint="call again: what is left of the copy has a TTL",
                )  # fmt: skip
            self._clock.sleep(_LOOK_S)
            status = self._head(blob_id).get("x-ms-copy-status")
        if status != "success":
            self.delete(blob_id)
            return False
        return True

    def _delete_together(self, keys: Sequence[str]) -> Sequence[Answer]:
        requests = []
        for key in keys:
            headers = {"Content-Length": "0"}
            parts = urlsplit(self._http.credentials.sign("DELETE", self._url(key), headers))
            requests.append(("DELETE", f"{parts.path}?{parts.query}".rstrip("?"), headers))
        kind, body = batch(requests)
        url = f"{self._container_url}?restype=container&comp=batch"
        answer = self._http.ask("POST", url, {"Content-Type": kind}, body, what="batch", accept=(200, 202))
        with self._http.understood():
            return batch_answers(answer, len(keys))

    # --- reading ---

    def stat(self, blob_id: str) -> BlobInfo:
        """A TTL begins when the blob is written."""
        head = self._head(blob_id)
        with self._http.understood(blob=blob_id):
            written_ms = _epoch_ms(head.get("x-ms-creation-time") or head["Last-Modified"])
            size = int(head["Content-Length"])
        days = head.get(_TTL_FIELD)
        if days is None and head.get("x-ms-tag-count", "0") != "0":
            days = self._tag(blob_id)
        expires = None
        if days is not None:
            expires = written_ms + int(days) * DAY_MS if days.isascii() and days.isdigit() else -1
        return BlobInfo(blob_id, size, written_ms, expires)

    def _head(self, blob_id: str) -> Mapping[str, str]:
        try:
            return self._http.ask("HEAD", self._url(self._key(blob_id)), what="stat", blob=blob_id).headers
        except MissingBlob:
            self._page(self._prefix + self._own, None, 1)  # raises AccessDenied if there is no container
            raise

    def _tag(self, blob_id: str) -> str | None:
        url = f"{self._url(self._key(blob_id))}?comp=tags"
        answer = self._http.ask("GET", url, what="read-tags", blob=blob_id)
        with self._http.understood(blob=blob_id):
            tags = {tag.findtext("Key"): tag.findtext("Value") for tag in ET.fromstring(answer.body).iter("Tag")}
        return tags.get(TTL_TAG)

    def _page(self, prefix: str, token: str | None, most: int) -> BlobPage:
        query = {"restype": "container", "comp": "list", "prefix": prefix, "maxresults": most, "include": "metadata"}
        if token:
            query["marker"] = token
        answer = self._http.ask("GET", f"{self._container_url}?{urlencode(query, quote_via=quote)}", what="list")
        with self._http.understood():
            page = ET.fromstring(answer.body)
            blobs = [info for found in page.iter("Blob") if (info := self._listed(found)) is not None]
        return BlobPage(blobs, page.findtext("NextMarker") or None)

    def _listed(self, found: ET.Element) -> BlobInfo | None:
        """None for a directory of a hierarchical namespace, which is listed like a blob."""
        if (
            found.findtext("Metadata/hdi_isfolder") == "true"
            or found.findtext("Properties/ResourceType") == "directory"
        ):
            return None
        name = found.find("Name")
        key = (name.text or "") if name is not None else ""
        if name is not None and name.get("Encoded") == "true":
            key = unquote(key)
        written = found.findtext("Properties/Creation-Time") or found.findtext("Properties/Last-Modified") or ""
        size = int(found.findtext("Properties/Content-Length") or 0)
        return BlobInfo(key.removeprefix(self._prefix), size, _epoch_ms(written))

    # --- administration ---

    def fix(self) -> Sequence[str]:
        """Nothing: the rules belong to the account, and not to what a job may change."""
        return ()

    def _rule_problem(self) -> str | None:
        if not self._has_tags:
            return (
                "note: this account or role has no blob index tags: what failed commits leave behind stays until "
                "`statemgr gc --write`"
            )
        return (
            f"note: the lifecycle rule that deletes blobs with the tag {TTL_TAG}={self._ttl_days} belongs to the "
            "storage account, where statemgr cannot look: docs/storage.md has it. Without it, what failed commits "
            "leave behind stays until `statemgr gc --write`"
        )


def meaning(answer: Answer, what: str, where: Mapping[str, str]) -> StatemgrError:
    """The error for an answer of Azure Storage. The only place that reads its codes."""
    status, code = answer.status, answer.headers.get("x-ms-error-code", "")
    message = ""
    if answer.body:
        try:
            error = ET.fromstring(answer.body)
            code, message = code or error.findtext("Code") or "", (error.findtext("Message") or "").split("\n")[0][:200]
        except ET.ParseError:
            message = answer.body[:200].decode(errors="replace").strip()
    text = f"Azure answered {status} {code}: {message}".rstrip(": ")
    told: dict[str, Any] = {**where, **({"code": code} if code else {})}
    if code in _DAMAGED or (code == "InvalidOperation" and "MD5" in message):
        return Damaged(text, **told)
    if code in ("BlobAlreadyExists", "ConditionNotMet") or (status == 412 and what in ("put", "get")):
        return BlobExists("a blob of this name exists already", **where)
    if code in ("ContainerNotFound", "ContainerDisabled", "ResourceNotFound") and status == 404:
        return AccessDenied(text, hint="create the container, or correct blob.store.uri", **told)
    if code in ("AccountIsDisabled",) or status in (401, 403):
        right = f"{_ACTION}{_RIGHTS[what]}" if code.startswith("AuthorizationPermission") else None
        hint = f"grant this identity the role in docs/security.md, or {KEYS_HINT}"
        return AccessDenied(text, hint=hint, missing_right=right, **told)
    if status == 413:
        return body_refused(text, **told)
    if (
        status in (405, 501)
        or (status == 404 and what == "batch")
        or re.search(r"Unsupported|Not(Yet)?Supported", code)
    ):
        return Lacking(text, **told)
    if code in _BUSY or status in (408, 429) or status >= 500:
        return UnavailableError(text, **told)
    if status == 404:
        if not code:
            return not_of_store("Azure", status, "the endpoint of the storage account", **where)
        return MissingBlob("the blob does not exist", **where)
    if code == "AccountLimitExceeded":
        return DiskFull(text, hint="raise the limit of the storage account: it is full", **told)
    return InvalidError(text, **told)


def _ttl_fields(ttl_days: int, *, tags: bool) -> Mapping[str, str]:
    return {"x-ms-tags": f"{TTL_TAG}={ttl_days}"} if tags else {_TTL_FIELD: str(ttl_days)}


def _epoch_ms(text: str) -> int:
    time = datetime.fromisoformat(text) if "T" in text[:12] and "-" in text[:5] else parsedate_to_datetime(text)
    return int(time.timestamp() * 1000)


def _place(uri: str, account: str) -> tuple[str, str, str]:
    """The account, the container and the prefix of a URI. Raises: ConfigError."""
    parts = urlsplit(uri)
    prefix = unquote(parts.path).strip("/")
    if parts.scheme == "abfss":
        container, _, host = parts.netloc.partition("@")
        return host.partition(".")[0], container, prefix
    return account, parts.netloc, prefix


def _accounts(fields: Mapping[str, str]) -> list[str]:
    """The accounts that a connection string names, in lower case: by its name, and by the host of an endpoint of
    Azure's own, which may be that of the account's second region."""
    own = re.match(
        r"https?://(\w+)(-secondary)?\.([\w-]+\.)?blob\.(core|storage\.azure)\.", fields.get("blobendpoint", ""), re.I
    )
    return [name.lower() for name in (fields.get("accountname"), own and own[1]) if name]


def open_store(uri: str, config: JobConfig, clock: Clock) -> AzureBlobStore:
    """The store of ``az://container/prefix`` or ``abfss://container@account.dfs.core.windows.net/prefix``."""
    settings = config.blob_azure
    given = settings.get("connection.string") or os.environ.get("AZURE_STORAGE_CONNECTION_STRING") or ""
    fields = connection(str(given))
    hide([str(given), *secrets_of(fields)])
    named = _accounts(fields)
    account, container, prefix = _place(
        uri, str(settings.get("account") or next(iter(named), "") or os.environ.get("AZURE_STORAGE_ACCOUNT") or "")
    )
    if any(name != account.lower() for name in named):
        raise ConfigError(
            f"the blobs are in the account {account}, and the connection string is of another one",
            hint="correct blob.store.azure.account, blob.store.uri, or the connection string (or the variable "
            "AZURE_STORAGE_CONNECTION_STRING)", key="blob.store.azure.connection.string",
        )  # fmt: skip
    suffix = fields.get("endpointsuffix", "core.windows.net")
    if urlsplit(uri).scheme == "abfss":
        suffix = urlsplit(uri).netloc.partition(".dfs.")[2] or suffix
    endpoint = fields.get("blobendpoint") or (f"https://{account}.blob.{suffix}" if account else "")
    if not endpoint:
        raise ConfigError(
            "the account of the Azure container is not known", key="blob.store.azure.account",
            hint="set it, or blob.store.azure.connection.string",
        )  # fmt: skip
    if not endpoint.lower().startswith(("http://", "https://")):
        raise ConfigError(
            "the connection string of the Azure account has a BlobEndpoint without http:// or https://",
            key="blob.store.azure.connection.string",
        )
    http = Http("Azure", 2 * config.parallelism + 2, clock, meaning, {"x-ms-version": _VERSION}, container=container)
    if "accountkey" in fields:
        http.credentials = SharedKey(fields.get("accountname", account), fields["accountkey"], clock)
    elif "sharedaccesssignature" in fields:
        http.credentials = Signature(fields["sharedaccesssignature"], clock)
    else:
        if endpoint.startswith("http:"):
            raise ConfigError(
                "a token is never sent to a server without TLS", key="blob.store.azure.connection.string",
                hint="use an https endpoint, or an account key",
            )  # fmt: skip
        http.credentials = Token(_default_credential, clock)
    return AzureBlobStore(
        http, endpoint.rstrip("/"), container, f"{prefix}/" if prefix else "",
        clock=clock, own=f"{config.job_key}/", ttl_days=config.ttl_days,
    )  # fmt: skip


def _default_credential() -> Any:
    from azure.identity import DefaultAzureCredential  # slow to load, and only tokens need it

    # its own time-outs are minutes, and it would repeat what the retrying decorator repeats
    return DefaultAzureCredential(connection_timeout=5, read_timeout=30, retry_connect=0, retry_read=0)
