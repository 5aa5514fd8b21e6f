"""S3-compatible servers that lack a part of the protocol: tags, conditions, checksums, or deletes of many objects."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest
from click.testing import CliRunner

from statemgr import JobConfig, StateManager
from statemgr.blobs import BlobExists, open_blob_store, open_raw_blob_store
from statemgr.blobs.s3 import abilities, copying
from statemgr.blobs.s3.store import S3BlobStore
from statemgr.cli.main import cli
from statemgr.errors import AccessDenied, InvalidError, UnavailableError
from statemgr.health.checks import Finding, Report, check_blobs
from statemgr.local.machine import SystemClock
from statemgr.ports import BlobStore, list_blobs
from statemgr.testing.conformance import BlobStoreSuite
from tests.commits import TASK, write
from tests.core.integration.s3_proxy import PAGE, Answer, Fault, S3Proxy, error_body
from tests.jobs import job_mapping, with_changes
from tests.servers import KafkaServer, S3Server

#: As Cloudflare R2, Backblaze B2 and Google Cloud Storage answer.
NOT_IMPLEMENTED = (501, "NotImplemented", "Header '{0}' with value '{1}' not implemented")
UNSUPPORTED = (400, "InvalidArgument", "Unsupported header '{0}' received for this API call.")
NAMELESS = (501, "", "")


@dataclass
class LackingProxy(S3Proxy):
    """Refuses requests that have one of the headers or query parameters ``lacks``, with ``refusal``. Refuses deletes of
    many objects with ``many``, a status and a code, if that is given."""

    lacks: frozenset[str] = frozenset()
    refusal: tuple[int, str, str] = NOT_IMPLEMENTED
    many: tuple[int, str] | None = None
    refused: list[str] = field(default_factory=list)

    def forward(self, method: str, path: str, headers: Mapping[str, str], data: bytes) -> Answer:
        """Answer as such a server would."""
        query = parse_qs(urlsplit(path).query, keep_blank_values=True)
        asked = {name.lower(): value for name, value in headers.items()} | dict.fromkeys(query, "")
        status, code, message = self.refusal
        for name in sorted(self.lacks & asked.keys()):
            self.refused.append(name)
            body = error_body(code, message.format(name, asked[name])) if code else b""
            return status, [("Content-Type", "application/xml")], body
        if self.many and method == "POST" and "delete" in query and "content-md5" not in asked:
            status, code = self.many
            message = "Missing required header for this request: Content-Md5." if status == 400 else "refused"
            body = error_body(code, message)
            return status, [("Content-Type", "application/xml")], body
        return super().forward(method, path, headers, data)


TAGS = frozenset({"x-amz-tagging", "tagging"})


@pytest.fixture
def proxy(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[LackingProxy]:
    """Start a server that lacks nothing at first, also if another one had its port before."""
    monkeypatch.setattr(abilities, "_KNOWN", {})
    with LackingProxy(s3.endpoint) as running:
        yield running


@pytest.fixture
def settings(s3: S3Server, proxy: LackingProxy) -> dict[str, object]:
    """Return the settings of a job whose blobs are on that server."""
    return {
        "blob.store.uri": f"s3://{s3.bucket}/{s3.fresh_prefix('lacking')}",
        "blob.store.s3.endpoint": proxy.endpoint,
        "blob.store.s3.region": s3.region,
        "blob.store.s3.access.key": s3.access_key,
        "blob.store.s3.secret.key": s3.secret_key,
        "blob.store.s3.path.style": True,
        "blob.store.retry.policy.max.retries": 1,
        "blob.store.retry.policy.backoff.delay.millis": 1,
    }


def opened(settings: Mapping[str, object]) -> BlobStore:
    """Open the store as a job does."""
    return open_blob_store(JobConfig.from_mapping({"job.name": "orders", **settings}), SystemClock())


class TestWithoutTags(BlobStoreSuite):
    """A server without tags is a blob store like any other."""

    @pytest.fixture
    def blobs(self, proxy: LackingProxy, settings: dict[str, object]) -> Iterator[BlobStore]:
        """Open the adapter alone."""
        proxy.lacks = TAGS
        store = open_raw_blob_store(JobConfig.from_mapping({"job.name": "orders", **settings}), SystemClock())
        yield store
        store.close()


def test_a_page_of_an_ingress_gives_no_ttl_back(proxy: LackingProxy, settings: dict[str, object]) -> None:
    """FAULTS 8: an ingress answers 404 in place of the server when the store looks for the record of a published blob.
    The blob has no TTL all the same, and the request is repeated."""
    proxy.lacks = TAGS
    store = opened(settings)
    store.put("orders/1/a", b"x", ttl_days=30)
    assert store.stat("orders/1/a").expires_ms is not None
    store.remove_ttl("orders/1/a")
    proxy.faults = [Fault(method, ".a.kept", times=9, answer=(404, PAGE)) for method in ("HEAD", "GET")]
    with pytest.raises(UnavailableError, match="404 without"):
        store.stat("orders/1/a")
    proxy.faults = [Fault(method, ".a.kept", answer=(404, PAGE)) for method in ("HEAD", "GET")]
    assert store.stat("orders/1/a").expires_ms is None
    store.close()


@pytest.mark.parametrize("refusal", [NOT_IMPLEMENTED, UNSUPPORTED, NAMELESS], ids=["501", "400", "no body"])
def test_without_tags_nothing_else_is_given_up(
    proxy: LackingProxy, settings: dict[str, object], refusal: tuple[int, str, str]
) -> None:
    """The first upload finds out that tags are missing. TTLs go into metadata; conditions and checksums stay."""
    proxy.lacks, proxy.refusal = TAGS, refusal
    store = opened(settings)
    store.put("orders/1/a", b"first", ttl_days=30)
    with pytest.raises(BlobExists):
        store.put("orders/1/a", b"other", ttl_days=30)
    assert store.stat("orders/1/a").expires_ms is not None
    store.remove_ttl("orders/1/a")
    assert store.stat("orders/1/a").expires_ms is None
    assert [info.blob_id for info in list_blobs(store, "")] == ["orders/1/a"]
    proxy.requests.clear()
    proxy.refused.clear()
    store.put("orders/1/b", b"x", ttl_days=30)
    other = opened(settings)
    other.put("orders/1/c", b"x", ttl_days=30)
    assert [method for method, _ in proxy.requests] == ["PUT", "PUT"], "the server is asked once by a process"
    assert all(header.get("if-none-match") == "*" for header in proxy.headers[-2:])
    assert all("x-amz-checksum-crc32" in header for header in proxy.headers[-2:])
    assert proxy.refused == []
    store.close()
    other.close()


def test_a_process_that_only_reads_finds_out_too(proxy: LackingProxy, settings: dict[str, object]) -> None:
    """`gc` reads TTLs before it writes anything."""
    store = opened(settings)
    store.put("orders/1/a", b"x", ttl_days=None)
    proxy.lacks = TAGS
    assert store.stat("orders/1/a").expires_ms is None
    store.remove_ttl("orders/1/a")
    store.close()


@pytest.mark.parametrize("header", ["if-none-match", "x-amz-checksum-crc32"])
def test_what_is_missing_is_left_out_and_nothing_else(
    proxy: LackingProxy, s3: S3Server, settings: dict[str, object], header: str
) -> None:
    """A server without conditions, or without checksums, still gets the tag and the other of the two."""
    proxy.lacks = frozenset({header})
    store = opened(settings)
    store.put("orders/1/a", b"x", ttl_days=30)
    proxy.headers.clear()
    store.put("orders/1/b", b"x", ttl_days=30)
    (sent,) = [headers for headers in proxy.headers if headers.get("x-amz-tagging")]
    assert {"if-none-match", "x-amz-checksum-crc32"} & sent.keys() == {"if-none-match", "x-amz-checksum-crc32"} - {
        header
    }
    assert (
        any("does not check checksums" in text for text in store.administration.probe())
        == (header == "x-amz-checksum-crc32")
        or s3.server == "moto"
    )
    if header == "if-none-match":
        assert not any("lifecycle rule is installed" in text for text in store.administration.fix())
    store.close()


@pytest.mark.parametrize("size", [1, 2 * 1024 * 1024])
def test_a_copy_asks_for_a_free_name(
    proxy: LackingProxy, settings: dict[str, object], monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    """A copy that the server makes late, after it was repeated and published, must not bring the TTL back. A server
    that refuses this condition gets the blob by a PUT."""
    monkeypatch.setattr(copying, "_MOST", 1024)
    store = open_raw_blob_store(JobConfig.from_mapping({"job.name": "orders", **settings}), SystemClock())
    assert isinstance(store, S3BlobStore)
    store.put("orders/1/a", bytes(size), ttl_days=None)
    assert store.copy_from(store, store.stat("orders/1/a"), "orders/1/b", ttl_days=1)
    assert proxy.headers[-1]["if-none-match"] == "*"
    proxy.lacks = frozenset({"if-none-match"})
    assert not store.copy_from(store, store.stat("orders/1/a"), "orders/1/c", ttl_days=1)
    assert not list(store.administration.unfinished("orders/1/"))
    store.close()


@pytest.mark.parametrize("times", [1, 2])
def test_a_passing_refusal_gives_nothing_up(proxy: LackingProxy, settings: dict[str, object], times: int) -> None:
    """A proxy answers 501 for a moment. The request is sent again, with its tag and its condition."""
    store = opened(settings)
    store.put("orders/1/warm", b"x", ttl_days=None)
    proxy.faults = [Fault("PUT", times=times, answer=(501, "NotImplemented"))]
    store.put("orders/1/a", b"x", ttl_days=30)
    proxy.faults = [Fault("DELETE", path="tagging", answer=(501, "NotImplemented"))]
    store.remove_ttl("orders/1/a")
    with pytest.raises(BlobExists):
        store.put("orders/1/a", b"other", ttl_days=30)
    # the refused PUT, and then two looks at what is there
    assert any(sent.get("x-amz-tagging") for sent in proxy.headers[-3:])
    assert sorted(info.blob_id for info in list_blobs(store, "")) == ["orders/1/a", "orders/1/warm"]
    store.close()


def test_a_tagged_blob_is_not_kept_by_a_record(proxy: LackingProxy, settings: dict[str, object]) -> None:
    """A lifecycle rule may expire a blob that was tagged before the server lost its tags: its TTL is not removed."""
    store = opened(settings)
    store.put("orders/1/a", b"x", ttl_days=30)
    proxy.lacks = TAGS
    with pytest.raises(InvalidError):
        store.remove_ttl("orders/1/a")
    store.close()


def test_a_job_on_a_server_without_tags(
    proxy: LackingProxy, settings: dict[str, object], kafka: KafkaServer, tmp_path: Path
) -> None:
    """A job commits and restores on another machine; and its published blobs have no TTL."""
    proxy.lacks, proxy.many = TAGS, (400, "MissingContentMD5")
    config = JobConfig.from_mapping(job_mapping(kafka, tmp_path, backup=("blob-store",)) | settings)
    for number in range(2):
        moved = with_changes(config, state__dir=str(tmp_path / f"machine-{number}"))
        with StateManager(moved) as manager, manager.open_task(TASK) as task:
            assert dict(task.store("totals").range()) == {b"%d" % n: b"x" for n in range(number)}
            write(task, {b"%d" % number: b"x"})
            task.commit({"orders-0": number})
    store = open_blob_store(config, SystemClock())
    found = [info.blob_id for info in list_blobs(store, f"{config.job_key}/Partition_0")]
    assert found
    assert all(store.stat(name).expires_ms is None for name in found)
    store.put(f"{config.job_key}/Partition_0/totals/failed/index", b"x", ttl_days=30)
    path = tmp_path / "job.toml"
    path.write_text("\n".join(f"{json.dumps(k)} = {json.dumps(v)}" for k, v in config.to_mapping().items()))
    result = CliRunner().invoke(cli, ["gc", "--config", str(path), "--json"], catch_exceptions=False)
    assert json.loads(result.stdout)["young"]["blobs"] == 1
    assert any("no tags" in text for text in store.administration.probe())
    assert store.administration.fix() == ()
    store.close()


@pytest.mark.parametrize(
    "many",
    [(400, "MissingContentMD5"), (400, "InvalidRequest"), (405, "MethodNotAllowed"), (403, "SignatureDoesNotMatch")],
)
def test_a_server_that_refuses_to_delete_many(
    proxy: LackingProxy, settings: dict[str, object], many: tuple[int, str]
) -> None:
    """Blobs are deleted one by one, and `doctor` deletes several as a clean-up does, and says what it means."""
    store = opened(settings)
    proxy.many = many
    names = [f"orders/1/{number}" for number in range(5)]
    for name in names:
        store.put(name, b"x", ttl_days=30)
    assert store.delete_many(names) == {}
    assert list(list_blobs(store, "orders/1/")) == []
    findings = diagnosed(settings)
    assert [finding.status.value for finding in findings if finding.check == "blob delete"] == ["ok"]
    assert any("one object with a request" in finding.detail for finding in findings) == ("Signature" not in many[1])
    store.close()


def test_deletes_that_are_refused_one_by_one_too(proxy: LackingProxy, settings: dict[str, object]) -> None:
    """Where no delete is allowed, that is one error, and neither the store nor `doctor` tries each blob."""
    store = opened(settings)
    names = [f"orders/1/{number}" for number in range(5)]
    for name in names:
        store.put(name, b"x", ttl_days=30)
    proxy.many = (403, "AccessDenied")
    proxy.faults = [Fault("DELETE", times=99, answer=(403, "AccessDenied"))]
    proxy.requests.clear()
    with pytest.raises(AccessDenied):
        store.delete_many(names)
    assert len(proxy.requests) == 2
    problems = [finding.check for finding in diagnosed(settings) if finding.status.value == "problem"]
    assert problems == ["blob TTL", "blob delete"]
    store.close()


def diagnosed(settings: Mapping[str, object]) -> list[Finding]:
    """Return what `doctor` finds in the blob store."""
    report = Report()
    check_blobs(report, JobConfig.from_mapping({"job.name": "orders", **settings}), fix=False)
    return report.findings
