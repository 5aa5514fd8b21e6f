"""Blobs as objects of an S3 bucket, through boto3. Touches the bucket only, below one prefix.

Every PUT has its CRC-32 and the condition that the name does not exist. Some servers accept a wrong CRC. A process
finds this out once by sending one, and the verifying decorator then reads every upload back. TTLs are in
:mod:`statemgr.blobs.s3.expiry`.
"""

from __future__ import annotations

import base64
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import IO, Any
from urllib.parse import unquote, urlsplit

from botocore.exceptions import ClientError
from zlib_ng import zlib_ng

from statemgr.blobs.body import CHUNK, BytesReader, body_size, open_body
from statemgr.blobs.names import delete_each, unique_name
from statemgr.blobs.s3.administration import S3Administration
from statemgr.blobs.s3.client import Connections, Place, make_client
from statemgr.blobs.s3.copying import copy_object
from statemgr.blobs.s3.errors import DIGEST, code_and_status, of_key, translated
from statemgr.blobs.s3.expiry import Expiry, Records, Tags
from statemgr.blobs.s3.reading import LargeReads, S3Reader
from statemgr.config import JobConfig
from statemgr.config.units import DAY_MS
from statemgr.errors import AccessDenied, InvalidError, MissingBlob, StatemgrError
from statemgr.ports import BlobInfo, BlobReader, BlobStore, Body, Clock

#: Keys that S3 takes in one request.
_MOST_DELETES = 1000
#: The server has no such request, or refuses it for this object; the caller's own credentials may still read it.
_CANNOT_COPY = {"NotImplemented", "MethodNotAllowed", "InvalidRequest", "AccessDenied"}
#: Settings after ``blob.store.s3.`` → the fields of a PUT that ask the server for encryption at rest.
_ENCRYPTION = {"sse.algorithm": "ServerSideEncryption", "sse.kms.key.id": "SSEKMSKeyId"}
_CHECKING: dict[tuple[str, str], bool] = {}
_CHECKING_LOCK = threading.Lock()


class S3BlobStore:
    """A blob store in a place of a bucket.

    Args:
        ttl_days: the TTL whose lifecycle rule the administration looks for.
        encryption: fields of every PUT that ask for encryption at rest.
        own: the prefix of the names of the job's blobs. Nothing is written elsewhere.
    """

    def __init__(self, place: Place, clock: Clock, *, ttl_days: int, encryption: Mapping[str, Any], own: str) -> None:
        self._place = place
        self._client = place.client
        self._bucket = place.bucket
        self._connections = Connections(place.client)
        self._large_reads = LargeReads(clock)
        self._own = own
        self._encryption = encryption
        self._expiry: Expiry = Records(place, encryption) if place.is_directory else Tags(place)
        self._conditional = True
        self._deletes_many = True
        self.administration = S3Administration(place, ttl_days, lambda: self.checks_uploads)

    # --- writing ---

    @property
    def checks_uploads(self) -> bool:
        """Tried once per process, endpoint and bucket."""
        place = (self._client.meta.endpoint_url, self._bucket)
        with _CHECKING_LOCK:
            if place not in _CHECKING:
                _CHECKING[place] = self._refuses_wrong_checksum()
            return _CHECKING[place]

    def put(self, blob_id: str, body: Body, *, ttl_days: int | None) -> None:
        key = self._place.key(blob_id)
        extra = {**self._encryption, **(self._expiry.fields(ttl_days) if ttl_days is not None else {})}
        with open_body(body) as stream, translated(self._bucket, blob_id):
            extra["ChecksumCRC32"] = _crc32(stream)
            try:
                self._send(key, stream, body_size(body), extra)
            except ClientError as error:
                # only if the server does not support the condition
                if not self._conditional or code_and_status(error)[0] != "NotImplemented":
                    raise
                self._conditional = False
                self._send(key, stream, body_size(body), extra)

    def copy_from(self, source: BlobStore, wanted: BlobInfo, blob_id: str, *, ttl_days: int) -> bool:
        """Within a bucket, by the server. False where it does not check what it stores, or may not copy the object."""
        if not isinstance(source, S3BlobStore) or source._bucket != self._bucket or not self.checks_uploads:
            return False
        if source._client.meta.endpoint_url != self._client.meta.endpoint_url:
            return False
        fields = {**self._expiry.fields(ttl_days), **self._encryption}
        with translated(self._bucket, wanted.blob_id):
            try:
                copy_object(source._place, wanted.blob_id, wanted.size, self._place, blob_id, fields)
            except ClientError as error:
                if code_and_status(error)[0] not in _CANNOT_COPY:
                    raise
                return False
        return True

    def _send(self, key: str, stream: IO[bytes], size: int, extra: Mapping[str, Any]) -> None:
        stream.seek(0)
        condition: dict[str, Any] = {"IfNoneMatch": "*"} if self._conditional else {}
        self._client.put_object(Bucket=self._bucket, Key=key, Body=stream, ContentLength=size, **condition, **extra)

    def _refuses_wrong_checksum(self) -> bool:
        key = f"{self._place.prefix}{self._own}_statemgr-probe-{unique_name()}"
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
            pass  # the job may write but not delete: five bytes stay
        return False

    def delete(self, blob_id: str) -> None:
        failed = self.delete_many([blob_id])
        if failed:
            raise failed[blob_id]

    def delete_many(self, blob_ids: Sequence[str]) -> Mapping[str, StatemgrError]:
        """Deletes 1000 keys with a request, or one if the server has only that."""
        keys = {key: blob_id for blob_id in blob_ids for key in self._expiry.keys(blob_id)}
        wanted, failed = list(keys), dict[str, StatemgrError]()
        for start in range(0, len(wanted), _MOST_DELETES):
            chunk = wanted[start : start + _MOST_DELETES]
            if len(chunk) == 1 or not self._delete_together(chunk, keys, failed):
                failed |= {keys[key]: error for key, error in delete_each(chunk, self._delete_key).items()}
        return failed

    def _delete_together(self, chunk: Sequence[str], keys: Mapping[str, str], failed: dict[str, StatemgrError]) -> bool:
        """Adds to ``failed``. Returns: whether the server has such a request."""
        if not self._deletes_many:
            return False
        with translated(self._bucket):
            try:
                answer = self._client.delete_objects(
                    Bucket=self._bucket, Delete={"Objects": [{"Key": key} for key in chunk], "Quiet": True}
                )
            except ClientError as error:
                if code_and_status(error)[0] not in ("NotImplemented", "MethodNotAllowed"):
                    raise
                self._deletes_many = False
                return False
        for problem in answer.get("Errors", ()):
            blob_id = keys[problem["Key"]]
            meaning = of_key(problem.get("Code", ""), problem.get("Message", ""), self._bucket, blob_id)
            if not isinstance(meaning, MissingBlob):
                failed[blob_id] = meaning
        return True

    def _delete_key(self, key: str) -> None:
        try:
            with translated(self._bucket, key.removeprefix(self._place.prefix)):
                self._client.delete_object(Bucket=self._bucket, Key=key)
        except MissingBlob:
            pass  # S3 itself answers 204, others 404

    def remove_ttl(self, blob_id: str) -> None:
        self._expiry.remove(blob_id)

    # --- reading ---

    @contextmanager
    def get(self, blob_id: str, offset: int = 0, length: int | None = None) -> Iterator[BlobReader]:
        """``readinto`` raises UnavailableError if the body ends early."""
        key = self._place.key(blob_id)
        if length == 0:
            self._place.head(blob_id)
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
            yield BytesReader(b"")  # the range begins at the end of the blob
            return
        body: Any = answer["Body"]
        try:
            if offset and answer["ResponseMetadata"]["HTTPStatusCode"] != 206:
                raise InvalidError("this S3 server ignores ranges", bucket=self._bucket, blob=blob_id)
            # a proxy that sends the body in chunks leaves out its length, and the last chunk is the end
            yield S3Reader(body, answer.get("ContentLength"), self._bucket, blob_id, self._large_reads)
        finally:
            body.close()

    def stat(self, blob_id: str) -> BlobInfo:
        """A TTL begins when the blob is written."""
        head = self._place.head(blob_id)
        days = self._expiry.days(blob_id, head)
        try:
            size, modified_ms = head["ContentLength"], int(head["LastModified"].timestamp() * 1000)
        except KeyError as error:
            raise InvalidError(
                f"the S3 server does not tell a blob's {error}", bucket=self._bucket, blob=blob_id,
                hint="check whether a proxy in front of it removes the header",
            ) from error  # fmt: skip
        if days is None:
            return BlobInfo(blob_id, size, modified_ms)
        return BlobInfo(blob_id, size, modified_ms, modified_ms + int(days) * DAY_MS if days.isdigit() else -1)

    def close(self) -> None:
        self._connections.break_off()
        self._large_reads.close()
        self._client.close()


def _crc32(stream: IO[bytes]) -> str:
    value = 0
    while data := stream.read(CHUNK):
        value = zlib_ng.crc32(data, value)
    return base64.b64encode(value.to_bytes(4, "big")).decode()


def open_store(uri: str, config: JobConfig, clock: Clock) -> S3BlobStore:
    """The store of ``s3://bucket/prefix``. Raises: AccessDenied."""
    parts, settings = urlsplit(uri), config.blob_s3
    prefix = unquote(parts.path).strip("/")
    # connections for every part in flight, hedged ones counted twice, and for the indexes
    client = make_client(settings, connections=2 * config.parallelism + 2)
    return S3BlobStore(
        Place(client, parts.netloc, f"{prefix}/" if prefix else ""),
        clock,
        ttl_days=config.ttl_days,
        encryption={field: str(settings[name]) for name, field in _ENCRYPTION.items() if settings.get(name)},
        own=f"{config.job_key}/",
    )
