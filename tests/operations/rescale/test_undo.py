"""The way back from a rescale, when somebody or something is in its way."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from statemgr import JobConfig
from statemgr.blobs.memory import MemoryBlobStore
from statemgr.cli.main import cli
from statemgr.errors import (
    AccessDenied,
    FencedError,
    LayoutMismatch,
    MissingError,
    PermissionNeeded,
    RetryableError,
    TopicMisconfigured,
    UnavailableError,
)
from statemgr.flows import replaced_layouts
from statemgr.flows.replaced_layouts import keep_in_layout
from statemgr.ids import task_name
from statemgr.kafka.checkpoint_topic import CheckpointTopic
from statemgr.local import durable
from statemgr.operations.gc.gc import collect_garbage
from statemgr.operations.rescale import undo as undoing
from statemgr.operations.rescale.plan import changes_in_force
from statemgr.operations.rescale.rescale import Workers, rescale
from statemgr.phases import Phase, observed
from statemgr.ports import list_blobs, no_progress
from statemgr.testing.memory_servers import MemoryServers
from tests.cli.test_running_job import write_toml
from tests.commits import TASK, attempt, failing
from tests.jobs import with_changes

CONFIG: dict[str, object] = {
    "job.name": "orders",
    "task.inputs": ["orders"],
    "task.backup.factories": ["blob-store"],
    "task.restore.factories": ["blob-store", "kafka-changelog"],
    "stores.totals.value.serde": "bytes",
}


class Job:
    """A job of one task that has committed one key."""

    def __init__(self, servers: MemoryServers, config: JobConfig | None = None) -> None:
        self.servers, self.config = servers, servers.on_disk(config or servers.config, "disk")
        with servers.manager(self.config, "kafka-partition") as manager, manager.open_task(TASK) as task:
            task.store("totals").put(b"a", b"1")
            task.commit({"orders-0": 1})

    def work(self, config: JobConfig, function: Callable[..., Any], *arguments: object, **more: object) -> Any:
        """Call a function with the services and the log of a configuration."""
        with (
            closing(self.servers.services(config)) as services,
            closing(CheckpointTopic(config, services.clock, owned=True)) as log,
        ):
            return function(services, log, *arguments, **more)

    def rescale(self, tasks: int = 2) -> JobConfig:
        """Rescale to ``tasks`` tasks. Returns: the configuration of these."""

        def submit(function: Callable[..., Any], *arguments: object) -> Any:
            with self.servers.services(self.config).executors.pool("work", 1) as pool:
                return pool.submit(lambda: self.work(self.config, lambda services, _: function(services, *arguments)))

        workers = Workers(submit, 1, self.servers.services)
        self.work(self.config, rescale, tasks, workers, no_progress, chosen="murmur2")
        both = {"task.backup.factories": ["blob-store", "kafka-changelog"]}
        return JobConfig.from_mapping(self.config.to_mapping(), {"job.tasks": tasks, **both})

    def undo(self, new: JobConfig, checkpoint_id: str | None = None) -> None:
        """Go back to one task."""
        self.work(new, undoing.undo, self.servers.services, no_progress, checkpoint_id)

    def in_force(self) -> JobConfig:
        """The configuration of the current layout, as the command writes it."""
        changes = self.work(self.config, lambda _, log: changes_in_force(self.config, log.read()))
        return JobConfig.from_mapping(self.config.to_mapping(), changes)

    def current(self) -> str:
        """The ID of the task's current checkpoint."""
        return str(self.work(self.config, lambda _, log: log.read())[TASK].current.checkpoint_id)

    def tasks(self) -> set[int]:
        """The number of tasks in the current layout."""
        return {record.layout.tasks for record in self.work(self.config, lambda _, log: log.read()).values()}

    def blobs(self) -> list[str]:
        """The names of all blobs."""
        blobs = self.work(self.config, lambda services, _: [*list_blobs(services.blobs(), "orders/")])
        return [blob.blob_id for blob in blobs]

    def lose(self, blobs: list[str]) -> None:
        """Delete these blobs, and the local state."""
        self.work(self.config, lambda services, _: services.transfer().delete_all(blobs))
        self.servers.lose_disk()

    def state(self, config: JobConfig) -> dict[bytes, bytes]:
        """What the task has after the loss of its disk."""
        self.servers.lose_disk()
        with self.servers.manager(config, "kafka-partition") as manager, manager.open_task(TASK) as task:
            return dict(task.store("totals").range())

    def expiring(self) -> list[str]:
        """The blobs that have a TTL."""
        blobs = self.work(self.config, lambda services, _: [*list_blobs(services.blobs(), "orders/")])
        return [blob.blob_id for blob in blobs if blob.expires_ms is not None]


@pytest.fixture
def job(servers: MemoryServers) -> Job:
    """Make a job."""
    return Job(servers)


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("before", ["JobTopics", "_with_output", "keep_blobs"])
def test_the_second_undo_does_not_undo_the_first(
    job: Job, monkeypatch: pytest.MonkeyPatch, before: str, *, named: bool
) -> None:
    """Invariant 12: before a step of one undo, another one goes back, and fills the changelog. The first one ends with
    an error, and the old layout stays current. Its records from before the rescale are no longer there. It is the same
    if both name a checkpoint of that layout."""
    wanted = job.current() if named else None
    new = job.rescale()
    real = getattr(undoing, before)

    def overtaken(*given: Any) -> Any:
        monkeypatch.setattr(undoing, before, real)
        job.undo(new, wanted)
        return real(*given)

    monkeypatch.setattr(undoing, before, overtaken)
    with pytest.raises(FencedError):
        job.undo(new, wanted)
    assert job.tasks() == {1}
    assert not job.work(job.config, lambda _, log: log.read(generation=1))
    with job.servers.manager(job.config, "kafka-partition") as manager, manager.open_task(TASK) as task:
        assert dict(task.store("totals").range()) == {b"a": b"1"}


@pytest.mark.parametrize("named", [False, True])
def test_an_undo_that_was_interrupted_is_not_undone_by_the_next_one(job: Job, *, named: bool) -> None:
    """The command dies after its publish, before it writes the configuration of the old layout. It says so when it is
    run again, with or without the name of a checkpoint, and does not return to the newer layout."""
    wanted = job.current() if named else None
    new = job.rescale()
    job.undo(new, wanted)
    with pytest.raises(LayoutMismatch, match="the job has 1 task now") as raised:
        job.undo(new, wanted)
    assert "rescale --tasks 1 --write" in str(raised.value.hint)
    assert job.tasks() == {1}


@pytest.mark.parametrize("named", [False, True])
def test_an_interrupted_undo_between_layouts_of_as_many_tasks(job: Job, *, named: bool) -> None:
    """The job went from one task to two and back, and returns to the first layout. The command is run again with the
    configuration that it could not change, which has as many tasks: it does not return to the newer layout either."""
    wanted = job.current()
    job.rescale()
    job.config = job.in_force()
    job.rescale(1)
    newest = job.in_force()
    job.undo(newest, wanted)
    with pytest.raises(LayoutMismatch, match=r"but the configuration has the changelogs of .* \(stores.totals.ch"):
        job.undo(newest, wanted if named else None)
    assert {record.layout.generation for record in job.work(job.config, lambda _, log: log.read()).values()} == {4}
    job.config = job.in_force()
    job.undo(job.config)  # on purpose
    assert job.current() != wanted


def test_a_slower_rescale_to_as_many_tasks_leaves_the_changelogs_alone(job: Job, servers: MemoryServers) -> None:
    """Both were given at once, on two machines. When the slower one would fill the new changelogs, owners work with
    them: it ends with an error, and has written nothing."""
    keys = {b"key-%d" % number: b"1" for number in range(40)}
    job.config = with_changes(job.config, task__backup__factories=["kafka-changelog"])
    with servers.manager(job.config, "kafka-partition") as manager, manager.open_task(TASK) as task:
        task.store("totals").put_many(keys)
        task.commit({"orders-0": 2})
    here, ends = job.config, list[list[int]]()

    def changelog_ends() -> list[int]:
        (topic,) = (name for name in servers.broker.topics if name.endswith("-g2"))
        return [servers.broker.end(topic, number, only_settled=False) for number in range(2)]

    def overtake(phase: Phase, subject: str) -> None:
        if phase is Phase.SPLIT and job.config is here and not ends:
            ends.append([])
            job.config = servers.on_disk(here, "elsewhere")
            job.rescale()
            job.config, ends[0] = here, changelog_ends()

    with observed(overtake), pytest.raises(FencedError, match="somebody else has changed the number of tasks"):
        job.rescale()
    assert ends == [changelog_ends()]
    assert job.tasks() == {2}


@pytest.mark.parametrize("committed", [True, False])
def test_a_zombie_of_a_removed_task_fences_nobody(job: Job, committed: bool) -> None:
    """FAULT 39: the brokers have forgotten its ID. It finds no checkpoint of its task in the new layout, which no open
    transaction hides, and ends before it takes an ID from the new owner."""
    new = job.rescale()
    two = JobConfig.from_mapping(job.config.to_mapping(), {"job.tasks": 2, "task.restore.factories": ["blob-store"]})
    with (
        job.servers.manager(job.servers.on_disk(two, "zombie"), "kafka-partition") as zombies,
        job.servers.manager(job.config, "kafka-partition") as manager,
    ):
        zombie = zombies.open_task(task_name(1))
        if committed:
            zombie.commit({"orders-1": 0})
        job.undo(new)
        job.servers.broker.forget_ids()
        epoch = manager.acquire()
        checkpoints = manager.publish([attempt(job.config, epoch, TASK, {b"b": b"1"}, 2)])
        with pytest.raises(FencedError, match="the job was rescaled in the meantime"):
            zombie.commit({"orders-1": 1})
        again = attempt(job.config, epoch.after_publish(), TASK, {b"b": b"2"}, 3, checkpoints=checkpoints)
        assert manager.publish([again])[TASK].input_offsets == {"orders-0": 3}


def test_an_interrupted_rescale_goes_on_with_another_version(job: Job) -> None:
    """A version that cannot read a note about a stored part stores this part again."""
    with failing(Phase.BEGIN), pytest.raises(UnavailableError):
        job.rescale()
    notes = [*job.config.state_dir.rglob("stored-*.note")]
    for note in notes:
        durable.write_note(note, {**durable.read_note(note, 1 << 20), "commit": bytes(40).hex()})
    job.rescale()
    assert (len(notes), job.tasks()) == (2, {2})


@pytest.mark.parametrize("at", [Phase.SPLIT, Phase.STORED])
def test_a_rescale_does_not_go_on_from_the_layout_of_another_one(job: Job, at: Phase) -> None:
    """Invariant 12: while a rescale to six tasks builds, somebody on another machine rescales to four. The first one
    has only the keys of the old task, most of which are elsewhere now. It ends with an error, and no key is lost."""
    keys = {b"key-%d" % number: b"1" for number in range(40)}
    with job.servers.manager(job.config, "kafka-partition") as manager, manager.open_task(TASK) as task:
        for key, value in keys.items():
            task.store("totals").put(key, value)
        task.commit({"orders-0": 2})
    here, elsewhere = job.config, job.servers.on_disk(job.config, "another-disk")

    def overtake(phase: Phase, subject: str) -> None:
        if phase is at and job.config is here:
            job.config = elsewhere
            job.rescale(4)

    with observed(overtake), pytest.raises(FencedError, match="somebody else has changed the number of tasks"):
        job.rescale(6)
    assert job.tasks() == {4}
    new = JobConfig.from_mapping(job.config.to_mapping(), {"job.tasks": 4, "task.restore.factories": ["blob-store"]})
    with job.servers.manager(new, "kafka-partition") as manager:
        stores = [manager.open_task(task_name(number)).store("totals") for number in range(4)]
        assert {key: value for store in stores for key, value in store.range()} == {b"a": b"1", **keys}


def test_a_new_changelog_that_another_rescale_deletes(job: Job) -> None:
    """Somebody on another machine begins to rescale to another number of tasks, and makes the new changelogs again,
    just before a layout is published that needs them. Nothing is published, and the next try succeeds."""
    here, elsewhere = job.config, job.servers.on_disk(job.config, "another-disk")

    def make_again(phase: Phase, subject: str) -> None:
        if phase is Phase.STORED and job.config is here:
            job.config = elsewhere
            topics = job.servers.broker.topics
            (topic,) = [name for name in topics if name.endswith("-g2")]
            job.servers.broker.delete(topic)
            job.servers.broker.create(topic, 2, {"cleanup.policy": "compact"})

    with observed(make_again), pytest.raises(RetryableError, match="another rescale has deleted the new changelog"):
        job.rescale(2)
    assert job.tasks() == {1}
    job.rescale(2)
    assert job.tasks() == {2}


def test_what_was_stored_long_before_the_publish_may_be_garbage(job: Job) -> None:
    """A rescale takes longer than garbage collection leaves uploads alone, and the job commits meanwhile. The last
    uploads are young, but the first ones, which the new stores need as well, are not."""
    clock = job.servers.clock

    def commit(phase: Phase, subject: str) -> None:
        if (phase, subject) == (Phase.STORED, "Partition 0/totals") and job.tasks() == {1}:
            with job.servers.manager(job.config, "kafka-partition") as manager, manager.open_task(TASK) as task:
                task.store("totals").put_many({b"%d" % number: b"2" for number in range(20)})  # of both new tasks
                task.commit({"orders-0": 2})
            clock.advance(13 * 3600)

    with observed(commit), pytest.raises(RetryableError, match="its blobs may be deleted as garbage"):
        job.rescale()
    assert job.tasks() == {1}
    job.rescale()
    assert job.tasks() == {2}


def test_the_ttls_of_the_layout_that_is_left_are_removed(
    job: Job, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The tasks of this layout are not opened again. So a rescale and an undo publish nothing until its blobs have no
    TTL. If those of the new layout keep theirs, a line says what to do."""
    real = MemoryBlobStore.remove_ttl
    refused = "Partition_0"

    def refuse(self: MemoryBlobStore, blob_id: str) -> None:
        if refused in blob_id:
            raise AccessDenied("403", hint="ask for the right")
        real(self, blob_id)

    monkeypatch.setattr(MemoryBlobStore, "remove_ttl", refuse)
    with pytest.raises(RetryableError, match="nothing was published: the TTL of 1 blob") as raised:
        job.rescale()
    assert "s3:DeleteObjectTagging" in str(raised.value.hint)
    assert job.tasks() == {1}

    refused = "Partition_1"  # of the new layout alone
    with caplog.at_level(logging.WARNING):
        new = job.rescale()
    assert "the new layout is published, but the TTL of" in caplog.text
    assert "statemgr gc --write --fix" in caplog.text
    assert job.tasks() == {2}
    assert {name.split("/")[2] for name in job.expiring()} == {"Partition_1"}
    with pytest.raises(RetryableError, match="nothing was published"):
        job.undo(new)
    assert job.tasks() == {2}

    refused = "nothing"
    job.undo(new)
    assert job.tasks() == {1}
    assert job.expiring() == []


@pytest.mark.parametrize("at", [Phase.BEGIN, Phase.SEND_CHECKPOINT])
def test_a_layout_that_is_collected_before_the_publish(job: Job, at: Phase) -> None:
    """While an undo is at work, garbage collection collects the layout, and its next run deletes the blobs. The undo
    publishes nothing."""
    new = job.rescale()
    job.servers.clock.advance(3 * 86400)
    deleted: list[int] = []

    def collect(phase: Phase, subject: str) -> None:
        if phase is at and not deleted:
            deleted.append(0)
            reports = [job.work(new, collect_garbage, no_progress, delete=True) for _ in range(2)]
            deleted[0] = reports[1].deleted.blobs

    with observed(collect), pytest.raises(RetryableError, match="garbage collection has collected the layout"):
        job.undo(new)
    assert deleted[0] > 0
    assert job.tasks() == {2}
    assert job.work(new, collect_garbage, no_progress).missing == []


def test_no_layout_comes_back_without_its_blobs(job: Job) -> None:
    """Nothing else has the state."""
    old, new = job.blobs(), job.rescale()
    job.lose(old)
    with pytest.raises(MissingError):
        job.undo(new)
    assert job.tasks() == {2}


def test_lost_blobs_are_made_again_from_the_changelog(servers: MemoryServers) -> None:
    """The layout comes back, and both backends have its state."""
    both = ["blob-store", "kafka-changelog"]
    servers.reconfigure({"task.backup.factories": both})
    job = Job(servers)
    old, new = job.blobs(), job.rescale()
    job.lose(old)
    job.undo(new)
    for backend in both:
        config = JobConfig.from_mapping(job.config.to_mapping(), {"task.restore.factories": [backend]})
        assert job.state(config) == {b"a": b"1"}


@pytest.mark.parametrize("is_kept", [True, False])
def test_a_tag_that_an_undo_overtakes(job: Job, monkeypatch: pytest.MonkeyPatch, is_kept: bool) -> None:
    """The job goes back while a tag is being written to the old layout, and does not know it. That is no success. The
    next try tags the checkpoint where it is now."""
    (record,) = job.work(job.config, lambda _, log: log.read()).values()
    checkpoint_id, new = str(record.current.checkpoint_id), job.rescale()
    real = replaced_layouts.task_alone

    def overtaken(*given: Any) -> Any:
        monkeypatch.undo()
        job.undo(new)
        return real(*given)

    monkeypatch.setattr(replaced_layouts, "task_alone", overtaken)
    with pytest.raises(RetryableError, match="was brought back or collected meanwhile"):
        job.work(new, keep_in_layout, checkpoint_id, is_kept=is_kept)
    assert job.tasks() == {1}


def test_an_undo_that_a_tag_overtakes(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint is kept after an undo has read the layout. It publishes nothing without the tag, and the next one
    brings it along."""
    (record,) = job.work(job.config, lambda _, log: log.read()).values()
    checkpoint_id, new = str(record.current.checkpoint_id), job.rescale()
    monkeypatch.setattr(replaced_layouts, "fence_ids", lambda *_: None)  # it was there before the undo
    tagged = []

    def tag(phase: Phase, subject: str) -> None:
        if phase is Phase.SEND_CHECKPOINT and not tagged:
            tagged.append(job.work(new, keep_in_layout, checkpoint_id, is_kept=True))

    with observed(tag), pytest.raises(RetryableError, match="changed which checkpoints it keeps"):
        job.undo(new)
    assert tagged == [{TASK: (checkpoint_id,)}]
    job.undo(new)
    (record,) = job.work(job.config, lambda _, log: log.read()).values()
    assert record.kept == (checkpoint_id,)


def test_the_look_before_an_undo(job: Job, tmp_path: Path) -> None:
    """Without --write the command asks for the blobs as well, and says if the input is gone or refused."""
    old, new = job.blobs(), job.rescale()
    job.servers.broker.create("orders", 2)
    write_toml(new, tmp_path / "job.toml")
    look = ["rescale", "--undo", "--json", "--config", str(tmp_path / "job.toml")]
    found = CliRunner().invoke(cli, look, catch_exceptions=False)
    assert json.loads(found.stdout)["input_problems"] == ["orders-0 ends at offset 0 now, before 1"]
    assert json.loads(found.stdout)["refused_inputs"] == ["orders has 2 partitions, but the job will have 1 task"]
    job.lose(old)
    found = CliRunner().invoke(cli, look, catch_exceptions=False)
    (damaged,) = json.loads(found.stdout)["damaged"]
    assert any(blob_id in damaged["why"] or "does not exist" in damaged["why"] for blob_id in old)
    assert (damaged["task"], damaged["store"], damaged["factory"]) == (TASK, "totals", "blob-store")
    told = " ".join(CliRunner().invoke(cli, [*look[:2], *look[3:]], catch_exceptions=False).stderr.split())
    assert "warning: the job may be unable to read its input: orders-0 ends at offset 0" in told
    assert "warning: a consumer loop will refuse its input: orders has 2 partitions" in told
    assert "warning: blob-store has lost state of totals of Partition 0" in told


def test_the_changelog_of_an_undo_to_another_layout(job: Job) -> None:
    """Somebody begins to go back to a layout of one task, which creates its new changelog and dies, and then goes back
    to one of two tasks. The error names the changelog, and not a number of tasks."""
    job.rescale()
    job.config = job.in_force()
    job.rescale(4)
    both = {"task.backup.factories": ["blob-store", "kafka-changelog"]}
    job.config = JobConfig.from_mapping(job.in_force().to_mapping(), both)
    plan = job.work(job.config, lambda _, log: undoing.plan_undo(job.config, log))
    topic = plan.changes["stores.totals.changelog.topic"]
    job.servers.broker.create(topic, 1, {"cleanup.policy": "compact"})
    with pytest.raises(PermissionNeeded, match="1 partition instead of 2") as refused:
        job.undo(job.config)
    assert "delete the topic" in str(refused.value.hint)
    job.servers.broker.delete(topic)
    job.undo(job.config)
    assert job.tasks() == {2}


def test_an_undo_that_is_refused_stops_nobody(job: Job) -> None:
    """The changelog of the old layout has lost its settings. Who runs the job goes on."""
    both = {"task.backup.factories": ["blob-store", "kafka-changelog"]}
    job.config = JobConfig.from_mapping(job.config.to_mapping(), both)
    with job.servers.manager(job.config, "kafka-partition") as manager, manager.open_task(TASK) as task:
        task.store("totals").put(b"b", b"2")
        task.commit({"orders-0": 2})
    old = job.config.stores["totals"].changelog_topic
    job.rescale()
    new = job.in_force()
    job.servers.broker.configure(old, {"cleanup.policy": "delete"})
    with job.servers.manager(new, "kafka-partition") as manager, manager.open_task(TASK) as task:
        with pytest.raises(TopicMisconfigured):
            job.undo(new)
        task.store("totals").put(b"b", b"3")
        task.commit({"orders-0": 3})
