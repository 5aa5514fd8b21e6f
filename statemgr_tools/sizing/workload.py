"""The numbers of a planned job with which the formulas begin. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

from statemgr.config import JobConfig
from statemgr.config.policies import SnapshotInterval
from statemgr.errors import InvalidError

MIB = 1024 * 1024
DEFAULT_INTERVAL = SnapshotInterval(commits=50, size=256 * MIB, seconds=600)


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A job in a consumer loop whose tasks and stores are alike. Rates and sizes are for the complete job.

    Attributes:
        tasks, processes, stores, topics: the number of tasks, of processes that run them, of stores in each task, and
            of input topics.
        keys, key_bytes, value_bytes: keys of all stores together, and the mean size of a key and a value.
        changes_per_s: puts and deletes per second, to random keys.
        commit_s: seconds between commits; ``interval``: when a task makes a snapshot; ``share``: the mean share
            of the interval's commits after which a task makes one.
        retained, hourly, daily: retained checkpoints per task: the newest, and the last ones of hours and of days.
        ttl_days: the days after which unpublished blobs expire.
        lost_share: the share of uploaded bytes that no checkpoint ever names, because a process died before its
            publish.
        blobs, changelog: the backends that commits feed.
        disk_ratio: bytes of table files for each byte of keys and values; 1 without compression.
        sharing: tasks of a process whose segments share a blob.
        part_bytes, parallelism: ``blob.store.part.size`` and ``blob.store.parallelism``.
        get_s, put_s: seconds until the blob store answers a small request.
        bandwidth, store_bandwidth: bytes per second between one process and the blob store, and of the store for all
            processes together (infinite by default).
        replication, compaction_lag_s, kafka_segment_bytes: replicas of the topics, the age from which the changelog is
            compacted, and the brokers' ``segment.bytes``.
        write_buffer_bytes, level0_trigger, target_file_bytes, memory_bytes: RocksDB's options, and
            ``state.memory.bytes``.
    """

    tasks: int
    processes: int = 1
    stores: int = 1
    topics: int = 1
    keys: float
    key_bytes: float = 16
    value_bytes: float = 100
    changes_per_s: float
    commit_s: float = 60.0
    interval: SnapshotInterval = DEFAULT_INTERVAL
    share: float = 0.75
    retained: int = 2
    hourly: int = 0
    daily: int = 0
    ttl_days: float = 30
    lost_share: float = 0.0001
    blobs: bool = True
    changelog: bool = False
    disk_ratio: float = 1.0
    sharing: float = 4
    part_bytes: float = 64 * MIB
    parallelism: int = 8
    get_s: float = 0.03
    put_s: float = 0.05
    bandwidth: float = 500e6
    store_bandwidth: float = math.inf
    replication: int = 3
    compaction_lag_s: float = 4 * 3600
    kafka_segment_bytes: float = 1024 * MIB
    write_buffer_bytes: float = 16 * MIB
    level0_trigger: int = 4
    target_file_bytes: float = 64 * MIB
    memory_bytes: float = 128 * MIB

    def __post_init__(self) -> None:
        """Check the numbers. Raises: InvalidError if one makes no sense."""
        positive = ("tasks", "processes", "stores", "keys", "commit_s", "bandwidth", "disk_ratio", "parallelism")
        bytes_ = ("store_bandwidth", "part_bytes", "write_buffer_bytes", "target_file_bytes")
        finite = {"keys", "commit_s", "disk_ratio"}
        for name in (*positive, *bytes_, "level0_trigger"):
            if not getattr(self, name) > 0 or (name in finite and getattr(self, name) == math.inf):
                raise InvalidError(f"{name} is {getattr(self, name)}", hint="give a finite number above 0")
        for name in ("key_bytes", "value_bytes", "changes_per_s", "get_s", "put_s", "lost_share"):
            if not 0 <= getattr(self, name) < math.inf:
                raise InvalidError(f"{name} is {getattr(self, name)}", hint="give a finite number that is not negative")
        if self.processes > self.tasks:
            raise InvalidError(
                f"{self.processes} processes are more than the {self.tasks} tasks",
                hint="a task runs in one process: plan at most as many processes as tasks",
            )


def settings_of(config: JobConfig) -> dict[str, object]:
    """Return the attributes of a :class:`Workload` that a job's configuration determines."""
    stores = list(config.stores.values())
    found: dict[str, object] = {
        "tasks": config.tasks,
        "stores": max(len(stores), 1),
        "topics": max(len(config.inputs), 1),
        "commit_s": config.commit_ms / 1000,
        "interval": config.snapshot_interval,
        "retained": config.retained,
        "hourly": config.retained_hourly,
        "daily": config.retained_daily,
        "ttl_days": config.ttl_days,
        "part_bytes": config.get("blob.store.part.size"),
        "parallelism": config.get("blob.store.parallelism"),
        "memory_bytes": config.get("state.memory.bytes"),
    }
    if stores:
        first = stores[0]
        factories = {factory for store in stores for factory in store.backup_factories}
        found |= {
            "blobs": "blob-store" in factories,
            "changelog": "kafka-changelog" in factories,
            "compaction_lag_s": first.min_compaction_lag_ms / 1000,
        }
        options = {
            "write_buffer_bytes": "write.buffer.size.bytes",
            "level0_trigger": "level0.compaction.trigger",
            "target_file_bytes": "target.file.size.bytes",
        }
        found |= {name: first.rocksdb[key] for name, key in options.items() if key in first.rocksdb}
    replication = config.checkpoint_replication_factor
    return found | ({"replication": replication} if replication > 0 else {})
