"""Checks changes of the configuration since the checkpoint: new and removed stores, and other serdes."""

from __future__ import annotations

from collections.abc import Mapping

from statemgr.backends.services import Services
from statemgr.config import StoreConfig
from statemgr.model.checkpoint import Checkpoint, CheckpointRecord
from statemgr.model.permissions import Permissions
from statemgr.model.plan import check_listing
from statemgr.model.serde_check import Labels, check_serdes


def check_changes(
    services: Services,
    records: Mapping[str, CheckpointRecord | None],
    permissions: Mapping[str, Permissions],
    *,
    application_may_choose: bool,
) -> None:
    """Refuse an opening that would lose state because the configuration changed.

    Args:
        application_may_choose: whether the application may later pass other serdes than the configured ones. Then
            serdes that the configuration leaves at their defaults are checked when the application asks for the store.

    Raises: PermissionNeeded.
    """
    config = services.config
    labels = {
        name: _configured(services, store) if application_may_choose else (store.key_serde, store.value_serde)
        for name, store in config.stores.items()
        if store.durable
    }
    for task, record in records.items():
        if record is None:
            continue
        check_listing(
            record.current, config.stores, permissions[task], durable=services.durable, job=config.job_name, task=task
        )
        check_serdes(
            record.current, labels, allowed=permissions[task].allow_serde_change, job=config.job_name, task=task
        )


def serdes_in_force(services: Services, checkpoint: Checkpoint | None) -> dict[str, tuple[str, str]]:
    """Store → labels of its serdes: those that are configured, or the checkpoint's until the application asks for
    it."""
    found = {}
    for name, store in services.config.stores.items():
        key, value = _configured(services, store)
        recorded = checkpoint.serdes.get(name) if checkpoint else None
        before = recorded or (store.key_serde, store.value_serde)
        found[name] = (key or before[0], value or before[1])
    return found


def _configured(services: Services, store: StoreConfig) -> Labels:
    """The labels of explicitly configured serdes; None for a serde that is left at its default."""
    given = services.config.values
    prefix = f"stores.{store.name}"
    return (
        store.key_serde if f"{prefix}.key.serde" in given else None,
        store.value_serde if f"{prefix}.value.serde" in given else None,
    )
