"""The way back from a rescale of a Spark query: its processor's record, its output and its sources."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest

from statemgr import JobConfig
from statemgr.engine import attempts, open_attempt
from statemgr.engine.host import AttemptHost
from statemgr.errors import InvalidError, MissingBlob
from statemgr.ids import task_name
from statemgr.kafka.checkpoint_topic import CheckpointTopic
from statemgr.model.checkpoint import Checkpoint, CheckpointRecord, MicroBatch
from statemgr.model.keys.partitioners import candidates
from statemgr.operations.gc.gc import GarbageReport, collect_garbage
from statemgr.operations.rescale.plan import plan_rescale
from statemgr.operations.rescale.rescale import Workers, rescale
from statemgr.operations.rescale.undo import plan_undo, undo
from statemgr.ports import no_progress
from statemgr.services import submit_here
from statemgr.testing.memory_servers import MemoryServers
from tests.commits import TASK
from tests.operations.rescale.test_undo import CONFIG as OF_A_LOOP

CONFIG = OF_A_LOOP | {"job.tasks": 2, "task.restore.factories": ["blob-store"], "task.checkpoint.retained": 2}
PARTITIONER = "spark-hash(string)"
RECORD = json.dumps(
    {
        "format": 1,
        "store": "totals",
        "key": {"type": "struct", "fields": [{"name": "a", "type": "string"}]},
        "variables": {"variable_0": {"kind": "value", "values": ["x"]}},
    }
).encode()
KEYS = [b"svalue\x00\x01\x01key-%d\x00\x01" % number for number in range(40)]


class Query:
    """A query whose attachments are all in blobs: a processor's record, and output of each task in two parts."""

    def __init__(self, servers: MemoryServers) -> None:
        self.servers, self.batch = servers, 0
        servers.broker.create("orders", 1)
        numbers = candidates(PARTITIONER, "bytes", None, json.dumps(["string"]))[PARTITIONER](KEYS)
        self._numbers = dict(zip(KEYS, numbers, strict=True))

    def run(self, config: JobConfig, batches: int, end: str = '{{"orders":{{"0":{0}}}}}') -> None:
        """Publish micro-batches. ``end``: their end offsets, with a place for the number of the batch."""
        config = self.servers.on_disk(config, "query")
        with closing(self.servers.services(config)) as services, self.servers.manager(config, PARTITIONER) as manager:
            host, epoch = AttemptHost(services), manager.acquire()
            for _ in range(batches):
                commits = []
                for task in map(task_name, range(config.tasks)):
                    with open_attempt(config, task, epoch.checkpoints.get(task), epoch, host=host) as attempt:
                        for key in KEYS if self.batch == 0 else ():
                            if task_name(self._numbers[key] % config.tasks) == task:
                                attempt.store("totals").put(key, b"v")
                        if task == TASK:
                            attempt.attach("processor-state", RECORD)
                        for part in range(2):
                            attempt.attach(f"output-{part}", b"rows")
                        commits.append(attempt.prepare({"orders-0": self.batch + 1}))
                made = manager.publish(commits, MicroBatch("query", self.batch, "{}", end.format(self.batch)))
                self.batch += 1
                epoch = replace(epoch.after_publish(), checkpoints=made)

    def work(self, config: JobConfig, function: Any, *arguments: object, **more: object) -> Any:
        """Call a function with the services and the log of a configuration."""
        config = self.servers.on_disk(config, "command")
        with (
            closing(self.servers.services(config)) as services,
            closing(CheckpointTopic(config, services.clock, owned=True)) as log,
        ):
            return function(services, log, *arguments, **more)

    def rescale(self, config: JobConfig, tasks: int) -> JobConfig:
        """Rescale to ``tasks`` tasks. Returns: the configuration of these."""

        def rescaled(services: Any, log: Any) -> JobConfig:
            new = plan_rescale(services.config, log.read(), tasks, None).new_config
            rescale(services, log, tasks, Workers(submit_here(services), 1, self.servers.services), no_progress)
            return new

        new: JobConfig = self.work(config, rescaled)
        return new

    def undo(self, config: JobConfig) -> None:
        """Go back to the layout before."""
        self.work(config, undo, self.servers.services, no_progress)

    def records(self, config: JobConfig) -> Mapping[str, CheckpointRecord]:
        """The records of the current layout."""
        records: Mapping[str, CheckpointRecord] = self.work(config, lambda _, log: log.read())
        return records

    def read(self, config: JobConfig, checkpoint: Checkpoint, name: str = "processor-state") -> bytes:
        """The bytes of an attachment."""
        (found,) = [one for one in checkpoint.attachments if one.name == name]
        assert found.blob is not None
        data: bytes = self.work(config, lambda services, _: services.transfer().get_bytes(found.blob, 1 << 20))
        return data

    def lose(self, config: JobConfig, checkpoint: Checkpoint, name: str) -> str:
        """Delete the blob of an attachment. Returns: its name."""
        (blob_id,) = [one.blob.blob_id for one in checkpoint.attachments if one.name == name and one.blob is not None]
        assert not self.work(config, lambda services, _: services.transfer().delete_all([blob_id]))
        return blob_id

    def collect(self, config: JobConfig) -> GarbageReport:
        """What a garbage collection would do."""
        report: GarbageReport = self.work(config, collect_garbage, no_progress)
        return report


@pytest.fixture
def query(servers: MemoryServers, monkeypatch: pytest.MonkeyPatch) -> Query:
    """Make a job of two tasks, without a batch."""
    monkeypatch.setattr(attempts, "inline_attachments_limit", lambda tasks: 0)
    return Query(servers)


def names(checkpoint: Checkpoint) -> list[str]:
    """The attachments of a checkpoint but the note about the publish that it repeats."""
    return [one.name for one in checkpoint.attachments if one.name != "sequence"]


def test_a_processor_comes_back_after_the_other_layout_has_dropped_its_record(query: Query) -> None:
    """Each layout has a blob of its own with the record. The new tasks drop the checkpoint that they began with, and
    with it the blob. So do the old ones, once they have come back."""
    old = query.servers.config
    query.run(old, 3)
    new = query.rescale(old, 1)
    query.run(new, 3)
    query.undo(new)
    back = query.records(old)
    assert [names(one)[:1] for one in back[TASK].checkpoints] == [["processor-state"]] * 3
    assert query.read(old, back[TASK].current) == RECORD
    assert query.collect(old).missing == []
    query.run(old, 4)
    query.undo(old)
    assert query.read(new, query.records(new)[TASK].current) == RECORD
    assert query.collect(new).missing == []


def test_no_layout_comes_back_without_the_record_of_its_processor(query: Query) -> None:
    """The query could not start on the state. Garbage collection names the blob."""
    old = query.servers.config
    query.run(old, 3)
    before = query.records(old)[TASK].current
    new = query.rescale(old, 1)
    lost = query.lose(old, before, "processor-state")
    with pytest.raises(MissingBlob, match="'processor-state' of checkpoint") as raised:
        query.undo(new)
    assert raised.value.where["blob"] == lost
    assert query.records(new)[TASK].layout.tasks == 1
    found = query.collect(new)
    assert ([one.lost for one in found.layouts], found.missing) == ([lost], [])


def test_the_output_of_a_batch_comes_back_as_a_whole_or_not_at_all(query: Query) -> None:
    """A new task has deleted a part of a batch's output, and died. The batch was delivered, and a part of its rows is
    not delivered again. The output of other batches stays."""
    old = query.servers.config
    query.run(old, 3)
    before = query.records(old)
    new = query.rescale(old, 1)
    query.lose(old, before["Partition 1"].current, "output-1")
    query.undo(new)
    for task, record in query.records(old).items():
        rest = ["processor-state"] if task == TASK else []
        assert [names(one) for one in record.checkpoints] == [rest, rest, [*rest, "output-0", "output-1"]]
    assert query.collect(old).missing == []


def test_a_query_that_only_its_location_continues(query: Query) -> None:
    """A query that reads files continues after its last batch only: a rescale begins there, and an undo is possible as
    long as the new tasks have run none."""
    end = '{{"orders":{{"0":{0}}},"source 1":"{0}"}}'
    old = query.servers.config
    query.run(old, 2, end)
    records = query.records(old)
    with pytest.raises(InvalidError, match="only the location of its last batch can continue it"):
        plan_rescale(old, records, 1, str(records[TASK].checkpoints[1].checkpoint_id))
    new = query.rescale(old, 1)
    query.undo(new)
    assert query.records(old)[TASK].current.batch == records[TASK].current.batch
    query.undo(old)
    query.run(new, 1, end)
    for function, more in ((undo, (query.servers.services, no_progress)), (_plan, ())):
        with pytest.raises(InvalidError, match="only the location of its last batch can continue it"):
            query.work(new, function, *more)
    assert query.records(new)[TASK].layout.tasks == 1


def _plan(services: Any, log: Any) -> object:
    return plan_undo(services.config, log)
