"""A worker of an engine: a process that runs one attempt after the other, and may be killed while one closes."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from statemgr import JobConfig
from statemgr.backends.blobs import snapshots
from statemgr.engine import Epoch, checkpoint_from_bytes, open_attempt, prepared_to_bytes
from statemgr.flows.committing import local_copies
from statemgr.transfer.downloads import Downloads
from tests.commits import TASK

#: Changes of local files, which count as steps.
_STEPS = ("os.rename", "os.link", "os.mkdir", "os.remove", "os.rmdir", "shutil.rmtree")


@dataclass(frozen=True)
class Order:
    """An attempt to run. ``changes``: None deletes. ``die_at``: which step of the close kills the worker."""

    checkpoint: bytes
    epoch: bytes
    changes: Mapping[bytes, bytes | None]
    offset: int
    by_need: bool
    die_at: int | None


@dataclass(frozen=True)
class Answer:
    """What the attempt found, and the bytes of its commit."""

    found: Mapping[bytes, bytes]
    factory: str
    bytes_to_come: int
    prepared: bytes


def work(config: Mapping[str, object], orders: Connection) -> None:
    """Run attempts until the connection is closed."""
    snapshots._LARGE = 4 * 1024
    local_copies._LIMIT = 4  # many compactions
    fetch_part = Downloads.fetch_part

    def slowly(*arguments: Any) -> None:
        time.sleep(0.5)  # so that attempts meet a state that is not whole
        fetch_part(*arguments)

    Downloads.fetch_part = slowly  # type: ignore[method-assign, assignment]
    left = [-1]

    def hook(event: str, _: object) -> None:
        if left[0] >= 0 and event in _STEPS:
            left[0] -= 1
            if left[0] < 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)
    job = JobConfig.from_mapping(config)
    while True:
        try:
            order: Order = orders.recv()
        except EOFError:
            return
        checkpoint, epoch = checkpoint_from_bytes(order.checkpoint), Epoch.from_bytes(order.epoch)
        opened = open_attempt(job, TASK, checkpoint, epoch, by_need=order.by_need)
        store = opened.store("totals")
        (restored,) = opened.restored
        found = dict(store.range())
        for key, value in order.changes.items():
            store.delete(key) if value is None else store.put(key, value)
        prepared = prepared_to_bytes(opened.prepare({"orders-0": order.offset}))
        orders.send(Answer(found, restored.factory, restored.bytes_to_come, prepared))
        left[0] = -1 if order.die_at is None else order.die_at
        opened.close(wait=False)
