"""A process that is suspended while it holds the lock of a local directory: others go on without the local copies."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from statemgr import StateManager
from statemgr.engine import open_attempt
from statemgr.engine.host import AttemptHost
from statemgr.local import shared_directories
from statemgr.testing.memory_servers import MemoryServers
from tests.commits import TASK

CONFIG: dict[str, object] = {
    "job.name": "orders",
    "task.backup.factories": ["blob-store"],
    "blob.store.compression": "zstd",
    "stores.totals.value.serde": "bytes",
}
_HOLD = """
import fcntl, os, signal, sys
for path in sys.argv[1:]:
    fcntl.flock(os.open(path, os.O_RDWR), fcntl.LOCK_EX)
print("held", flush=True)
signal.pause()
"""


@contextmanager
def frozen(locks: list[Path]) -> Iterator[None]:
    """Suspend a process that holds these locks, and end it after the block."""
    command = [sys.executable, "-c", _HOLD, *map(str, locks)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        os.kill(process.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            process.kill()


@pytest.fixture(autouse=True)
def brief_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait only briefly for locks."""
    monkeypatch.setattr(shared_directories, "_DEADLINE_SECONDS", 0.2)


def test_tasks_and_attempts_go_on_next_to_a_frozen_process(servers: MemoryServers) -> None:
    """Invariants 10 and 13: each lock below ``state.dir`` is held. Tasks and attempts restore from the blob store and
    commit, and so do those that were open before. Without the frozen process, nothing is left of the detour."""
    config = servers.on_disk(servers.config, "disk")
    host = AttemptHost(servers.services(config))

    def session(key: bytes) -> None:
        with StateManager(config, services=servers.services) as manager, manager.open_task(TASK) as task:
            task.store("totals").put(key, bytes(10_000))
            task.commit({"orders-0": 1})

    def batch(key: bytes) -> set[object]:
        with StateManager(servers.on_disk(config, "driver"), services=servers.services) as driver:
            epoch = driver.acquire()
            with open_attempt(config, TASK, epoch.checkpoints[TASK], epoch, host=host) as opened:
                opened.store("totals").put(key, bytes(10_000))
                driver.publish([opened.prepare({"orders-0": 2})])
                return {key for key, _ in opened.store("totals").range()}

    session(b"a")
    assert batch(b"b") == {b"a", b"b"}
    locks = [path for path in config.state_dir.rglob("lock") if path.is_file()]
    assert {path.parent.name for path in locks} == {"scratch", "totals"}
    with StateManager(config, services=servers.services) as manager:
        with manager.open_task(TASK) as before, frozen(locks):
            before.store("totals").put(b"c", bytes(10_000))
            before.commit({"orders-0": 3}, materialize=True)
        with frozen(locks):
            session(b"d")
            assert batch(b"e") == {b"a", b"b", b"c", b"d", b"e"}
            assert batch(b"f") == {b"a", b"b", b"c", b"d", b"e", b"f"}
    host.services.close()
    session(b"g")
    assert not list(config.state_dir.rglob("aside"))
