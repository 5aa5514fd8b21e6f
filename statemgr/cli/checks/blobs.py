"""The blob store: put with a TTL, get, refused overwrite, TTL removed, delete, lifecycle rule, the clock."""

from __future__ import annotations

from statemgr.cli.checks.brokers import clock_finding
from statemgr.cli.checks.finding import Finding, Status, guarded
from statemgr.config import JobConfig
from statemgr.errors import InvalidError, StatemgrError
from statemgr.ports import BlobAdministration, BlobStore, Clock

_CONTENT = b"statemgr doctor"


def check_blobs(config: JobConfig, *, fix: bool) -> list[Finding]:
    """Every kind of request that a job makes, once and without retries. ``fix`` installs the lifecycle rule."""
    from statemgr.blobs import open_raw_blob_store
    from statemgr.local.clock import SystemClock, system_ids

    findings: list[Finding] = []
    if config.get("blob.store.uri") is None:
        return [
            Finding(check="blobs", status=Status.NOTE, detail="blob.store.uri is not set: the job uses no blob store")
        ]
    clock = SystemClock()
    with guarded("blobs", findings):
        store = open_raw_blob_store(config, clock)
        try:
            blob_id = f"{config.job_key}/_doctor/{system_ids().attempt_id()}"
            _requests(store, blob_id, config.ttl_days, clock, findings)
            if fix:
                _fix(store.administration, findings)
            _probe(store.administration, findings)
        finally:
            store.close()
    return findings


def _requests(store: BlobStore, blob_id: str, ttl_days: int, clock: Clock, findings: list[Finding]) -> None:
    """Stops at the first failure, but always tries to delete what was put. Raises: StatemgrError."""
    before = clock.time_ns()
    store.put(blob_id, _CONTENT, ttl_days=ttl_days)
    after = clock.time_ns()
    _ok("blob put", "with a TTL", findings)
    try:
        _get(store, blob_id, findings)
        _overwrite(store, blob_id, findings)
        info = store.stat(blob_id)
        findings.append(clock_finding("the blob store's", info.modified_ms - (before + after) // 2_000_000))
        with guarded("blob TTL", findings, fix="allow s3:PutObjectTagging and s3:DeleteObjectTagging"):
            store.remove_ttl(blob_id)
            _ok("blob TTL", "removed", findings)
    finally:
        with guarded("blob delete", findings):
            store.delete(blob_id)
            _ok("blob delete", "done", findings)


def _get(store: BlobStore, blob_id: str, findings: list[Finding]) -> None:
    buffer = bytearray(len(_CONTENT) + 1)
    filled = 0
    with guarded("blob get", findings), store.get(blob_id) as reader:
        while read := reader.readinto(memoryview(buffer)[filled:]):
            filled += read
        if bytes(buffer[:filled]) == _CONTENT:
            _ok("blob get", "what was put came back", findings)
        else:
            findings.append(
                Finding(
                    check="blob get",
                    status=Status.PROBLEM,
                    detail="the blob store returned other bytes than it was sent",
                    fix="use another blob store: this one changes data",
                )
            )


def _overwrite(store: BlobStore, blob_id: str, findings: list[Finding]) -> None:
    """A second put under the same name must be refused."""
    try:
        store.put(blob_id, b"other", ttl_days=1)
    except InvalidError:
        _ok("blob overwrite", "refused, as it should be", findings)
    except StatemgrError as error:
        findings.append(Finding(check="blob overwrite", status=Status.NOTE, detail=error.message, fix=error.hint))
    else:
        findings.append(
            Finding(
                check="blob overwrite",
                status=Status.NOTE,
                detail="not refused: the server has no conditional PUTs, so that only unique names protect blobs",
            )
        )


def _fix(administration: BlobAdministration, findings: list[Finding]) -> None:
    with guarded("blob lifecycle", findings, fix="allow s3:PutLifecycleConfiguration, or create the rule yourself"):
        for done in administration.fix():
            _ok("blob lifecycle", done, findings)


def _probe(administration: BlobAdministration, findings: list[Finding]) -> None:
    for text in administration.probe():
        note = text.removeprefix("note:").strip()
        status = Status.NOTE if text.startswith("note:") else Status.PROBLEM
        fix = None if status is Status.NOTE else "`statemgr doctor --fix`"
        findings.append(Finding(check="blob store", status=status, detail=note, fix=fix))


def _ok(check: str, detail: str, findings: list[Finding]) -> None:
    findings.append(Finding(check=check, status=Status.OK, detail=detail))
