"""Blob stores, and decorators that retry, verify and count. The scheme of ``blob.store.uri`` chooses the store.

``statemgr.config.factories`` names the stores. The module of a store is imported only if the job uses it, because the
vendors' clients are extras.
"""

from __future__ import annotations

from statemgr.blobs.body import open_body
from statemgr.blobs.counting import CountingBlobStore, counts_of
from statemgr.blobs.names import BlobExists, check_blob_id
from statemgr.blobs.retrying import RetryingBlobStore
from statemgr.blobs.verifying import VerifyingBlobStore
from statemgr.config import JobConfig, blob_store_of
from statemgr.config.factories import BLOB_EXTRAS, plugged
from statemgr.errors import ConfigError
from statemgr.ports import BlobStore, Clock, OpenBlobStore

__all__ = ["BlobExists", "check_blob_id", "open_blob_store", "open_body", "open_raw_blob_store"]


def open_blob_store(config: JobConfig, clock: Clock) -> RetryingBlobStore:
    """The job's blob store, with retries and verification. Its requests are counted.

    Raises: ConfigError for the URI, PrerequisiteMissing if a package is not installed, AccessDenied.
    """
    counts = counts_of(config.job_key)
    counted = CountingBlobStore(open_raw_blob_store(config, clock), counts)
    return RetryingBlobStore(VerifyingBlobStore(counted), config.retry, clock, counts=counts)


def open_raw_blob_store(config: JobConfig, clock: Clock) -> BlobStore:
    """The job's blob store without decorators. Raises: as :func:`open_blob_store`."""
    uri = config.blob_uri
    if uri is None:
        raise ConfigError(
            "blob.store.uri is not set",
            key="blob.store.uri",
            hint="set it to file:///directory, or to a bucket or container (docs/storage.md)",
        )
    entry = blob_store_of(uri)
    what, hide = f"the blob store for {entry.name}:// URIs", config.hider()
    package = entry.dist.name if entry.dist else f"'statemgr[{BLOB_EXTRAS.get(entry.name, entry.name)}]'"
    open_store: OpenBlobStore = plugged(what, entry.load, package=package, hide=hide)
    if entry.dist is None:
        return open_store(uri, config, clock)
    what = f"{what} ({entry.value} of the package {package})"
    return plugged(what, lambda: open_store(uri, config, clock), BlobStore, package=package, hide=hide)
