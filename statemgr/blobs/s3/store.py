"""Blobs as objects of an S3 bucket, through boto3. Touches the bucket only, below one prefix.

Every PUT carries its CRC-32 and a condition that nothing of that name exists. Whether the server checks the
CRC is asked once per process with a wrong one (some accept it): if not, the verifying decorator reads back.
A TTL is the tag ``statemgr-ttl=<days>`` set by a header of the PUT; a lifecycle rule of the bucket expires
tagged objects, and removing the tag keeps an object for ever. The SDK's own retries are off: the retrying
decorator owns the deadline.
"""

from __future__ import annotations

import base64
import threading
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING, Any, cast

import boto3
from botocore.config import Config
from botocore.exceptions import ClientError
from zlib_ng import zlib_ng

from statemgr.blobs.body import CHUNK, BytesReader, body_size, open_body
from statemgr.blobs.names import check_blob_id, delete_each
from statemgr.blobs.s3 import lifecycle as s3_lifecycle
from statemgr.blobs.s3 import log as s3_log
from statemgr.blobs.s3 import uploads as s3_uploads
from statemgr.blobs.s3.connections import Connections
from statemgr.blobs.s3.errors import DIGEST, code_and_status, of_key, translated
from statemgr.blobs.s3.reading import LargeReads, S3Reader
from statemgr.errors import AccessDenied, InvalidError, MissingBlob, StatemgrError, UnavailableError
from statemgr.ports import BlobInfo, BlobReader, Body, UnfinishedUpload

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client

_CONNECT_TIMEOUT_S = 5
_READ_TIMEOUT_S = 30
#: Settings that are credentials.
_SECRETS = ("access.key", "secret.key", "session.token")
#: What S3 takes in one request.
_MOST_DELETES = 1000
_DAY_MS = 24 * 3600 * 1000
_CHECKING: dict[tuple[str, str], bool] = {}
_CHECKING_LOCK = threading.Lock()


def make_client(settings: Mapping[str, str | bool], connections: int) -> S3Client:
    """A client by the settings after ``blob.store.s3.``; what is not set comes from boto3's own chain."""

    def text(name: str) -> str | None:
        return str(settings[name]) if settings.get(name) else None

    # before the SDK sees them, and again when it has loaded all its parts
    secrets = [str(settings[name]) for name in _SECRETS if settings.get(name)]
    s3_log.hide(secrets)
    style = "path" if settings.get("path.style") in (True, "true") else "auto"
    with translated(""):
        # an own session: the default one is shared by whoever else uses boto3 in this process
        client = boto3.session.Session().client(
            "s3",
            endpoint_url=text("endpoint"),
            region_name=text("region"),
            aws_access_key_id=text("access.key"),
            aws_secret_access_key=text("secret.key"),
            aws_session_token=text("session.token"),
            config=Config(
                max_pool_connections=connections,
                connect_timeout=_CONNECT_TIMEOUT_S,
                read_timeout=_READ_TIMEOUT_S,
                retries={"total_max_attempts": 1},
                request_checksum_calculation="when_required",
                response_checksum_validation="when_required",
                # each PUT carries a signed CRC-32; a SHA-256 of its body beside it would cost more than sending it
                s3={"addressing_style": cast(Any, style), "payload_signing_enabled": False},
            ),
        )
    s3_log.hide(secrets)
    return client


def encryption_fields(settings: Mapping[str, str | bool]) -> dict[str, str]:
    """The fields of a PUT that ask the server for encryption at rest, by the settings after ``blob.store.s3.``."""
    fields = {"ServerSideEncryption": "sse.algorithm", "SSEKMSKeyId": "sse.kms.key.id"}
    return {field: str(settings[name]) for field, name in fields.items() if settings.get(name)}


class S3BlobStore:
    """A blob store in ``bucket``, below ``prefix`` (no ``/`` at its ends; may be empty).

    Args:
        client: of boto3, as :func:`make_client` makes it.
        ttl_days: the TTL whose lifecycle rule :meth:`probe` looks for.
        encryption: fields of every PUT that ask for encryption at rest, as :func:`encryption_fields` makes them.
        own: what the names of the job's blobs begin with; nothing is written elsewhere.
    """

    #: Tags are in no listing.
    listing_tells_ttl = False

    def __init__(
        self,
        client: S3Client,
        bucket: str,
        prefix: str,
        *,
        ttl_days: int,
        encryption: Mapping[str, str] | None = None,
        own: str = "",
    ) -> None:
        self._client = client
        self._connections = Connections(client)
        self._large_reads = LargeReads()
        self._bucket = bucket
        self._prefix = f"{prefix}/" if prefix else ""
        self._own = own
        self._ttl_days = ttl_days
        self._encryption: dict[str, Any] = dict(encryption or {})
        self._conditional = True
        self.most_deletes = _MOST_DELETES

    # --- writing ---

    @property
    def checks_uploads(self) -> bool:
        """Whether a PUT with a wrong checksum is refused; found out once per process, endpoint and bucket."""
        place = (self._client.meta.endpoint_url, self._bucket)
        with _CHECKING_LOCK:
            if place not in _CHECKING:
                _CHECKING[place] = self._refuses_wrong_checksum()
            return _CHECKING[place]

    def put(self, blob_id: str, body: Body, *, ttl_days: int | None) -> None:
        """As the port says. Raises: BlobExists."""
        key = self._key(blob_id)
        extra: dict[str, Any] = dict(self._encryption)
        if ttl_days is not None:
            extra["Tagging"] = f"{s3_lifecycle.TTL_TAG}={ttl_days}"
        with open_body(body) as stream, translated(self._bucket, blob_id):
            extra["ChecksumCRC32"] = _crc32(stream)
            try:
                self._send(key, stream, body_size(body), extra)
            except ClientError as error:
                # only where the condition itself is what the server lacks
                if not self._conditional or code_and_status(error)[0] != "NotImplemented":
                    raise
                self._conditional = False
                self._send(key, stream, body_size(body), extra)

    def _send(self, key: str, stream: IO[bytes], size: int, extra: Mapping[str, Any]) -> None:
        stream.seek(0)
        condition: dict[str, Any] = {"IfNoneMatch": "*"} if self._conditional else {}
        self._client.put_object(Bucket=self._bucket, Key=key, Body=stream, ContentLength=size, **condition, **extra)

    def _refuses_wrong_checksum(self) -> bool:
        key = f"{self._prefix}{self._own}_statemgr-probe-{uuid.uuid4().hex}"
        with translated(self._bucket):
            try:
                self._client.put_object(
                    Bucket=self._bucket, Key=key, Body=b"probe", ChecksumCRC32="AAAAAA==", **self._encryption
                )
            except ClientError as error:
                code, status = code_and_status(error)
                if code in DIGEST or (status == 400 and code == "InvalidRequest"):
                    return True
                raise
        try:
            with translated(self._bucket):
                self._client.delete_object(Bucket=self._bucket, Key=key)
        except AccessDenied:
            pass  # may write but not delete: five bytes stay
        return False

    def delete(self, blob_id: str) -> None:
        """As the port says."""
        try:
            with translated(self._bucket, blob_id):
                self._client.delete_object(Bucket=self._bucket, Key=self._key(blob_id))
        except MissingBlob:
            pass  # S3 itself answers 204, others 404

    def delete_many(self, blob_ids: Sequence[str]) -> Mapping[str, StatemgrError]:
        """As the port says. A server that has no such request gets one for each blob from then on."""
        keys = {self._key(blob_id): blob_id for blob_id in blob_ids}
        with translated(self._bucket):
            try:
                answer = self._client.delete_objects(
                    Bucket=self._bucket, Delete={"Objects": [{"Key": key} for key in keys], "Quiet": True}
                )
            except ClientError as error:
                if code_and_status(error)[0] not in ("NotImplemented", "MethodNotAllowed"):
                    raise
                answer = None
        if answer is None:
            self.most_deletes = 1
            return delete_each(blob_ids, self.delete)
        failed = {
            keys[e["Key"]]: of_key(e.get("Code", ""), e.get("Message", ""), self._bucket, keys[e["Key"]])
            for e in answer.get("Errors", ())
        }
        return {blob_id: error for blob_id, error in failed.items() if not isinstance(error, MissingBlob)}

    def remove_ttl(self, blob_id: str) -> None:
        """As the port says: deletes the object's tags."""
        try:
            with translated(self._bucket, blob_id):
                self._client.delete_object_tagging(Bucket=self._bucket, Key=self._key(blob_id))
        except UnavailableError:
            # some servers answer 500 for an object that is gone: then this says so
            self._head(blob_id)
            raise

    # --- reading ---

    @contextmanager
    def get(self, blob_id: str, offset: int = 0, length: int | None = None) -> Iterator[BlobReader]:
        """As the port says. A body that ends early raises UnavailableError from ``readinto``."""
        key = self._key(blob_id)
        if length == 0:
            self._head(blob_id)
            yield BytesReader(b"")
            return
        extra: dict[str, Any] = {}
        if offset or length is not None:
            extra["Range"] = f"bytes={offset}-{'' if length is None else offset + length - 1}"
        with translated(self._bucket, blob_id):
            try:
                answer = self._client.get_object(Bucket=self._bucket, Key=key, **extra)
            except ClientError as error:
                if code_and_status(error)[1] != 416:
                    raise
                answer = None
        if answer is None:
            yield BytesReader(b"")  # from its end on there is nothing
            return
        body: Any = answer["Body"]
        try:
            if offset and answer["ResponseMetadata"]["HTTPStatusCode"] != 206:
                raise InvalidError("this S3 server ignores ranges", bucket=self._bucket, blob=blob_id)
            # a proxy that sends the body in chunks leaves its length out: then its end is where the last chunk says
            yield S3Reader(body, answer.get("ContentLength"), self._bucket, blob_id, self._large_reads)
        finally:
            body.close()

    def stat(self, blob_id: str) -> BlobInfo:
        """As the port says; the end of a TTL is its tag's days after the writing."""
        info = self._head(blob_id)
        with translated(self._bucket, blob_id):
            tags = self._client.get_object_tagging(Bucket=self._bucket, Key=self._key(blob_id))["TagSet"]
        days = next((tag["Value"] for tag in tags if tag["Key"] == s3_lifecycle.TTL_TAG), None)
        if days is None:
            return info
        expires = info.modified_ms + int(days) * _DAY_MS if days.isdigit() else -1
        return BlobInfo(blob_id, info.size, info.modified_ms, expires)

    def list(self, prefix: str, after: str | None = None) -> Iterator[BlobInfo]:
        """As the port says, in the order of names. A listing does not tell TTLs: ``expires_ms`` is None."""
        start: dict[str, Any] = {"StartAfter": self._prefix + after} if after else {}
        pages = self._client.get_paginator("list_objects_v2").paginate(
            Bucket=self._bucket, Prefix=self._prefix + prefix, **start
        )
        iterator = iter(pages)
        while True:
            with translated(self._bucket):
                page = next(iterator, None)
            if page is None:
                return
            for found in page.get("Contents", ()):
                blob_id = found["Key"].removeprefix(self._prefix)
                yield BlobInfo(blob_id, found["Size"], int(found["LastModified"].timestamp() * 1000))

    def _head(self, blob_id: str) -> BlobInfo:
        try:
            with translated(self._bucket, blob_id):
                found = self._client.head_object(Bucket=self._bucket, Key=self._key(blob_id))
        except MissingBlob:
            # the answer to a HEAD has no body to tell a missing bucket from a missing object
            try:
                with translated(self._bucket):
                    self._client.head_bucket(Bucket=self._bucket)
            except MissingBlob:
                raise AccessDenied(
                    "the bucket does not exist", bucket=self._bucket, hint="create it, or mend blob.store.uri"
                ) from None
            raise
        try:
            return BlobInfo(blob_id, found["ContentLength"], int(found["LastModified"].timestamp() * 1000))
        except KeyError as error:
            raise InvalidError(
                f"the S3 server does not say a blob's {error}", bucket=self._bucket, blob=blob_id,
                hint="a proxy in front of it may remove the header",
            ) from error  # fmt: skip

    # --- the bucket ---

    def time_ms(self) -> int:
        """As the port says, to the second."""
        return s3_uploads.time_ms(self._client, self._bucket)

    def unfinished(self, prefix: str) -> Iterator[UnfinishedUpload]:
        """As the port says: multipart uploads."""
        return s3_uploads.unfinished(self._client, self._bucket, self._prefix, prefix)

    def abandon(self, upload: UnfinishedUpload) -> None:
        """As the port says."""
        s3_uploads.abandon(self._client, self._bucket, self._prefix + upload.blob_id, upload)

    def probe(self) -> Sequence[str]:
        """As the port says. A text that starts with ``note:`` is something to know, not to mend."""
        problems = [s3_lifecycle.problem(self._client, self._bucket, self._prefix, self._ttl_days)]
        if not self.checks_uploads:
            problems.append("note: this server does not check checksums: every upload is read back")
        return [problem for problem in problems if problem]

    def ensure_lifecycle_rule(self) -> None:
        """Install the rule that expires what carries the TTL tag, beside those that are there. Idempotent.

        Raises: InvalidError where the server has no lifecycle rules.
        """
        s3_lifecycle.ensure(self._client, self._bucket, self._prefix, self._ttl_days)

    def close(self) -> None:
        """Close the connections; a request in progress raises UnavailableError."""
        self._connections.break_off()
        self._large_reads.close()
        self._client.close()

    def _key(self, blob_id: str) -> str:
        check_blob_id(blob_id)
        return self._prefix + blob_id


def _crc32(stream: IO[bytes]) -> str:
    value = 0
    while data := stream.read(CHUNK):
        value = zlib_ng.crc32(data, value)
    return base64.b64encode(value.to_bytes(4, "big")).decode()
