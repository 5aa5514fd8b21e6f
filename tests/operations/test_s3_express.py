"""Directory buckets of S3 Express One Zone: no tags, no order in a listing, and requests that a session signs."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from statemgr import JobConfig, StateManager
from statemgr.blobs import open_blob_store, open_raw_blob_store
from statemgr.cli.main import cli
from statemgr.errors import PermissionNeeded
from statemgr.local.machine import SystemClock
from statemgr.ports import BlobStore, list_blobs
from statemgr.testing.conformance import BlobStoreSuite
from tests.commits import TASK, write
from tests.core.integration.express_proxy import ExpressProxy
from tests.jobs import job_mapping, with_changes
from tests.servers import KafkaServer, S3Server


@pytest.fixture
def express(s3: S3Server) -> Iterator[ExpressProxy]:
    """Create a separate directory bucket for each test."""
    bucket = f"express-{secrets.token_hex(5)}--use1-az4--x-s3"
    keys = {"access_key": s3.access_key, "secret_key": s3.secret_key, "region": s3.region}
    with ExpressProxy(s3.endpoint, bucket=bucket, **keys) as proxy:
        proxy.create_bucket()
        yield proxy


def settings(express: ExpressProxy) -> dict[str, object]:
    """Return the settings for the bucket."""
    return {
        "blob.store.uri": f"s3://{express.bucket}/some/where",
        "blob.store.s3.endpoint": express.endpoint,
        "blob.store.s3.region": express.region,
        "blob.store.s3.access.key": "user",
        "blob.store.s3.secret.key": "of-express",
    }


class TestExpress(BlobStoreSuite):
    """A directory bucket is a blob store like any other."""

    @pytest.fixture
    def blobs(self, express: ExpressProxy) -> Iterator[BlobStore]:
        """Open the adapter alone."""
        config = JobConfig.from_mapping({"job.name": "orders", **settings(express)})
        store = open_raw_blob_store(config, SystemClock())
        yield store
        store.close()


def test_a_ttl_costs_no_request_of_its_own(express: ExpressProxy) -> None:
    """An upload is one request, with its TTL. A listing shows blobs and no TTL records, and a delete removes both."""
    config = JobConfig.from_mapping({"job.name": "orders", **settings(express)})
    store = open_blob_store(config, SystemClock())
    store.put("orders/1/warm", b"x", ttl_days=None)
    express.requests.clear()
    store.put("orders/1/a", b"x", ttl_days=30)
    assert [method for method, _ in express.requests] == ["PUT"]
    store.remove_ttl("orders/1/a")
    assert sorted(info.blob_id for info in list_blobs(store, "orders/")) == ["orders/1/a", "orders/1/warm"]
    store.delete("orders/1/a")
    store.put("orders/1/a", b"again", ttl_days=30)
    assert store.stat("orders/1/a").expires_ms is not None, "the old record is gone"
    store.close()


def test_a_job_on_a_directory_bucket(express: ExpressProxy, kafka: KafkaServer, tmp_path: Path) -> None:
    """A job commits and restores on other machines, and gc keeps the young blob of a failed commit. Without its
    checkpoint topic, the job refuses to start empty, since published blobs exist."""
    mapping = job_mapping(kafka, tmp_path, backup=("blob-store",)) | settings(express)
    config = JobConfig.from_mapping(mapping)
    for number in range(3):
        moved = with_changes(config, state__dir=str(tmp_path / f"machine-{number}"))
        with StateManager(moved) as manager, manager.open_task(TASK) as task:
            assert dict(task.store("totals").range()) == {b"%d" % n: b"x" for n in range(number)}
            write(task, {b"%d" % number: b"x"})
            task.commit({"orders-0": number})
    store = open_blob_store(config, SystemClock())
    prefix = f"{config.job_key}/Partition_0/totals"
    assert all(info.expires_ms is None for info in map(store.stat, _names(store, prefix)))
    store.put(f"{prefix}/failed/index", b"x", ttl_days=30)
    published = _names(store, prefix) - {f"{prefix}/failed/index"}
    path = tmp_path / "job.toml"
    path.write_text("\n".join(f"{json.dumps(k)} = {json.dumps(v)}" for k, v in config.to_mapping().items()))
    result = CliRunner().invoke(cli, ["gc", "--config", str(path), "--json", "--write"], catch_exceptions=False)
    assert json.loads(result.stdout)["young"]["blobs"] == 1
    assert published == _names(store, prefix) - {f"{prefix}/failed/index"}
    assert [text.startswith("note: directory buckets") for text in store.administration.probe()] == [True]
    assert store.administration.fix() == ()
    store.close()
    lost = with_changes(config, task__checkpoint__topic=kafka.fresh_name("other"), state__dir=str(tmp_path / "empty"))
    with StateManager(lost) as manager, pytest.raises(PermissionNeeded, match="published blob"):
        manager.open_task(TASK)


def _names(store: BlobStore, prefix: str) -> set[str]:
    return {info.blob_id for info in list_blobs(store, prefix)}
