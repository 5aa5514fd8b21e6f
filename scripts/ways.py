"""Counts how long the ways through the code are: which files one call of a user enters, with how many calls.

Runs a job in memory and traces a read, a write, a commit of one key and an opening without a local disk. A *call* is
one of a function of statemgr, a *move* one into another file. Use: ``python scripts/ways.py [--files]``.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

import statemgr
from statemgr import StateManager
from statemgr.config.factories import BLOB_STORE, KAFKA_CHANGELOG
from statemgr.testing.memory_servers import MemoryServers

_ROOT = Path(statemgr.__file__).parent
_TASK = "Partition 0"


@dataclass
class Way:
    """What a call enters: files below ``statemgr/`` in the order of their first call."""

    name: str
    files: dict[str, int] = field(default_factory=dict)
    calls: int = 0
    moves: int = 0

    @property
    def lines(self) -> int:
        return sum(len((_ROOT / file).read_text().splitlines()) for file in self.files)

    def enter(self, file: str, caller: str | None) -> None:
        """Count a call of a function in a file."""
        self.calls += 1
        self.moves += caller != file
        self.files.setdefault(file, len(self.files))


class Tracer:
    """Counts what all threads enter that start after it, while :meth:`trace` runs."""

    def __init__(self) -> None:
        self.ways: list[Way] = []
        self._lock = threading.Lock()
        self._now: Way | None = None
        threading.setprofile(self._event)

    def trace(self, name: str, work: Callable[[], object]) -> None:
        """Do work on this thread, and count."""
        self._now = way = Way(name)
        self.ways.append(way)
        sys.setprofile(self._event)
        try:
            work()
        finally:
            sys.setprofile(None)
            self._now = None

    def _event(self, frame: FrameType, event: str, _: object) -> None:
        if event == "call" and self._now is not None and (file := _file(frame)) is not None:
            with self._lock:
                self._now.enter(file, frame.f_back and _file(frame.f_back))


def _manager(servers: MemoryServers, disk: str) -> StateManager:
    return servers.manager(servers.on_disk(servers.config, disk), "kafka-partition")


def _file(frame: FrameType) -> str | None:
    """The file below ``statemgr/``, without the servers in memory."""
    path, root = frame.f_code.co_filename, f"{_ROOT}/"
    return path.removeprefix(root) if path.startswith(root) and not path.startswith(f"{root}testing/") else None


def ways() -> list[Way]:
    """Trace all ways."""
    tracer = Tracer()
    for name, factories in (
        ("changelog", [KAFKA_CHANGELOG]), ("blobs", [BLOB_STORE]), ("both", [KAFKA_CHANGELOG, BLOB_STORE]),
    ):  # fmt: skip
        config = {
            "job.name": name, "job.tasks": 1, "task.inputs": ["orders"], "stores.totals.type": "rocksdb",
            "task.backup.factories": factories, "task.restore.factories": factories,
        }  # fmt: skip
        servers = MemoryServers(config)
        servers.open()
        with closing(servers):
            _trace_job(tracer, servers, name)
    threading.setprofile(None)
    return tracer.ways


def _trace_job(tracer: Tracer, servers: MemoryServers, name: str) -> None:
    with _manager(servers, "one") as manager:
        task = manager.open_task(_TASK)
        store = task.store("totals")
        for offset in (1, 2):  # what only the first commits do is no part of the way
            store.put(b"key", str(offset).encode())
            task.commit({"orders-0": offset})
        if name == "both":
            tracer.trace("get", lambda: store.get(b"key"))
            tracer.trace("put", lambda: store.put(b"key", b"other"))
        store.put(b"key", b"other")
        tracer.trace(f"commit, {name}", lambda: task.commit({"orders-0": 3}))
    with _manager(servers, "other") as manager:
        tracer.trace(f"open, {name}", lambda: manager.open_task(_TASK))


def main() -> None:
    """Print the table, or the files of each way."""
    print(f"{'way':20} {'files':>6} {'calls':>6} {'moves':>6} {'lines':>7}")
    for way in ways():
        print(f"{way.name:20} {len(way.files):6} {way.calls:6} {way.moves:6} {way.lines:7}")
        if "--files" in sys.argv:
            print("".join(f"    {file}\n" for file in way.files), end="")


if __name__ == "__main__":
    main()
