"""Encryption at rest: the headers of every upload to S3."""

from __future__ import annotations

import pytest

from statemgr.blobs import open_blob_store
from statemgr.config import JobConfig
from statemgr.local.machine import SystemClock
from tests.core.integration.s3_proxy import S3Proxy
from tests.servers import S3Server

_PREFIX = "x-amz-server-side-encryption"
KEY = "arn:aws:kms:eu-west-1:111122223333:key/orders"


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, {}),
        ({"algorithm": "AES256"}, {_PREFIX: "AES256"}),
        ({"algorithm": "aws:kms"}, {_PREFIX: "aws:kms"}),
        (
            {"algorithm": "aws:kms:dsse", "kms.key.id": KEY},
            {_PREFIX: "aws:kms:dsse", f"{_PREFIX}-aws-kms-key-id": KEY},
        ),
    ],
)
def test_every_upload_asks_for_it(s3: S3Server, settings: dict[str, str], expected: dict[str, str]) -> None:
    """Every PUT of a blob has the headers, including the probe of checksums. No other request has them."""
    with S3Proxy(s3.endpoint) as proxy:
        config = JobConfig.from_mapping(
            {
                "job.name": "orders",
                "blob.store.uri": f"s3://{s3.bucket}/{s3.fresh_prefix('sse')}",
                "blob.store.s3.endpoint": proxy.endpoint,
                "blob.store.s3.region": s3.region,
                "blob.store.s3.access.key": s3.access_key,
                "blob.store.s3.secret.key": s3.secret_key,
                "blob.store.s3.path.style": True,
                **{f"blob.store.s3.sse.{name}": value for name, value in settings.items()},
            }
        )
        store = open_blob_store(config, SystemClock())
        store.put("a/b", b"data", ttl_days=30)
        assert store.checks_uploads
        store.remove_ttl("a/b")
        assert store.stat("a/b").size == 4
        store.close()
        puts = [
            headers
            for (method, path), headers in zip(proxy.requests, proxy.headers, strict=True)
            if method == "PUT" and "tagging" not in path.rpartition("?")[2]
        ]
        others = [headers for headers in proxy.headers if headers not in puts]
    asked = [{name: value for name, value in headers.items() if name.startswith(_PREFIX)} for headers in puts]
    assert asked
    assert asked == [expected] * len(asked)
    assert others
    assert not any(name.startswith(_PREFIX) for headers in others for name in headers)
