"""A process without free file descriptors: its errors say so, and it loses nothing and gives nothing up."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from statemgr import JobConfig
from tests.commits import TASK, totals
from tests.jobs import DUAL, SEGMENTS, SNAPSHOTS, job_mapping
from tests.servers import KafkaServer, S3Server

pytestmark = pytest.mark.integration
ROOT = Path(__file__).resolve().parents[3]


def run(what: str, mapping: dict[str, object], directory: Path, **more: object) -> list[dict[str, Any]]:
    """The errors that a child process met (see ``tests/few_files.py``)."""
    directory.mkdir()
    order = {"what": what, "config": mapping, "directory": str(directory), **more}
    child = subprocess.run(
        [sys.executable, "-m", "tests.few_files", json.dumps(order)],
        cwd=ROOT, capture_output=True, text=True, check=False, timeout=600,
    )  # fmt: skip
    assert child.returncode == 0, child.stderr[-3000:]
    found: list[dict[str, Any]] = json.loads(child.stdout)
    return found


def check(found: list[dict[str, Any]], names: set[str]) -> None:
    """Check that each kind of work failed with few descriptors, always with a retryable error, that an error named the
    limit, and that the work succeeded with enough descriptors."""
    failed = [one for one in found if one["kinds"]]
    for one in failed:
        assert "RetryableError" in one["kinds"], one
    assert {one["name"] for one in failed} >= names
    assert {one["name"] for one in failed if "ulimit -n" in one["text"]} >= names, failed
    assert {one["name"] for one in found if not one["kinds"]} >= names, "and with enough it works"


def mapping_of(kafka: KafkaServer, directory: Path, **more: Any) -> dict[str, object]:
    """A job that gives up early."""
    return job_mapping(kafka, directory, **more) | {
        "blob.store.retry.policy.max.retries": 0,
        "task.commit.timeout.ms": 3_000,
    }


@pytest.mark.long
@pytest.mark.parametrize("where", ["file", "s3"])
def test_blobs_without_descriptors(where: str, kafka: KafkaServer, s3: S3Server, tmp_path: Path) -> None:
    """FAULT 24: too many open files at a PUT or a GET cause a retryable error that names the limit, never a lost
    blob."""
    mapping = mapping_of(kafka, tmp_path, s3=s3 if where == "s3" else None)
    check(run(where, mapping, tmp_path / "work"), {f"{where} put", f"{where} get"})


def test_a_store_without_descriptors(kafka: KafkaServer, tmp_path: Path) -> None:
    """FAULT 24: too many open files in RocksDB cause a retryable error at any of its files, and no file counts as
    damaged."""
    check(run("rocksdb", mapping_of(kafka, tmp_path), tmp_path / "work"), {"rocksdb"})


@pytest.mark.long
@pytest.mark.parametrize("kind", [SEGMENTS, SNAPSHOTS])
def test_tasks_without_descriptors(kafka: KafkaServer, tmp_path: Path, kind: str) -> None:
    """FAULT 24: with too few descriptors, restores and commits fail with retryable errors, and the next ones
    succeed."""
    mapping = mapping_of(kafka, tmp_path, backup=DUAL, kind=kind)
    found = run("tasks", mapping, tmp_path / "work", counts=[8, 18, 20, 22, 30])
    for one in found:
        assert not one["kinds"] or "RetryableError" in one["kinds"], one
    assert any("ulimit -n" in one["text"] for one in found)
    for factory in DUAL:
        assert totals(JobConfig.from_mapping(mapping), factory)[TASK] == {b"a": b"30"}
