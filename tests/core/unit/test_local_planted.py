"""A directory in place of each file that a task keeps below ``state.dir``."""

from __future__ import annotations

import re
import shutil
from contextlib import closing
from pathlib import Path

import pytest

from statemgr import StateManager
from statemgr.errors import InvalidError, StatemgrError
from statemgr.testing.memory_servers import MemoryServers
from statemgr.wiring import open_services
from tests.commits import TASK
from tests.jobs import with_changes

CONFIG: dict[str, object] = {
    "job.name": "orders",
    "task.backup.factories": ["kafka-changelog", "blob-store"],
    "task.restore.factories": ["blob-store", "kafka-changelog"],
    "task.commit.snapshot.interval": "5 commits",
    "stores.totals.value.serde": "bytes",
}


def content_after_commit(servers: MemoryServers, machine: str, number: int) -> dict[object, object]:
    """Open the task on a machine, commit one more key, and return the content."""
    config = servers.on_disk(servers.config, machine)
    with StateManager(config, services=servers.services) as manager, manager.open_task(TASK) as task:
        store = task.store("totals")
        store.put(b"key-%d" % number, bytes(5_000))
        task.commit({"orders-0": number}, materialize=number % 2 == 0)
        return {key: len(value) for key, value in store.range()}


def kinds(root: Path) -> dict[str, Path]:
    """Return one file of each kind below a directory: the last one whose name differs only in numbers."""
    files = sorted(path for path in root.rglob("*") if path.is_file())
    return {re.sub(r"[0-9a-f]{6,}|[0-9]+", "N", path.relative_to(root).as_posix()): path for path in files}


def test_a_directory_in_place_of_any_file(servers: MemoryServers) -> None:
    """Invariant 10: the copy is dropped and the state restored. Where the file is no part of a copy, an error may name
    the place."""
    number, expected = 0, dict[object, object]()

    def session(machine: str) -> dict[object, object]:
        nonlocal number
        number += 1
        found = content_after_commit(servers, machine, number)
        expected[b"key-%d" % number] = 5_000
        return found

    session("original")
    original = servers.on_disk(servers.config, "original").state_dir
    of_copies = [kind for kind in kinds(original) if "/committed/" in kind]
    assert {kind.rpartition("/")[2] for kind in of_copies} > {"CURRENT", "IDENTITY", "OPTIONS-N"}
    unlike: dict[str, object] = {}
    for place, kind in enumerate(kinds(original)):
        assert session("original") == expected
        disk = servers.on_disk(servers.config, f"copy-{place}").state_dir
        shutil.copytree(original, disk)
        path = kinds(disk).get(kind)
        if path is None:
            continue  # only the first session has one
        path.unlink()
        path.mkdir()
        try:
            found = session(f"copy-{place}")
        except StatemgrError as error:
            if kind in of_copies or str(disk) not in str(error):
                unlike[kind] = error
        else:
            if found != expected:
                unlike[kind] = found
    assert not unlike


def test_a_file_in_place_of_the_directory_itself(servers: MemoryServers, tmp_path: Path) -> None:
    """A state.dir below a file is a typed error, at the first use of it."""
    (tmp_path / "file").write_text("mine")
    config = with_changes(servers.config, state__dir=str(tmp_path / "file" / "state"))
    with closing(open_services(config)) as services, pytest.raises(StatemgrError, match=r"cannot use state\.dir"):
        services.task_directory(TASK)
    assert (tmp_path / "file").read_text() == "mine"


def test_a_process_that_cannot_keep_state_here_fences_nobody(servers: MemoryServers) -> None:
    """The directory of the job is a link to a larger disk. The start is refused, and who runs the job goes on."""
    here, there = (servers.on_disk(servers.config, machine) for machine in ("here", "there"))
    (there.state_dir / "larger").mkdir(parents=True)
    (there.state_dir / "orders").symlink_to(there.state_dir / "larger")
    with StateManager(here, services=servers.services) as manager, manager.open_task(TASK) as task:
        with pytest.raises(InvalidError, match="something else"):
            StateManager(there, services=servers.services)
        task.store("totals").put(b"a", b"1")
        task.commit({"orders-0": 1})
