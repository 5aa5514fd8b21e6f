"""No place for a directory: what reads published state says so with a typed error, whichever directory it is."""

from __future__ import annotations

import errno
import itertools
import os
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from statemgr import JobConfig
from statemgr.config.factories import BLOB_STORE, KAFKA_CHANGELOG
from statemgr.errors import DiskFull
from statemgr.operations.migrate.verify import StoreToVerify, Verifier
from statemgr.ports import no_progress
from statemgr.reader import JobReader
from statemgr.services import submit_here
from statemgr.testing.memory_servers import MemoryServers
from tests.commits import TASK

CONFIG: dict[str, object] = {
    "job.name": "orders",
    "task.inputs": ["orders"],
    "task.backup.factories": [KAFKA_CHANGELOG, BLOB_STORE],
    "stores.totals.value.serde": "bytes",
}


@pytest.fixture
def published(servers: MemoryServers) -> MemoryServers:
    """The servers, after one commit of the task."""
    with servers.manager(servers.on_disk(servers.config, "owner"), "kafka-partition") as manager:
        task = manager.open_task(TASK)
        task.store("totals").put(b"key", b"value")
        task.commit({"orders-0": 1})
    return servers


def restore(servers: MemoryServers, config: JobConfig, directory: Path) -> None:
    """Restore the task into a directory."""
    with JobReader(config, services=servers.services) as job:
        job.restore(TASK, directory / "restored")


def verify(servers: MemoryServers, config: JobConfig, _: Path) -> None:
    """Compare the backups of the task."""
    with closing(servers.services(config)) as services, JobReader(config, services=servers.services) as job:
        record = job.records()[TASK]
        verifier = Verifier(services, submit_here(services), no_progress, processes=1, differences=3)
        assert verifier.verify(StoreToVerify(record, record.current, "totals", (KAFKA_CHANGELOG, BLOB_STORE))).equal


@pytest.mark.parametrize("use", [restore, verify])
def test_there_is_no_place_for_a_directory(
    published: MemoryServers,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    use: Callable[[MemoryServers, JobConfig, Path], None],
) -> None:
    """FAULT 24: each directory that is made in turn is the one that the disk has no place for."""
    mkdir = os.mkdir
    for number in itertools.count():
        made: list[object] = []

        def full(path: object, *more: object, made: list[object] = made, number: int = number) -> None:
            made.append(path)
            if len(made) > number:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
            mkdir(path, *more)  # type: ignore[arg-type]

        config = published.on_disk(published.config, f"{use.__name__}-{number}")
        with monkeypatch.context() as patch:
            patch.setattr(os, "mkdir", full)
            try:
                use(published, config, tmp_path / f"{number}")
            except DiskFull:
                continue
            assert len(made) <= number, f"{made[number]} was not made, and nobody was told"
            break
    assert number > 3
