"""Blob stores of every kind for the conformance suite."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

from statemgr.blobs import open_blob_store, open_raw_blob_store
from statemgr.config import JobConfig
from statemgr.local.machine import SystemClock
from statemgr.ports import BlobStore

BLOB_KINDS = ("memory", "file", "s3")


#: Each kind as the bare adapter, and with the decorators that a job uses. S3 with them takes longest, and they do the
#: same for each kind.
_OPENED = [
    pytest.param(
        (kind, opened), id=f"{kind}-{name}", marks=pytest.mark.long if (kind, name) == ("s3", "decorated") else ()
    )
    for kind in BLOB_KINDS
    for name, opened in (("raw", open_raw_blob_store), ("decorated", open_blob_store))
]


def _config(kind: str, request: pytest.FixtureRequest, directory: Path) -> JobConfig:
    settings: dict[str, object] = {"job.name": "orders"}
    if kind == "s3":
        s3 = request.getfixturevalue("s3")
        settings |= {
            "blob.store.uri": f"s3://{s3.bucket}/{s3.fresh_prefix('conformance')}",
            "blob.store.s3.endpoint": s3.endpoint,
            "blob.store.s3.region": s3.region,
            "blob.store.s3.access.key": s3.access_key,
            "blob.store.s3.secret.key": s3.secret_key,
            "blob.store.s3.path.style": True,
        }
    elif kind == "file":
        (directory / "blobs" / "lost+found").mkdir(parents=True)  # a disk that is mounted
        settings["blob.store.uri"] = (directory / "blobs").as_uri()
    else:
        settings["blob.store.uri"] = f"memory://{secrets.token_hex(8)}"
    return JobConfig.from_mapping(settings)


@pytest.fixture(params=BLOB_KINDS)
def blob_config(request: pytest.FixtureRequest, tmp_path: Path) -> JobConfig:
    """Return the configuration of a job with its own empty blob store."""
    return _config(request.param, request, tmp_path)


@pytest.fixture(params=_OPENED)
def opened_blobs(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[BlobStore]:
    """Open a blob store of each kind, both as the bare adapter and with the decorators that a job uses."""
    kind, opened = request.param
    store = opened(_config(kind, request, tmp_path), SystemClock())
    yield store
    store.close()
