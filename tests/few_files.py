"""Run with few free file descriptors: ``python -m tests.few_files '{…}'`` prints what each try raised, as JSON.

The program limits its own ``RLIMIT_NOFILE`` so that exactly that many descriptors are free.
"""

from __future__ import annotations

import json
import os
import resource
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from statemgr import JobConfig, StateManager
from statemgr.blobs import open_blob_store
from statemgr.errors import StatemgrError
from statemgr.local.machine import SystemClock
from statemgr.local.rocksdb.store import RocksDbStore
from statemgr.ports import FileSlice
from tests.commits import TASK, write


@contextmanager
def descriptors_left(count: int) -> Iterator[None]:
    """Leave exactly ``count`` free descriptors inside the block."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = {int(name) for name in os.listdir("/proc/self/fd") if Path("/proc/self/fd", name).exists()}
    limit = 0
    while count >= 0:
        limit += 1
        count -= limit not in used
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def attempt(name: str, left: int, action: Callable[[], object]) -> dict[str, Any]:
    """Run an action with ``left`` free descriptors and return its outcome."""
    try:
        with descriptors_left(left):
            action()
    except StatemgrError as error:
        kinds = [kind.__name__ for kind in type(error).__mro__]
        return {"name": name, "left": left, "kinds": kinds, "text": str(error)}
    except Exception as error:
        return {"name": name, "left": left, "kinds": [type(error).__name__], "text": repr(error)}
    return {"name": name, "left": left, "kinds": [], "text": ""}


def blobs(config: JobConfig, name: str, directory: Path) -> Iterator[dict[str, Any]]:
    """Try a PUT of a local file and a GET on the configured blob store."""
    (directory / "body").write_bytes(b"x" * 1000)
    body = FileSlice(directory / "body", 0, 1000)

    def put() -> None:
        store.put(f"few/{name}-{left}", body, ttl_days=None)

    def get() -> None:
        with store.get("few/there") as reader:
            assert reader.readinto(memoryview(bytearray(10))) == 10

    for left in range(8):
        for what, action in (("put", put), ("get", get)):
            store = open_blob_store(config, SystemClock())
            if what == "get" and not left:
                store.put("few/there", b"x" * 10, ttl_days=None)
                store.close()
                store = open_blob_store(config, SystemClock())
            yield attempt(f"{name} {what}", left, action)
            store.close()


def rocksdb(directory: Path) -> Iterator[dict[str, Any]]:
    """Try to open a store, read from it and make a checkpoint of it."""
    path = directory / "rocksdb"
    store = RocksDbStore.open(path, {})
    store.write([(b"k%d" % n, b"v" * 100) for n in range(1000)])
    store.close()

    def work() -> None:
        opened = RocksDbStore.open(path, {"max.open.files": 16})
        try:
            assert opened.get(b"k1") == b"v" * 100
            opened.write([(b"n", b"v")])
            opened.checkpoint(directory / f"checkpoint-{left}")
        finally:
            opened.close()

    for left in range(24):
        yield attempt("rocksdb", left, work)


def tasks(config: JobConfig, directory: Path, counts: list[int]) -> Iterator[dict[str, Any]]:
    """Try to restore a task from each of its backends, and to commit."""
    with StateManager(config) as manager, manager.open_task(TASK) as task:
        write(task, {b"a": b"0"})
        task.commit({"orders-0": 1})
    for factory in config.stores["totals"].restore_factories:
        for left in counts:
            there = directory / f"{factory}-{left}"
            mapping = {**config.to_mapping(), "state.dir": str(there), "task.restore.factories": [factory]}
            with StateManager(JobConfig.from_mapping(mapping | {"task.commit.timeout.ms": 1_000})) as manager:

                def restore(manager: StateManager = manager) -> None:
                    manager.open_task(TASK).close()

                yield attempt(f"restore {factory}", left, restore)
            if factory != "blob-store":
                continue
            with StateManager(JobConfig.from_mapping(mapping)) as manager, manager.open_task(TASK) as task:
                write(task, {b"a": b"%d" % left})
                yield attempt("commit", left, lambda task=task: task.commit({"orders-0": 2}))  # type: ignore[misc]
                task.commit({"orders-0": 3})


def main() -> None:
    """Run the tries that the first argument asks for."""
    order = json.loads(sys.argv[1])
    directory = Path(order["directory"])
    config = JobConfig.from_mapping(order["config"])
    match order["what"]:
        case "rocksdb":
            found = rocksdb(directory)
        case "tasks":
            found = tasks(config, directory, order["counts"])
        case name:
            found = blobs(config, name, directory)
    print(json.dumps(list(found)))


if __name__ == "__main__":
    main()
