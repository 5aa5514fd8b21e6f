"""The formulas of commits and snapshots: requests and bytes of the blob store. One formula per line, with its source.

"Observed" numbers were counted with ``JobTester``; ``tests/tools/test_plan_capacity.py`` repeats that. Others are
constants of the code or lines of docs/performance.md. Pure.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from statemgr.model.record_size import inline_chain_limit
from statemgr.model.snapshot import INLINE_LIMIT
from statemgr_tools.sizing.workload import MIB, Workload

#: Bytes of changes up to which a segment is inline (statemgr.backends.blobs.backup).
INLINE_SEGMENT = 2 * 1024
#: Changes from which a segment is a table (statemgr.backends.blobs.tables).
TABLE = 2_000
#: Bytes of a segment without its changes: header, block and end (docs/format.md), and a zstandard frame.
SEGMENT = 80
#: Bytes for each change beyond its key and value: in a table (``commit-bytes`` in docs/performance.md: 1.22 MB for
#: 1.16 MB of changes), and in records, whose sizes zstandard compresses (observed).
OF_TABLE_CHANGE, OF_RECORD_CHANGE = 6, 2
#: Bytes of a chain without segments, of a segment that it refers to, and of an inline segment beyond its own
#: (observed).
CHAIN, CHAIN_REFERENCE, CHAIN_INLINE = 200, 90, 12
#: Bytes of changes of a store that are uploaded before the commit (statemgr.flows.committing.persist_ahead).
AHEAD = 8 * MIB
#: Maximum bytes of the level below level 0, and the factor by which each next level is larger (RocksDB's defaults).
LEVEL_BASE, FANOUT = 256 * MIB, 10
#: Bytes of memtable that an entry takes beyond its key and value (RocksDB's skip list, observed).
OF_MEMTABLE_ENTRY = 24
#: Bytes of an index blob without its table files but with the directory's inline files (observed), and per file.
INDEX, INDEX_FILE = 9_000, 120


@dataclass(frozen=True)
class ChainWalk:
    """The totals of the commits between two snapshots of one store.

    Attributes:
        blobs: commits that wrote a blob; ``bytes``: bytes in these blobs; ``inline``: mean inline bytes of a record.
    """

    blobs: int
    bytes: float
    inline: float


def walk_chain(commits: int, segment: float, *, inline: bool, limit: int) -> ChainWalk:
    """Follow a chain from a snapshot through its commits (``BlobBackup._inline`` and ``_write``).

    Args:
        segment: bytes of one commit's segment; ``inline``: whether it is small enough to be inline.
        limit: maximum bytes of an inline chain.
    """
    stored = waiting = blobs = 0
    written = in_records = 0.0
    for _ in range(commits):
        size = CHAIN + CHAIN_REFERENCE * stored + (segment + CHAIN_INLINE) * (waiting + 1)
        if inline and size <= limit:
            waiting += 1
            in_records += size
            continue
        stored += waiting + 1
        written += segment * (waiting + 1) + CHAIN + CHAIN_REFERENCE * stored
        waiting, blobs = 0, blobs + 1
    return ChainWalk(blobs, written, in_records / max(commits, 1))


class Commits:
    """The uploads of a :class:`Workload`'s commits and snapshots. Rates are for the complete job."""

    def __init__(self, workload: Workload) -> None:
        self.given = workload

    # --- one commit of one store of one task ----------------------------------------------------------------------

    @cached_property
    def record_bytes(self) -> float:
        """Bytes of a key and its value."""
        return self.given.key_bytes + self.given.value_bytes

    @cached_property
    def state_bytes(self) -> float:
        """Bytes of table files in the complete job."""
        return self.given.keys * self.record_bytes * self.given.disk_ratio

    @cached_property
    def store_keys(self) -> float:
        """Number of keys in one store of one task."""
        return self.given.keys / self.given.tasks / self.given.stores

    @cached_property
    def store_bytes(self) -> float:
        """Bytes of table files in one store of one task."""
        return self.state_bytes / self.given.tasks / self.given.stores

    @cached_property
    def active(self) -> float:
        """The share of tasks that have changes to commit: changes are random, and an idle task commits nothing."""
        return -math.expm1(-self.given.changes_per_s * self.given.commit_s / self.given.tasks)

    @cached_property
    def commits_per_s(self) -> float:
        """Commits of all tasks per second. Each one is a publish, and so a Kafka transaction."""
        return self.given.tasks * self.active / self.given.commit_s

    @cached_property
    def changes(self) -> float:
        """Changes of one store in one commit."""
        return self.given.changes_per_s / self.commits_per_s / self.given.stores if self.commits_per_s else 0.0

    @cached_property
    def segment_bytes(self) -> float:
        """Bytes of one store's segment, if keys and values do not compress."""
        each = OF_TABLE_CHANGE if self.changes >= TABLE else OF_RECORD_CHANGE
        return SEGMENT + self.changes * (self.record_bytes + each)

    @cached_property
    def is_inline(self) -> bool:
        """Whether a segment fits into the checkpoint record."""
        return self.changes * self.record_bytes <= INLINE_SEGMENT

    # --- the snapshot policy ---------------------------------------------------------------------------------------

    @cached_property
    def every_commit(self) -> bool:
        """Whether each commit is a snapshot (``1 commit``), so that there are no segments."""
        return self.given.interval.is_every_commit

    @cached_property
    def commits_between(self) -> int:
        """Commits from one snapshot to the next: the first limit that they reach.

        Sources: FLIP-158's periodic materialisation, ``SnapshotInterval.is_over``.
        """
        if self.every_commit:
            return 1
        limits, interval = [100_000.0], self.given.interval
        if interval.commits is not None:
            limits.append(interval.commits * self.given.share)
        if interval.size is not None:
            limits.append(interval.size / self.segment_bytes)
        if interval.seconds is not None and self.active:
            limits.append(interval.seconds / (self.given.commit_s / self.active))
        return max(1, math.ceil(min(limits)))

    @cached_property
    def snapshots_per_s(self) -> float:
        """Snapshots of all stores per second."""
        return self.commits_per_s * self.given.stores / self.commits_between if self.given.blobs else 0.0

    # --- bytes and blobs of one snapshot ---------------------------------------------------------------------------

    @cached_property
    def flushes(self) -> float:
        """Flushes of memtables from one snapshot to the next. The snapshot itself flushes the last one."""
        changed = self.commits_between * self.changes * (self.record_bytes + OF_MEMTABLE_ENTRY)
        return max(1.0, changed / self.given.write_buffer_bytes + 0.5 * (changed > self.given.write_buffer_bytes))

    @cached_property
    def flushed_bytes(self) -> float:
        """Bytes of one flush's table file, which has each changed key once."""
        changes = self.commits_between * self.changes / self.flushes
        distinct = self.store_keys * -math.expm1(-changes / self.store_keys)
        return distinct * self.record_bytes * self.given.disk_ratio

    @cached_property
    def level_bytes(self) -> list[float]:
        """Bytes of RocksDB's levels below level 0, the largest last (``level_compaction_dynamic_level_bytes``)."""
        levels = [self.store_bytes]
        while levels[0] > LEVEL_BASE:
            levels.insert(0, levels[0] / FANOUT)
        return levels

    @cached_property
    def rewritten_bytes(self) -> float:
        """Bytes that compaction rewrites from one snapshot to the next.

        After every few flushes, RocksDB merges level 0 into the level below it. Data that moves further down rewrites
        up to ten times as much there. A file counts at most once.
        """
        merged = min(1.0, self.flushes / self.given.level0_trigger)
        moved = self.flushes * self.flushed_bytes
        deeper = sum(min(size, FANOUT * moved) for size in self.level_bytes[1:])
        return merged * self.level_bytes[0] + deeper

    @cached_property
    def waiting_files(self) -> float:
        """New files of level 0 in a snapshot."""
        return min(self.flushes, self.given.level0_trigger - 1)

    @cached_property
    def snapshot_bytes(self) -> float:
        """Bytes of a snapshot's new files and its index (``Snapshots.store``)."""
        files = self.waiting_files + self.store_bytes / self.given.target_file_bytes
        return self.waiting_files * self.flushed_bytes + self.rewritten_bytes + INDEX + INDEX_FILE * files

    @cached_property
    def snapshot_blobs(self) -> float:
        """Blobs of a snapshot: its index, and the parts of level 0 files and rewritten files.

        Files up to 16 KiB are in the index (``INLINE_LIMIT``).
        """
        part = min(self.given.part_bytes, self.given.target_file_bytes)
        merged = min(1.0, self.flushes / self.given.level0_trigger)
        flushed = max(1, self.flushed_bytes / part) if self.flushed_bytes > INLINE_LIMIT else 0
        rewritten = max(merged, self.rewritten_bytes / part) if self.level_bytes[0] > INLINE_LIMIT else 0
        return 1 + self.waiting_files * flushed + rewritten

    # --- requests and bytes of the job -----------------------------------------------------------------------------

    @cached_property
    def chain(self) -> ChainWalk:
        """The commits of one store between two snapshots."""
        if self.every_commit:
            return ChainWalk(0, 0.0, float(CHAIN))
        limit = inline_chain_limit(self.given.stores, 1)
        return walk_chain(self.commits_between, self.segment_bytes, inline=self.is_inline, limit=limit)

    @cached_property
    def commits_with_blob_per_s(self) -> float:
        """Commits per second with segments in a blob, which all stores of a task share."""
        return self.commits_per_s * self.chain.blobs / self.commits_between if self.given.blobs else 0.0

    @cached_property
    def ahead(self) -> int:
        """Blobs of 8 MiB that the stores upload ahead of a commit."""
        return math.floor(self.changes * self.record_bytes / AHEAD) * self.given.stores

    @cached_property
    def sharing(self) -> float:
        """Tasks whose segments share one blob. 16 tasks of a process needed 2 to 4 (observed); a blob takes 16 MiB."""
        room = 16 * MIB / (self.segment_bytes * self.given.stores)
        return max(1.0, min(self.given.sharing, self.given.tasks / self.given.processes, room))

    @cached_property
    def puts_per_s(self) -> float:
        """PUT requests per second. Hedging adds at most a tenth when the store is slow (``commit-tail``)."""
        segments = self.commits_with_blob_per_s * (1 / self.sharing + self.ahead)
        return segments + self.snapshots_per_s * self.snapshot_blobs

    @cached_property
    def untags_per_s(self) -> float:
        """Requests per second that remove TTLs of published blobs: one per task and blob, even shared (``CleanUp``)."""
        segments = self.commits_with_blob_per_s * (1 + self.ahead)
        return segments + self.snapshots_per_s * self.snapshot_blobs

    @cached_property
    def deletes_per_s(self) -> float:
        """DELETE requests per second: one each for the segments before a snapshot, an old index, and replaced files."""
        segments = 1 if self.chain.blobs else 0
        files = min(1.0, self.flushes / self.given.level0_trigger) if self.level_bytes[0] > INLINE_LIMIT else 0
        return self.snapshots_per_s * (segments + 1 + files)

    @cached_property
    def uploaded_per_s(self) -> float:
        """Bytes of all PUT requests per second."""
        return self.segments_per_s + self.snapshots_per_s * self.snapshot_bytes

    @cached_property
    def segments_per_s(self) -> float:
        """Bytes of segment blobs per second."""
        if not self.given.blobs:
            return 0.0
        return self.commits_per_s * self.given.stores * self.chain.bytes / self.commits_between

    @cached_property
    def stored_bytes(self) -> float:
        """Bytes in the blob store.

        These are the state, segments until the next snapshot is published and older checkpoints are dropped, replaced
        files until then, what only the checkpoints of hours and days need, and blobs of unpublished commits until they
        expire.
        """
        if not self.given.blobs:
            return 0.0
        commits = self.commits_between / 2 + self.given.retained
        segments = self.given.tasks * self.given.stores * commits * self.chain.bytes / self.commits_between
        held = self.given.retained / self.commits_between  # older snapshots that retained checkpoints need
        replaced = self.given.tasks * self.given.stores * held * self.rewritten_bytes
        lost = self.uploaded_per_s * self.given.lost_share * self.given.ttl_days * 86_400
        older = self.given.tasks * self.given.stores * self.older_bytes
        return self.state_bytes + segments + replaced + older + lost

    @cached_property
    def older_bytes(self) -> float:
        """Bytes of one store that only the checkpoints of hours and days need: for each, the files that compaction has
        replaced until the next of them, at most the whole state, and half the segments of an interval."""
        rewritten_per_s = self.rewritten_bytes / (self.commits_between * self.given.commit_s)
        return sum(
            count * (min(self.store_bytes, rewritten_per_s * length_s) + self.chain.bytes / 2)
            for count, length_s in ((self.given.hourly, 3600), (self.given.daily, 86_400))
        )
