"""Finds settings that are valid one by one but contradict each other. Reads the metadata of installed packages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple, cast

from statemgr.config.factories import BLOB_STORE, KAFKA_CHANGELOG, check_factories
from statemgr.config.store import StoreConfig
from statemgr.errors import ConfigError

if TYPE_CHECKING:
    from statemgr.config.job import JobConfig

#: Is next to a task's stores on disk.
_PUBLISHED = "PUBLISHED"
#: In Samza, ``stores.default.*`` are defaults of all stores.
RESERVED_STORES = (_PUBLISHED, "default")
#: Settings of clients that the protocol depends on.
_OWN_SETTINGS = (
    "transactional.id", "enable.idempotence", "isolation.level", "enable.auto.commit", "acks",
    "delivery.report.only.error",
)  # fmt: skip
#: Settings of topics that the protocol depends on.
OWN_TOPIC_SETTINGS = (
    "cleanup.policy", "max.message.bytes", "min.compaction.lag.ms", "delete.retention.ms", "message.timestamp.type",
    "unclean.leader.election.enable",
)  # fmt: skip
_MOST_TOPIC = 249
#: librdkafka's default of ``max.poll.interval.ms``.
POLL_INTERVAL_MS = 300_000


class _Problem(NamedTuple):
    """The key to change, what is wrong, what to do about it, and the topic that it is about."""

    key: str
    message: str
    hint: str
    topic: str | None = None


def check_job(config: JobConfig) -> None:
    """Raises: ConfigError for the first contradiction. It names the key to change."""
    if "job.name" not in config.values:
        raise ConfigError("job.name is not set", hint='for example job.name = "orders"', key="job.name")
    for key, value in config.values.items():
        if key.endswith(".factories"):
            check_factories(key, cast("list[str]", value))
    for problem in _problems(config):
        raise ConfigError(problem.message, hint=problem.hint, key=problem.key, topic=problem.topic)


def _problems(config: JobConfig) -> Iterator[_Problem]:
    for key in config.values:
        name = key.removeprefix("kafka.")
        for kind in ("producer.", "consumer.", "admin."):
            name = name.removeprefix(kind)
        if key.startswith("kafka.") and name in _OWN_SETTINGS:
            yield _Problem(key, f"{key} cannot be set: exactly-once publishing depends on it", "remove the key")
    yield from _of_offsets(config)
    yield from _of_names(config)
    yield from _of_encryption(config)
    yield from _of_versions(config)
    yield from _of_shutdown(config)
    for store in config.stores.values():
        yield from _of_store(store)
        yield from _of_backends(store, config)
        yield from _of_schemas(f"stores.{store.name}", store.value_serde, store.value_schemas)
        yield from _of_memory(store, config.memory_bytes)
    yield from _of_schemas("task.input", config.input_value_serde, config.get("task.input.value.avro.schemas"))
    yield from _of_new_topics(config)
    yield from _of_topics(config)


def _of_offsets(config: JobConfig) -> Iterator[_Problem]:
    for key in ("kafka.auto.offset.reset", "kafka.consumer.auto.offset.reset"):
        if str(config.values.get(key, "error")) != "error":
            message = f"{key} cannot be set: a client that jumps to another offset skips input silently"
            hint = (
                "remove it; a partition that is in no checkpoint is read from its first offset, or by a task without "
                'a checkpoint from its end with task.input.start = "latest"'
            )
            yield _Problem(key, message, hint)


def _of_names(config: JobConfig) -> Iterator[_Problem]:
    """A store's name is the name of a directory, and macOS ignores the case of these."""
    seen = {_PUBLISHED.lower(): _PUBLISHED}
    for name in config.stores:
        other = seen.setdefault(name.lower(), name)
        if other != name:
            message = (
                f"the name of the store {name!r} differs from {other!r} only in case: on macOS, both are one directory"
            )
            yield _Problem(f"stores.{name}", message, "choose another name for the store")


def _of_encryption(config: JobConfig) -> Iterator[_Problem]:
    algorithm, key_id = "blob.store.s3.sse.algorithm", "blob.store.s3.sse.kms.key.id"
    if key_id in config.values and not str(config.get(algorithm)).startswith("aws:kms"):
        now = config.get(algorithm) or "not set"
        message = f"{key_id} is set, but {algorithm} is {now}: the key would not be used"
        yield _Problem(algorithm, message, f'set {algorithm} = "aws:kms"')
    uri = str(config.get("blob.store.uri") or "")
    if algorithm in config.values and uri and not uri.startswith(("s3:", "${")):
        message = f"{algorithm} is set, but blob.store.uri is not in S3: nothing would be encrypted"
        yield _Problem(algorithm, message, f"remove {algorithm}, or set blob.store.uri to s3://bucket/prefix")


def _of_versions(config: JobConfig) -> Iterator[_Problem]:
    read, write = "task.checkpoint.read.versions", "task.checkpoint.write.versions"
    if 2 not in config.write_versions:
        yield _Problem(write, f"{write} must contain 2", "[1, 2] also serves older software")
    if not set(config.write_versions) <= set(config.read_versions):
        yield _Problem(read, f"{read} must contain every version in {write}", "add the versions that are missing")


def _of_shutdown(config: JobConfig) -> Iterator[_Problem]:
    key, limit = "task.shutdown.ms", "max.poll.interval.ms"
    given = config.values.get(f"kafka.consumer.{limit}", config.values.get(f"kafka.{limit}", POLL_INTERVAL_MS))
    if str(given).isdecimal() and config.shutdown_ms > int(str(given)):
        message = (
            f"{key} is {config.shutdown_ms}, more than {limit} of the consumer = {given}: the consumer group would "
            "give the tasks to other processes during the last commits"
        )
        yield _Problem(key, message, f"lower it, or raise kafka.consumer.{limit}")


def _of_store(store: StoreConfig) -> Iterator[_Problem]:
    key = f"stores.{store.name}"
    if store.name.startswith("_") or store.name in RESERVED_STORES:
        hint = "choose a name that does not start with '_' and is not " + " or ".join(RESERVED_STORES)
        yield _Problem(key, f"{key} uses a reserved name for a store", hint)
    key = f"stores.{store.name}.restore.factories"
    if store.restore_factories and not store.durable:
        hint = f"set stores.{store.name}.backup.factories"
        yield _Problem(key, f"{key} is set, but the store is not backed up", hint)
    if store.durable and not store.restore_factories:
        message = f"{key} is empty, but the store is backed up: nothing could restore it"
        yield _Problem(key, message, "name the factories to restore from, or remove the key")


def _of_backends(store: StoreConfig, config: JobConfig) -> Iterator[_Problem]:
    used = BLOB_STORE in (*store.backup_factories, *store.restore_factories)
    if used and "blob.store.uri" not in config.values:
        message = f"blob.store.uri is not set, but the store {store.name!r} uses {BLOB_STORE}"
        hint = 'for example blob.store.uri = "file:///var/lib/statemgr/blobs" or "s3://bucket/prefix"'
        yield _Problem("blob.store.uri", message, hint)
    if 1 in config.write_versions and store.durable and KAFKA_CHANGELOG not in store.backup_factories:
        message = (
            f"task.checkpoint.write.versions has 1, but the store {store.name!r} is not backed up to "
            f"{KAFKA_CHANGELOG}: checkpoints of version 1 can refer to nothing else"
        )
        hint = f"add {KAFKA_CHANGELOG} to the backup factories of the store, or write version 2 only"
        yield _Problem("task.checkpoint.write.versions", message, hint)


def _of_schemas(prefix: str, named: str, schemas: object) -> Iterator[_Problem]:
    """``named``: the serde of the values under this prefix of keys."""
    key, serde = f"{prefix}.value.avro.schemas", f"{prefix}.value.serde"
    if named == "avro" and schemas is None:
        hint = "list every version of the schema, the newest last"
        yield _Problem(key, f"{key} is not set, but {serde} is avro", hint)
    if named != "avro" and schemas is not None:
        yield _Problem(key, f"{key} is set, but {serde} is {named}", f'set {serde} = "avro"')


def _of_memory(store: StoreConfig, memory_bytes: int) -> Iterator[_Problem]:
    size = int(str(store.rocksdb["write.buffer.size.bytes"]))
    if store.type == "rocksdb" and size > memory_bytes // 2:
        key = f"stores.{store.name}.rocksdb.write.buffer.size.bytes"
        message = (
            f"{key} is {size}, more than half of state.memory.bytes = {memory_bytes}: a memtable could never fill up"
        )
        yield _Problem(key, message, "raise state.memory.bytes, or make the write buffer smaller")


def _of_new_topics(config: JobConfig) -> Iterator[_Problem]:
    for name, value in config.topic_settings.items():
        key = f"task.topics.{name}"
        if name in OWN_TOPIC_SETTINGS:
            yield _Problem(key, f"{key} cannot be set: statemgr chooses it", "remove the key")
        if name == "min.insync.replicas" and value.isdigit() and 0 < config.checkpoint_replication_factor < int(value):
            message = f"{key} is more than task.checkpoint.replication.factor: nothing could be written"
            yield _Problem(key, message, f"set it to at most {config.checkpoint_replication_factor}")


def _of_topics(config: JobConfig) -> Iterator[_Problem]:
    """No topic has two uses."""
    topics = [("task.checkpoint.topic", config.checkpoint_topic)]
    topics += [(f"stores.{store.name}.changelog.topic", store.changelog_topic) for store in config.stores.values()]
    topics += [("task.inputs", topic) for topic in config.inputs]
    # a job may send to its own input, to try again later
    topics += [("task.outputs", topic) for topic in config.outputs if topic not in config.inputs]
    used: dict[str, str] = {}
    for key, topic in topics:
        if len(topic) > _MOST_TOPIC:
            message = f"{key}: the topic's name is longer than {_MOST_TOPIC} characters"
            yield _Problem(key, message, "Kafka allows no longer names: choose a shorter one", topic)
        if topic in used:
            yield _Problem(key, f"{key} names the same topic as {used[topic]}", "give each its own topic", topic)
        used[topic] = key
