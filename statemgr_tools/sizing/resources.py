"""The formulas of topics, restores, machines and cost. One formula per line, with its source. Pure.

Measured numbers come from ``statemgr bench`` on two processors. docs/performance.md has those of a slower machine.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cached_property

from statemgr.model.snapshot import INLINE_LIMIT
from statemgr_tools.sizing.commits import TABLE, Commits
from statemgr_tools.sizing.prices import Prices
from statemgr_tools.sizing.workload import MIB, Workload

#: Bytes of a task record without stores and inputs, and per store and input (observed, with short names).
RECORD, RECORD_STORE, RECORD_TOPIC = 100, 203, 40
#: Bytes of a record's key (observed); of a record and of a batch beyond key and value, and of a transaction's marker
#: (Kafka's message format, version 2).
RECORD_KEY, KAFKA_RECORD, KAFKA_BATCH, KAFKA_MARKER = 48, 10, 61, 78
#: The share of a compacted topic that may be dirty: Kafka's ``min.cleanable.dirty.ratio``.
DIRTY = 0.5
#: Seconds after which Kafka closes a segment (``segment.ms``) and keeps deletes (``delete.retention.ms``).
SEGMENT_S, DELETES_S = 7 * 86_400, 86_400
#: Records per second: a restore from a changelog (``restore-changelog``), and of the checkpoint topic (``open-job``).
CHANGELOG_RECORDS, TOPIC_RECORDS = 661_861, 854_934
#: Bytes per second that a restore fetches and verifies (``restore-s3``), and ingests as tables (``restore-segments``).
RESTORED_BYTES, INGESTED_BYTES = 1_382e6, 220e6
#: Seconds for each record that a restore writes (``restore-segments``, before segments were tables).
APPLIED_S = 2e-6
#: Bytes of a process without stores, of a thread's transfer buffer, of a store's write buffer and of its change buffer.
PROCESS, BUFFER, WRITE_BUFFER, CHANGE_BUFFER = 90 * MIB, MIB, 4 * MIB, 32 * MIB
#: Most bytes of changelog records that wait in a task's producer (statemgr.kafka.clients).
PRODUCER_QUEUE = 32 * MIB
#: Seconds of a publish (docs/performance.md, Batches on Spark).
PUBLISH_S = 0.021
#: Seconds after which a process lists the orders to check blobs (statemgr.engine.coordinator), and after which a task
#: checks each of its blobs again (statemgr.flows.upkeep).
LOOK_S, CHECK_S = 60, 86_400
MONTH_S = 30 * 86_400


class Resources:
    """The needs of a :class:`Workload`'s topics, restores and machines."""

    def __init__(self, workload: Workload) -> None:
        self.given = workload
        self.commits = Commits(workload)

    @cached_property
    def commit_s(self) -> float:
        """Seconds from the start of a commit to its checkpoint: the upload of its segments, then the publish."""
        if not self.given.blobs:
            return PUBLISH_S
        size = self.commits.snapshot_bytes if self.commits.every_commit else self.commits.segment_bytes
        upload = self.given.put_s + size * self.given.stores * self.sharing_tasks / self.given.bandwidth
        return PUBLISH_S + (0.0 if self.commits.is_inline and not self.commits.every_commit else upload)

    @cached_property
    def sharing_tasks(self) -> float:
        """Tasks of a process that commit at the same time and share its bandwidth."""
        return self.tasks_per_process * self.commits.active

    # --- the checkpoint topic --------------------------------------------------------------------------------------

    @cached_property
    def checkpoint_record_bytes(self) -> float:
        """Bytes of the task record of a task that publishes alone, including its inline chains."""
        inline = self.commits.chain.inline if self.given.blobs else 0.0
        return RECORD + RECORD_TOPIC * self.given.topics + self.given.stores * (RECORD_STORE + inline)

    @cached_property
    def publish_bytes(self) -> float:
        """Bytes that a publish adds to the topic: a batch with the record and the oldest one's delete, and a marker."""
        records = 2 * (RECORD_KEY + KAFKA_RECORD) + self.checkpoint_record_bytes
        return KAFKA_BATCH + records + KAFKA_MARKER

    @cached_property
    def topic_written_per_s(self) -> float:
        """Bytes per second that publishes add to the topic on one replica."""
        return self.commits.commits_per_s * self.publish_bytes

    @cached_property
    def topic_live_bytes(self) -> float:
        """Bytes of the retained records."""
        each = RECORD_KEY + KAFKA_RECORD + self.checkpoint_record_bytes
        return self.given.tasks * (self.given.retained + self.given.hourly + self.given.daily) * each

    @cached_property
    def topic_bytes(self) -> float:
        """Bytes of the topic on one replica before compaction.

        These are live and dirty records, one day's deletes, and the segment that Kafka is writing, which it never
        compacts.
        """
        deletes = self.commits.commits_per_s * DELETES_S * (RECORD_KEY + KAFKA_RECORD)
        active = min(self.given.kafka_segment_bytes, self.topic_written_per_s * SEGMENT_S)
        return (self.topic_live_bytes + deletes) / (1 - DIRTY) + active

    @cached_property
    def topic_read_s(self) -> float:
        """Seconds that a starting process needs to read the topic: two records per publish that the topic still has."""
        return 2 * self.topic_bytes / self.publish_bytes / TOPIC_RECORDS

    # --- changelogs ------------------------------------------------------------------------------------------------

    @cached_property
    def changelog_written_per_s(self) -> float:
        """Bytes per second of changelog records on one replica."""
        return self.given.changelog * self.given.changes_per_s * (self.commits.record_bytes + KAFKA_RECORD)

    @cached_property
    def changelog_records(self) -> float:
        """Records in the changelogs.

        There is one for each key. Others are too young for compaction, dirty (as many as Kafka allows), or in the
        segment that Kafka is writing in each partition, which it does not compact.
        """
        if not self.given.changelog:
            return 0.0
        per_segment = self.given.kafka_segment_bytes / (self.commits.record_bytes + KAFKA_RECORD)
        active = self.given.tasks * self.given.stores * per_segment
        young = self.given.changes_per_s * max(self.given.compaction_lag_s, 1)
        return self.given.keys / (1 - DIRTY) + max(young, min(active, self.given.changes_per_s * SEGMENT_S))

    @cached_property
    def changelog_bytes(self) -> float:
        """Bytes of the changelogs on one replica."""
        return self.changelog_records * (self.commits.record_bytes + KAFKA_RECORD)

    @cached_property
    def kafka_bytes(self) -> float:
        """Bytes of disk on all brokers together."""
        return self.given.replication * (self.topic_bytes + self.changelog_bytes)

    # --- restores --------------------------------------------------------------------------------------------------

    @cached_property
    def tasks_per_process(self) -> float:
        """Tasks of the busiest process."""
        return math.ceil(self.given.tasks / self.given.processes)

    @cached_property
    def needed_blobs(self) -> float:
        """Blobs of one task that a restore needs: index, parts and segments."""
        part = min(self.given.part_bytes, self.given.target_file_bytes)
        waiting = (self.given.level0_trigger - 1) / 2 if self.commits.flushed_bytes > INLINE_LIMIT else 0.0
        parts = waiting + max(1.0, self.commits.store_bytes / part)
        return self.given.stores * (parts + self.commits.chain.blobs / 2 + 1)

    @cached_property
    def restore_gets(self) -> float:
        """GET requests of one task's restore.

        These are its chain and an older one, the needed blobs, and a check of each of them when the task opens
        (``Transfer.absent``).
        """
        return 2 * self.needed_blobs + self.given.stores * min(2.0, self.commits.chain.blobs / 2)

    @cached_property
    def _segments(self) -> float:
        """Mean number of segments in a chain."""
        return 0.0 if self.commits.every_commit else self.commits.commits_between / 2

    @cached_property
    def restore_bytes(self) -> float:
        """Bytes that one task's restore fetches."""
        segments = self._segments * self.commits.segment_bytes
        return self.given.stores * (self.commits.store_bytes + segments)

    @cached_property
    def fetch_bandwidth(self) -> float:
        """Bytes per second of a process that restores alone."""
        return min(self.given.bandwidth, RESTORED_BYTES, self.given.store_bandwidth)

    @cached_property
    def apply_s(self) -> float:
        """Seconds of processing for one task's segments: tables are ingested, and records are written."""
        size = self._segments * self.commits.segment_bytes * self.given.stores
        changes = self._segments * self.commits.changes * self.given.stores
        return size / INGESTED_BYTES if self.commits.changes >= TABLE else changes * APPLIED_S

    @cached_property
    def restore_latency_s(self) -> float:
        """Seconds of latency in one task's restore: the chain, then the index, then rounds of requests."""
        return self.given.get_s * (2 + math.ceil(self.restore_gets / self.given.parallelism))

    @cached_property
    def restore_task_s(self) -> float:
        """Seconds until one task is open on an empty machine, without the time to read the checkpoint topic."""
        if not self.given.blobs:
            return self._replayed(1, 1)
        return self.restore_latency_s + self.restore_bytes / self.fetch_bandwidth + self.apply_s

    def restore_tasks_s(self, tasks: float, processes: float) -> float:
        """Seconds until tasks that are spread over processes are open, including the time to read the checkpoint topic.

        Tasks of a process share its bandwidth and its request threads.
        """
        if not self.given.blobs:
            return self.topic_read_s + self._replayed(tasks, processes)
        each = math.ceil(tasks / processes)
        bandwidth = min(self.fetch_bandwidth, self.given.store_bandwidth / processes)
        rounds = self.given.get_s * (2 + math.ceil(each * self.restore_gets / self.given.parallelism))
        return self.topic_read_s + rounds + each * (self.restore_bytes / bandwidth + self.apply_s)

    def _replayed(self, tasks: float, processes: float) -> float:
        records = self.changelog_records / self.given.tasks * math.ceil(tasks / processes)
        return records / CHANGELOG_RECORDS

    @cached_property
    def restore_machine_s(self) -> float:
        """Seconds until all tasks of a lost machine are open on one new machine."""
        return self.restore_tasks_s(self.tasks_per_process, 1)

    @cached_property
    def restore_spread_s(self) -> float:
        """Seconds until they are open if the other processes share the lost machine's tasks."""
        others = min(self.given.processes - 1, self.tasks_per_process)
        return self.restore_tasks_s(self.tasks_per_process, others) if others else self.restore_machine_s

    @cached_property
    def restore_all_s(self) -> float:
        """Seconds until every task is open if all machines are lost and replaced."""
        return self.restore_tasks_s(self.given.tasks, self.given.processes)

    # --- upkeep ----------------------------------------------------------------------------------------------------

    @cached_property
    def lists_per_s(self) -> float:
        """LIST requests per second of all processes, also while the job is idle."""
        return self.given.processes / LOOK_S if self.given.blobs else 0.0

    @cached_property
    def checks_per_s(self) -> float:
        """GET requests per second with which the owners check the blobs of their tasks, also while the job is idle."""
        return self.given.tasks * self.needed_blobs / CHECK_S if self.given.blobs else 0.0

    # --- machines --------------------------------------------------------------------------------------------------

    @cached_property
    def disk_per_process(self) -> float:
        """Bytes of local disk.

        These are the state, files that only older checkpoints and running compactions need, and segments and changes
        since the snapshot.
        """
        stores = self.tasks_per_process * self.given.stores
        segments = self.commits.commits_between * self.commits.segment_bytes
        return stores * (self.commits.store_bytes + self.commits.rewritten_bytes + 2 * segments)

    @cached_property
    def memory_per_process(self) -> float:
        """Bytes of resident memory: the shared budget of RocksDB, buffers of stores, transfers and producers, and
        Python."""
        changed = self.commits.changes * self.commits.record_bytes
        buffers = min(WRITE_BUFFER, changed) + min(CHANGE_BUFFER, changed)
        queue = self.given.changelog * min(PRODUCER_QUEUE, self.given.stores * changed)
        of_tasks = self.tasks_per_process * (self.given.stores * buffers + queue)
        return PROCESS + self.given.memory_bytes + of_tasks + self.given.parallelism * BUFFER

    @cached_property
    def network_per_process(self) -> float:
        """Bytes per second that a process sends to the blob store and to Kafka, without its own output."""
        sent = self.commits.uploaded_per_s + self.changelog_written_per_s + self.topic_written_per_s
        return sent / self.given.processes

    # --- cost ------------------------------------------------------------------------------------------------------

    def monthly_cost(self, prices: Prices) -> Mapping[str, float]:
        """The cost of each part in 30 days."""
        store, month, commits = prices.blob_store, MONTH_S / 1000, self.commits
        tasks = commits.given.tasks if commits.given.blobs else 0
        gets = tasks * self.restore_gets * prices.restores_per_month / 1000 + self.checks_per_s * month
        return {
            "blob store: PUT": commits.puts_per_s * month * store.put_1000,
            "blob store: LIST": self.lists_per_s * month * store.put_1000,
            "blob store: removing TTLs": commits.untags_per_s * month * store.untag_1000,
            "blob store: DELETE": commits.deletes_per_s * month * store.delete_1000,
            "blob store: GET": gets * store.get_1000,
            "blob store: storage": store.storage(commits.stored_bytes),
            "Kafka: storage": self.kafka_bytes / 1e9 * prices.kafka.storage_gb,
            "Kafka: writes": (self.changelog_written_per_s + self.topic_written_per_s)
            * MONTH_S
            / 1e9
            * prices.kafka.written_gb,
            "local disk": self.disk_per_process * self.given.processes / 1e9 * prices.machines.disk_gb,
            "memory": self.memory_per_process * self.given.processes / 1e9 * prices.machines.memory_gb,
        }
