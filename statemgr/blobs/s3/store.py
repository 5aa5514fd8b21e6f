"""Blobs as objects of an S3 bucket, through boto3. Touches the bucket only, below one prefix.

Every PUT has its CRC-32 and the condition that the name does not exist. Servers that lack a part of this get requests
without it (:mod:`statemgr.blobs.s3.abilities`), and if they accept a wrong CRC, the verifying decorator reads every
upload back. TTLs are in :mod:`statemgr.blobs.s3.expiry`.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import IO, Any, TypeVar
from urllib.parse import unquote, urlsplit

from botocore.exceptions import ClientError, ParamValidationError
from zlib_ng import zlib_ng

from statemgr.blobs.body import CHUNK, BytesReader, body_size, open_body
from statemgr.blobs.names import delete_each
from statemgr.blobs.reading import BodyReader, LargeReads
from statemgr.blobs.s3.abilities import Abilities, is_unsupported
from statemgr.blobs.s3.administration import S3Administration
from statemgr.blobs.s3.client import Place, connections_of, make_client
from statemgr.blobs.s3.copying import copy_object
from statemgr.blobs.s3.errors import code_and_status, of_key, too_large, translated
from statemgr.blobs.s3.expiry import Expiry, Records, Tags
from statemgr.config import JobConfig
from statemgr.config.units import DAY_MS
from statemgr.errors import AccessDenied, InvalidError, MissingBlob, StatemgrError
from statemgr.ports import BlobInfo, BlobReader, BlobStore, Body, Clock

T = TypeVar("T")
#: Bytes that Amazon S3 takes in one request. It refuses more only after all of them were sent.
_LARGEST = 5 * 1024**3
#: Keys that S3 takes in one request.
_MOST_DELETES = 1000
#: The server has no such request, or refuses it for this object; the caller's own credentials may still read it.
_CANNOT_COPY = {"NotImplemented", "MethodNotAllowed", "InvalidRequest", "AccessDenied"}
#: Settings after ``blob.store.s3.`` → the fields of a PUT that ask the server for encryption at rest.
_ENCRYPTION = {"sse.algorithm": "ServerSideEncryption", "sse.kms.key.id": "SSEKMSKeyId"}


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
        self._connections = connections_of(place.client)
        self._large_reads = LargeReads(clock)
        self._encryption = encryption
        self._abilities = Abilities(place, own, encryption)
        self._tags, self._records = Tags(place), Records(place, encryption)
        self.administration = S3Administration(place, ttl_days, self._abilities, own)

    # --- writing ---

    @property
    def checks_uploads(self) -> bool:
        return self._abilities.checks_uploads()

    def put(self, blob_id: str, body: Body, *, ttl_days: int | None) -> None:
        key, size = self._place.key(blob_id), body_size(body)
        if size > _LARGEST and ".amazonaws." in self._client.meta.endpoint_url:  # others may take more
            raise too_large(f"the blob has {size:,} bytes", self._bucket, blob_id)
        with open_body(body) as stream, translated(self._bucket, blob_id):
            known: dict[str, Any] = {"IfNoneMatch": "*", "ChecksumCRC32": _crc32(stream)}

            def send(lacks: frozenset[str]) -> None:
                stream.seek(0)
                fields = {name: value for name, value in known.items() if name not in lacks}
                fields |= {**self._encryption, **self._ttl_fields(ttl_days)}
                self._client.put_object(Bucket=self._bucket, Key=key, Body=stream, ContentLength=size, **fields)

            self._without_what_lacks(send)

    def copy_from(self, source: BlobStore, wanted: BlobInfo, blob_id: str, *, ttl_days: int) -> bool:
        """Within a bucket, by the server. False where it does not check what it stores, may not copy the object, or
        cannot make the copy depend on whether the name is free, as it does for a PUT."""
        if not isinstance(source, S3BlobStore) or source._bucket != self._bucket or not self.checks_uploads:
            return False
        if source._client.meta.endpoint_url != self._client.meta.endpoint_url:
            return False
        fields = {**self._ttl_fields(ttl_days), **self._encryption}
        condition = {} if "IfNoneMatch" in self._abilities.lacks else {"IfNoneMatch": "*"}
        with translated(self._bucket, wanted.blob_id):
            try:
                copy_object(source._place, wanted.blob_id, wanted.size, self._place, blob_id, fields, condition)
            except ClientError as error:
                # a PUT of the blob then finds out what the server lacks
                if code_and_status(error)[0] not in _CANNOT_COPY and not is_unsupported(error):
                    raise
                return False
            except ParamValidationError:
                return False  # an SDK from before October 2025 has no such condition for copies
        return True

    @property
    def _expiry(self) -> Expiry:
        return self._records if "Tagging" in self._abilities.lacks else self._tags

    def _ttl_fields(self, ttl_days: int | None) -> Mapping[str, Any]:
        return {} if ttl_days is None else self._expiry.fields(ttl_days)

    def _without_what_lacks(self, request: Callable[[frozenset[str]], T]) -> T:
        """Make a request; if the server turns out to lack a part of it, again without this part.

        Raises: ClientError, StatemgrError.
        """
        lacks = self._abilities.lacks
        try:
            return request(lacks)
        except ClientError as error:
            if not is_unsupported(error):
                raise
            self._abilities.learn(lacks)
        return request(self._abilities.lacks)

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
            left = chunk if len(chunk) == 1 else self._delete_together(chunk, keys, failed)
            failed |= {keys[key]: error for key, error in delete_each(left, self._delete_key).items()}
        return failed

    def _delete_together(
        self, chunk: Sequence[str], keys: Mapping[str, str], failed: dict[str, StatemgrError]
    ) -> Sequence[str]:
        """Adds to ``failed``. Returns: the keys to delete one by one, because the server refuses such a request."""
        if not self._abilities.deletes_many:
            return chunk
        try:
            with translated(self._bucket):
                answer = self._client.delete_objects(
                    Bucket=self._bucket, Delete={"Objects": [{"Key": key} for key in chunk], "Quiet": True}
                )
        except (InvalidError, AccessDenied) as refusal:
            # servers refuse this request in many ways (no Content-MD5, another signature): one delete tells
            self._delete_key(chunk[0])
            if _is_about_many(refusal.__cause__):
                self._abilities.deletes_one_by_one()
            return chunk[1:]
        for problem in answer.get("Errors", ()):
            blob_id = keys[problem["Key"]]
            meaning = of_key(problem.get("Code", ""), problem.get("Message", ""), self._bucket, blob_id)
            if not isinstance(meaning, MissingBlob):
                failed[blob_id] = meaning
        return ()

    def _delete_key(self, key: str) -> None:
        try:
            with translated(self._bucket, key.removeprefix(self._place.prefix)):
                self._client.delete_object(Bucket=self._bucket, Key=key)
        except MissingBlob:
            pass  # S3 itself answers 204, others 404

    def remove_ttl(self, blob_id: str) -> None:
        self._place.key(blob_id)
        with translated(self._bucket, blob_id):
            self._without_what_lacks(lambda _: self._expiry.remove(blob_id))

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
            yield BodyReader(
                body._raw_stream, answer.get("ContentLength"), self._large_reads,
                lambda: translated(self._bucket, blob_id), bucket=self._bucket, blob=blob_id,
            )  # fmt: skip
        finally:
            body.close()

    def stat(self, blob_id: str) -> BlobInfo:
        """A TTL begins when the blob is written."""
        head = self._place.head(blob_id)
        with translated(self._bucket, blob_id):
            days = self._without_what_lacks(lambda _: self._expiry.days(blob_id, head))
        try:
            size, modified_ms = head["ContentLength"], int(head["LastModified"].timestamp() * 1000)
        except KeyError as error:
            raise InvalidError(
                f"the S3 server does not tell a blob's {error}", bucket=self._bucket, blob=blob_id,
                hint="check whether a proxy in front of it removes the header",
            ) from error  # fmt: skip
        if days is None:
            return BlobInfo(blob_id, size, modified_ms)
        return BlobInfo(
            blob_id, size, modified_ms, modified_ms + int(days) * DAY_MS if days.isascii() and days.isdigit() else -1
        )

    def close(self) -> None:
        self._connections.break_off()
        self._large_reads.close()
        self._client.close()


def _is_about_many(cause: BaseException | None) -> bool:
    """Whether an answer refuses to delete many objects with one request, and not only these objects or now."""
    if not isinstance(cause, ClientError):
        return False
    code = code_and_status(cause)[0]
    return is_unsupported(cause) or code == "MethodNotAllowed" or "md5" in str(cause).lower()


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
