"""`statemgr topics repair` after a rescale: what is left of both layouts."""

from __future__ import annotations

import pytest

from statemgr import JobConfig
from statemgr.errors import PermissionNeeded
from statemgr.kafka.transactions.publisher import publish_alone
from statemgr.model import codecs
from statemgr.model.jobs.layouts import is_retired_layout
from statemgr.operations.gc.gc import collect_garbage
from statemgr.operations.topics.topic_repair import copy_valid, look
from statemgr.ports import no_progress
from statemgr.testing.memory_servers import MemoryServers
from tests.operations.rescale import test_undo
from tests.operations.rescale.test_undo import Job
from tests.operations.topics.test_topic_repair import NEW, damage, repaired

CONFIG = test_undo.CONFIG


@pytest.fixture
def job(servers: MemoryServers) -> Job:
    """A job that was rescaled from one task to two."""
    made = Job(servers)
    made.rescale()
    return made


@pytest.mark.parametrize("how", ["damaged", "deleted"])
def test_the_newest_layout_is_lost(job: Job, how: str) -> None:
    """Without its job record nobody can read the new tasks' records, and the layout before is current again, whatever
    else there is of the new one. The report says so. The record that retires the layout is left out: garbage collection
    would delete the checkpoints that the job goes on with."""
    config, clock = job.config, job.servers.clock
    if how == "damaged":
        damage(job.servers, config, "", 2)
    else:
        entries = job.servers.broker.log(config.checkpoint_topic, 0).entries
        keys = [entry.key for entry in entries if entry and entry.key and codecs.is_key(entry.key)]
        of_job = [(key, None) for key in keys if not codecs.decode_key(key).task]
        publish_alone(config, clock, "test", config.checkpoint_topic, of_job)
    *found, retiring = look(config, clock).left_out
    goes_back = "the job goes back to the layout with 1 task: `statemgr rescale --tasks 1 --write` then changes the "
    of_tasks = [(one.key, one.then) for one in found if not one.key.startswith("job record")]
    assert of_tasks == [(f"Partition {n}, layout 2, sequence 2", f"{goes_back}configuration") for n in range(2)]
    assert retiring.why.startswith("it retires a layout that is the current one again")
    with pytest.raises(PermissionNeeded, match="the job goes back to the layout with 1 task"):
        copy_valid(config, clock, NEW)
    copy_valid(config, clock, NEW, allow_older=True)
    job.config = repaired(config)
    before = job.current()
    assert job.tasks() == {1}
    clock.advance(2 * 86400)
    for _ in range(2):
        assert job.work(job.config, collect_garbage, no_progress, delete=True).layouts == []
        clock.advance(2 * 86400)
    assert job.current() == before
    assert job.state(job.config) == {b"a": b"1"}


def test_the_record_of_a_replaced_layout_is_lost(job: Job) -> None:
    """The tasks keep their checkpoints, but `rescale --undo` cannot go back, and garbage collection deletes its blobs.
    So this needs the permission, too."""
    config, clock = job.config, job.servers.clock
    for entry in job.servers.broker.log(config.checkpoint_topic, 0).entries:
        if entry and entry.key and entry.value and is_retired_layout(entry.key):
            entry.value = entry.value[:-1]
    (left_out,) = look(config, clock).left_out
    assert (
        left_out.then == "the replaced layout with 1 task cannot come back, and `statemgr gc --write` deletes its blobs"
    )
    with pytest.raises(PermissionNeeded, match="cannot come back"):
        copy_valid(config, clock, NEW)
    copy_valid(config, clock, NEW, allow_older=True)
    job.config = JobConfig.from_mapping(repaired(config).to_mapping(), {"job.tasks": 2})
    assert job.tasks() == {2}
