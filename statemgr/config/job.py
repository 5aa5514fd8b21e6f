"""The configuration of a job: validated once, frozen, secrets masked. Reads files only through ``loading``.

References (``${env:…}``, ``${file:…}``) are resolved by :meth:`JobConfig.kafka_client`,
:attr:`JobConfig.blob_uri`, :attr:`JobConfig.blob_s3` and :attr:`JobConfig.state_dir`,
each time they are asked for.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from statemgr.config import contradictions
from statemgr.config.interval import SnapshotInterval
from statemgr.config.keys import lookup
from statemgr.config.loading import load_values, parse_resolved, read_toml
from statemgr.config.retry import RetryPolicy
from statemgr.config.secrets import has_reference, hidden_texts, masked, resolve, without
from statemgr.config.store import StoreConfig, store_from_values
from statemgr.config.values import Value
from statemgr.errors import ConfigError
from statemgr.ids import topic_name

if TYPE_CHECKING:
    from confluent_kafka import Consumer

ClientKind = Literal["producer", "consumer", "admin"]
_CLIENT_KINDS = ("producer", "consumer", "admin")
_S3 = "blob.store.s3."


@dataclass(frozen=True, kw_only=True)
class JobConfig:
    """A job's configuration. Make one with :meth:`from_file` or :meth:`from_mapping`.

    ``values`` are the keys that were given, dotted, checked and typed, with references unresolved.
    """

    values: Mapping[str, Value]

    def __post_init__(self) -> None:
        if "job.name" not in self.values:
            raise ConfigError("job.name is not set", hint='for example job.name = "orders"', key="job.name")
        for key, value in self.values.items():
            if key.endswith(".factories"):
                contradictions.check_factories(key, cast("list[str]", value))
        contradictions.check_client_settings(self.values)
        contradictions.check_encryption(self.values)
        contradictions.check_versions(self.read_versions, self.write_versions)
        for store in self.stores.values():
            contradictions.check_store(
                store, has_blob_uri="blob.store.uri" in self.values, write_versions=self.write_versions
            )
            contradictions.check_serde(store)
            contradictions.check_memory(store, self.memory_bytes)
        topics = [("task.checkpoint.topic", self.checkpoint_topic)]
        topics += [(f"stores.{s.name}.changelog.topic", s.changelog_topic) for s in self.stores.values()]
        contradictions.check_topics([*topics, *(("task.inputs", topic) for topic in self.inputs)])

    @classmethod
    def from_file(cls, path: str | os.PathLike[str], overrides: Mapping[str, object] | None = None) -> JobConfig:
        """Load a TOML file. ``overrides`` are dotted keys that win over the file. Raises: ConfigError."""
        return cls(values=load_values(read_toml(path), overrides or {}))

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, object], overrides: Mapping[str, object] | None = None) -> JobConfig:
        """Load a mapping, nested or dotted; every value may be a string. Raises: ConfigError."""
        return cls(values=load_values(mapping, overrides or {}))

    def to_mapping(self) -> dict[str, Value]:
        """What :meth:`from_mapping` makes an equal object from; safe for JSON, references unresolved.

        A secret that was given literally is in it literally: use references for what leaves the machine.
        """
        return {key: list(value) if isinstance(value, list) else value for key, value in self.values.items()}  # type: ignore[misc]

    def masked(self) -> dict[str, object]:
        """The given keys as they may be shown to anyone."""
        return {key: masked(key, value) for key, value in self.values.items()}

    def hider(self) -> Callable[[str], str]:
        """What puts a mask in place of secrets, and of what references stand for now, in a text of other software."""
        return partial(without, hidden_texts(self.values))

    def __repr__(self) -> str:
        return f"JobConfig({self.masked()!r})"

    def get(self, key: str) -> Any:
        """The typed value of a key (unresolved), its default when it was not given, None when it has none.

        Raises: ConfigError for an unknown key.
        """
        if key in self.values:
            return self.values[key]
        computed = self._computed(key)
        if computed is not None:
            return computed
        return lookup(key).default

    def _computed(self, key: str) -> Value | None:
        """Defaults that are worked out from other keys."""
        if key == "task.checkpoint.topic":
            return self.checkpoint_topic
        if key == "task.restore.factories":
            return list(self.get("task.backup.factories"))
        parts = key.split(".", 2)
        if parts[0] == "stores" and len(parts) == 3 and parts[1] in self.stores:
            store = self.stores[parts[1]]
            computed: dict[str, Value] = {
                "backup.factories": list(store.backup_factories),
                "restore.factories": list(store.restore_factories),
                "changelog.topic": store.changelog_topic,
                "changelog": store.changelog_topic,
            }
            return computed.get(parts[2])
        return None

    # --- the job --------------------------------------------------------------------------------------------

    @property
    def job_name(self) -> str:
        """The job's name; a part of every topic and blob name."""
        return str(self.values["job.name"])

    @property
    def job_id(self) -> str:
        """Tells runs of one job apart."""
        return str(self.get("job.id"))

    @property
    def job_key(self) -> str:
        """``<name>/<ID>``: the job, as steps are announced for it."""
        return f"{self.job_name}/{self.job_id}"

    @property
    def tasks(self) -> int:
        """Number of tasks (state partitions)."""
        return int(self.get("job.tasks"))

    @property
    def inputs(self) -> list[str]:
        """Input topics."""
        return list(self.get("task.inputs"))

    @property
    def state_dir(self) -> Path:
        """Local directory of the stores, resolved; relative to the working directory."""
        return Path(str(self._resolved("state.dir")))

    @property
    def memory_bytes(self) -> int:
        """Memory of all RocksDB stores of a process together, in bytes."""
        return int(self.get("state.memory.bytes"))

    @property
    def metrics_port(self) -> int | None:
        """Port of the metrics; 0 is any free one, None is off."""
        return cast("int | None", self.values.get("metrics.port"))

    # --- checkpoints and commits ----------------------------------------------------------------------------

    @property
    def checkpoint_topic(self) -> str:
        """The checkpoint topic's name."""
        given = self.values.get("task.checkpoint.topic")
        return str(given or f"__statemgr_checkpoints_{topic_name(self.job_name, self.job_id)}")

    @property
    def checkpoint_replication_factor(self) -> int:
        """Replicas of a checkpoint topic that is created; -1 is the broker's default."""
        return int(self.get("task.checkpoint.replication.factor"))

    @property
    def read_versions(self) -> tuple[int, ...]:
        """Record versions that are read, ascending."""
        return tuple(cast("list[int]", self.values.get("task.checkpoint.read.versions", [1, 2])))

    @property
    def write_versions(self) -> tuple[int, ...]:
        """Record versions that are written, ascending."""
        return tuple(cast("list[int]", self.values.get("task.checkpoint.write.versions", [2])))

    @property
    def retained(self) -> int:
        """Checkpoints kept per task."""
        return int(self.get("task.checkpoint.retained"))

    @property
    def commit_ms(self) -> int:
        """Milliseconds between commits of a consumer loop."""
        return int(self.get("task.commit.ms"))

    @property
    def commit_max_delay_ms(self) -> int:
        """Age of a commit on its way, in milliseconds, from which its task waits for it."""
        return int(self.get("task.commit.max.delay.ms"))

    @cached_property
    def snapshot_interval(self) -> SnapshotInterval:
        """What may gather on top of a snapshot before the next one is made."""
        return SnapshotInterval.parse(self.get("task.commit.snapshot.interval"))

    @property
    def tolerated_snapshot_failures(self) -> int:
        """Snapshots in a row that may fail before commits do."""
        return int(self.get("task.commit.snapshot.tolerated.failures"))

    @property
    def commit_timeout_ms(self) -> int:
        """Longest time of a commit, and the transaction's timeout, in milliseconds."""
        return int(self.get("task.commit.timeout.ms"))

    # --- stores ---------------------------------------------------------------------------------------------

    @cached_property
    def stores(self) -> Mapping[str, StoreConfig]:
        """The declared stores by name, in the order of their names. Any key of a store declares it."""
        names = sorted({key.split(".", 2)[1] for key in self.values if key.startswith("stores.")})
        return {name: store_from_values(name, self.values, (self.job_name, self.job_id)) for name in names}

    # --- blobs ----------------------------------------------------------------------------------------------

    @property
    def blob_uri(self) -> str | None:
        """Where blobs are, resolved. Raises: ConfigError for a reference that names nothing."""
        value = self._resolved("blob.store.uri")
        return None if value is None else str(value)

    @property
    def blob_s3(self) -> Mapping[str, str | bool]:
        """Settings of S3 by their names after ``blob.store.s3.``, resolved, secrets in the clear.

        Only what was given, and ``path.style``. Raises: ConfigError for a reference that names nothing.
        """
        keys = [key for key in self.values if key.startswith(_S3)]
        result = {key.removeprefix(_S3): cast("str | bool", self._resolved(key)) for key in keys}
        result.setdefault("path.style", False)
        return result

    @property
    def ttl_days(self) -> int:
        """Time to live of blobs that no checkpoint refers to yet, in days."""
        return int(self.get("blob.store.ttl.days"))

    @property
    def part_size(self) -> int:
        """Bytes of one part of a file."""
        return int(self.get("blob.store.part.size"))

    @property
    def compresses(self) -> bool:
        """Whether parts of files are compressed where that makes them smaller."""
        return bool(self.get("blob.store.compression") == "zstd")

    @property
    def parallelism(self) -> int:
        """Parts of files in flight at a time."""
        return int(self.get("blob.store.parallelism"))

    @property
    def inflight_bytes(self) -> int:
        """``blob.store.inflight.bytes``."""
        return int(self.get("blob.store.inflight.bytes"))

    @property
    def retry(self) -> RetryPolicy:
        """When requests to the blob store are tried again."""
        prefix = "blob.store.retry.policy."
        return RetryPolicy(
            max_retries=self.get(prefix + "max.retries"),
            max_duration_ms=self.get(prefix + "max.retry.duration.millis"),
            backoff_ms=self.get(prefix + "backoff.delay.millis"),
            backoff_max_ms=self.get(prefix + "backoff.max.delay.millis"),
            factor=self.get(prefix + "backoff.delay.factor"),
            jitter=self.get(prefix + "jitter.factor"),
        )

    # --- Kafka ----------------------------------------------------------------------------------------------

    def kafka_client(self, kind: ClientKind) -> dict[str, str | int | float | bool]:
        """Settings for one of librdkafka's clients, resolved, with secrets in the clear.

        The kind's own settings (``kafka.producer.*``…) win over the shared ones.

        Raises: ConfigError when ``kafka.bootstrap.servers`` is not set, or for a reference to nothing.
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
            if family in _CLIENT_KINDS:
                if family == kind:
                    own[rest] = cast("str | int | float | bool", self._resolved(key))
            else:
                shared[name] = cast("str | int | float | bool", self._resolved(key))
        return shared | own

    def consumer(self, group: str) -> Consumer:
        """A consumer for :meth:`statemgr.StateManager.run`: a member of ``group`` that commits nothing by itself, reads
        committed records, checks their checksums, and never jumps to another offset. It takes the settings under
        ``kafka.*`` and ``kafka.consumer.*``. Close it after the manager.

        Raises: ConfigError, InvalidError.
        """
        # the client is of a higher floor than the configuration: loaded by name, and only by who reads input
        made: Consumer = import_module("statemgr.kafka.group_consumer").group_consumer(self, group)
        return made

    def _resolved(self, key: str) -> Value | None:
        value = cast("Value | None", self.get(key))
        if not has_reference(value):
            return value
        # Checked again: what stands behind a reference is known only now.
        return parse_resolved(key, resolve(key, str(value)))
