"""The configuration of one store. Reads the environment and files only to resolve references."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from statemgr.config.keys import lookup
from statemgr.config.rocksdb_options import ROCKSDB_OPTIONS, rocksdb_defaults
from statemgr.config.secrets import has_reference, resolve
from statemgr.config.values import AVRO_SCHEMAS, Value
from statemgr.errors import ConfigError
from statemgr.ids import topic_name


@dataclass(frozen=True, kw_only=True)
class StoreConfig:
    """One store.

    ``type`` is ``rocksdb`` or ``memory``; ``restore_factories`` is in order of preference;
    ``min_compaction_lag_ms``: the changelog's; ``value_schemas``: of the values, references unresolved, None unless
    they are Avro; ``write_batch_size``: changes gathered for one native batch; ``rocksdb`` has every option, by its
    name after ``rocksdb.``.
    """

    name: str
    type: str = "rocksdb"
    backup_factories: tuple[str, ...] = ()
    restore_factories: tuple[str, ...] = ()
    changelog_topic: str
    min_compaction_lag_ms: int = 4 * 3600 * 1000
    key_serde: str = "bytes"
    value_serde: str = "bytes"
    value_schemas: list[str] | str | None = None
    write_batch_size: int = 5000
    rocksdb: Mapping[str, Value] = field(default_factory=rocksdb_defaults)

    @property
    def durable(self) -> bool:
        """True when its state is backed up anywhere."""
        return bool(self.backup_factories)

    def avro_schemas(self) -> list[str]:
        """Versions of the values' Avro schema as JSON, oldest first. Raises: ConfigError when they cannot be read."""
        key, given = f"stores.{self.name}.value.avro.schemas", self.value_schemas or []
        if not has_reference(given):
            return list(given)
        try:
            return cast("list[str]", AVRO_SCHEMAS.parse(resolve(key, str(given))))
        except (ValueError, OverflowError, RecursionError):
            raise ConfigError(f"{key} must be {AVRO_SCHEMAS.expected}", key=key) from None


def store_from_values(name: str, values: Mapping[str, Value], job: tuple[str, str]) -> StoreConfig:
    """The store ``name`` of a job (its name and ID) from checked values.

    A store that is not backed up is not restored by default.
    """

    def value(suffix: str) -> Any:
        key = f"stores.{name}.{suffix}"
        return values.get(key, lookup(key).default)

    default_backup = values.get("task.backup.factories", lookup("task.backup.factories").default)
    backup = cast("list[str]", values.get(f"stores.{name}.backup.factories", default_backup))
    default_restore = values.get("task.restore.factories", backup) if backup else []
    restore = cast("list[str]", values.get(f"stores.{name}.restore.factories", default_restore))
    return StoreConfig(
        name=name,
        type=value("type"),
        backup_factories=tuple(backup),
        restore_factories=tuple(restore),
        changelog_topic=value("changelog.topic") or topic_name(*job, name, "changelog"),
        min_compaction_lag_ms=value("changelog.min.compaction.lag.ms"),
        key_serde=value("key.serde"),
        value_serde=value("value.serde"),
        value_schemas=value("value.avro.schemas"),
        write_batch_size=value("write.batch.size"),
        rocksdb={option.name: value(f"rocksdb.{option.name}") for option in ROCKSDB_OPTIONS},
    )
