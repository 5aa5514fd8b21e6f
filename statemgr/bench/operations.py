"""What is measured in processes of their own: restores, backups, and what plain code does with the same bytes.

Each function takes and returns JSON; times are seconds of the operation alone, without the process's start.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from statemgr.bench.seed import STORE, TASK
from statemgr.config import JobConfig
from statemgr.engine import Attempt, Epoch, checkpoint_from_bytes, checkpoint_to_bytes, open_attempt
from statemgr.ids import CheckpointId
from statemgr.model.checkpoint import Checkpoint, Layout

_THREADS = 8


def open_at(config: JobConfig, checkpoint: Checkpoint | None) -> Attempt:
    """Task 0's store ``s`` at a checkpoint, without Kafka."""
    return open_attempt(config, TASK, checkpoint, Epoch(1, Layout(1, 1, "kafka-partition"), {}))


def backup(config: dict[str, Any], checkpoint: str) -> dict[str, Any]:
    """Open a store, and prepare a commit of it: all is uploaded that is not in the blob store yet."""
    base = checkpoint_from_bytes(bytes.fromhex(checkpoint))
    with open_at(JobConfig.from_mapping(config), base) as attempt:
        start = time.perf_counter()
        prepared = attempt.prepare({})
        took = time.perf_counter() - start
    store = prepared.stores[STORE]
    following = replace(
        base,
        checkpoint_id=CheckpointId(base.checkpoint_id.millis + 1, 0),
        sequence=base.sequence + 1,
        stores={STORE: store.state_id},
        state_checkpoint_markers={factory: {STORE: marker} for factory, marker in store.markers.items()},
    )
    return {"seconds": took, "checkpoint": checkpoint_to_bytes(following).hex()}


def restore(config: dict[str, Any], checkpoint: str) -> dict[str, Any]:
    """Open a store at a checkpoint: restored, verified, and ready for its first read when it returns."""
    parsed = JobConfig.from_mapping(config)
    start = time.perf_counter()
    with open_at(parsed, checkpoint_from_bytes(bytes.fromhex(checkpoint))) as attempt:
        next(iter(attempt.store(STORE).range()), None)
        took = time.perf_counter() - start
        (restored,) = attempt.restored
    return {
        "seconds": took,
        "factory": restored.factory,
        "bytes_fetched": restored.bytes_fetched,
        "bytes_reused": restored.bytes_reused,
    }


def copy(paths: list[str], target: str, durable: bool) -> dict[str, Any]:
    """A plain parallel copy of files by eight threads; ``durable``: each is synced, as what is restored is."""
    Path(target).mkdir()

    def one(path: str) -> None:
        copied = shutil.copyfile(path, Path(target, Path(path).name))
        if durable:
            with open(copied, "rb+") as file:
                os.fsync(file.fileno())

    return {"seconds": in_parallel(one, paths)}


def in_parallel(action: Callable[[str], None], items: list[str]) -> float:
    """Do something with each of many, by eight threads. Returns seconds."""
    start = time.perf_counter()
    with ThreadPoolExecutor(_THREADS) as pool:
        for done in [pool.submit(action, item) for item in items]:
            done.result()
    return time.perf_counter() - start
