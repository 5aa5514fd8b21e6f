"""What the pages of `statemgr ui` read, without a browser and with servers in memory."""

from __future__ import annotations

from contextlib import closing
from random import Random

import pytest

from statemgr.errors import InvalidError
from statemgr.testing.memory_servers import MemoryServers
from statemgr_tools.ui.model import JobView
from tests.commits import TASK
from tests.jobs import with_changes

CHANGELOG, BLOBS = "kafka-changelog", "blob-store"
CONFIG: dict[str, object] = {
    "job.name": "orders",
    "task.inputs": ["orders"],
    "task.backup.factories": [BLOBS, CHANGELOG],
    "task.restore.factories": [BLOBS, CHANGELOG],
    "task.commit.snapshot.interval": ["1 commit"],
    "stores.totals.value.serde": "bytes",
}
#: Bytes of a value. Stores of half of it may be fetched.
LARGE = 100_000


def committed(servers: MemoryServers, *values: bytes) -> list[str]:
    """Commit one value of the key after the other. Returns: the checkpoints."""
    found = []
    with servers.manager(servers.on_disk(servers.config, "one"), "kafka-partition") as manager:
        task = manager.open_task(TASK)
        for offset, value in enumerate(values):
            task.store("totals").put(b"key", value)
            found.append(str(task.commit({"orders-0": offset}).checkpoint_id))
    return found


def test_the_size_of_the_wanted_checkpoint_decides(servers: MemoryServers) -> None:
    """A large store is not fetched, but its checkpoint of the time when it was small is."""
    older, newest = committed(servers, b"1", Random(1).randbytes(LARGE))
    with closing(JobView(servers.config, most_bytes=LARGE // 2)) as view:
        assert view.get(TASK, "totals", older, b"key") == b"1"
        with pytest.raises(InvalidError, match=rf"{BLOBS} has 1\d\d,\d\d\d bytes"):
            view.get(TASK, "totals", newest, b"key")


def test_the_backend_that_the_restore_reads_decides(servers: MemoryServers) -> None:
    """The changelog is large: it also has what was replaced, and nothing in it is compressed."""
    newest = committed(servers, bytes(LARGE), b"2")[-1]
    with closing(JobView(servers.config, most_bytes=LARGE // 2)) as view:
        assert view.get(TASK, "totals", newest, b"key") == b"2"
    config = with_changes(servers.config, task__restore__factories=[CHANGELOG])
    refused = pytest.raises(InvalidError, match=f"{CHANGELOG} has about 100,0.. bytes")
    with closing(JobView(config, most_bytes=LARGE // 2)) as view, refused:
        view.get(TASK, "totals", newest, b"key")
