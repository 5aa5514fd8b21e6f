"""Jobs in many shapes, run by the real Quix Streams: each is adopted exactly, or refused by name.

Oracles: what Quix Streams itself reads from its stores, and a recount of the rows.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from statemgr import StateManager
from statemgr.ids import task_name
from statemgr.serdes import QuixKey
from tests.old_jobs import Adopter, messages_of, topics_of
from tests.peers.quix import QUIX, Content, QuixApplication
from tests.servers import KafkaServer

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(300)]
#: Every key, some more often, and some whose count is deleted. In one topic, a key counts again after that.
ROWS = [*range(1, 31), 3, 5, 7, 3, -4, -6, -8]


@pytest.mark.parametrize("name", QUIX)
def test_a_shape_is_adopted_exactly_or_refused(kafka: KafkaServer, tmp_path: Path, name: str) -> None:
    """The new job has what Quix Streams had, key by key. It goes on, is rolled back, and is given another number of
    tasks. A refusal names the store and the reason, and nothing is written."""
    shape = QUIX[name]
    job = QuixApplication(kafka, shape)
    rows = [*ROWS, 6] if shape.topics == 1 else ROWS
    job.run(job.send(rows))
    had = job.run(job.send(rows))
    if shape.counts:
        assert counts_of(had) == recount(job)
    adopter = job.adopter(tmp_path)
    options = [option.replace("TOPIC", job.topics[0]) for option in shape.options]
    if shape.refused is not None:
        named, why = shape.refused
        before = topics_of(kafka, job.group)
        refused = adopter.refusal("new") or ""
        assert named in refused
        assert why in refused
        assert topics_of(kafka, job.group) == before
        if not options:
            return
    adopter.init(f"{job.group}-new", *options, "--set", "task.checkpoint.retained=10", "--force")
    topics = {row["store"]: row["topic"] for row in adopter.json(*options)["changelogs"]}
    adopter.run("--write", *options)
    new = New(adopter, job, topics)
    assert new.state() == had
    adopted = [one["checkpoint_id"] for one in json.loads(adopter.command("checkpoints list", "--json"))]
    job.send(rows)
    new.go_on()
    if shape.counts:
        assert counts_of(new.state()) == recount(job)
    adopter.command("checkpoints rollback", *(word for one in adopted for word in ("--to", one)), "--write")
    assert new.state() == had
    new.go_on()
    after = new.state()
    for write in ((), ("--write",)):
        adopter.command("rescale", "--tasks", "3", *write)
    assert adopter.config.tasks == 3
    assert new.state() == after


def recount(job: QuixApplication) -> Counter[int]:
    """How often each number has come since its count was deleted last, over all stores."""
    counts: Counter[int] = Counter()
    for row in job.rows:
        if row < 0:
            del counts[-row]
        else:
            counts[row] += len(job.topics)
    return counts


def counts_of(content: Content) -> Counter[int]:
    """The same, as the stores have it."""
    numbers = {
        (topic, key[: -len(b'|"of"')]): int(value) for (topic, key), value in content.items() if key.endswith(b'|"of"')
    }
    counts: Counter[int] = Counter()
    for (topic, key), value in content.items():
        if key.endswith(b'|"rows"'):
            counts[numbers[topic, key[: -len(b'|"rows"')]]] += count_in(value)
    return counts


def count_in(value: bytes) -> int:
    """The count in a value."""
    found = json.loads(value)
    return int(found["é|"][0] if isinstance(found, dict) else found)


class New:
    """The new job. ``topics``: store → its old changelog."""

    def __init__(self, adopter: Adopter, job: QuixApplication, topics: dict[str, str]) -> None:
        self._adopter, self._job, self._topics = adopter, job, topics

    def state(self) -> Content:
        """Return what the stores have in all tasks: each key in one task."""
        found: Content = {}
        with StateManager(self._adopter.config) as manager:
            for number in range(self._adopter.config.tasks):
                with manager.open_task(task_name(number)) as task:
                    for store, topic in self._topics.items():
                        entries = task.store(store, value_serde="bytes").range()
                        of = {(topic, raw(key)): value for key, value in entries if not is_newest_time(key)}
                        assert not found.keys() & of.keys(), "a key is in two tasks"
                        found |= of
        return found

    def go_on(self) -> None:
        """Process the rest of the input as the job would, if it counts, or only read it."""
        with StateManager(self._adopter.config) as manager:
            for number in range(self._adopter.config.tasks):
                with manager.open_task(task_name(number)) as task:
                    assert task.last_checkpoint is not None
                    offsets = dict(task.last_checkpoint.input_offsets)
                    for source, offset in offsets.items():
                        for message in messages_of(self._job.kafka, source, offset):
                            if self._job.shape.counts:
                                row = int.from_bytes(message.value(), "big", signed=True)
                                self._count(task, message.topic(), row)
                            offsets[source] = message.offset() + 1
                    task.commit(offsets)

    def _count(self, task: Any, topic: str, row: int) -> None:
        (name,) = [store for store, changelog in self._topics.items() if topic in changelog]
        store = task.store(name, value_serde="bytes")
        found = [
            key[: -len(b'"of"')] for key, value in store.range() if key.endswith(b'|"of"') and int(value) == abs(row)
        ]
        (prefix,) = found
        if row < 0:
            store.delete(prefix + b'"rows"')
            return
        before = store.get(prefix + b'"rows"') or b"0"
        count = count_in(before) + 1
        store.put(prefix + b'"rows"', json.dumps({"é|": [count]} if before[:1] == b"{" else count).encode())


def is_newest_time(key: Any) -> bool:
    """Whether a key is that of the newest time of rows, which Quix Streams has in another column family."""
    return isinstance(key, QuixKey) and key.start_ms < 0


def raw(key: Any) -> bytes:
    """The bytes of a key as Quix Streams has it."""
    if isinstance(key, bytes):
        return key
    of, *times = key
    prefix: bytes = of + b"|" if of else b""
    return prefix + b"|".join(time.to_bytes(8, "big") for time in times)
