"""Every metric that a process of a job serves, declared once. ``docs/monitoring.md`` has the table of them.

All have the label ``job``. ``most`` bounds the number of series of a process: what the product is made of.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Literal

from statemgr.blobs.counting import OPERATIONS, OUTCOMES

Kind = Literal["counter", "gauge", "histogram"]
#: The values of the labels after ``job``, and the number.
Series = Iterable[tuple[tuple[str, ...], float]]
#: Gives the series of a metric when Prometheus scrapes.
Source = Callable[[], Series]
_TASK, _STORE = "tasks", "tasks × stores"

#: Kinds of failures that are told apart; all others count as ``other``.
MOST_KINDS = 48


@dataclass(frozen=True, slots=True)
class Declared:
    """One metric.

    Attributes:
        name: without the ``_total`` of counters.
        text: what it means, with its unit.
        labels: in addition to ``job``.
        most: bound of the number of series in one process; ``1`` is one per job.
        known: values of the labels that a counter is served with from the start, because Prometheus sees an increase
            only if it has seen the number before.
    """

    name: str
    kind: Kind
    text: str
    labels: tuple[str, ...] = ()
    most: str = "1"
    known: tuple[tuple[str, ...], ...] = ()

    @property
    def shown(self) -> str:
        """The name as Prometheus has it. A histogram also has ``_bucket``, ``_sum`` and ``_count``."""
        return f"{self.name}_total" if self.kind == "counter" else self.name

    @property
    def series(self) -> tuple[str, ...]:
        """All names that it has in a query."""
        if self.kind == "histogram":
            return tuple(f"{self.name}_{end}" for end in ("bucket", "sum", "count"))
        return (self.shown,)


def _counter(name: str, text: str, *labels: str, most: str = "1", known: Iterable[tuple[str, ...]] = ()) -> Declared:
    return Declared(f"statemgr_{name}", "counter", text, labels, most, tuple(known))


def _each(*values: str) -> Iterator[tuple[str, ...]]:
    """The values of a counter's only label."""
    return ((value,) for value in values)


def _gauge(name: str, text: str, *labels: str, most: str = "1") -> Declared:
    return Declared(f"statemgr_{name}", "gauge", text, labels, most)


#: Heading → metrics, in the order of the table.
METRICS: dict[str, tuple[Declared, ...]] = {
    "tasks, lag and age": (
        _gauge(
            "tasks",
            "Tasks that this process has open or still has to open, as `/readyz` counts them; on Spark, on the driver, "
            "all tasks",
        ),
        _gauge("job_tasks", "Tasks that the job has: `job.tasks` of this process"),
        _gauge(
            "input_lag",
            "Messages of an input partition that can be received and are not processed yet. On Spark `task` is empty, "
            "and these are the messages after the published checkpoint",
            "task", "topic", "partition", most="input partitions",
        ),
        _counter(
            "input_messages",
            "Messages that a consumer loop has processed since this process got the task, also those that it processed "
            "again",
            "task", most=_TASK,
        ),
        Declared(
            "statemgr_process_seconds",
            "histogram",
            "Seconds of a call of `process` or `process_batch` in a consumer loop. On Spark, see "
            "`statemgr_commit_seconds`",
            most="12",
        ),
        _gauge(
            "input_held_up_seconds",
            "For how long this process has seen the same open transaction of other software hold up an input "
            "partition: nobody receives what follows it",
            "task", "topic", "partition", most="input partitions",
        ),
        _gauge(
            "last_commit_timestamp_seconds",
            "When this process last published a commit of the task; until then, when it opened the task",
            "task", most=_TASK,
        ),
        _gauge(
            "checkpoint_timestamp_seconds",
            "When the newest published checkpoint of the task was taken, whoever published it",
            "task", most=_TASK,
        ),
        _gauge(
            "ends_by_itself",
            "On Spark: 1 if the query ends when it has read its input (trigger `availableNow` or `once`), and a "
            "scheduler starts it again",
        ),
        _gauge("watermark_seconds", "On Spark: the watermark, in seconds since the epoch"),
    ),
    "failures": (
        _counter(
            "failures",
            "Openings, commits, snapshots, batches and loops that failed. `kind` is the class of the error. If an "
            "error ends the process, a scrape may come too late: the line `stopped` of the log has the final counts",
            "kind", most=str(MOST_KINDS + 1),
        ),
        _gauge(
            "topic_problems",
            "Wrong settings of the job's own topics, and missing ones, when this process last looked, once a minute",
        ),
    ),
    "restores": (
        _gauge(
            "restore_progress_ratio",
            "Share of the current step of a restore: fetch, then apply segments, or replay. 1 when the store is open",
            "task", "store", most=_STORE,
        ),
        _counter(
            "restores",
            "Stores restored. `backend` is a factory, `local` (the state was on this machine) or `empty` (a new "
            "store). `reason` is `new`, `local-copy`, `first-choice`, or why an earlier factory was not used: "
            "`damaged`, `unreachable` or `absent`",
            "backend", "reason", most="6 × backends",
        ),
        _counter(
            "restore_bytes", "Bytes that restores fetched, also after the store was open", "backend", most="backends"
        ),
        _counter("restore_seconds", "Seconds that restores took", "backend", most="backends"),
        _gauge(
            "restore_bytes_to_come",
            "Bytes of a store that are still in the blob store while the task works already",
            "task", "store", most=_STORE,
        ),
        _gauge(
            "restore_seconds_to_come",
            "Seconds until these bytes are here, at their rate so far",
            "task", "store", most=_STORE,
        ),
        _counter(
            "restore_faults", "Parts that a read had to fetch, because they were still to come",
            "task", "store", most=_STORE,
        ),
    ),
    "state": (
        _gauge(
            "state_keys",
            "Keys in the stores of the task. RocksDB estimates them: changes that are not compacted count as more "
            "keys. When it opens a store, it looks at 20 table files at most, and assumes that the others are alike",
            "task", most=_TASK,
        ),
        _gauge("state_bytes", "Bytes of the stores of the task on disk", "task", most=_TASK),
        _gauge("rocksdb_keys", "Keys of the store, as `statemgr_state_keys` has them", "task", "store", most=_STORE),
        _gauge("rocksdb_bytes", "Bytes of the table files of the store", "task", "store", most=_STORE),
        _gauge(
            "rocksdb_memtable_bytes",
            "Bytes of the changes of the store that are not in table files yet",
            "task", "store", most=_STORE,
        ),
        _gauge(
            "rocksdb_compaction_bytes",
            "Bytes that compactions of the store have still to rewrite. Compactions do not keep up if it keeps growing",
            "task", "store", most=_STORE,
        ),
        _gauge(
            "rocksdb_writes_slowed",
            "1 while RocksDB delays or stops the writes of the store, until compactions and flushes have caught up",
            "task", "store", most=_STORE,
        ),
        _gauge(
            "memory_bytes",
            "Bytes of `state.memory.bytes` that the RocksDB stores of the process use for blocks, indexes, filters and "
            "memtables. The cache fills up, so a number near the limit is normal. Above it, what is in use does not "
            "fit",
        ),
        _gauge("memory_limit_bytes", "That limit: `state.memory.bytes` of the process"),
        _gauge(
            "segments",
            "Segments that a restore would apply on top of the snapshot. On Spark, as of the last commit but one",
            "task", "store", most=_STORE,
        ),
        _gauge("segments_bytes", "Bytes of these segments", "task", "store", most=_STORE),
        _counter(
            "materializations",
            "Background snapshots, with `outcome` = `made` or `failed`",
            "outcome", most="2", known=_each("made", "failed"),
        ),
        _gauge("materialization_seconds", "Seconds of the last background snapshot", "task", "store", most=_STORE),
        _gauge("blobs_with_ttl", "Published blobs that still have a TTL, and would expire", "task", most=_TASK),
    ),
    "the blob store": (
        _counter(
            "blob_requests",
            "Requests, each attempt of a repeated one. `operation` is `put`, `get`, `read` (a body that broke off), "
            "`stat`, `list`, `copy`, `delete` or `remove-ttl`. `outcome` is `ok`, `missing`, `unavailable`, `denied`, "
            "`full` or `error`",
            "operation", "outcome", most="48", known=product(OPERATIONS, ("ok", *OUTCOMES)),
        ),
        _counter(
            "blob_retries",
            "Attempts that were repeated after a pause",
            "operation", most="12", known=_each(*OPERATIONS),
        ),
        _counter(
            "blob_hedges",
            "Extra requests, started because the first one was slow",
            "operation", most="2", known=_each("get", "put"),
        ),
        _counter(
            "blob_bytes",
            "Bytes of bodies, with `direction` = `upload` or `download`",
            "direction", most="2", known=_each("upload", "download"),
        ),
    ),
    "commits": (
        _counter(
            "commits",
            "Commits of tasks, also those that a repair makes without input, with `outcome` = `published` or `failed`",
            "outcome", most="2", known=_each("published", "failed"),
        ),
        Declared(
            "statemgr_publish_seconds",
            "histogram",
            "Seconds from the begin of a publishing transaction to its acknowledgement",
            most="17",
        ),
        _gauge("commit_changes", "Changes in the last commit", "task", most=_TASK),
        _gauge("commit_uploaded_bytes", "Bytes of the blobs that the last commit uploaded", "task", most=_TASK),
        _gauge(
            "commit_seconds",
            "Seconds that a phase of the last commit took. In a consumer loop `phase` is `flush` (the only part "
            "that the task waits for), `upload`, `publish` or `clean-up`; on Spark `open`, `process` or `prepare`",
            "task", "phase", most="4 × tasks",
        ),
    ),
    "commits of a consumer loop": (
        _counter("commits_skipped", "Periodic commits that fell due while another was in progress"),
        _counter("commits_blocked", "How often a task had to wait for a commit in progress"),
        _counter("commit_blocked_seconds", "Seconds of these waits"),
    ),
    "micro-batches of Spark": (
        _gauge("commit_requests", "Blobs that the last commit uploaded, one PUT each", "task", most=_TASK),
        _counter(
            "batches",
            "Micro-batches, with `kind` = `published` or `replayed`",
            "kind", most="2", known=_each("published", "replayed"),
        ),
        _counter(
            "batch_rows",
            "Rows, with `kind` = `input`, `late` or `output`",
            "kind", most="3", known=_each("input", "late", "output"),
        ),
        _counter(
            "batch_keys", "Keys, with `kind` = `read` or `written`", "kind", most="2", known=_each("read", "written")
        ),
        _counter(
            "batch_seconds",
            "Seconds, with `phase` = `stage`, `publish` or `output`",
            "phase", most="3", known=_each("stage", "publish", "output"),
        ),
        _counter("batch_retries", "Attempts at tasks that failed and ran again"),
    ),
    "`statemgr standby`": (
        _gauge("standby_sequence", "Sequence number of the checkpoint that this machine has", "task", most=_TASK),
        _gauge("standby_checkpoint_seconds", "When that checkpoint was taken", "task", most=_TASK),
        _counter("standby_failures", "Turns that failed, for a task or as a whole"),
    ),
}  # fmt: skip
#: Buckets of the histograms, in seconds.
PROCESS_BUCKETS = (0.0001, 0.001, 0.01, 0.1, 0.5, 1, 10, 60, 300)
PUBLISH_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)


def declared() -> Iterator[Declared]:
    """All metrics."""
    for metrics in METRICS.values():
        yield from metrics


_BY_NAME = {metric.name: metric for metric in declared()}


def named(name: str) -> Declared:
    """The metric of this name, without ``statemgr_``. Raises: KeyError if none has it."""
    return _BY_NAME[f"statemgr_{name}"]
