"""The table of configuration keys: pattern, kind, default, meaning. Pure.

The one source of truth: loading, ``JobConfig.get`` and the table in the documentation all come from it.
In a pattern, ``<name>`` is a store's name and a trailing ``*`` is the rest of the key.
"""

from __future__ import annotations

from statemgr.config.entry import Key
from statemgr.config.table_stores import STORE_KEYS
from statemgr.config.values import (
    BLOB_URI,
    BOOLEAN,
    CLIENT_VALUE,
    ENDPOINT,
    FACTORIES,
    INTERVAL,
    NAME_KIND,
    TEXT,
    TOPIC,
    TOPICS,
    choice,
    integer,
    number,
    numbers,
)

_DAY_MS = 24 * 3600 * 1000
_GIBIBYTE = 1024**3

_JOB = (
    Key(pattern="job.name", kind=NAME_KIND, default_text="required", doc="Name of the job."),
    Key(pattern="job.id", kind=NAME_KIND, default="1", doc="Tells runs of one job apart."),
    Key(
        pattern="job.tasks",
        kind=integer(1, 100_000),
        default=1,
        doc="Number of tasks (state partitions). Changing it later is a rescale.",
    ),
    Key(pattern="task.inputs", kind=TOPICS, default=[], doc="Input topics of a consumer loop."),
    Key(
        pattern="state.dir",
        kind=TEXT,
        default="./.statemgr/state",
        deferred=True,
        doc="Local directory of the stores. A cache: it may vanish at any time.",
    ),
    Key(
        pattern="state.memory.bytes",
        kind=integer(8 * 1024 * 1024, 1024 * _GIBIBYTE, "bytes"),
        default=128 * 1024 * 1024,
        doc="Memory of all RocksDB stores of a process together: their block cache, with the memtables (up to half of "
        "it), indexes and filters. Of several jobs in one process the largest counts.",
    ),
    Key(
        pattern="metrics.port",
        kind=integer(0, 65535),
        default_text="off",
        doc="Port of the Prometheus metrics; 0 takes a free one.",
    ),
)
_BACKENDS = (
    Key(
        pattern="task.backup.factories",
        kind=FACTORIES,
        default=["kafka-changelog"],
        doc="Where state is backed up: `kafka-changelog`, `blob-store` (snapshots and the changes after them) or both. "
        "Empty: nowhere.",
    ),
    Key(
        pattern="task.restore.factories",
        kind=FACTORIES,
        default_text="the backup factories",
        doc="Where state is restored from, in order of preference.",
    ),
)
_CHECKPOINTS = (
    Key(
        pattern="task.checkpoint.topic",
        kind=TOPIC,
        default_text="`__statemgr_checkpoints_<job.name>-<job.id>`",
        doc="The checkpoint topic.",
    ),
    Key(
        pattern="task.checkpoint.replication.factor",
        kind=integer(-1, 32767),
        default=-1,
        doc="Replicas of the topics that statemgr creates; -1 is the broker's default.",
    ),
    Key(
        pattern="task.checkpoint.read.versions",
        kind=numbers((1, 2), "a list of 1 and 2"),
        default=[1, 2],
        doc="Versions of checkpoint records that are read.",
    ),
    Key(
        pattern="task.checkpoint.write.versions",
        kind=numbers((1, 2), "a list of 1 and 2"),
        default=[2],
        doc="Versions of checkpoint records that are written; 1 too, while older software may take over.",
    ),
    Key(
        pattern="task.checkpoint.retained",
        kind=integer(1, 100),
        default=2,
        doc="Checkpoints kept per task.",
    ),
    Key(
        pattern="task.commit.ms",
        kind=integer(1, _DAY_MS, "milliseconds"),
        default=60_000,
        doc="Time between commits of a consumer loop.",
    ),
    Key(
        pattern="task.commit.max.delay.ms",
        kind=integer(0, _DAY_MS, "milliseconds"),
        default=60_000,
        doc="Age of a commit on its way from which its task waits for it: a consumer loop pauses the task's input.",
    ),
    Key(
        pattern="task.commit.timeout.ms",
        kind=integer(1000, 900_000, "milliseconds"),
        default=300_000,
        doc="Longest time that a commit may take; also the transaction's timeout (brokers allow 900000).",
    ),
)
_SNAPSHOTS = (
    Key(
        pattern="task.commit.snapshot.interval",
        kind=INTERVAL,
        default=["50 commits", "256 MiB", "10 min"],
        doc="With `blob-store`: how many commits, bytes or minutes of changes may follow a snapshot before the next is "
        "made in the background; the first limit reached counts, a little earlier for some tasks than for others. "
        "`1 commit`: every commit stores a snapshot, and changes are not recorded.",
    ),
    Key(
        pattern="task.commit.snapshot.tolerated.failures",
        kind=integer(0, 1_000_000),
        default=3,
        doc="With `blob-store`: how many background snapshots in a row may fail before commits fail.",
    ),
)
_BLOBS = (
    Key(
        pattern="blob.store.uri",
        kind=BLOB_URI,
        default_text="none",
        deferred=True,
        doc="Where blobs are: `file:///directory` or `s3://bucket/prefix`.",
    ),
    Key(
        pattern="blob.store.s3.endpoint",
        kind=ENDPOINT,
        default_text="AWS",
        deferred=True,
        doc="Server's URL.",
    ),
    Key(pattern="blob.store.s3.region", kind=TEXT, default_text="the SDK's", deferred=True, doc="Region."),
    Key(
        pattern="blob.store.s3.access.key",
        kind=TEXT,
        default_text="the SDK's",
        deferred=True,
        doc="Access key ID. Without keys, the SDK looks for credentials as usual.",
    ),
    Key(
        pattern="blob.store.s3.secret.key",
        kind=TEXT,
        default_text="the SDK's",
        deferred=True,
        doc="Secret access key: `${env:NAME}` or `${file:PATH}`.",
    ),
    Key(
        pattern="blob.store.s3.session.token",
        kind=TEXT,
        default_text="the SDK's",
        deferred=True,
        doc="Session token: `${env:NAME}` or `${file:PATH}`.",
    ),
    Key(
        pattern="blob.store.s3.path.style",
        kind=BOOLEAN,
        default=False,
        doc="Bucket in the path rather than in the host name; most other S3 servers need it.",
    ),
    Key(
        pattern="blob.store.s3.sse.algorithm",
        kind=choice("AES256", "aws:kms", "aws:kms:dsse"),
        default_text="the bucket's",
        doc="Server-side encryption that every upload asks for.",
    ),
    Key(
        pattern="blob.store.s3.sse.kms.key.id",
        kind=TEXT,
        default_text="AWS's own",
        deferred=True,
        doc="The KMS key (ID or ARN) for `aws:kms` and `aws:kms:dsse`.",
    ),
    Key(
        pattern="blob.store.ttl.days",
        kind=integer(1, 3650, "days"),
        default=30,
        doc="Time to live of blobs that no checkpoint refers to yet.",
    ),
    Key(
        pattern="blob.store.part.size",
        kind=integer(1024, 5 * _GIBIBYTE, "bytes"),
        default=64 * 1024 * 1024,
        doc="Bytes of one part of a file; each part is a blob.",
    ),
    Key(
        pattern="blob.store.compression",
        kind=choice("none", "zstd"),
        default="none",
        doc="`zstd` compresses each part of a file that gets at least a tenth smaller.",
    ),
    Key(pattern="blob.store.parallelism", kind=integer(1, 256), default=8, doc="Parts in flight at a time."),
    Key(
        pattern="blob.store.inflight.bytes",
        kind=integer(1, 1 << 44, "bytes"),
        default=1 << 30,
        doc="Bytes of the parts in flight at a time; a larger one goes alone.",
    ),
    Key(
        pattern="blob.store.retry.policy.max.retries",
        kind=integer(-1, 1_000_000),
        default=10,
        doc="Retries of one request; -1 leaves the limit to the duration.",
    ),
    Key(
        pattern="blob.store.retry.policy.max.retry.duration.millis",
        kind=integer(0, _DAY_MS, "milliseconds"),
        default=120_000,
        doc="Time after which a request is not tried again.",
    ),
    Key(
        pattern="blob.store.retry.policy.backoff.delay.millis",
        kind=integer(0, _DAY_MS, "milliseconds"),
        default=100,
        doc="Wait before the first retry.",
    ),
    Key(
        pattern="blob.store.retry.policy.backoff.max.delay.millis",
        kind=integer(0, _DAY_MS, "milliseconds"),
        default=10_000,
        doc="Longest wait between retries.",
    ),
    Key(
        pattern="blob.store.retry.policy.backoff.delay.factor",
        kind=number(1, 100),
        default=2.0,
        doc="Each wait is this many times the one before.",
    ),
    Key(
        pattern="blob.store.retry.policy.jitter.factor",
        kind=number(0, 1),
        default=0.5,
        doc="Share of each wait that is random.",
    ),
)
_KAFKA = (
    Key(
        pattern="kafka.bootstrap.servers",
        kind=CLIENT_VALUE,
        default_text="required to connect",
        deferred=True,
        doc="Brokers: `host:port,…`.",
    ),
    Key(
        pattern="kafka.producer.*",
        kind=CLIENT_VALUE,
        default_text="librdkafka's",
        deferred=True,
        doc="Passed to producers alone.",
    ),
    Key(
        pattern="kafka.consumer.*",
        kind=CLIENT_VALUE,
        default_text="librdkafka's",
        deferred=True,
        doc="Passed to consumers alone.",
    ),
    Key(
        pattern="kafka.admin.*",
        kind=CLIENT_VALUE,
        default_text="librdkafka's",
        deferred=True,
        doc="Passed to admin clients alone.",
    ),
    Key(
        pattern="kafka.*",
        kind=CLIENT_VALUE,
        default_text="librdkafka's",
        deferred=True,
        doc="Passed to every client under librdkafka's names: SASL and TLS work as they do there.",
    ),
)

#: Every key, in the order of the documentation. Of two that match, the first counts.
KEYS: tuple[Key, ...] = (*_JOB, *_BACKENDS, *_CHECKPOINTS, *_SNAPSHOTS, *STORE_KEYS, *_BLOBS, *_KAFKA)
