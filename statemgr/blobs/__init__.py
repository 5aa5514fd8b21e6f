"""Blob stores: one vendor a module, and decorators around them. The scheme of ``blob.store.uri`` chooses the store.

Floor 2. Stores are plug-ins: an entry point ``statemgr.blob_stores``, named like the scheme, refers to an
:data:`statemgr.ports.OpenBlobStore`. A store's module is imported only when the job uses it: boto3 is an extra.
"""

from __future__ import annotations

from statemgr.blobs.names import BlobExists, check_blob_id
from statemgr.blobs.retrying import RetryingBlobStore
from statemgr.blobs.verifying import VerifyingBlobStore
from statemgr.config import JobConfig, blob_store_of
from statemgr.errors import ConfigError, PrerequisiteMissing
from statemgr.ports import BlobStore, Clock, OpenBlobStore

__all__ = ["BlobExists", "check_blob_id", "open_blob_store", "open_raw_blob_store"]


def open_blob_store(config: JobConfig, clock: Clock) -> RetryingBlobStore:
    """The job's blob store, retrying and verifying.

    Raises: ConfigError for the URI, PrerequisiteMissing when a package is not installed, AccessDenied.
    """
    return RetryingBlobStore(VerifyingBlobStore(open_raw_blob_store(config, clock)), config.retry, clock)


def open_raw_blob_store(config: JobConfig, clock: Clock) -> BlobStore:
    """The job's blob store without decorators. Raises: as :func:`open_blob_store`."""
    uri = config.blob_uri
    if uri is None:
        raise ConfigError(
            "blob.store.uri is not set", key="blob.store.uri", hint="set it to file:///directory or s3://bucket/prefix"
        )
    entry = blob_store_of(uri)
    try:
        open_store: OpenBlobStore = entry.load()
    except ModuleNotFoundError as error:
        package = entry.dist.name if entry.dist else f"'statemgr[{entry.name}]'"
        raise PrerequisiteMissing(
            f"the blob store for {entry.name}:// URIs needs {error.name}, which is not installed",
            hint=f"pip install {package}",
        ) from error
    return open_store(uri, config, clock)
