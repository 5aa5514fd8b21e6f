"""What differs between S3 servers: lifecycle rules and checksums. Also: wrong buckets and wrong keys."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from statemgr.blobs import open_blob_store, open_raw_blob_store
from statemgr.blobs.s3.abilities import Abilities
from statemgr.blobs.s3.store import S3BlobStore
from statemgr.config import JobConfig
from statemgr.errors import AccessDenied, InvalidError
from statemgr.local.machine import SystemClock
from statemgr.ports import list_blobs
from statemgr_tools.dev.s3 import S3Server as DevS3Server
from tests.servers import S3Server

# one worker, because each would set up the fixtures of this module
pytestmark = pytest.mark.xdist_group("moto")


@pytest.fixture(scope="module")
def moto(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DevS3Server]:
    """Start a server that has lifecycle rules and accepts a PUT with a wrong checksum."""
    server = DevS3Server(directory=tmp_path_factory.mktemp("moto"), kind="moto")
    server.start()
    yield server
    server.stop()


def settings(server: DevS3Server | S3Server, prefix: str, **more: object) -> dict[str, object]:
    """Return the settings of a job whose blobs are on a server."""
    path = f"/{prefix}" if prefix else ""
    return {
        "job.name": "orders",
        "blob.store.uri": f"s3://{server.bucket}{path}",
        "blob.store.s3.endpoint": server.endpoint,
        "blob.store.s3.region": server.region,
        "blob.store.s3.access.key": server.access_key,
        "blob.store.s3.secret.key": server.secret_key,
        "blob.store.s3.path.style": True,
        **more,
    }


def open_raw(server: DevS3Server | S3Server, prefix: str, **more: object) -> S3BlobStore:
    """Open the adapter alone."""
    store = open_raw_blob_store(JobConfig.from_mapping(settings(server, prefix, **more)), SystemClock())
    assert isinstance(store, S3BlobStore)
    return store


@pytest.mark.parametrize("prefix", ["", "some/where"])
def test_the_lifecycle_rule_is_missed_installed_and_found(moto: DevS3Server, prefix: str) -> None:
    """A9: the store checks for the rule that expires tagged blobs, and installs it once, next to those of others."""
    store = open_raw(moto, prefix, **{"blob.store.ttl.days": 7})
    client: Any = store._client
    other = {"ID": "mine", "Status": "Enabled", "Filter": {"Prefix": "logs/"}, "Expiration": {"Days": 3}}
    client.put_bucket_lifecycle_configuration(Bucket=moto.bucket, LifecycleConfiguration={"Rules": [other]})
    assert any("no lifecycle rule" in problem for problem in store.administration.probe())
    for _ in range(2):
        store.administration.fix()
        assert not any("lifecycle" in problem for problem in store.administration.probe())
    rules = client.get_bucket_lifecycle_configuration(Bucket=moto.bucket)["Rules"]
    assert [rule["ID"] == "mine" for rule in rules] == [True, False]
    longer = open_raw(moto, prefix, **{"blob.store.ttl.days": 8})
    assert any("statemgr-ttl=8" in problem for problem in longer.administration.probe())
    store.close()
    longer.close()


def test_a_rule_for_another_prefix_does_not_count(moto: DevS3Server) -> None:
    """A rule that expires other objects does not count; a rule of a parent prefix does."""
    open_raw(moto, "a", **{"blob.store.ttl.days": 9}).administration.fix()
    assert not any(
        "lifecycle" in text for text in open_raw(moto, "a/b", **{"blob.store.ttl.days": 9}).administration.probe()
    )
    assert any("lifecycle" in text for text in open_raw(moto, "b", **{"blob.store.ttl.days": 9}).administration.probe())


def test_a_bucket_with_versions_gets_a_rule_for_them(moto: DevS3Server) -> None:
    """The server accepts the rule, and it is found again."""
    store = open_raw(moto, "", **{"blob.store.uri": "s3://kept/some/where"})
    client: Any = store._client
    client.create_bucket(Bucket="kept")
    assert not any("version" in text for text in store.administration.probe())
    client.put_bucket_versioning(Bucket="kept", VersioningConfiguration={"Status": "Enabled"})
    assert any("keeps a version" in text for text in store.administration.probe())
    store.administration.fix()
    assert not any("version" in text for text in store.administration.probe())
    assert len(client.get_bucket_lifecycle_configuration(Bucket="kept")["Rules"]) == 2
    store.close()


def test_a_server_without_lifecycle_rules_says_so(s3: S3Server) -> None:
    """On a server without lifecycle rules, the probe reports a note, and installing the rule raises a typed error."""
    store = open_raw(s3, s3.fresh_prefix())
    before = [problem for problem in store.administration.probe() if "lifecycle" in problem]
    try:
        store.administration.fix()
    except InvalidError:
        assert [problem.startswith("note: this S3 server has no lifecycle") for problem in before] == [True]
    else:
        assert s3.server != "versitygw"
        assert not any("lifecycle" in problem for problem in store.administration.probe())
    store.close()


def test_a_server_that_does_not_check_is_found_out_and_read_back(
    moto: DevS3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Invariant 2: a probe with a wrong checksum reveals the server. The store then reads every PUT back, and the probe
    leaves nothing behind."""
    store = open_raw(moto, "checks")
    assert not store.checks_uploads
    assert any("read back" in problem for problem in store.administration.probe())
    assert list(list_blobs(store, "")) == []
    gets: list[str] = []
    original = S3BlobStore.get
    monkeypatch.setattr(S3BlobStore, "get", lambda self, blob, *a: gets.append(blob) or original(self, blob, *a))
    decorated = open_blob_store(JobConfig.from_mapping(settings(moto, "checks")), SystemClock())
    decorated.put("a/b", b"data", ttl_days=30)
    assert gets == ["a/b"]
    store.close()
    decorated.close()


def test_the_probe_is_made_once_per_process(moto: DevS3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Later stores on the same bucket do not probe again."""
    assert not open_raw(moto, "once").checks_uploads
    monkeypatch.setattr(Abilities, "_refuses_wrong_checksum", lambda self: pytest.fail("asked again"))
    assert not open_raw(moto, "other").checks_uploads


def test_versitygw_checks(s3: S3Server) -> None:
    """Where the server refuses a wrong checksum, the store relies on it; the probe leaves nothing behind."""
    store = open_raw(s3, s3.fresh_prefix())
    assert store.checks_uploads == (s3.server == "versitygw") or s3.server == "given"
    assert list(list_blobs(store, "")) == []
    store.close()


def test_a_bucket_that_does_not_exist(s3: S3Server) -> None:
    """FAULTS 10: a bucket that does not exist is a denied access for every method, and not a missing blob."""
    config = settings(s3, "x") | {"blob.store.uri": "s3://no-such-bucket-of-ours/x"}
    store = open_raw_blob_store(JobConfig.from_mapping(config), SystemClock())
    calls = [
        lambda: store.put("a", b"x", ttl_days=1), lambda: store.stat("a"), lambda: store.delete("a"),
        lambda: store.remove_ttl("a"), lambda: list(list_blobs(store, "")), lambda: store.get("a").__enter__(),
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(AccessDenied, match="bucket"):
            call()
    store.close()


def test_wrong_keys(s3: S3Server) -> None:
    """FAULTS 10: a wrong secret key raises AccessDenied with a hint."""
    if s3.server == "moto":
        pytest.skip("moto takes any key")
    config = settings(s3, "x") | {"blob.store.s3.secret.key": "not-the-key"}
    store = open_blob_store(JobConfig.from_mapping(config), SystemClock())
    with pytest.raises(AccessDenied) as caught:
        store.put("a", b"x", ttl_days=1)
    assert "access.key" in str(caught.value.hint)
    store.close()


def test_no_keys_at_all(s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """FAULTS 10: without any credentials, the error says so."""
    monkeypatch.setenv("HOME", str(tmp_path))
    config = settings(s3, "x")
    del config["blob.store.s3.access.key"], config["blob.store.s3.secret.key"]
    store = open_blob_store(JobConfig.from_mapping(config), SystemClock())
    with pytest.raises(AccessDenied, match="credentials"):
        store.put("a", b"x", ttl_days=1)
    store.close()


def test_keys_of_the_environment(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys that the configuration does not set come from the SDK's own chain."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", s3.access_key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", s3.secret_key)
    config = settings(s3, s3.fresh_prefix())
    del config["blob.store.s3.access.key"], config["blob.store.s3.secret.key"]
    store = open_blob_store(JobConfig.from_mapping(config), SystemClock())
    store.put("a", b"x", ttl_days=1)
    assert store.stat("a").size == 1
    store.close()


def test_an_object_has_its_tag_from_the_start(s3: S3Server) -> None:
    """A TTL needs no request of its own: the tag comes with the PUT."""
    prefix = s3.fresh_prefix()
    store = open_raw(s3, prefix)
    store.put("a", b"x", ttl_days=12)
    tags = s3.client().get_object_tagging(Bucket=s3.bucket, Key=f"{prefix}/a")["TagSet"]
    assert tags == [{"Key": "statemgr-ttl", "Value": "12"}]
    store.close()


def test_keys_never_show(s3: S3Server) -> None:
    """FAULTS 30: the repr of a store shows no keys."""
    store = open_raw(s3, "x")
    assert s3.secret_key not in repr(store) + repr(vars(store))
    store.close()
