"""Blob stores of every kind for the conformance suite."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from statemgr.blobs import open_blob_store, open_raw_blob_store
from statemgr.config import JobConfig
from statemgr.local.machine import SystemClock
from statemgr.ports import BlobStore

BLOB_KINDS = ("memory", "file", "s3")


@pytest.fixture(params=BLOB_KINDS)
def blob_config(request: pytest.FixtureRequest, tmp_path: Path) -> JobConfig:
    """Return the configuration of a job with its own empty blob store."""
    settings: dict[str, object] = {"job.name": "orders"}
    if request.param == "s3":
        s3 = request.getfixturevalue("s3")
        settings |= {
            "blob.store.uri": f"s3://{s3.bucket}/{s3.fresh_prefix('conformance')}",
            "blob.store.s3.endpoint": s3.endpoint,
            "blob.store.s3.region": s3.region,
            "blob.store.s3.access.key": s3.access_key,
            "blob.store.s3.secret.key": s3.secret_key,
            "blob.store.s3.path.style": True,
        }
    elif request.param == "file":
        settings["blob.store.uri"] = (tmp_path / "blobs").as_uri()
    else:
        settings["blob.store.uri"] = f"memory://{secrets.token_hex(8)}"
    return JobConfig.from_mapping(settings)


@pytest.fixture(params=["raw", "decorated"])
def opened_blobs(request: pytest.FixtureRequest, blob_config: JobConfig) -> Iterator[BlobStore]:
    """Open a blob store of each kind, both as the bare adapter and with the decorators that a job uses."""
    opened: Callable[[JobConfig, SystemClock], BlobStore] = (
        open_raw_blob_store if request.param == "raw" else open_blob_store
    )
    store = opened(blob_config, SystemClock())
    yield store
    store.close()
