"""The clean-up of blobs that several tasks share."""

from __future__ import annotations

from typing import Any

from statemgr.backends.blobs.clean_up import SharedSegments
from statemgr.errors import UnavailableError
from statemgr.model.checkpoint import CheckpointRecord, Layout
from statemgr.ports import StoreIdentity


def test_two_tasks_clean_up_the_same_blob_and_one_fails() -> None:
    """While one task's clean-up deletes a blob, another one's has deleted it. The failure of the first one leaves
    nothing that a later clean-up would miss."""
    now = 0.0
    shared = SharedSegments(lambda: now)
    owner = StoreIdentity("orders", "1", "Partition 0", "totals")
    shared.stored("blob", owner, 1)
    shared.no_longer_needed(["blob"])
    record = CheckpointRecord("orders", "1", "Partition 0", Layout(1, 1, "kafka-partition"), ())
    failing: list[dict[str, UnavailableError]] = [{"blob": UnavailableError("away")}, {}]

    class Transfer:
        def delete_all(self, blobs: list[str]) -> dict[str, UnavailableError]:
            failed = failing.pop(0)
            if failed:
                release()
            return failed

    def release() -> None:
        arguments: Any = (lambda tasks: {"Partition 0": record}, None, Transfer())
        shared.release(*arguments)

    for _ in range(3):
        now += 3600
        release()
    assert failing == []
