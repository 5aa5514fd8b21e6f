"""Clean-ups that fail: which ones block commits, and which ones do not."""

from __future__ import annotations

import logging
import random
from pathlib import Path

import pytest

from statemgr import JobConfig, StateManager
from statemgr.blobs.file import FileBlobStore
from statemgr.errors import AccessDenied, RetryableError
from statemgr.flows.committing import clean_up
from tests.commits import TASK, attempt, blob_files, commit, current, totals
from tests.jobs import job_mapping, with_changes
from tests.servers import KafkaServer

CHANGELOG = ["kafka-changelog"]


def refuse(self: FileBlobStore, blob_id: str) -> None:
    """Take the place of a method of the blob store."""
    raise AccessDenied("told to", blob=blob_id)


def without_blobs(config: JobConfig) -> JobConfig:
    """Return the job with changelogs alone, and without a blob store."""
    mapping = {key: value for key, value in config.to_mapping().items() if not key.startswith("blob.")}
    return JobConfig.from_mapping(mapping | {"task.backup.factories": CHANGELOG, "task.restore.factories": CHANGELOG})


def test_a_job_that_has_left_blobs_behind_commits(
    kafka: KafkaServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """If older checkpoints have blobs and no blob store is configured any more, one warning says so and no commit
    fails."""
    both = JobConfig.from_mapping(job_mapping(kafka, tmp_path))
    commit(both, {b"a": b"1"}, 1)
    alone = without_blobs(both)
    with caplog.at_level(logging.WARNING, logger="statemgr"):
        commit(alone, {b"b": b"2"}, 2)
    assert caplog.text.count("the job no longer uses blob-store") == 1
    checkpoint = commit(alone, {b"c": b"3"}, 3)
    assert set(checkpoint.state_checkpoint_markers) == {"kafka-changelog"}
    assert totals(alone, "kafka-changelog")[TASK] == {b"a": b"1", b"b": b"2", b"c": b"3"}
    # and back: the blob store gets the complete state again
    commit(with_changes(both, task__restore__factories=CHANGELOG), {}, 4)
    assert totals(both, "blob-store")[TASK] == {b"a": b"1", b"b": b"2", b"c": b"3"}


def test_a_ttl_that_was_outstanding_when_the_blob_store_went(
    kafka: KafkaServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job goes back to changelogs while the TTL of its blobs cannot be removed, and takes the blob store out of its
    configuration. The blobs expire, as the documentation says, and commits go on after a third of the TTL, too."""
    both = JobConfig.from_mapping(job_mapping(kafka, tmp_path))

    with monkeypatch.context() as patch:
        patch.setattr(FileBlobStore, "remove_ttl", refuse)
        for number in (1, 2):
            commit(both, {b"%d" % number: b"1"}, number)
    record = current(both)
    assert record is not None
    assert record.current.outstanding_ttl
    alone = without_blobs(both)
    monkeypatch.setattr(clean_up, "DAY_MS", 0)
    assert not commit(alone, {b"b": b"2"}, 3).outstanding_ttl
    commit(alone, {b"c": b"3"}, 4)


def test_outstanding_ttls_stay_few(kafka: KafkaServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Invariant 13: only the newest checkpoint lists outstanding TTLs, and a commit that would list too many is
    refused."""
    config = JobConfig.from_mapping(job_mapping(kafka, tmp_path, backup=("blob-store",), task__checkpoint__retained=3))

    with monkeypatch.context() as patch:
        patch.setattr(FileBlobStore, "remove_ttl", refuse)
        for number in range(3):
            commit(config, {b"%d" % number: b"x"}, number)
        record = current(config)
        assert record is not None
        assert len(record.checkpoints) == 3
        outstanding = {o.blob_id for o in record.current.outstanding_ttl}
        assert len(outstanding) == 2, "all but its own, which the next owner finds"
        assert outstanding < blob_files(tmp_path, expiring=True)
        assert not any(older.outstanding_ttl for older in record.checkpoints[1:])
        patch.setattr(clean_up, "MOST_OUTSTANDING", len(outstanding))
        with pytest.raises(RetryableError, match="TTL") as caught:
            commit(config, {b"3": b"x"}, 3)
        assert "s3:DeleteObjectTagging" in str(caught.value.hint)
    commit(config, {b"4": b"x"}, 4)
    assert not blob_files(tmp_path, expiring=True)
    assert totals(config, "blob-store")[TASK] == {b"%d" % n: b"x" for n in (0, 1, 2, 4)}


@pytest.mark.parametrize("whole_job", [False, True])
def test_a_snapshot_that_lost_blobs_is_filled_anew(kafka: KafkaServer, tmp_path: Path, whole_job: bool) -> None:
    """Invariant 2: the open finds blobs that expired before their TTL was removed, and no later checkpoint needs
    them."""
    config = JobConfig.from_mapping(job_mapping(kafka, tmp_path, restore=("kafka-changelog",)))
    commit(config, {b"a": random.Random(1).randbytes(200_000)}, 1)
    gone = sorted(blob for blob in blob_files(tmp_path) if not blob.endswith("/index"))
    (tmp_path / "blobs" / gone[0]).unlink()
    if whole_job:
        with StateManager(config) as manager:
            manager.publish([attempt(config, manager.acquire(), TASK, {b"b": b"2"}, 2)])
    else:
        commit(config, {b"b": b"2"}, 2)
    assert totals(config, "blob-store") == totals(config, "kafka-changelog")
    assert len(totals(config, "blob-store")[TASK]) == 2
