"""Moves the same bytes with plain boto3: the references of restores from and backups to S3.

The client is the fastest known one in plain Python: eight threads, raw streams into reused buffers, bodies of bytes, no
checksums. Each function runs in its own process, and takes and returns JSON.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import boto3
from botocore.config import Config

from statemgr.model.hashing import read_buffer
from statemgr_tools.bench.memory import let_go
from statemgr_tools.bench.operations import in_parallel

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client

_BUFFER = 1024 * 1024


def client_of(s3: dict[str, str]) -> S3Client:
    """Return a client for eight threads. ``s3`` has the fields of an ``S3Address``."""
    return boto3.session.Session().client(
        "s3",
        endpoint_url=s3["endpoint"],
        region_name=s3["region"],
        aws_access_key_id=s3["access_key"],
        aws_secret_access_key=s3["secret_key"],
        config=Config(
            max_pool_connections=8,
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
            s3={"addressing_style": "path"},
        ),
    )


def put(s3: dict[str, str], paths: list[str], prefix: str, held: str | None = None) -> dict[str, Any]:
    """Put every file as one object with ``prefix``."""
    client = client_of(s3)
    client.list_objects_v2(Bucket=s3["bucket"], MaxKeys=1)  # the extra cost of a first request does not count

    def one(path: str) -> None:
        body = Path(path).read_bytes()
        client.put_object(Bucket=s3["bucket"], Key=f"{prefix}/{Path(path).name}", Body=body)

    let_go(held)
    return {"seconds": in_parallel(one, paths)}


def get(s3: dict[str, str], names: list[str], prefix: str, target: str, held: str) -> dict[str, Any]:
    """Get every object into a file. Like a restore, this syncs nothing."""
    client = client_of(s3)
    client.list_objects_v2(Bucket=s3["bucket"], MaxKeys=1)
    Path(target).mkdir()
    local = threading.local()

    def one(name: str) -> None:
        if not hasattr(local, "buffer"):
            local.buffer = read_buffer(_BUFFER)
        body: Any = client.get_object(Bucket=s3["bucket"], Key=f"{prefix}/{name}")["Body"]
        raw = body._raw_stream
        with open(Path(target, name), "wb", buffering=0) as file:
            while size := raw.readinto(local.buffer):
                file.write(local.buffer[:size])
        body.close()

    let_go(held)
    return {"seconds": in_parallel(one, names)}


def remove(s3: dict[str, str], prefix: str) -> None:
    """Delete everything with a prefix."""
    client = client_of(s3)
    for page in client.get_paginator("list_objects_v2").paginate(Bucket=s3["bucket"], Prefix=prefix):
        for found in page.get("Contents", ()):
            client.delete_object(Bucket=s3["bucket"], Key=found["Key"])
    client.close()
