"""Moves the same bytes with plain boto3: the references of restores from and backups to S3.

The client is the fastest known one in plain Python: eight threads, raw streams into reused buffers, bodies of bytes, no
checksums. Each function runs in its own process, and takes and returns JSON. ``s3`` has the fields of an ``S3Address``.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

from statemgr.model.hashing import read_buffer
from statemgr_tools.bench.addresses import S3Address
from statemgr_tools.bench.memory import let_go
from statemgr_tools.bench.operations import in_parallel

_BUFFER = 1024 * 1024


def put(s3: dict[str, str], paths: list[str], prefix: str, held: str | None = None) -> dict[str, Any]:
    """Put every file as one object below ``prefix``, which is below the address's own."""
    client = S3Address(**s3).client()
    client.list_objects_v2(Bucket=s3["bucket"], MaxKeys=1)  # the extra cost of a first request does not count

    def one(path: str) -> None:
        body = Path(path).read_bytes()
        client.put_object(Bucket=s3["bucket"], Key=f"{s3['prefix']}/{prefix}/{Path(path).name}", Body=body)

    let_go(held)
    return {"seconds": in_parallel(one, paths)}


def get(s3: dict[str, str], names: list[str], prefix: str, target: str, held: str) -> dict[str, Any]:
    """Get every object into a file. Like a restore, this syncs nothing."""
    client = S3Address(**s3).client()
    client.list_objects_v2(Bucket=s3["bucket"], MaxKeys=1)
    Path(target).mkdir()
    local = threading.local()

    def one(name: str) -> None:
        if not hasattr(local, "buffer"):
            local.buffer = read_buffer(_BUFFER)
        body: Any = client.get_object(Bucket=s3["bucket"], Key=f"{s3['prefix']}/{prefix}/{name}")["Body"]
        raw = body._raw_stream
        with open(Path(target, name), "wb", buffering=0) as file:
            while size := raw.readinto(local.buffer):
                file.write(local.buffer[:size])
        body.close()

    let_go(held)
    return {"seconds": in_parallel(one, names)}
