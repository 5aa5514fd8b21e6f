"""Checks that a store still has the serdes that wrote its keys and values. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from statemgr.errors import PermissionNeeded
from statemgr.model.checkpoint import Checkpoint

#: The labels of a store's key serde and value serde; None: not known yet.
Labels = tuple[str | None, str | None]
_CONSEQUENCES = {
    "key": "what is stored under the old keys would not be found",
    "value": "the values that are stored could not be read",
}


def changed_serde(checkpoint: Checkpoint | None, store: str, now: Labels) -> tuple[str, str, str] | None:
    """What has changed (``key`` or ``value``), the serde in the checkpoint and the current one. None if nothing has."""
    recorded = checkpoint.serdes.get(store) if checkpoint else None
    for what, was, label in zip(("key", "value"), recorded or (), now, strict=False):
        if label is not None and label != was:
            return what, was, label
    return None


def check_serdes(
    checkpoint: Checkpoint | None, configured: Mapping[str, Labels], *, allowed: bool, job: str, task: str
) -> None:
    """Raises: PermissionNeeded if a store's serdes are not those of the checkpoint."""
    for store, labels in configured.items():
        found = changed_serde(checkpoint, store, labels)
        if found is None or allowed:
            continue
        assert checkpoint is not None
        what, was, now = found
        key = f"stores.{store}.key.serde" if what == "key" else f"stores.{store}.value.serde"
        raise PermissionNeeded(
            f"the {what}s of checkpoint {checkpoint.checkpoint_id} were written with the serde {was!r}, "
            f"but the store now has {now!r}: {_CONSEQUENCES[what]}",
            hint=f"set {key} back, or pass the old serde. To continue with the new one, use "
            "`statemgr permit --allow-serde-change`, or open the job once with allow_serde_change=True",
            job=job,
            task=task,
            store=store,
        )
