"""A job of other software on a broker in memory, and the job that adopts it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import closing
from typing import Any

from statemgr import JobConfig
from statemgr.flows.opening.open_job import JobTopics
from statemgr.ids import task_name
from statemgr.kafka.checkpoint_topic import CheckpointTopic
from statemgr.model.checkpoint import Checkpoint
from statemgr.model.keys.partitioners import murmur2
from statemgr.operations.adopt.adopt import Adopted, adopt
from statemgr.operations.adopt.found import Request
from statemgr.operations.adopt.old_topics import OldTopics
from statemgr.operations.adopt.origins import ORIGINS
from statemgr.operations.rescale.plan import plan_rescale
from statemgr.operations.rescale.rescale import Workers, rescale
from statemgr.operations.rescale.undo import undo
from statemgr.operations.rollback.owner import Goal, keep, roll_back
from statemgr.ports import no_progress
from statemgr.testing.memory_kafka import Group
from statemgr.testing.memory_servers import MemoryServers

#: The configuration of the new job, for the fixture ``servers``.
CONFIG: dict[str, object] = {
    "job.name": "orders",
    "job.tasks": 2,
    "task.inputs": ["orders"],
    "task.backup.factories": ["kafka-changelog"],
    "task.restore.factories": ["kafka-changelog"],
    "stores.totals.value.serde": "bytes",
}
#: Keys of the old job, by task.
KEYS = [[key for key in (b"key-%d" % n for n in range(20)) if murmur2([key])[0] % 2 == task] for task in (0, 1)]


class MemoryJob:
    """The old job ``old`` has read one row of each key, in two partitions.

    Args:
        changelog: settings of its changelog, besides ``cleanup.policy``.
    """

    def __init__(self, servers: MemoryServers, changelog: Mapping[str, str] | None = None) -> None:
        self.servers, self.broker = servers, servers.broker
        self.config = servers.on_disk(servers.config, "disk")
        self.broker.create("old-totals", 2, {"cleanup.policy": "compact", **(changelog or {})})
        self.broker.create("orders", 2, {"cleanup.policy": "delete"})
        for task, keys in enumerate(KEYS):
            for key in keys:
                self.broker.append("old-totals", task, key, b"1")
                self.broker.append("orders", task, key, b"row")
        self.broker.groups["old"] = Group(offsets={("orders", task): len(keys) for task, keys in enumerate(KEYS)})

    def work(
        self, function: Callable[..., Any], *arguments: object, config: JobConfig | None = None, **more: Any
    ) -> Any:
        """Call a function with the services and the log of the new job."""
        config = config or self.config
        with (
            closing(self.servers.services(config)) as services,
            closing(CheckpointTopic(config, services.clock, owned=True)) as log,
        ):
            return function(services, log, *arguments, **more)

    def request(self, **more: Any) -> Request:
        """What to adopt."""
        inputs, changelogs = self.config.inputs, {"totals": "old-totals"}
        return Request(ORIGINS["raw"], "old", changelogs, inputs=inputs, tasks=2, settle_s=0.0, **more)

    def adopt(self, request: Request | None = None, run: Callable[..., Adopted] = adopt, **more: Any) -> Adopted:
        """Adopt the old job."""
        options = {"in_place": False, "progress": no_progress, **more}
        if options["in_place"]:
            changes = {"stores.totals.changelog.topic": "old-totals"}
            self.config = JobConfig.from_mapping(self.config.to_mapping(), changes)
        with OldTopics(self.config, self.servers.clock) as old:
            found: Adopted = self.work(run, old, request or self.request(), **options)
            return found

    def old_job_commits(self, partition: int) -> None:
        """The old job reads one more row of a partition."""
        self.broker.groups["old"].offsets["orders", partition] += 1

    # --- what is done to the new job -----------------------------------------------------------------------------

    def open(self, task: int, config: JobConfig | None = None, **permissions: bool) -> Checkpoint:
        """Open a task in a new process, and close it. Returns: its checkpoint."""
        with (
            self.servers.manager(config or self.config, "kafka-partition") as manager,
            manager.open_task(task_name(task), **permissions) as opened,
        ):
            assert opened.last_checkpoint is not None
            return opened.last_checkpoint

    def commit(self) -> None:
        """Commit one more row with each task."""
        with self.servers.manager(self.config, "kafka-partition") as manager:
            for number, keys in enumerate(KEYS):
                with manager.open_task(task_name(number)) as task:
                    task.store("totals").put(keys[0], b"2")
                    task.commit({f"orders-{number}": len(keys) + 1})

    def first(self) -> str:
        """The ID of the adoption's checkpoint."""
        records = self.work(lambda _, log: log.read())
        return str(records[task_name(0)].checkpoints[-1].checkpoint_id)

    def tag(self) -> JobConfig:
        """Keep the adoption's checkpoint: all tasks are published again."""
        self.work(lambda services, log: keep(services, log, JobTopics(services), self.first(), is_kept=True))
        return self.config

    def go_back(self) -> JobConfig:
        """Commit, and go back to the adoption."""
        self.commit()
        self.work(lambda services, log: roll_back(services, log, JobTopics(services), Goal((self.first(),))))
        return self.config

    def go_back_alone(self) -> JobConfig:
        """Commit, and go back to the adoption, task by task."""
        self.commit()
        for number in (0, 1):
            goal = Goal((self.first(),), task_name(number))
            self.work(lambda services, log, goal=goal: roll_back(services, log, JobTopics(services), goal))
        return self.config

    def rescale(self) -> JobConfig:
        """Rescale to four tasks."""

        def submit(function: Callable[..., Any], *arguments: object) -> Any:
            with self.servers.services(self.config).executors.pool("work", 1) as pool:
                return pool.submit(lambda: self.work(lambda services, _: function(services, *arguments)))

        plan = plan_rescale(self.config, self.work(lambda _, log: log.read()), 4, None)
        workers = Workers(submit, 1, self.servers.services)
        self.work(rescale, 4, workers, no_progress, chosen="murmur2")
        return plan.new_config

    def rescale_and_return(self) -> JobConfig:
        """Rescale to four tasks, and undo it."""
        self.work(undo, self.servers.services, no_progress, config=self.rescale())
        return self.config
