"""A process that restores one store from blobs, without Kafka, and dies by SIGKILL at the n-th GET of a part."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from contextlib import AbstractContextManager
from typing import Any

from statemgr import JobConfig
from statemgr.blobs.file import FileBlobStore
from statemgr.flows.opening.restore import StoreRestore, restore_store
from statemgr.model.checkpoint import BlobMarker
from statemgr.model.plan import StorePlan
from statemgr.ports import BlobReader, CommittedDirectory
from statemgr.wiring import open_services

TASK, STORE = "Partition 0", "totals"


def restore(config: JobConfig, marker: BlobMarker) -> tuple[CommittedDirectory | None, StoreRestore]:
    """Restore one store with the product's own flow."""
    services = open_services(config)
    try:
        plan = StorePlan(STORE, "state-0", (("blob-store", marker),), {})
        return restore_store(services, TASK, plan, lambda what, done, total: None)
    finally:
        services.close()


def die_at(number: int) -> None:
    """Kill this process at the n-th request for a part."""
    get, seen, lock = FileBlobStore.get, [0], threading.Lock()

    def counting(self: FileBlobStore, blob_id: str, *more: Any) -> AbstractContextManager[BlobReader]:
        if not blob_id.endswith("/index"):
            with lock:
                seen[0] += 1
                if seen[0] == number:
                    os.kill(os.getpid(), signal.SIGKILL)
        return get(self, blob_id, *more)

    FileBlobStore.get = counting  # type: ignore[method-assign]


def main() -> None:
    """Run the order in the first argument."""
    order = json.loads(sys.argv[1])
    die_at(order["die_at"])
    restore(JobConfig.from_mapping(order["config"]), BlobMarker(inline=bytes.fromhex(order["marker"])))


if __name__ == "__main__":
    main()
