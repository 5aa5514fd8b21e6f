"""The jobs of the corpus: one for each way in which state is kept, written by the real flows."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from statemgr import StateManager
from statemgr.engine import open_attempt
from statemgr.engine.host import AttemptHost
from statemgr.engine.task import Task
from statemgr.flows.opening.open_job import JobTopics
from statemgr.ids import task_name
from statemgr.kafka.checkpoint_topic import CheckpointTopic
from statemgr.model.checkpoint import Checkpoint, MicroBatch
from statemgr.model.jobs.permissions import Permissions
from statemgr.operations.materialize.materialize import materialize_store
from statemgr.operations.rescale.plan import plan_rescale
from statemgr.operations.rescale.rescale import Workers, rescale
from statemgr.operations.rollback.owner import keep
from statemgr.operations.topics.permits import PermitTopic
from statemgr.ports import no_progress
from statemgr.services import Services, submit_here
from statemgr.stores.store import Store
from statemgr.testing.memory_servers import MemoryServers
from tests.commits import TASK
from tests.compatibility.corpus import Truth, save

CHANGELOG, BLOBS = "kafka-changelog", "blob-store"
_BASE: dict[str, object] = {
    "job.name": "orders",
    "task.inputs": ["orders"],
    "task.checkpoint.retained": 3,
    "stores.totals.key.serde": "bytes",
    "stores.totals.value.serde": "bytes",
}
_KEYS = 40


class Writer:
    """Writes one job, and notes what it has at each checkpoint."""

    def __init__(self, settings: Mapping[str, object], seed: int) -> None:
        self.servers = MemoryServers(_BASE | settings)
        self.servers.open()
        self.config = self.servers.config
        self.truths: list[Truth] = []
        #: Task → store → what it has.
        self.now: dict[str, dict[str, dict[bytes, bytes]]] = {}
        self._chance = random.Random(seed)
        self._offset = 0
        self.servers.broker.create("orders", self.config.tasks)

    def manager(self, disk: str = "disk") -> StateManager:
        return StateManager(self.servers.on_disk(self.config, disk), services=self.servers.services)

    def commit(self, task: Task, changes: int = _KEYS, size: int = 30, **options: Any) -> Checkpoint:
        """Put and delete random keys, and commit a record of the input."""
        self.change(task.name, {name: task.store(name) for name in self.config.stores}, changes, size)
        self._offset += 1
        number = int(task.name.removeprefix("Partition "))
        self.servers.broker.append("orders", number, b"key", b"value")
        self.servers.clock.advance(60)
        checkpoint = task.commit({f"orders-{number}": self._offset}, **options)
        self.note(task.name, checkpoint)
        return checkpoint

    def change(self, task: str, stores: Mapping[str, Store], changes: int = _KEYS, size: int = 30) -> None:
        """Put and delete random keys."""
        content = self.now.setdefault(task, {name: {} for name in stores})
        for name, store in stores.items():
            for number in range(changes):
                key, value = b"%04d" % self._chance.randrange(2 * changes), self._chance.randbytes(size)
                if number % 8 == 7 and key in content[name]:
                    store.delete(key)
                    del content[name][key]
                else:
                    store.put(key, value)
                    content[name][key] = value

    def note(self, task: str, checkpoint: Checkpoint) -> None:
        """A checkpoint has what the task has now."""
        copied = {store: dict(pairs) for store, pairs in self.now[task].items()}
        self.truths.append(Truth(task, str(checkpoint.checkpoint_id), dict(checkpoint.input_offsets), copied))

    def save(self, file: Path) -> None:
        """Write the file, and stop the servers."""
        save(file, self.servers, self.config, self.truths)
        self.servers.close()


def changelog(writer: Writer) -> None:
    """Records of both versions, a second store, and a transaction that was aborted."""
    with writer.manager() as manager, manager.open_task(TASK) as task:
        for _ in range(4):
            writer.commit(task)


def dual(writer: Writer) -> None:
    """Segments in the chain and in blobs, a snapshot, and segments after it."""
    with writer.manager() as manager, manager.open_task(TASK) as task:
        writer.commit(task)
        writer.commit(task, changes=200, size=100)
        writer.commit(task, materialize=True)
        writer.commit(task)
        writer.commit(task, changes=5)


def snapshots(writer: Writer) -> None:
    """Each commit is a snapshot of files, and parts are compressed."""
    with writer.manager() as manager, manager.open_task(TASK) as task:
        for _ in range(4):
            writer.commit(task)


def kept(writer: Writer) -> None:
    """A checkpoint that is kept beyond the retention, and a permission that waits."""
    with writer.manager() as manager, manager.open_task(TASK) as task:
        first = writer.commit(task)
    _with_topic(
        writer, lambda services, log: keep(services, log, JobTopics(services), str(first.checkpoint_id), is_kept=True)
    )
    with writer.manager() as manager, manager.open_task(TASK) as task:
        for _ in range(4):
            writer.commit(task)
    with closing(writer.servers.services(writer.config)) as services:
        topic = PermitTopic(writer.config, services.clock, services.ids)
        with closing(topic):
            topic.give([TASK], Permissions(allow_empty_start=True))


def offered(writer: Writer) -> None:
    """A job on changelogs, with a first snapshot that waits for the next opening."""
    with writer.manager() as manager, manager.open_task(TASK) as task:
        for _ in range(3):
            writer.commit(task)
    made: list[Any] = []
    _with_topic(
        writer, lambda services, log: made.append(materialize_store(services, log, TASK, "totals", no_progress))
    )
    assert made[0].offered, made[0].reason


def rescaled(writer: Writer) -> None:
    """Two tasks that were one, whose layout is retired and can come back."""
    with writer.manager() as manager, manager.open_task(TASK) as task:
        for _ in range(3):
            writer.commit(task)
    whole = writer.now[TASK]["totals"]

    def split(services: Services, log: CheckpointTopic) -> None:
        writer.config = plan_rescale(services.config, log.read(), 2, None).new_config
        workers = Workers(submit_here(services), 1, writer.servers.services)
        rescale(services, log, 2, workers, no_progress, chosen="murmur2")

    _with_topic(writer, split)
    parts: list[dict[bytes, bytes]] = []
    with writer.manager() as manager:
        for number in range(2):
            with manager.open_task(task_name(number)) as task:
                checkpoint = task.last_checkpoint
                assert checkpoint is not None
                parts.append(dict(task.store("totals").range()))
                writer.now[task.name] = {"totals": parts[-1]}
                writer.note(task.name, checkpoint)
    assert parts[0] | parts[1] == whole
    assert len(parts[0]) + len(parts[1]) == len(whole)


def batches(writer: Writer) -> None:
    """Micro-batches of two tasks that are published together, with output rows inline and in a blob."""
    config = writer.servers.on_disk(writer.config, "executor")
    services = writer.servers.services(config)
    host = AttemptHost(services)
    with closing(services), writer.manager() as manager:
        epoch = manager.acquire()
        for number in range(3):
            prepared = []
            for task in map(task_name, range(2)):
                with open_attempt(config, task, epoch.checkpoints.get(task), epoch, host=host) as attempt:
                    writer.change(task, attempt.stores)
                    attempt.attach("output", bytes(100_000 * number))
                    prepared.append(attempt.prepare({}))
            batch = MicroBatch("query", number, "{}", f'{{"orders":{{"0":{number}}}}}', watermark_ms=number)
            made = manager.publish(prepared, batch, input_offsets={"orders-0": number + 1, "orders-1": number + 1})
            for task, checkpoint in made.items():
                writer.note(task, checkpoint)
            epoch = replace(epoch.after_publish(), checkpoints=made)
            writer.servers.clock.advance(60)


def _with_topic(writer: Writer, work: Callable[[Services, CheckpointTopic], object]) -> None:
    config = writer.servers.on_disk(writer.config, "operator")
    with (
        closing(writer.servers.services(config)) as services,
        closing(CheckpointTopic(config, services.clock, owned=True)) as log,
    ):
        work(services, log)


_BOTH = {"task.backup.factories": [CHANGELOG, BLOBS]}
#: Name → settings, and who writes it.
JOBS: dict[str, tuple[Mapping[str, object], Callable[[Writer], None]]] = {
    "changelog": ({"task.backup.factories": [CHANGELOG], "task.checkpoint.write.versions": [1, 2]}, changelog),
    "dual": (_BOTH | {"stores.seen.value.serde": "bytes", "stores.seen.key.serde": "bytes"}, dual),
    "time-to-live": (_BOTH | {"stores.totals.ttl.ms": 90_000_000}, dual),
    "snapshots": (
        {
            "task.backup.factories": [BLOBS],
            "task.commit.snapshot.interval": ["1 commit"],
            "blob.store.compression": "zstd",
        },
        snapshots,
    ),
    "kept": (_BOTH, kept),
    "offered": ({"task.backup.factories": [CHANGELOG]}, offered),
    "rescaled": (_BOTH, rescaled),
    "batches": (_BOTH | {"job.tasks": 2}, batches),
}


def write_jobs(directory: Path) -> None:
    """Write a file for each job."""
    for number, (name, (settings, write)) in enumerate(JOBS.items()):
        writer = Writer(settings, number)
        write(writer)
        writer.save(directory / f"{name}.job")
