"""The names of the changelogs of a layout: which one a rescale chooses, and whether a configuration has them."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace

import pytest

from statemgr import JobConfig
from statemgr.ids import task_name
from statemgr.kafka.checkpoint_topic import CheckpointTopic
from statemgr.model.checkpoint import ChangelogMarker, CheckpointRecord, Layout
from statemgr.operations.copy.copy import copy
from statemgr.operations.copy.look import look
from statemgr.operations.rescale.plan import changes_in_force, plan_rescale, topic_of_generation
from statemgr.ports import no_progress
from statemgr.testing.memory_servers import MemoryServers
from tests import model_samples as sample
from tests.operations.rescale import test_undo
from tests.operations.rescale.test_undo import Job

CONFIG = {
    **test_undo.CONFIG,
    "task.backup.factories": ["kafka-changelog"],
    "task.restore.factories": ["kafka-changelog"],
}
CHANGELOG = "stores.totals.changelog.topic"


@pytest.mark.parametrize(
    ("topic", "generation", "expected"),
    [
        ("totals", 2, "totals-g2"),
        ("totals-g2", 3, "totals-g3"),
        ("totals-g2", 2, "totals-g2-g2"),
        ("totals-g7", 2, "totals-g7-g2"),
        ("totals-g7-g2", 7, "totals-g7-g7"),
        ("totals-g7", 8, "totals-g8"),
    ],
)
def test_a_name_that_no_layout_has_used(topic: str, generation: int, expected: str) -> None:
    """An ending that the job has not reached yet comes from another job, and stays."""
    assert topic_of_generation("totals", topic, generation) == expected


def test_a_copy_of_a_rescaled_job_is_rescaled(servers: MemoryServers) -> None:
    """The copy begins with generation 1, and its changelog ends with `-g2`, as the one of the job: its first rescale,
    which makes generation 2, writes to another changelog. So does the second one, and both ways back."""
    job = Job(servers)
    job.rescale(2)
    source = job.in_force()
    name = source.stores["totals"].changelog_topic.replace("orders", "new")
    target = JobConfig.from_mapping(
        source.to_mapping(), {"job.name": "new", CHANGELOG: name, "task.checkpoint.topic": "new-checkpoints"}
    )
    target = servers.on_disk(target, "new")
    with (
        closing(servers.services(source)) as old,
        closing(servers.services(target)) as new,
        closing(CheckpointTopic(source, servers.clock)) as old_log,
        closing(CheckpointTopic(target, servers.clock, owned=True)) as new_log,
    ):
        copy(old, new, new_log, look(old, new, old_log.read(), new_log, ()), no_progress)
    assert name.endswith("-g2")
    job.config, used, ids = target, {2: name}, dict[int, str]()
    ids[2] = job.current()
    for tasks in (4, 3):
        job.rescale(tasks)
        job.config = job.in_force()
        used[tasks], ids[tasks] = job.config.stores["totals"].changelog_topic, job.current()
    assert len({*used.values()}) == 3, used
    for tasks in (4, 2):
        job.undo(job.config, ids[tasks])
        job.config = job.in_force()
        assert (job.tasks(), job.config.stores["totals"].changelog_topic) == ({tasks}, used[tasks])
    with servers.manager(job.config, "kafka-partition") as manager:
        rows = {}
        for number in range(2):
            with manager.open_task(task_name(number)) as task:
                rows |= dict(task.store("totals").range())
    assert rows == {b"a": b"1"}


def records(
    generation: int, marker: str | None = None, left: str | None = None, tasks: int = 2
) -> Mapping[str, CheckpointRecord]:
    """The records of a layout, whose store `totals` has a changelog, or has left one."""
    found = {}
    for number in range(tasks):
        now = {"totals": ChangelogMarker(marker, "id", number, 5)} if marker else {}
        before = {"totals": (ChangelogMarker(left, "id", number, 5),)} if left else {}
        checkpoint = replace(
            sample.CHECKPOINT,
            stores={"totals": "1-a-totals"},
            state_checkpoint_markers={"kafka-changelog": now},
            retired_changelogs=before,
            input_offsets={},
            attachments=(),
            batch=None,
        )
        name = task_name(number)
        layout = Layout(generation, tasks, "kafka-partition")
        found[name] = CheckpointRecord("orders", "1", name, layout, (checkpoint,))
    return found


def in_force(found: Mapping[str, CheckpointRecord], **topics: str) -> Mapping[str, int | str]:
    """What a configuration of two tasks lacks, whose stores have these changelogs."""
    stores = {f"stores.{store}.changelog.topic": topic for store, topic in topics.items()}
    return changes_in_force(JobConfig.from_mapping({"job.name": "orders", "job.tasks": 2, **stores}), found)


def test_a_configuration_of_another_layout() -> None:
    """A changelog of the checkpoints counts. Without one, the name shows the generation."""
    assert in_force(records(3, "a-g3"), totals="a-g2") == {"job.tasks": 2, CHANGELOG: "a-g3"}
    assert in_force(records(3, "a"), totals="a-g2") == {"job.tasks": 2, CHANGELOG: "a"}
    assert in_force(records(3), totals="a-g2") == {"job.tasks": 2, CHANGELOG: "a-g3"}
    assert in_force(records(3), totals="a") == {"job.tasks": 2, CHANGELOG: "a-g3"}
    other = in_force(records(3), totals="a-g2", counts="b-g2")
    assert other == {"job.tasks": 2, CHANGELOG: "a-g3", "stores.counts.changelog.topic": "b-g3"}
    assert in_force(records(2, tasks=3), totals="a-g2") == {"job.tasks": 3}


@pytest.mark.parametrize(
    ("found", "topics"),
    [
        (records(1), {"totals": "a-g2"}),
        (records(3), {"totals": "a-g3"}),
        (records(3, left="a"), {"totals": "a"}),
        (records(3), {"totals": "a-g3", "added": "b"}),
        (records(3, "a"), {"totals": "a", "added": "b"}),
    ],
)
def test_a_configuration_of_the_layout(found: Mapping[str, CheckpointRecord], topics: Mapping[str, str]) -> None:
    """A job that went back has changelogs without the ending, and may have left them since. A store that was added
    after a rescale has no ending either."""
    assert in_force(found, **topics) == {}


def test_the_changelog_of_the_plan() -> None:
    """It is named after that of the checkpoints, whatever the configuration says."""
    config = JobConfig.from_mapping({"job.name": "orders", "job.tasks": 2, CHANGELOG: "other"})
    assert plan_rescale(config, records(1, "a-g2"), 3, None).changes == {"job.tasks": 3, CHANGELOG: "a-g2-g2"}
