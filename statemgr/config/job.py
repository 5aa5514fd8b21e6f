"""The configuration of a job: validated once, frozen, secrets masked. Reads files only through ``loading``.

:meth:`JobConfig.kafka_client`, :attr:`JobConfig.blob_uri`, :attr:`JobConfig.blob_s3` and :attr:`JobConfig.state_dir`
resolve references (``${env:…}``, ``${file:…}``) each time they are used.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

from statemgr.config.contradictions import check_job
from statemgr.config.keys import lookup
from statemgr.config.loading import (
    has_reference,
    hidden_texts,
    load_values,
    masked,
    our_key,
    parse_resolved,
    read_toml,
    resolve,
    without,
)
from statemgr.config.policies import RetryPolicy, SnapshotInterval
from statemgr.config.store import StoreConfig, schemas_of, store_from_values
from statemgr.config.values import Value
from statemgr.errors import ConfigError, InvalidError
from statemgr.ids import task_index, topic_name

if TYPE_CHECKING:
    from confluent_kafka import Consumer

T = TypeVar("T")
ClientKind = Literal["producer", "consumer", "admin"]
CLIENT_KINDS: tuple[ClientKind, ...] = ("producer", "consumer", "admin")
#: Begins the name of a checkpoint topic, unless another name is set.
CHECKPOINTS = "__statemgr_checkpoints_"
#: Keys that limit the size of a record, the stronger one first.
RECORD_LIMITS = ("kafka.producer.message.max.bytes", "kafka.message.max.bytes")
#: librdkafka's default of ``message.max.bytes``, and what it adds to a record (RD_KAFKAP_MESSAGE_V2_MAX_OVERHEAD).
_MESSAGE_MAX_BYTES, _OF_RECORD = 1_000_000, 36
log = logging.getLogger(__name__)


def _setting(key: str, of: Callable[[Any], T]) -> cached_property[T]:
    """An attribute with the value of a key or its default, and with the documentation of the key."""
    entry = lookup(key)
    attribute = cached_property[T](lambda config: of(config.values.get(key, entry.default)))
    attribute.__doc__ = entry.doc
    return attribute


@dataclass(frozen=True, kw_only=True)
class JobConfig:
    """A job's configuration. Make one with :meth:`from_file` or :meth:`from_mapping`.

    ``values`` are the keys that were given, dotted, checked and typed, with references unresolved.
    """

    values: Mapping[str, Value]

    def __post_init__(self) -> None:
        check_job(self)

    @classmethod
    def from_file(cls, path: str | os.PathLike[str], overrides: Mapping[str, object] | None = None) -> JobConfig:
        """Load a TOML file. ``overrides`` are dotted keys that replace those of the file. Raises: ConfigError."""
        return cls.from_mapping(read_toml(path), overrides)

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, object], overrides: Mapping[str, object] | None = None) -> JobConfig:
        """Load a mapping with nested or dotted keys. Every value may be a string. Raises: ConfigError."""
        values, notices = load_values(mapping, overrides or {})
        for notice in notices:
            log.warning("%s", notice)
        return cls(values=values)

    def to_mapping(self) -> dict[str, Value]:
        """A mapping that :meth:`from_mapping` makes an equal object from. JSON has all its values.

        References are unresolved. A secret that was given as a plain value is in it as a plain value.
        """
        return {key: list(value) if isinstance(value, list) else value for key, value in self.values.items()}  # type: ignore[misc]

    def masked(self) -> dict[str, object]:
        """The given keys, with secrets masked."""
        return {key: masked(key, value) for key, value in self.values.items()}

    def hider(self) -> Callable[[str], str]:
        """A function that masks secrets, and the present values of references, in a text of other software."""
        return partial(without, hidden_texts(self._hidden))

    @cached_property
    def _hidden(self) -> Mapping[str, Value]:
        """The values that :meth:`masked` masks, and those with references."""
        shown = self.masked()
        return {key: value for key, value in self.values.items() if shown[key] != value or has_reference(value)}

    def __repr__(self) -> str:
        return f"JobConfig({self.masked()!r})"

    def get(self, key: str) -> Any:
        """The typed value of a key with references unresolved, or its default, or None if it has no default.

        Raises: ConfigError for an unknown key.
        """
        if key in self.values:
            return self.values[key]
        key = our_key(key)
        if key in self.values:
            return self.values[key]
        if key == "task.checkpoint.topic":
            return self.checkpoint_topic
        if key == "task.restore.factories":
            return list(self.get("task.backup.factories"))
        first, _, rest = key.partition(".")
        name, _, setting = rest.partition(".")
        if first == "stores" and name in self.stores:
            store = self.stores[name]
            if setting == "backup.factories":
                return list(store.backup_factories)
            if setting == "restore.factories":
                return list(store.restore_factories)
            if setting == "changelog.topic":
                return store.changelog_topic
        return lookup(key).default

    # --- the job --------------------------------------------------------------------------------------------

    job_name = _setting("job.name", str)
    job_id = _setting("job.id", str)
    tasks = _setting("job.tasks", int)
    memory_bytes = _setting("state.memory.bytes", int)
    log_format = _setting("log.format", str)
    log_level = _setting("log.level", str)

    @cached_property
    def job_key(self) -> str:
        """``<name>/<ID>``."""
        return f"{self.job_name}/{self.job_id}"

    @cached_property
    def restore_factories(self) -> tuple[str, ...]:
        """The factories that restores of the stores may use."""
        return tuple(dict.fromkeys(one for store in self.stores.values() for one in store.restore_factories))

    @property
    def metrics_port(self) -> int | None:
        """Port of the metrics. 0 takes a free one, None is off."""
        return cast("int | None", self.get("metrics.port"))

    @property
    def owner_published(self) -> bool:
        """Whether checkpoints name the process that published them."""
        return bool(self.get("job.owner.published"))

    @property
    def inputs(self) -> list[str]:
        return list(self.get("task.inputs"))

    @property
    def outputs(self) -> list[str]:
        return list(self.get("task.outputs"))

    starts_latest = _setting("task.input.start", "latest".__eq__)
    input_key_serde = _setting("task.input.key.serde", str)
    input_value_serde = _setting("task.input.value.serde", str)
    batch_messages = _setting("task.batch.messages", int)

    def input_schemas(self) -> list[str]:
        """Versions of the Avro schema of the input's values, as JSON, oldest first. Raises: ConfigError if they cannot
        be read."""
        key = "task.input.value.avro.schemas"
        return schemas_of(key, self.get(key))

    @cached_property
    def state_dir(self) -> Path:
        """Local directory of the stores, resolved. A relative path starts at the working directory."""
        return Path(str(self._resolved("state.dir")))

    state_cleanup_delay_ms = _setting("state.cleanup.delay.ms", int)

    # --- checkpoints and commits ----------------------------------------------------------------------------

    checkpoint_replication_factor = _setting("task.checkpoint.replication.factor", int)
    read_versions = _setting("task.checkpoint.read.versions", tuple[int, ...])
    write_versions = _setting("task.checkpoint.write.versions", tuple[int, ...])
    retained = _setting("task.checkpoint.retained", int)
    retained_hourly = _setting("task.checkpoint.hourly", int)
    retained_daily = _setting("task.checkpoint.daily", int)
    commit_ms = _setting("task.commit.ms", int)
    commit_max_delay_ms = _setting("task.commit.max.delay.ms", int)
    commit_timeout_ms = _setting("task.commit.timeout.ms", int)
    shutdown_ms = _setting("task.shutdown.ms", int)
    snapshot_interval = _setting("task.commit.snapshot.interval", SnapshotInterval.parse)
    by_need_bytes = _setting("task.restore.by.need.bytes", int)
    tolerated_snapshot_failures = _setting("task.commit.snapshot.tolerated.failures", int)

    @cached_property
    def checkpoint_topic(self) -> str:
        given = self.values.get("task.checkpoint.topic")
        return str(given or f"{CHECKPOINTS}{topic_name(self.job_name, self.job_id)}")

    def check_task(self, name: str) -> None:
        """Raises: InvalidError if the job has no such task."""
        if task_index(name) >= self.tasks:
            raise InvalidError(
                f"the job has {self.tasks} tasks, so there is no {name!r}",
                hint="job.tasks is the number of partitions of the input",
                job=self.job_name,
            )

    # --- stores ---------------------------------------------------------------------------------------------

    @cached_property
    def stores(self) -> Mapping[str, StoreConfig]:
        """The stores by name, in the order of their names. Any key of a store declares it."""
        names = sorted({key.split(".", 2)[1] for key in self.values if key.startswith("stores.")})
        return {name: store_from_values(name, self.values, (self.job_name, self.job_id)) for name in names}

    def store(self, name: str) -> StoreConfig:
        """The settings of a store. Raises: ConfigError for an unknown name."""
        if name not in self.stores:
            known = ", ".join(self.stores) or "none"
            raise ConfigError(f"the job has no store {name!r}", hint=f"it has: {known}", store=name)
        return self.stores[name]

    # --- blobs ----------------------------------------------------------------------------------------------

    ttl_days = _setting("blob.store.ttl.days", int)
    part_size = _setting("blob.store.part.size", int)
    compresses = _setting("blob.store.compression", "zstd".__eq__)
    parallelism = _setting("blob.store.parallelism", int)
    inflight_bytes = _setting("blob.store.inflight.bytes", int)

    @property
    def blob_uri(self) -> str | None:
        """The URI of the blob store, resolved. Raises: ConfigError for a reference that cannot be resolved."""
        value = self._resolved("blob.store.uri")
        return None if value is None else str(value)

    @property
    def blob_s3(self) -> Mapping[str, str | bool]:
        """The given settings after ``blob.store.s3.``, and ``path.style``, resolved and with secrets in plain text.

        Raises: ConfigError for a reference that cannot be resolved.
        """
        return {"path.style": self.get("blob.store.s3.path.style"), **self._below("blob.store.s3.")}

    @property
    def blob_gcs(self) -> Mapping[str, str | bool]:
        """The given settings after ``blob.store.gcs.``, as :attr:`blob_s3`."""
        return self._below("blob.store.gcs.")

    @property
    def blob_azure(self) -> Mapping[str, str | bool]:
        """The given settings after ``blob.store.azure.``, as :attr:`blob_s3`."""
        return self._below("blob.store.azure.")

    def _below(self, prefix: str) -> Mapping[str, str | bool]:
        keys = [key for key in self.values if key.startswith(prefix)]
        return {key.removeprefix(prefix): cast("str | bool", self._resolved(key)) for key in keys}

    @property
    def retry(self) -> RetryPolicy:
        """When requests to the blob store are tried again."""
        prefix = "blob.store.retry.policy."
        return RetryPolicy(
            max_retries=self._given(prefix + "max.retries"),
            max_duration_ms=self._given(prefix + "max.retry.duration.millis"),
            backoff_ms=self._given(prefix + "backoff.delay.millis"),
            backoff_max_ms=self._given(prefix + "backoff.max.delay.millis"),
            factor=self._given(prefix + "backoff.delay.factor"),
            jitter=self._given(prefix + "jitter.factor"),
        )

    # --- Kafka ----------------------------------------------------------------------------------------------

    @cached_property
    def most_record_bytes(self) -> int:
        """Bytes of key, value and headers of the largest record that the producer takes. Raises: ConfigError."""
        for key in RECORD_LIMITS:
            if key in self.values:
                try:
                    return int(str(self._resolved(key))) - _OF_RECORD
                except ValueError:
                    raise ConfigError(f"{key} must be a whole number of bytes", key=key) from None
        return _MESSAGE_MAX_BYTES - _OF_RECORD

    def kafka_client(self, kind: ClientKind) -> dict[str, str | int | float | bool]:
        """Settings for one of librdkafka's clients, resolved and with secrets in plain text.

        Settings for one kind (``kafka.producer.*``) replace the shared ones.

        Raises: ConfigError if ``kafka.bootstrap.servers`` is not set, or a reference cannot be resolved.
        """
        if "kafka.bootstrap.servers" not in self.values:
            raise ConfigError(
                "kafka.bootstrap.servers is not set",
                hint='for example kafka.bootstrap.servers = "localhost:9092"',
                key="kafka.bootstrap.servers",
            )
        shared: dict[str, str | int | float | bool] = {}
        own: dict[str, str | int | float | bool] = {}
        for key in self.values:
            if not key.startswith("kafka."):
                continue
            name = key.removeprefix("kafka.")
            family, _, rest = name.partition(".")
            if family not in CLIENT_KINDS:
                shared[name] = cast("str | int | float | bool", self._resolved(key))
            elif family == kind:
                own[rest] = cast("str | int | float | bool", self._resolved(key))
        return shared | own

    @property
    def topic_settings(self) -> dict[str, str]:
        """Settings of topics that statemgr creates besides those that it needs, under Kafka's names, as Kafka takes
        them."""
        prefix = "task.topics."
        found = {key.removeprefix(prefix): value for key, value in self.values.items() if key.startswith(prefix)}
        return {name: str(value).lower() if isinstance(value, bool) else str(value) for name, value in found.items()}

    def schema_registry(self) -> dict[str, str | int | float | bool]:
        """Settings for the client of the Schema Registry, under its own names, resolved and with secrets in plain text.

        Raises: ConfigError if a reference cannot be resolved.
        """
        prefix = "schema.registry."
        keys = [key for key in self.values if key.startswith(prefix)]
        return {key.removeprefix(prefix): cast("str | int | float | bool", self._resolved(key)) for key in keys}

    def consumer(self, group: str) -> Consumer:
        """A consumer for :meth:`statemgr.StateManager.run`: a member of ``group`` that commits nothing by itself, reads
        committed records, checks their checksums, and never jumps to another offset. It takes the settings under
        ``kafka.*`` and ``kafka.consumer.*``. Close it after the manager.

        Raises: ConfigError, InvalidError.
        """
        # the client is on a higher floor than the configuration, so it is loaded by name
        made: Consumer = import_module("statemgr.kafka.group_consumer").group_consumer(self, group)
        return made

    def _given(self, key: str) -> Any:
        """The value of a key, or its default; for a key that has one, by our name."""
        return self.values[key] if key in self.values else lookup(key).default

    def _resolved(self, key: str) -> Value | None:
        value: Value | None = self._given(key)
        if not has_reference(value):
            return value
        # check again, because the value of a reference is known only now
        return parse_resolved(key, resolve(key, str(value)))
