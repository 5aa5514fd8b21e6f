"""Settings that are right one by one and wrong together. Reads the metadata of installed packages.

Each is one error that names the key to change.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from statemgr.config.factories import BLOB_STORE, KAFKA_CHANGELOG, check_factories
from statemgr.config.store import StoreConfig
from statemgr.errors import ConfigError

if TYPE_CHECKING:
    from statemgr.config.job import JobConfig

#: ``PUBLISHED`` stands next to a task's stores; in Samza, ``stores.default.*`` are defaults of all stores.
_RESERVED = ("PUBLISHED", "default")
#: What the protocol depends on.
_OWN_SETTINGS = ("transactional.id", "enable.idempotence", "isolation.level", "enable.auto.commit", "acks")


def check_job(config: JobConfig) -> None:
    """Raises: ConfigError for the first contradiction."""
    if "job.name" not in config.values:
        raise ConfigError("job.name is not set", hint='for example job.name = "orders"', key="job.name")
    for key, value in config.values.items():
        if key.endswith(".factories"):
            check_factories(key, cast("list[str]", value))
        _check_client_setting(key)
    _check_encryption(config)
    _check_versions(config.read_versions, config.write_versions)
    for store in config.stores.values():
        _check_store(store)
        _check_backends(store, config)
        _check_schemas(store)
        _check_memory(store, config.memory_bytes)
    _check_topics(config)


def _check_store(store: StoreConfig) -> None:
    key = f"stores.{store.name}"
    if store.name.startswith("_") or store.name in _RESERVED:
        raise ConfigError(
            f"{key} uses a reserved name for a store",
            hint="choose a name that does not start with '_' and is not " + " or ".join(_RESERVED),
            key=key,
        )
    key = f"stores.{store.name}.restore.factories"
    if store.restore_factories and not store.durable:
        hint = f"set stores.{store.name}.backup.factories"
        raise ConfigError(f"{key} is set, but the store is not backed up", hint=hint, key=key)
    if store.durable and not store.restore_factories:
        hint = "name the factories to restore from, or remove the key"
        raise ConfigError(f"{key} is empty, but the store is backed up: nothing could restore it", hint=hint, key=key)


def _check_backends(store: StoreConfig, config: JobConfig) -> None:
    used = BLOB_STORE in (*store.backup_factories, *store.restore_factories)
    if used and "blob.store.uri" not in config.values:
        raise ConfigError(
            f"blob.store.uri is not set, but the store {store.name!r} uses {BLOB_STORE}",
            hint='for example blob.store.uri = "file:///var/lib/statemgr/blobs" or "s3://bucket/prefix"',
            key="blob.store.uri",
        )
    if 1 in config.write_versions and store.durable and KAFKA_CHANGELOG not in store.backup_factories:
        raise ConfigError(
            f"task.checkpoint.write.versions has 1, but the store {store.name!r} is not backed up to "
            f"{KAFKA_CHANGELOG}: checkpoints of version 1 can refer to nothing else",
            hint=f"add {KAFKA_CHANGELOG} to the backup factories of the store, or write version 2 only",
            key="task.checkpoint.write.versions",
        )


def _check_schemas(store: StoreConfig) -> None:
    key, serde = f"stores.{store.name}.value.avro.schemas", f"stores.{store.name}.value.serde"
    if store.value_serde == "avro" and store.value_schemas is None:
        hint = "list every version of the schema, the newest last"
        raise ConfigError(f"{key} is not set, but {serde} is avro", hint=hint, key=key)
    if store.value_serde != "avro" and store.value_schemas is not None:
        raise ConfigError(f"{key} is set, but {serde} is {store.value_serde}", hint=f'set {serde} = "avro"', key=key)


def _check_memory(store: StoreConfig, memory_bytes: int) -> None:
    size = int(str(store.rocksdb["write.buffer.size.bytes"]))
    if store.type == "rocksdb" and size > memory_bytes // 2:
        key = f"stores.{store.name}.rocksdb.write.buffer.size.bytes"
        raise ConfigError(
            f"{key} is {size}, more than half of state.memory.bytes = {memory_bytes}: a memtable could never fill up",
            hint="raise state.memory.bytes, or make the write buffer smaller",
            key=key,
        )


def _check_versions(read: Sequence[int], write: Sequence[int]) -> None:
    if 2 not in write:
        key = "task.checkpoint.write.versions"
        raise ConfigError(f"{key} must contain 2", hint="[1, 2] also serves older software", key=key)
    if not set(write) <= set(read):
        key = "task.checkpoint.read.versions"
        hint = "add the versions that are missing"
        raise ConfigError(f"{key} must contain every version in task.checkpoint.write.versions", hint=hint, key=key)


def _check_encryption(config: JobConfig) -> None:
    algorithm, key_id = "blob.store.s3.sse.algorithm", "blob.store.s3.sse.kms.key.id"
    if key_id in config.values and not str(config.get(algorithm)).startswith("aws:kms"):
        raise ConfigError(
            f"{key_id} is set, but {algorithm} is {config.get(algorithm) or 'not set'}: the key would not be used",
            hint=f'set {algorithm} = "aws:kms"',
            key=algorithm,
        )
    uri = str(config.get("blob.store.uri") or "")
    if algorithm in config.values and uri and not uri.startswith(("s3:", "${")):
        raise ConfigError(
            f"{algorithm} is set, but blob.store.uri is not in S3: nothing would be encrypted",
            hint=f"remove {algorithm}, or set blob.store.uri to s3://bucket/prefix",
            key=algorithm,
        )


def _check_topics(config: JobConfig) -> None:
    """No topic has two uses."""
    topics = [("task.checkpoint.topic", config.checkpoint_topic)]
    topics += [(f"stores.{store.name}.changelog.topic", store.changelog_topic) for store in config.stores.values()]
    topics += [("task.inputs", topic) for topic in config.inputs]
    used: dict[str, str] = {}
    for key, topic in topics:
        if len(topic) > 249:
            hint = "Kafka allows no longer names: choose a shorter one"
            raise ConfigError(f"{key}: the topic's name is longer than 249 characters", hint=hint, key=key, topic=topic)
        if topic in used:
            hint = "give each its own topic"
            raise ConfigError(f"{key} names the same topic as {used[topic]}", hint=hint, key=key, topic=topic)
        used[topic] = key


def _check_client_setting(key: str) -> None:
    name = key.removeprefix("kafka.")
    for kind in ("producer.", "consumer.", "admin."):
        name = name.removeprefix(kind)
    if key.startswith("kafka.") and name in _OWN_SETTINGS:
        hint = "remove the key"
        raise ConfigError(f"{key} cannot be set: exactly-once publishing depends on it", hint=hint, key=key)
