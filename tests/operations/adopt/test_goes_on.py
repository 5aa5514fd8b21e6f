"""An old job that goes on after its adoption, and checkpoints of the new job that only repeat the adoption."""

from __future__ import annotations

from collections.abc import Callable
from shutil import rmtree

import pytest

from statemgr import JobConfig
from statemgr.blobs import open_raw_blob_store
from statemgr.errors import PermissionNeeded
from statemgr.operations.adopt import adopt as flow
from statemgr.operations.adopt.adopt import adopt, dry_run
from statemgr.ports import list_blobs
from statemgr.testing.memory_servers import MemoryServers
from tests.operations.adopt.memory_job import CONFIG, KEYS, MemoryJob

__all__ = ["CONFIG"]


@pytest.fixture
def job(servers: MemoryServers) -> MemoryJob:
    """A job that was just adopted."""
    made = MemoryJob(servers)
    assert made.adopt().old is not None
    return made


@pytest.mark.parametrize(
    "again",
    [
        MemoryJob.tag,
        MemoryJob.go_back,
        MemoryJob.go_back_alone,
        MemoryJob.rescale,
        MemoryJob.rescale_and_return,
    ],
)
def test_a_repeated_adoption_still_asks_for_the_old_job(
    job: MemoryJob, again: Callable[[MemoryJob], JobConfig]
) -> None:
    """The adoption's checkpoint was published again, without a row of the new job. A task whose input the old job
    has processed since does not open."""
    config = again(job)
    before = [job.open(task, config) for task in range(config.tasks)]
    assert all(checkpoint.sequence > 1 and checkpoint.output_sequence == 1 for checkpoint in before)
    job.old_job_commits(1)
    for task in range(config.tasks):
        if task != 1:
            job.open(task, config)
    for _ in range(2):
        with pytest.raises(PermissionNeeded, match="the old job has gone on to offset"):
            job.open(1, config)
    permitted = job.open(1, config, allow_repeated_input=True)
    assert permitted.output_sequence == permitted.sequence
    assert job.open(1, config).checkpoint_id == permitted.checkpoint_id


def test_a_commit_ends_the_question(job: MemoryJob) -> None:
    """Tasks that have committed rows of their own open, whatever becomes of the old job, also after a tag."""
    job.commit()
    job.old_job_commits(1)
    job.tag()
    assert job.open(1).output_sequence == job.open(1).sequence


def test_an_owner_of_the_whole_job_asks_for_the_old_job(job: MemoryJob) -> None:
    """An engine takes all tasks over at once: it is refused if the old job has processed the input of one of them."""
    job.old_job_commits(1)
    with job.servers.manager(job.config, "kafka-partition") as manager:
        with pytest.raises(PermissionNeeded, match="the old job has gone on to offset"):
            manager.acquire()
        assert len(manager.acquire(allow_repeated_input=True).checkpoints) == 2


def test_a_second_run_looks_at_what_the_tasks_have_committed(job: MemoryJob) -> None:
    """The adoption is done, also with its checkpoint published again. It is no success if the old job has gone on."""
    job.tag()
    assert job.adopt().old is None
    job.old_job_commits(0)
    with pytest.raises(PermissionNeeded, match="it was adopted already, and since then the old job has gone on"):
        job.adopt()
    job.open(0, allow_repeated_input=True)
    assert job.adopt().old is None


def test_the_newer_state_of_the_old_job_is_adopted_again(servers: MemoryServers) -> None:
    """The steps of docs/migrating.md: until what the new job has stored is gone, too, an adoption and its dry run say
    what else to remove."""
    job = MemoryJob(servers)
    backups = {"task.backup.factories": ["kafka-changelog", "blob-store"]}
    job.config = config = JobConfig.from_mapping(job.config.to_mapping(), backups)
    job.adopt()
    job.commit()
    job.broker.append("old-totals", 1, KEYS[1][0], b"newer")
    for topic in (config.checkpoint_topic, config.stores["totals"].changelog_topic):
        job.broker.delete(topic)

    def refused(why: str) -> None:
        for run, more in ((dry_run, {"counting": False}), (adopt, {})):
            with pytest.raises(PermissionNeeded, match=why) as raised:
                job.adopt(run=run, **more)
            assert f"remove the directory {here} on this machine and the blobs below orders/1/" in str(
                raised.value.hint
            )

    here = config.state_dir / config.job_key
    refused("this machine has published state")
    rmtree(here)
    refused("the blob store has the published blob")
    blobs = open_raw_blob_store(config, servers.clock)
    for blob in list_blobs(blobs, f"{config.job_key}/"):
        blobs.delete(blob.blob_id)
    assert job.adopt().old is not None
    with servers.manager(config, "kafka-partition") as manager, manager.open_task("Partition 1") as task:
        assert task.store("totals").get(KEYS[1][0]) == b"newer"


def test_no_hint_says_to_delete_what_is_adopted_in_place(
    servers: MemoryServers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The changelog of the old job is the only state, whether the adoption was killed or its checkpoints are lost."""
    job = MemoryJob(servers, {"min.compaction.lag.ms": "14400000"})

    def killed(*arguments: object, **more: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(flow, "read_published", killed)
        with pytest.raises(KeyboardInterrupt):
            job.adopt(in_place=True)
    with pytest.raises(PermissionNeeded, match="has begun and has not ended") as raised:
        job.open(0)
    assert "With `--in-place` it created none: delete no topic" in str(raised.value.hint)
    job.adopt(in_place=True)
    job.commit()
    job.broker.delete(job.config.checkpoint_topic)
    for run, more in ((dry_run, {"counting": False}), (adopt, {})):
        with pytest.raises(PermissionNeeded, match="this machine has published state") as raised:
            job.adopt(run=run, in_place=True, **more)
        assert "Delete none of the topics and blobs that `--in-place` adopts" in str(raised.value.hint)
        assert "blobs below" not in str(raised.value.hint)
    rmtree(job.config.state_dir / job.config.job_key)
    job.adopt(in_place=True)
    with servers.manager(job.config, "kafka-partition") as manager, manager.open_task("Partition 1") as task:
        assert task.store("totals").get(KEYS[1][0]) == b"2"
