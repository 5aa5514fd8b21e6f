"""What the pages of `statemgr ui` read, without a browser and with servers in memory."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from contextlib import closing, suppress
from pathlib import Path
from random import Random
from typing import NoReturn

import pytest

from statemgr.blobs.memory import MemoryBlobStore
from statemgr.config import JobConfig
from statemgr.errors import InvalidError, StatemgrError, UnavailableError
from statemgr.health import diagnosis
from statemgr.model.checkpoint import CheckpointRecord
from statemgr.reader import JobReader
from statemgr.serdes import avro_serde
from statemgr.testing.memory_servers import MemoryServers
from statemgr_tools.ui import model, pages
from statemgr_tools.ui.model import Found, JobView
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
    "blob.store.retry.policy.max.retry.duration.millis": 1,
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


# --- servers that do not answer ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("fails", [True, False])
def test_a_task_is_shown_without_its_blobs(
    servers: MemoryServers, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    """If the blob store fails or does not answer, the page says so once, and has what the checkpoint topic has. No
    look-up begins."""
    checkpoints = committed(servers, b"1", b"2")
    over, asked = threading.Event(), threading.Event()

    def stat(*_: object) -> NoReturn:
        asked.set()
        assert fails or over.wait(60)
        raise UnavailableError("told to", blob="x")

    def get(*_: object) -> NoReturn:
        raise UnavailableError("told to wait for a long time", blob="x")

    monkeypatch.setattr(MemoryBlobStore, "stat", stat)
    monkeypatch.setattr(MemoryBlobStore, "get", get)
    monkeypatch.setattr(diagnosis, "PATIENCE_S", 0.5)
    with closing(JobView(servers.config)) as view:
        page = str(pages.task(view, {"task": TASK}).body)
        with pytest.raises(UnavailableError, match="the blob store cannot be read"):
            pages.store(view, {"task": TASK, "store": "totals", "key": "key"})
        over.set()
    assert page.count("the blob store cannot be read") == 1
    assert page.count("not read<") == len(checkpoints)
    assert all(one in page for one in checkpoints)
    assert asked.is_set()


def test_a_page_does_not_wait_for_the_brokers(servers: MemoryServers, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page that can show nothing without the checkpoint topic says that the brokers do not answer."""
    committed(servers, b"1")
    over = threading.Event()
    records = JobReader.records

    def late(self: JobReader) -> Mapping[str, CheckpointRecord]:
        assert over.wait(60)
        return records(self)

    monkeypatch.setattr(JobReader, "records", late)
    monkeypatch.setattr(model, "PATIENCE_S", 0.1)
    with closing(JobView(servers.config)) as view:
        for page, given in ((pages.task, {}), (pages.store, {"store": "totals", "key": "key"})):
            with pytest.raises(UnavailableError, match="the brokers have not answered"):
                page(view, {"task": TASK, **given})
        over.set()
        monkeypatch.setattr(model, "PATIENCE_S", 60.0)
        assert view.record(TASK).task == TASK


def test_nobody_waits_for_the_look_up_of_another(servers: MemoryServers, monkeypatch: pytest.MonkeyPatch) -> None:
    """While one fetches a large store, another one is refused after some seconds, and the page can be closed."""
    (checkpoint,) = committed(servers, b"1")
    monkeypatch.setattr(model, "PATIENCE_S", 0.05)
    begun, over = threading.Event(), threading.Event()

    def slow(*_: object) -> NoReturn:
        begun.set()
        assert over.wait(30)
        raise UnavailableError("the page is closed")

    monkeypatch.setattr(JobReader, "open_store", slow)
    view = JobView(servers.config)

    def look() -> None:
        with suppress(StatemgrError):
            view.get(TASK, "totals", checkpoint, b"key")

    first = threading.Thread(target=look)
    first.start()
    assert begun.wait(30)
    try:
        with pytest.raises(UnavailableError, match="another look-up is fetching its store"):
            view.get(TASK, "totals", checkpoint, b"key")
        view.close()
    finally:
        over.set()
        first.join(30)


def test_the_history_starts_no_check(servers: MemoryServers, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its thread also runs while nobody looks. Blobs that were damaged are checked again only while somebody does."""
    committed(servers, b"1")
    with closing(JobView(servers.config)) as view:
        looks: list[None] = []
        monkeypatch.setattr(view.checks, "problems", lambda: looks.append(None) or iter(()))
        view.history.add()
        assert len(view.history.points) == 1
        assert looks == []
        view.look()
        assert looks == [None]


def test_all_jobs_are_asked_at_the_same_time(servers: MemoryServers, monkeypatch: pytest.MonkeyPatch) -> None:
    """The list of jobs begins to read each job before it waits for any, so it waits only once for dead brokers."""
    committed(servers, b"1")
    both = threading.Barrier(2)
    read = JobView._read

    def together(self: JobView) -> object:
        both.wait(60)
        return read(self)

    monkeypatch.setattr(JobView, "_read", together)
    monkeypatch.setattr(model, "PATIENCE_S", 60.0)
    with closing(JobView(servers.config)) as one, closing(JobView(servers.config)) as other:
        assert str(pages.jobs([one, other]).body).count("1 of 1") == 2


def test_values_of_a_schema_that_is_added_while_the_page_is_open(tmp_path: Path) -> None:
    """The file is read for each page, as a new version of the job may write with a schema that was not there before."""
    path = tmp_path / "schemas.json"
    path.write_text('["int"]')
    job = {"job.name": "orders", "kafka.bootstrap.servers": "127.0.0.1:1", "task.backup.factories": "kafka-changelog"}
    store = {"serde": "avro", "avro.schemas": f"${{file:{path}}}"}
    config = JobConfig.from_mapping({**job, "stores.totals.value": store}).stores["totals"]

    def shown(value: bytes) -> str:
        return str(pages._items(config, Found(((b"k", value),), None), {}))

    assert "17" in shown(avro_serde(['"int"']).serialize(17))
    path.write_text('["int", "string"]')
    assert "a new text" in shown(avro_serde(['"string"']).serialize("a new text"))
