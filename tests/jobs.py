"""Job configurations for tests. Each job is small, has a unique name and uses the run's servers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from statemgr import JobConfig, StateManager
from tests.servers import KafkaServer, S3Server

DUAL = ("kafka-changelog", "blob-store")
#: How commits go to ``blob-store``: each as a snapshot, or as segments of changes on top of a snapshot.
SNAPSHOTS, SEGMENTS = "snapshots", "segments"
#: The matching value of ``task.commit.snapshot.interval``; the value for segments is the default.
INTERVALS = {SNAPSHOTS: ["1 commit"], SEGMENTS: ["50 commits", "256 MiB", "10 min"]}
#: Every way to back up, as factory and kind of commit.
ALL = (("kafka-changelog", SNAPSHOTS), ("blob-store", SNAPSHOTS), ("blob-store", SEGMENTS))


def job_mapping(
    kafka: KafkaServer,
    directory: Path,
    *,
    name: str | None = None,
    backup: Sequence[str] = DUAL,
    restore: Sequence[str] | None = None,
    stores: Sequence[str] = ("totals",),
    tasks: int = 1,
    s3: S3Server | None = None,
    kind: str = SNAPSHOTS,
    **more: object,
) -> dict[str, object]:
    """Return a job's configuration as a mapping. Keys in ``more`` use ``__`` for ``.``."""
    mapping: dict[str, object] = {
        "job.name": name or kafka.fresh_name("job"),
        "job.tasks": tasks,
        "kafka.bootstrap.servers": kafka.bootstrap_servers,
        "state.dir": str(directory / "state"),
        "task.backup.factories": list(backup),
        "task.restore.factories": list(restore or backup),
        "task.commit.timeout.ms": 30_000,
        "task.commit.snapshot.interval": INTERVALS[kind],
        "blob.store.part.size": 65_536,
        **{f"stores.{store}.value.serde": "bytes" for store in stores},
    }
    if s3 is None:
        mapping["blob.store.uri"] = (directory / "blobs").resolve().as_uri()
    else:
        mapping |= {
            "blob.store.uri": f"s3://{s3.bucket}/{s3.fresh_prefix()}",
            "blob.store.s3.endpoint": s3.endpoint,
            "blob.store.s3.region": s3.region,
            "blob.store.s3.access.key": s3.access_key,
            "blob.store.s3.secret.key": s3.secret_key,
        }
    return mapping | {key.replace("__", "."): value for key, value in more.items()}


def with_changes(config: JobConfig, **changes: object) -> JobConfig:
    """Return the same job with some keys changed (``__`` for ``.``)."""
    return JobConfig.from_mapping(
        {**config.to_mapping(), **{key.replace("__", "."): value for key, value in changes.items()}}
    )


def elsewhere(config: JobConfig, directory: Path, restore: str | Sequence[str]) -> JobConfig:
    """Return the same job on another machine (an empty state directory) that restores with ``restore``."""
    return with_changes(
        config,
        state__dir=str(directory),
        task__restore__factories=[restore] if isinstance(restore, str) else restore,
    )


def contents(config: JobConfig, task: str = "Partition 0") -> tuple[dict[str, dict[bytes, bytes]], Mapping[str, int]]:
    """Open the task, read all of every store and close it. Return the state and the input offsets."""
    with StateManager(config) as manager, manager.open_task(task) as opened:
        state = {store: dict(opened.store(store).range()) for store in config.stores}
        offsets = opened.last_checkpoint.input_offsets if opened.last_checkpoint else {}
        return state, offsets
