"""The table of configuration keys: the one place for what a key accepts, its default and its meaning. Pure.

Loading, :meth:`JobConfig.get`, ``statemgr config show --all`` and docs/configuration.md use it.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from typing import NamedTuple

from statemgr.config.factories import KAFKA_CHANGELOG
from statemgr.config.units import DAY_MS, GIBIBYTE, HOUR_MS, MEBIBYTE
from statemgr.config.values import (
    AVRO_SCHEMAS,
    BLOB_URI,
    BOOLEAN,
    CLIENT_VALUE,
    ENDPOINT,
    FACTORIES,
    INTERVAL,
    NAME_KIND,
    REGISTRY,
    TEXT,
    TOPIC,
    TOPIC_SETTING,
    TOPICS,
    Kind,
    Value,
    choice,
    duration,
    integer,
    number,
    numbers,
)
from statemgr.errors import ConfigError

#: Serdes whose bytes of equal values are always equal, so that a key can be found.
KEY_SERDES = ("bytes", "string", "integer", "json", "msgpack")
VALUE_SERDES = (*KEY_SERDES, "avro")
#: Serdes of keys with times, which may have that of the keys inside in parentheses.
WINDOW_SERDES = ("kafka-streams-window", "kafka-streams-session", "quix-window", "quix-timestamp")
_STORE_KEY_SERDE = Kind(
    f"one of {', '.join((*KEY_SERDES, *WINDOW_SERDES))}, the last ones also as in {WINDOW_SERDES[0]}(string)",
    choice(*KEY_SERDES, *WINDOW_SERDES, *(f"{one}({key})" for one in WINDOW_SERDES for key in KEY_SERDES[1:])).parse,
)
#: A store's name in a key has no dots, so that a mistyped key is never taken for another store.
_STORE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]{0,127}")
_VENDORS_SETTING = re.compile(
    r"(kafka\.(?:(?:producer|consumer|admin)\.)?|schema\.registry\.|task\.topics\.)[A-Za-z0-9_][A-Za-z0-9_.-]*"
)
_ROCKSDB = "stores.<name>.rocksdb."
#: Characters of an unknown key that are shown, and compared with known ones.
_LONGEST = 200


class Key(NamedTuple):
    """One key, or all that share a pattern: ``<name>`` is a store's name, a trailing ``*`` is the rest of the key.

    ``default`` is None if there is none, or if it depends on other keys. ``default_text`` then describes it.
    """

    pattern: str
    kind: Kind
    default: Value | None
    doc: str
    default_text: str = ""


_BYTES = "bytes"
_VERSIONS = numbers((1, 2), "a list of 1 and 2")

# fmt: off
#: Every key, in the order of the documentation.
KEYS: tuple[Key, ...] = (
    Key("job.name", NAME_KIND, None,
        "Name of the job.", "required"),
    Key("job.id", NAME_KIND, "1",
        "Distinguishes jobs of the same name, such as two deployments."),
    Key("job.tasks", integer(1, 100_000), 1,
        "Number of tasks (partitions of the state). `statemgr rescale` changes it for a job that has checkpoints."),
    Key("task.inputs", TOPICS, [],
        "Input topics of a consumer loop."),
    Key("task.outputs", TOPICS, [],
        "Topics that the application sends output to. `statemgr topics create`, `topics check` and `doctor` report "
        "those that do not exist, and a consumer loop does not start without them. `task.produce` refuses records that "
        "these topics do not take."),
    Key("task.input.start", choice("earliest", "latest"), "earliest",
        "Where a task of a consumer loop that has no checkpoint yet begins its input: at the first offset, or at the "
        "end. Set it before the first start of a job."),
    Key("task.input.key.serde", choice(*KEY_SERDES), "bytes",
        "Serde of the keys of a consumer loop's messages."),
    Key("task.input.value.serde", choice(*VALUE_SERDES), "bytes",
        "Serde of the values of a consumer loop's messages."),
    Key("task.input.value.avro.schemas", AVRO_SCHEMAS, None,
        "For the serde `avro`: every version of the schema of the values, oldest first. Values are read with the last "
        "one. `${file:PATH}` reads the JSON array from a file.", "none"),
    Key("task.batch.messages", integer(1, 1_000_000), 500,
        "Largest number of messages, of all tasks together, that a consumer loop polls before it calls "
        "`process_batch` for each task (it also stops after 16 MiB). It never waits for more messages."),
    Key("state.dir", TEXT, "./.statemgr/state",
        "Local directory of the stores. A relative path begins at the working directory of the process. It is a cache: "
        "you may delete it while no task is open."),
    Key("state.cleanup.delay.ms", duration(60_000, 3650 * DAY_MS), HOUR_MS,
        "Remove a task's local state when the processes of this job on this machine have run for this long without the "
        "task."),
    Key("state.memory.bytes", integer(8 * MEBIBYTE, 1024 * GIBIBYTE, _BYTES), 128 * MEBIBYTE,
        "Memory that all RocksDB stores of a process share for blocks, indexes, filters and memtables (memtables take "
        "up to half). If a process runs several jobs, the largest value applies."),
    Key("log.format", choice("text", "json"), "text",
        "Format of the log of a service whose application does not configure logging itself: lines of text, or one "
        "JSON object on each line."),
    Key("log.level", choice("debug", "info", "warning", "error"), "info",
        "Lowest level of statemgr's lines in that log."),
    Key("metrics.port", integer(0, 65535), None,
        "Port of the HTTP server with the Prometheus metrics (`/metrics`) and the pages for probes (`/healthz`, "
        "`/readyz`); 0 picks a free one.", "off"),
    Key("job.owner.published", BOOLEAN, True,
        "Whether a checkpoint names the process that published it, for `statemgr top` and the page: its machine, its "
        "process ID, and its version of statemgr. Everybody who may read the checkpoint topic can read them."),
    Key("task.backup.factories", FACTORIES, [KAFKA_CHANGELOG],
        "Where commits store state: `kafka-changelog`, `blob-store` (snapshots, and the changes after them) or both. "
        "An empty list backs nothing up."),
    Key("task.restore.factories", FACTORIES, None,
        "Where state is restored from, most preferred first.", "the backup factories"),
    Key("task.restore.by.need.bytes", integer(0, 1 << 60, _BYTES), 256 * MEBIBYTE,
        "A task, or an attempt on Spark, opens a store from `blob-store` before all of it is here, if its snapshot has "
        "at least this size: reads fetch what they need, and the rest follows in the background. 0 turns this off."),
    Key("task.checkpoint.topic", TOPIC, None,
        "The checkpoint topic.", "`__statemgr_checkpoints_<job.name>-<job.id>`"),
    Key("task.checkpoint.replication.factor", integer(-1, 32767), -1,
        "Number of replicas of the topics that statemgr creates; -1 takes the broker's default."),
    Key("task.topics.*", TOPIC_SETTING, None,
        "Further settings of the topics that statemgr creates, under Kafka's names, such as `min.insync.replicas`. "
        "Topics that exist are not changed.", "the broker's"),
    Key("task.checkpoint.read.versions", _VERSIONS, [1, 2],
        "Versions of checkpoint records that statemgr reads. Version 1 is that of software without blob snapshots."),
    Key("task.checkpoint.write.versions", _VERSIONS, [2],
        "Versions of checkpoint records that statemgr writes. Add 1 while older software may take the job over."),
    Key("task.checkpoint.retained", integer(1, 100), 2,
        "Number of checkpoints to keep per task: the newest ones."),
    Key("task.checkpoint.hourly", integer(0, 168), 0,
        "Also retain the last checkpoint of each hour, of so many hours."),
    Key("task.checkpoint.daily", integer(0, 366), 0,
        "Also retain the last checkpoint of each day (UTC), of so many days."),
    Key("task.commit.ms", duration(1, DAY_MS), 60_000,
        "Time between the commits of a consumer loop."),
    Key("task.commit.max.delay.ms", duration(0, DAY_MS), 60_000,
        "Pause input when a commit takes longer than this."),
    Key("task.commit.timeout.ms", duration(1000, 900_000), 300_000,
        "Longest time that a commit may take. It is also the timeout of the transaction, and brokers allow at most "
        "900000 by default."),
    Key("task.shutdown.ms", duration(1000, DAY_MS), 3000,
        "How long a consumer loop that was asked to stop takes for its last commits. After two thirds of this time it "
        "begins no other commit and leaves no local copies. The platform's grace period must be longer."),
    Key("task.commit.snapshot.interval", INTERVAL, ["50 commits", "256 MiB", "10 min"],
        "With `blob-store`: make a new snapshot in the background after this many commits, this many bytes of changes "
        "or this much time, whichever comes first (for some tasks after half as many commits, so that not all "
        "upload together). With `1 commit`, every commit stores a snapshot, and changes are not recorded."),
    Key("task.commit.snapshot.tolerated.failures", integer(0, 1_000_000), 3,
        "With `blob-store`: fail commits after more than this many failed background snapshots in a row."),
    Key("stores.<name>.type", choice("rocksdb", "memory"), "rocksdb",
        "Type of the store."),
    Key("stores.<name>.backup.factories", FACTORIES, None,
        "Backup factories of this store.", "`task.backup.factories`"),
    Key("stores.<name>.restore.factories", FACTORIES, None,
        "Restore factories of this store.", "`task.restore.factories`"),
    Key("stores.<name>.changelog.topic", TOPIC, None,
        "Changelog topic of this store.", "`<job.name>-<job.id>-<name>-changelog`"),
    Key("stores.<name>.changelog.min.compaction.lag.ms", duration(0, 365 * DAY_MS), 4 * HOUR_MS,
        "Records of the changelog that are younger than this are not compacted. "
        "A read of the changelog of a running job must take less time."),
    Key("stores.<name>.key.serde", _STORE_KEY_SERDE, "bytes",
        "Serde of the keys. `integer` writes 8 bytes that sort like the numbers. A serde for keys with times names the "
        "serde of the plain key in parentheses: `kafka-streams-window(string)`."),
    Key("stores.<name>.value.serde", choice(*VALUE_SERDES), "bytes",
        "Serde of the values."),
    Key("stores.<name>.value.avro.schemas", AVRO_SCHEMAS, None,
        "For the serde `avro`: every version of the schema of the values, oldest first. New values are written with "
        "the last one. `${file:PATH}` reads the JSON array from a file.", "none"),
    Key("stores.<name>.ttl.ms", duration(1, 100 * 365 * DAY_MS), None,
        "How long an entry lives after it was last written, in stores of consumer loops. A store cannot get a TTL, or "
        "lose it, after its first commit.", "entries do not expire"),
    Key("stores.<name>.write.batch.size", integer(1, 1_000_000), 5000,
        "Number of changes (at most 4 MiB) that are collected in memory and written as one batch. Reads see them "
        "immediately."),
    Key(_ROCKSDB + "compression", choice("none", "snappy", "lz4", "zstd"), "lz4",
        "Compression of table files."),
    Key(_ROCKSDB + "compaction.style", choice("level", "universal"), "level",
        "How RocksDB merges table files."),
    Key(_ROCKSDB + "write.buffer.size.bytes", integer(64 * 1024, 4 * GIBIBYTE, _BYTES), 16 * MEBIBYTE,
        "Size of one memtable; at most half of `state.memory.bytes`."),
    Key(_ROCKSDB + "num.write.buffers", integer(1, 64), 3,
        "Number of memtables that may fill up before writes wait."),
    Key(_ROCKSDB + "block.size.bytes", integer(1024, 16 * MEBIBYTE, _BYTES), 4096,
        "Size of a block in a table file."),
    Key(_ROCKSDB + "block.cache.size.bytes", integer(-1, 1024 * GIBIBYTE, _BYTES), -1,
        "Size of a block cache that belongs to this store alone, per task, in addition to `state.memory.bytes`. "
        "-1 uses the shared cache, 0 no cache."),
    Key(_ROCKSDB + "bloom.filter.bits", integer(0, 64), 10,
        "Bits per key in the Bloom filter; 0 turns it off."),
    Key(_ROCKSDB + "target.file.size.bytes", integer(64 * 1024, 4 * GIBIBYTE, _BYTES), 64 * MEBIBYTE,
        "Size at which RocksDB starts a new table file."),
    Key(_ROCKSDB + "level0.compaction.trigger", integer(1, 1000), 4,
        "Number of files in level 0 that starts a compaction."),
    Key(_ROCKSDB + "max.open.files", integer(-1, 1_000_000), 512,
        "Number of table files that stay open; -1 keeps all open."),
    Key(_ROCKSDB + "max.background.jobs", integer(1, 64), 2,
        "Most flushes and compactions of this store and task that run at the same time. All stores of a process share "
        "the threads, of which there are as many as the largest value asks for."),
    Key(_ROCKSDB + "optimize.filters.for.hits", BOOLEAN, False,
        "Leave the Bloom filter out of the last level. Files become smaller; use it if most reads find their key."),
    Key(_ROCKSDB + "statistics", BOOLEAN, False,
        "Add RocksDB's own counters and latencies to `Store.statistics()`. Counting makes the store a little slower."),
    Key("blob.store.uri", BLOB_URI, None,
        "Where the blobs are: `file:///directory`, `s3://bucket/prefix`, `gs://bucket/prefix` or `az://container/prefix`.",
        "none"),
    Key("blob.store.s3.endpoint", ENDPOINT, None,
        "URL of the S3 server.", "AWS"),
    Key("blob.store.s3.region", TEXT, None,
        "Region of the bucket.", "the SDK's"),
    Key("blob.store.s3.access.key", TEXT, None,
        "Access key ID. Without keys, the SDK finds credentials in its usual places.", "the SDK's"),
    Key("blob.store.s3.secret.key", TEXT, None,
        "Secret access key, as `${env:NAME}` or `${file:PATH}`.", "the SDK's"),
    Key("blob.store.s3.session.token", TEXT, None,
        "Session token, as `${env:NAME}` or `${file:PATH}`.", "the SDK's"),
    Key("blob.store.s3.path.style", BOOLEAN, False,
        "Put the bucket in the path instead of the host name. Most servers other than AWS need this."),
    Key("blob.store.s3.sse.algorithm", choice("AES256", "aws:kms", "aws:kms:dsse"), None,
        "Server-side encryption that every upload requests.", "the bucket's"),
    Key("blob.store.s3.sse.kms.key.id", TEXT, None,
        "KMS key (ID or ARN) for `aws:kms` and `aws:kms:dsse`.", "AWS's own"),
    Key("blob.store.gcs.endpoint", ENDPOINT, None,
        "URL of the server of Google Cloud Storage. One without TLS gets no credentials.", "Google's"),
    Key("blob.store.azure.account", TEXT, None,
        "Storage account of an `az://` URI.", "`AZURE_STORAGE_ACCOUNT`"),
    Key("blob.store.azure.connection.string", TEXT, None,
        "Connection string with an account key or a shared access signature, as `${env:NAME}` or `${file:PATH}`. "
        "Without one, a workload identity or managed identity gives tokens.", "`AZURE_STORAGE_CONNECTION_STRING`"),
    Key("blob.store.ttl.days", duration(1, 3650, "days"), 30,
        "Time to live of blobs that no checkpoint refers to yet."),
    Key("blob.store.part.size", integer(1024, 4 * GIBIBYTE, _BYTES), 64 * MEBIBYTE,
        "Size of the parts that files are split into. Each part is one blob."),
    Key("blob.store.compression", choice("none", "zstd"), "none",
        "`zstd` compresses the parts that it makes at least a tenth smaller."),
    Key("blob.store.parallelism", integer(1, 256), 8,
        "Number of parts that are transferred at the same time."),
    Key("blob.store.inflight.bytes", integer(1, 1 << 44, _BYTES), GIBIBYTE,
        "Total size of the parts that are transferred at the same time. A part that is larger is transferred alone."),
    Key("blob.store.retry.policy.max.retries", integer(-1, 1_000_000), 10,
        "How often a request is repeated; -1 sets no limit other than the duration."),
    Key("blob.store.retry.policy.max.retry.duration.millis", duration(0, DAY_MS), 120_000,
        "How long a request is repeated."),
    Key("blob.store.retry.policy.backoff.delay.millis", duration(0, DAY_MS), 100,
        "Wait before the first repetition."),
    Key("blob.store.retry.policy.backoff.max.delay.millis", duration(0, DAY_MS), 10_000,
        "Longest wait between two repetitions."),
    Key("blob.store.retry.policy.backoff.delay.factor", number(1, 100), 2.0,
        "Each wait is this many times as long as the one before."),
    Key("blob.store.retry.policy.jitter.factor", number(0, 1), 0.5,
        "Part of each wait that is random."),
    Key("kafka.bootstrap.servers", CLIENT_VALUE, None,
        "Addresses of the brokers: `host:port,…`.", "required to connect"),
    Key("kafka.producer.*", CLIENT_VALUE, None,
        "Passed to producers only. `queue.buffering.max.kbytes` is 32768 by default, or as much as the largest record.",
        "librdkafka's"),
    Key("kafka.consumer.*", CLIENT_VALUE, None,
        "Passed to consumers only.", "librdkafka's"),
    Key("kafka.admin.*", CLIENT_VALUE, None,
        "Passed to admin clients only.", "librdkafka's"),
    Key("kafka.*", CLIENT_VALUE, None,
        "Passed to every client under librdkafka's names. SASL and TLS work as they do in librdkafka.",
        "librdkafka's"),
    Key("schema.registry.url", REGISTRY, None,
        "Address of the Schema Registry, for serdes of `SchemaRegistry`.", "none"),
    Key("schema.registry.*", CLIENT_VALUE, None,
        "Passed to confluent-kafka's SchemaRegistryClient under its names, such as `basic.auth.user.info` and "
        "`ssl.ca.location`.", "the client's"),
)
# fmt: on
_BY_PATTERN = {entry.pattern: entry for entry in KEYS}


#: The default of every RocksDB option that a store may set, by its name after ``rocksdb.``. The list is closed, because
#: other options could change the content of a checkpoint. For example, first-in-first-out compaction drops keys.
ROCKSDB_DEFAULTS: Mapping[str, Value] = {
    entry.pattern.removeprefix(_ROCKSDB): entry.default
    for entry in KEYS
    if entry.pattern.startswith(_ROCKSDB) and entry.default is not None
}


def find(key: str) -> Key | None:
    """The entry for a key, or None when it is unknown."""
    first, _, rest = key.partition(".")
    if first == "stores":
        name, _, setting = rest.partition(".")
        return _BY_PATTERN.get(f"stores.<name>.{setting}") if _STORE_NAME.fullmatch(name) else None
    vendors = _VENDORS_SETTING.fullmatch(key)
    if vendors and key not in _BY_PATTERN:
        return _BY_PATTERN[vendors[1] + "*"]
    return None if "*" in key else _BY_PATTERN.get(key)


def lookup(key: str) -> Key:
    """The entry for a key. Raises: ConfigError that names the nearest known key."""
    entry = find(key)
    if entry is None:
        raise unknown(key)
    return entry


def unknown(key: str) -> ConfigError:
    """The error for an unknown key, with the nearest known one as its hint."""
    parts = key.split(".")
    name = parts[1] if len(parts) > 1 else "<name>"
    candidates = [pattern.replace("<name>", name) for pattern in _BY_PATTERN]
    near = difflib.get_close_matches(key[:_LONGEST], candidates, n=1, cutoff=0.6)
    hint = f"did you mean {near[0]}?" if near else "`statemgr config show --all` lists every key"
    shown = key if len(key) <= _LONGEST and key.isprintable() else repr(key[:_LONGEST])
    return ConfigError(f"unknown configuration key {shown}", hint=hint, key=shown)
