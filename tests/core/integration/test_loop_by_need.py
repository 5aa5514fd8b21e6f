"""A consumer loop works while most of its state is still in the blob store, which cannot be reached for a while."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from shutil import rmtree

import pytest
from confluent_kafka import Message

from statemgr import JobConfig, Task
from statemgr.backends.blobs import snapshots
from statemgr.backends.blobs.partial_tables import PartialTables
from statemgr.consumer import assigned_tasks
from statemgr.errors import UnavailableError
from statemgr.transfer.downloads import Downloads
from tests.jobs import contents, job_mapping
from tests.kafka_jobs import wait_until
from tests.loop_members import make_topic, member, produce, published
from tests.servers import KafkaServer


def test_a_task_waits_for_its_blob_store(kafka: KafkaServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A read needs a part that cannot be fetched. The partition is paused, the loop does not end, and when the blob
    store is back, each message counts once: also the one that was half processed."""
    monkeypatch.setattr(snapshots, "_LARGE", 4 * 1024)
    monkeypatch.setattr(assigned_tasks, "_REACH_S", 0.05)
    topic, reachable, tries = kafka.fresh_name("in"), [True], [0]
    make_topic(kafka, topic, 1)
    config = JobConfig.from_mapping(
        job_mapping(
            kafka, tmp_path, backup=("blob-store",), kind="segments", task__commit__ms=100,
            task__restore__by__need__bytes=1, stores__totals__rocksdb__block__cache__size__bytes=1024 * 1024,
            stores__totals__rocksdb__compression="none", blob__store__retry__policy__max__retries=0,
        )
    )  # fmt: skip
    get_range, source = Downloads.get_range, random.Random(1)
    padding = {b"padding-%d" % number: source.randbytes(1000) for number in range(2000)}

    def get(self: Downloads, *arguments: object) -> memoryview:
        if not reachable[0]:
            tries[0] += 1
            raise UnavailableError("no answer", blob=str(arguments[0]))
        return get_range(self, *arguments)  # type: ignore[arg-type]

    def never(_: PartialTables, check: Callable[[], None]) -> None:
        raise UnavailableError("no answer")

    def count(task: Task, message: Message) -> None:
        totals, key = task.store("totals"), message.key()
        assert isinstance(key, bytes)
        totals.put(key, b"%d" % (int(totals.get(key) or 0) + 1))
        name = b"padding-%d" % source.randrange(len(padding))
        assert totals.get(name) == padding[name]
        totals.put(b"all", b"%d" % (int(totals.get(b"all") or 0) + 1))

    def fill(task: Task, message: Message) -> None:
        if message.offset() == 0:
            for name, value in padding.items():
                task.store("totals").put(name, value)
        count(task, message)

    produce(kafka, topic, 1, range(50))
    stop, errors = member(config, kafka.fresh_name("group"), topic, fill)
    wait_until(lambda: bool(errors) or published(config) == {f"{topic}-0": 50})
    stop()
    assert errors == []
    rmtree(config.state_dir)
    monkeypatch.setattr(Downloads, "get_range", get)
    monkeypatch.setattr(PartialTables, "fetch_rest", never)
    stop, errors = member(config, kafka.fresh_name("group"), topic, count)
    produce(kafka, topic, 1, range(50, 60))
    wait_until(lambda: bool(errors) or published(config) == {f"{topic}-0": 60})
    reachable[0] = False
    produce(kafka, topic, 1, range(0, 50))
    wait_until(lambda: bool(errors) or tries[0] > 1)
    assert errors == []
    assert published(config) != {f"{topic}-0": 110}
    reachable[0] = True
    wait_until(lambda: bool(errors) or published(config) == {f"{topic}-0": 110})
    stop()
    assert errors == []
    state, _ = contents(config)
    found = state["totals"]
    assert {name: found[name] for name in padding} == padding
    assert found[b"all"] == b"110"
    assert sum(int(value) for name, value in found.items() if name.startswith(b"k")) == 110
