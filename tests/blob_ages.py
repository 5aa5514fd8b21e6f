"""Blob stores in which time passes, and what a job has in them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from statemgr import JobConfig
from statemgr.blobs.clouds.store import CloudBlobStore
from statemgr.blobs.file import FileBlobStore
from statemgr.blobs.s3.administration import S3Administration
from statemgr.config.units import DAY_MS
from statemgr.ports import list_blobs
from statemgr.wiring import open_services


def time_passes(monkeypatch: pytest.MonkeyPatch, milliseconds: int = 2 * DAY_MS) -> None:
    """Set the blob stores' clocks ahead of the times of the existing blobs."""
    for kind in (FileBlobStore, S3Administration, CloudBlobStore):
        original: Callable[[Any], int] = kind.time_ms
        monkeypatch.setattr(kind, "time_ms", lambda self, original=original: original(self) + milliseconds)


def names(config: JobConfig) -> set[str]:
    """Every blob of the job."""
    services = open_services(config)
    try:
        return {info.blob_id for info in list_blobs(services.blobs(), "")}
    finally:
        services.close()
