"""Blob stores: one vendor a module, decorators around it, chosen by the scheme of ``blob.store.uri``.

Floor 2. The S3 module is imported only when it is asked for: boto3 is an extra.
"""

from __future__ import annotations

from pathlib import Path
from urllib.parse import unquote, urlsplit

from statemgr.blobs.file import FileBlobStore
from statemgr.blobs.memory import MemoryBlobStore
from statemgr.blobs.names import BlobExists, check_blob_id
from statemgr.blobs.retrying import RetryingBlobStore
from statemgr.blobs.verifying import VerifyingBlobStore
from statemgr.config import JobConfig
from statemgr.errors import ConfigError, PrerequisiteMissing
from statemgr.ports import BlobStore, Clock

__all__ = ["BlobExists", "check_blob_id", "open_blob_store", "open_raw_blob_store"]


def open_blob_store(config: JobConfig, clock: Clock) -> RetryingBlobStore:
    """The job's blob store, retrying and verifying.

    Raises: ConfigError for the URI, PrerequisiteMissing when boto3 is not installed, AccessDenied.
    """
    return RetryingBlobStore(VerifyingBlobStore(open_raw_blob_store(config, clock)), config.retry, clock)


def open_raw_blob_store(config: JobConfig, clock: Clock) -> BlobStore:
    """The job's blob store without decorators (``file:///directory``, ``s3://bucket/prefix``, ``memory://name``)."""
    uri = config.blob_uri
    if uri is None:
        raise ConfigError(
            "blob.store.uri is not set", key="blob.store.uri", hint="file:///directory or s3://bucket/prefix"
        )
    parts = urlsplit(uri)
    match parts.scheme:
        case "file" if parts.netloc in ("", "localhost") and parts.path.startswith("/"):
            return FileBlobStore(Path(unquote(parts.path)), clock)
        case "s3" if parts.netloc:
            return _open_s3(config, parts.netloc, unquote(parts.path).strip("/"))
        case "memory":
            return MemoryBlobStore(clock, parts.netloc + parts.path or "default")
        case _:
            raise ConfigError(
                "blob.store.uri is not the URI of a blob store",
                key="blob.store.uri",
                hint="file:///directory (three slashes) or s3://bucket/prefix",
            )


def _open_s3(config: JobConfig, bucket: str, prefix: str) -> BlobStore:
    try:
        from statemgr.blobs.s3.store import S3BlobStore, encryption_fields, make_client
    except ModuleNotFoundError as error:
        if error.name not in ("boto3", "botocore", "urllib3", "zlib_ng"):
            raise
        raise PrerequisiteMissing(
            "an s3:// blob store needs boto3, which is not installed", hint="pip install 'statemgr[s3]'"
        ) from error
    # every part in flight, each of them hedged, and the indexes beside them
    settings = config.blob_s3
    client = make_client(settings, connections=2 * config.parallelism + 2)
    return S3BlobStore(
        client,
        bucket,
        prefix,
        ttl_days=config.ttl_days,
        encryption=encryption_fields(settings),
        own=f"{config.job_key}/",
    )
