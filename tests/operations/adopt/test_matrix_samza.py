"""Jobs in many shapes, run by the real Apache Samza: each is adopted exactly, or refused by name.

Oracle: a recount of the rows.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from statemgr import StateManager
from statemgr.ids import task_name
from statemgr.model.keys.partitioners import murmur2
from tests.old_jobs import Adopter, messages_of, topics_of
from tests.peers.samza import SamzaJob
from tests.peers.samza_shapes import SAMZA
from tests.servers import KafkaServer

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(300)]
#: The job dies before its first commit that has rows.
CRASH = {"crash": "yes", "task__commit__ms": "3600000"}


@pytest.mark.parametrize("name", SAMZA)
def test_a_shape_is_adopted_exactly_or_refused(kafka: KafkaServer, tmp_path: Path, name: str) -> None:
    """The new job has what a recount gives, key by key. It goes on, is rolled back, and is given another number of
    tasks. A refusal names the store and the reason, and nothing is written."""
    shape = SAMZA[name]
    job = SamzaJob(kafka, tmp_path, shape.partitions, shape.backends)
    job.run(job.send(some_rows(shape.partitions)), **shape.settings)
    if shape.dies:
        rows = some_rows(shape.partitions)
        job.run(job.send(rows, count=False), status=9, **CRASH, **shape.settings)
    options = [option.replace("JOB", job.name).replace("BLOBS", job.blobs.as_uri()) for option in shape.options]
    adopter = job.adopter(*options)
    if shape.refused is not None:
        named, why = shape.refused
        before = topics_of(kafka, job.name)
        refused = job.adopter().refusal("new") or ""
        assert named.replace("JOB", job.name) in refused
        assert why in refused
        assert topics_of(kafka, job.name) == before
        if not options:
            return
    blobs = ("--set", f"blob.store.uri={(tmp_path / 'blobs').as_uri()}")
    adopter.init(f"{job.name}-new", "--set", "task.checkpoint.retained=10", "--force", *blobs)
    adopter.run("--write")
    had = {key: value for of in job.expected for key, value in of.items()}
    assert content(adopter) == had
    adopted = [one["checkpoint_id"] for one in json.loads(adopter.command("checkpoints list", "--json"))]
    if shape.dies:
        job.count(rows)
    job.send(some_rows(shape.partitions))
    go_on(adopter, job)
    after = {key: value for of in job.expected for key, value in of.items()}
    assert content(adopter) == after
    adopter.command("checkpoints rollback", *(word for one in adopted for word in ("--to", one)), "--write")
    assert content(adopter) == had
    go_on(adopter, job)
    for write in ((), ("--write",)):
        adopter.command("rescale", "--tasks", str(shape.partitions + 1), *write)
    assert adopter.config.tasks == shape.partitions + 1
    assert content(adopter) == after


def some_rows(partitions: int) -> dict[int, list[tuple[str, str]]]:
    """Rows of every key, and some that delete their keys, in the partitions that Java's clients choose."""
    found: dict[int, list[tuple[str, str]]] = {partition: [] for partition in range(partitions)}
    for number in range(150):
        key = f"key-é-{number * 7 % 41}"
        row = key, "0" if number % 17 == 3 else "1"
        found[murmur2([key.encode()])[0] % partitions].append(row)
    return found


def content(adopter: Adopter) -> dict[bytes, bytes]:
    """The store ``counts`` over all tasks: each key in one task."""
    found: dict[bytes, bytes] = {}
    with StateManager(adopter.config) as manager:
        for number in range(adopter.config.tasks):
            with manager.open_task(task_name(number)) as task:
                of = dict(task.store("counts", key_serde="bytes", value_serde="bytes").range())
                assert not found.keys() & of.keys(), "a key is in two tasks"
                found |= of
    return found


def go_on(adopter: Adopter, job: SamzaJob) -> None:
    """Process the rest of the input as the old job would."""
    with StateManager(adopter.config) as manager:
        for number in range(adopter.config.tasks):
            with manager.open_task(task_name(number)) as task:
                assert task.last_checkpoint is not None
                offsets = dict(task.last_checkpoint.input_offsets)
                store = task.store("counts", key_serde="bytes", value_serde="bytes")
                for source, offset in offsets.items():
                    for message in messages_of(job.kafka, source, offset):
                        if message.value() == b"0":
                            store.delete(message.key())
                        else:
                            store.put(message.key(), b"%d" % (int(store.get(message.key()) or b"0") + 1))
                        offsets[source] = message.offset() + 1
                task.commit(offsets)
