"""Settings that are right one by one and wrong together. Reads the metadata of installed packages.

Each is one error that names the key to change.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from importlib.metadata import entry_points

from statemgr.config.store import StoreConfig
from statemgr.config.values import is_dotted_path
from statemgr.errors import ConfigError

#: The factories that come with statemgr.
KAFKA_CHANGELOG = "kafka-changelog"
BLOB_STORE = "blob-store"
_BUILT_IN = (KAFKA_CHANGELOG, BLOB_STORE)
#: What stands next to the stores' directories of a task; blobs of the task's own have names that start with ``_``.
_RESERVED = ("PUBLISHED",)
#: What the protocol depends on.
_OWN_SETTINGS = ("transactional.id", "enable.idempotence", "isolation.level", "enable.auto.commit", "acks")


def check_factories(key: str, factories: Iterable[str]) -> None:
    """Raises: ConfigError for a name that is neither built in, nor an entry point, nor a dotted path."""
    for factory in factories:
        if factory in _BUILT_IN or is_dotted_path(factory):
            continue
        known = (*_BUILT_IN, *(point.name for point in entry_points(group="statemgr.state_backends")))
        if factory not in known:
            near = get_close_matches(factory, known, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(sorted(set(known)))}"
            raise ConfigError(f"{key} names the unknown factory {factory!r}", hint=hint, key=key)


def check_store(store: StoreConfig, *, has_blob_uri: bool, write_versions: Sequence[int]) -> None:
    """One store against the rest. Raises: ConfigError."""
    prefix = f"stores.{store.name}"
    if store.name.startswith("_") or store.name in _RESERVED:
        raise ConfigError(
            f"{prefix} names a store with a reserved name: statemgr keeps something of its own under it",
            hint="choose a name that does not start with '_'" + "".join(f" and is not {name}" for name in _RESERVED),
            key=prefix,
        )
    if store.restore_factories and not store.durable:
        key = f"{prefix}.restore.factories"
        raise ConfigError(
            f"{key} is set, but the store is not backed up", hint=f"set {prefix}.backup.factories", key=key
        )
    if store.durable and not store.restore_factories:
        key = f"{prefix}.restore.factories"
        raise ConfigError(f"{key} is empty, but the store is backed up: it could never be restored", key=key)
    if BLOB_STORE in (*store.backup_factories, *store.restore_factories) and not has_blob_uri:
        raise ConfigError(
            f"blob.store.uri is not set, but the store {store.name!r} uses {BLOB_STORE}",
            hint='for example blob.store.uri = "file:///var/lib/statemgr/blobs" or "s3://bucket/prefix"',
            key="blob.store.uri",
        )
    if 1 in write_versions and store.durable and KAFKA_CHANGELOG not in store.backup_factories:
        raise ConfigError(
            f"task.checkpoint.write.versions has 1, but the store {store.name!r} has no {KAFKA_CHANGELOG} "
            "backup: a version 1 checkpoint could not name its state",
            hint=f"back it up to {KAFKA_CHANGELOG} too, or write version 2 alone",
            key="task.checkpoint.write.versions",
        )


def check_serde(store: StoreConfig) -> None:
    """Schemas and the serde that reads them go together. Raises: ConfigError."""
    key = f"stores.{store.name}.value.avro.schemas"
    if store.value_serde == "avro" and store.value_schemas is None:
        raise ConfigError(
            f"{key} is not set, but stores.{store.name}.value.serde is avro",
            hint="list every version of the schema, the newest last",
            key=key,
        )
    if store.value_serde != "avro" and store.value_schemas is not None:
        raise ConfigError(
            f"{key} is set, but stores.{store.name}.value.serde is {store.value_serde}",
            hint=f'set stores.{store.name}.value.serde = "avro"',
            key=key,
        )


def check_memory(store: StoreConfig, memory_bytes: int) -> None:
    """A memtable has room in the memory of the process. Raises: ConfigError."""
    size = int(str(store.rocksdb["write.buffer.size.bytes"]))
    if store.type == "rocksdb" and size > memory_bytes // 2:
        key = f"stores.{store.name}.rocksdb.write.buffer.size.bytes"
        raise ConfigError(
            f"{key} is {size}, more than half of state.memory.bytes = {memory_bytes}: a memtable could never fill",
            hint="raise state.memory.bytes, or lower it",
            key=key,
        )


def check_versions(read: Sequence[int], write: Sequence[int]) -> None:
    """Raises: ConfigError when what is written could not be read, or version 2 is not written."""
    if 2 not in write:
        key = "task.checkpoint.write.versions"
        raise ConfigError(f"{key} must contain 2", hint="[1, 2] also serves older software", key=key)
    if not set(write) <= set(read):
        key = "task.checkpoint.read.versions"
        raise ConfigError(f"{key} must contain every version in task.checkpoint.write.versions", key=key)


def check_encryption(values: Mapping[str, object]) -> None:
    """Raises: ConfigError for a KMS key without encryption by KMS, or encryption where there is no S3."""
    algorithm, key_id = "blob.store.s3.sse.algorithm", "blob.store.s3.sse.kms.key.id"
    if key_id in values and not str(values.get(algorithm, "")).startswith("aws:kms"):
        raise ConfigError(
            f"{key_id} is set, but {algorithm} is {values.get(algorithm, 'not set')}: the key would not be used",
            hint=f'{algorithm} = "aws:kms"',
            key=algorithm,
        )
    uri = str(values.get("blob.store.uri", ""))
    if algorithm in values and uri and not uri.startswith(("s3:", "${")):
        raise ConfigError(
            f"{algorithm} is set, but blob.store.uri is not in S3: nothing would be encrypted",
            hint="leave it out, or set blob.store.uri to s3://bucket/prefix",
            key=algorithm,
        )


def check_topics(topics: Iterable[tuple[str, str]]) -> None:
    """No topic has two uses. ``topics`` are pairs (key, topic). Raises: ConfigError."""
    used: dict[str, str] = {}
    for key, topic in topics:
        if len(topic) > 249:
            raise ConfigError(f"{key}: the topic's name is longer than 249 characters", key=key, topic=topic)
        if topic in used:
            raise ConfigError(
                f"{key} names the topic of {used[topic]} too", hint="give each its own", key=key, topic=topic
            )
        used[topic] = key


def check_client_settings(values: Mapping[str, object]) -> None:
    """Raises: ConfigError for a setting of librdkafka that statemgr sets itself."""
    for key in values:
        if not key.startswith("kafka."):
            continue
        name = key.removeprefix("kafka.")
        for kind in ("producer.", "consumer.", "admin."):
            name = name.removeprefix(kind)
        if name in _OWN_SETTINGS:
            raise ConfigError(
                f"{key} cannot be set: exactly-once publishing depends on it", hint="leave it out", key=key
            )
