"""The configuration of one store. Reads the environment and files only to resolve references."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

from statemgr.config.keys import ROCKSDB_DEFAULTS, lookup
from statemgr.config.loading import has_reference, parse_resolved, resolve
from statemgr.config.values import Value
from statemgr.ids import topic_name

_WITH_TTL = " with TTL"


@dataclass(frozen=True, kw_only=True)
class StoreConfig:
    """One store. See ``keys`` for the meaning of each key.

    ``restore_factories`` is in order of preference. ``value_schemas`` has references unresolved, and is None unless the
    values are Avro. ``ttl_ms``: None if entries do not expire. ``rocksdb`` has every option by its name after
    ``rocksdb.``.
    """

    name: str
    type: str
    backup_factories: tuple[str, ...]
    restore_factories: tuple[str, ...]
    changelog_topic: str
    min_compaction_lag_ms: int
    key_serde: str
    value_serde: str
    value_schemas: list[str] | str | None
    ttl_ms: int | None
    write_batch_size: int
    rocksdb: Mapping[str, Value]

    @property
    def durable(self) -> bool:
        """Whether any backend backs it up."""
        return bool(self.backup_factories)

    @property
    def restorable(self) -> bool:
        """Whether restores can read what commits store. If not, they can still read what commits stored before a change
        of the configuration."""
        return not set(self.backup_factories).isdisjoint(self.restore_factories)

    @cached_property
    def serdes(self) -> tuple[str, str]:
        """The labels of its configured serdes, as a checkpoint records them."""
        return self.key_serde, self.value_label(self.value_serde)

    def value_label(self, serde: str) -> str:
        """What a checkpoint records of a value serde."""
        return serde if self.ttl_ms is None else serde + _WITH_TTL

    @cached_property
    def avro_schemas(self) -> list[str]:
        """Versions of the values' Avro schema as JSON, oldest first. A file is read once.

        Raises: ConfigError if they cannot be read.
        """
        return schemas_of(f"stores.{self.name}.value.avro.schemas", self.value_schemas)


def expires(value_label: str) -> bool:
    """Whether a checkpoint's label of a value serde says that the values begin with their expiry."""
    return value_label.endswith(_WITH_TTL)


def schemas_of(key: str, given: list[str] | str | None) -> list[str]:
    """Avro schemas with references resolved. Raises: ConfigError if they cannot be read."""
    if has_reference(given):
        given = cast("list[str]", parse_resolved(key, resolve(key, str(given))))
    return list(given or [])


def store_from_values(name: str, values: Mapping[str, Value], job: tuple[str, str]) -> StoreConfig:
    """Make the configuration of a store from checked values. ``job``: the job's name and ID.

    A store that is not backed up is not restored by default.
    """

    def value(setting: str, otherwise: object = None) -> Any:
        key = f"stores.{name}.{setting}"
        default = lookup(key).default
        return values.get(key, otherwise if default is None else default)

    job_wide = "task.backup.factories"
    backup = value("backup.factories", values.get(job_wide, lookup(job_wide).default))
    restore = value("restore.factories", values.get("task.restore.factories", backup) if backup else [])
    return StoreConfig(
        name=name,
        type=value("type"),
        backup_factories=tuple(backup),
        restore_factories=tuple(restore),
        changelog_topic=value("changelog.topic", topic_name(*job, name, "changelog")),
        min_compaction_lag_ms=value("changelog.min.compaction.lag.ms"),
        key_serde=value("key.serde"),
        value_serde=value("value.serde"),
        value_schemas=value("value.avro.schemas"),
        ttl_ms=value("ttl.ms"),
        write_batch_size=value("write.batch.size"),
        rocksdb={option: value(f"rocksdb.{option}") for option in ROCKSDB_DEFAULTS},
    )
