"""The layouts that a rescale has replaced, in a garbage collection, and the changelogs that they leave."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import closing
from typing import Any, TypeVar

import pytest

from statemgr import JobConfig
from statemgr.config.factories import KAFKA_CHANGELOG
from statemgr.errors import ConfigError
from statemgr.flows.replaced_layouts import find_layout
from statemgr.ids import CheckpointId
from statemgr.kafka.transactions.publisher import publish_alone
from statemgr.model.checkpoint import ChangelogMarker, Checkpoint, CheckpointRecord, Layout
from statemgr.model.jobs.layouts import RetiredLayout
from statemgr.operations.gc import layouts as of_layouts
from statemgr.operations.gc.command import _print_layout
from statemgr.operations.gc.layouts import RetiredReport, collect_old_layouts
from statemgr.operations.rescale.rescale import Workers, rescale
from statemgr.operations.rescale.undo import undo
from statemgr.ports import CheckpointLog, no_progress
from statemgr.services import Services
from statemgr.testing.memory_servers import MemoryServers
from tests.commits import TASK
from tests.operations.gc import test_jobs
from tests.operations.gc.test_jobs import DAY_S, collect, commit, opened

CONFIG = test_jobs.CONFIG
T = TypeVar("T")


def test_a_collection_names_the_changelogs_of_an_old_layout(servers: MemoryServers) -> None:
    """The records that it deletes were the only ones with these names. After an undo, the newer layout's are named, and
    not those that the job uses again."""
    config = servers.on_disk(servers.config, "disk")
    for number in range(2):
        commit(servers, config, f"Partition {number}")

    def changelogs(now: JobConfig, **options: bool) -> list[tuple[bool, tuple[str, ...]]]:
        return [(one.collected, one.changelogs) for one in collect(servers, now, **options).layouts]

    new = rescaled(servers, config, 4)
    first, second = (one.stores["totals"].changelog_topic for one in (config, new))
    assert first != second
    assert changelogs(new, delete=True) == [(False, ())], "the job may go back to it"
    with opened(servers, new) as (services, log):
        undo(services, log, servers.services, no_progress)
    servers.clock.advance(2 * DAY_S)
    assert changelogs(config) == [(False, (second,))]
    assert changelogs(config, delete=True) == [(True, (second,))]
    assert changelogs(config, delete=True) == []


def rescaled(servers: MemoryServers, config: JobConfig, tasks: int) -> JobConfig:
    """Rescale the job. Returns: the configuration of the new layout."""

    def submit(work: Callable[..., T], *arguments: object) -> Future[T]:
        with closing(servers.services(config)) as services, services.executors.pool("work", 1) as pool:
            return pool.submit(work, services, *arguments)

    with opened(servers, config) as (services, log):
        done = rescale(services, log, tasks, Workers(submit, 1, servers.services), no_progress, chosen="murmur2")
    return done.built.plan.new_config


def without_blobs(config: JobConfig) -> JobConfig:
    """Return the job with changelogs alone."""
    mapping = {key: value for key, value in config.to_mapping().items() if key != "blob.store.uri"}
    alone = [KAFKA_CHANGELOG]
    return JobConfig.from_mapping({**mapping, "task.backup.factories": alone, "task.restore.factories": alone})


def test_layouts_of_a_job_without_a_blob_store(servers: MemoryServers) -> None:
    """They are collected, too, when they are old enough, and the changelogs are named that nothing needs then."""
    config = without_blobs(servers.on_disk(servers.config, "disk"))
    for number in range(2):
        commit(servers, config, f"Partition {number}")
    new = rescaled(servers, config, 4)
    servers.clock.advance(DAY_S - 60)
    (young,) = collect(servers, new, delete=True).layouts
    assert not young.collectable
    servers.clock.advance(120)
    (old,) = collect(servers, new).layouts
    assert (old.collectable, old.collected) == (True, False)
    report = collect(servers, new, delete=True)
    assert "only the layouts" in report.notes[0]
    (old,) = report.layouts
    assert (old.collected, old.changelogs) == (True, (config.stores["totals"].changelog_topic,))
    assert collect(servers, new, delete=True).layouts == []
    with opened(servers, new) as (_, log):
        assert len(log.read()) == 4


def test_a_configuration_that_lacks_the_blob_store(servers: MemoryServers) -> None:
    """Checkpoints name blobs, so something is wrong. Nothing is collected."""
    config = servers.on_disk(servers.config, "disk")
    for number in range(2):
        commit(servers, config, f"Partition {number}")
    new = rescaled(servers, config, 4)
    servers.clock.advance(2 * DAY_S)
    with pytest.raises(ConfigError, match=r"blob\.store\.uri"):
        collect(servers, without_blobs(new), delete=True)
    assert len(collect(servers, new).layouts) == 1


def test_the_current_layout_is_never_collected(servers: MemoryServers) -> None:
    """The topic says that the layout was replaced long ago: `topics repair` of an older version has lost the records of
    the layout that replaced it, and not this one. No checkpoint and no blob goes."""
    config = servers.on_disk(servers.config, "disk")
    for number in range(2):
        commit(servers, config, f"Partition {number}")
    with opened(servers, config) as (_, log):
        (layout,) = {record.layout for record in log.read().values()}
    retired = RetiredLayout("orders", "1", layout, servers.now_ms)
    publish_alone(config, servers.clock, "test", config.checkpoint_topic, [(retired.key, retired.value)])
    servers.clock.advance(2 * DAY_S)
    for _ in range(2):
        report = collect(servers, config, delete=True)
        assert (report.layouts, report.deleted.blobs) == ([], 0)
        with opened(servers, config) as (_, log):
            assert [*log.read()] == ["Partition 0", "Partition 1"]
            assert find_layout(log, None) is None


class Log:
    """A job whose layouts name these changelogs: generation → topics. The last one is current."""

    def __init__(self, topics: Mapping[int, Sequence[str]]) -> None:
        self.topics = dict(topics)

    def read(self, tasks: Any = None, *, generation: int | None = None) -> Mapping[str, CheckpointRecord]:
        """Each topic is of a store of its own; the last one is a topic that its store has left."""
        number = max(self.topics) if generation is None else generation
        if number not in self.topics:
            return {}
        markers = {topic: ChangelogMarker(topic, None, 0, 1) for topic in self.topics[number]}
        left = {topic: (markers.pop(topic),) for topic in list(markers)[1:]}
        id_ = CheckpointId(1, number)
        checkpoint = Checkpoint(id_, 1, 1, {}, {}, {KAFKA_CHANGELOG: markers}, retired_changelogs=left)
        return {TASK: CheckpointRecord("orders", "1", TASK, Layout(number, 1, "murmur2"), (checkpoint,))}

    def retired(self) -> Sequence[RetiredLayout]:
        """The first layouts were replaced at their numbers, in milliseconds."""
        *old, _ = sorted(self.topics)
        return [RetiredLayout("orders", "1", Layout(number, 1, "murmur2"), number) for number in old]


@pytest.mark.parametrize(
    ("topics", "expected"),
    [
        ({0: ["a", "b"], 5: ["c"]}, [("a", "b")]),
        ({0: ["a", "b"], 5: ["b"]}, [("a",)]),
        ({0: ["a", "b"], 5: ["c", "a"]}, [("b",)]),
        ({0: ["a", "b"], 1: ["b", "c"], 5: ["d"]}, [("a", "b"), ("b", "c")]),
        ({0: ["a", "b"], 4: ["b", "c"], 5: ["d"]}, [("a",), ()]),
        ({0: ["orders-1-totals-changelog", "b"], 5: ["c"]}, [("b",)]),
    ],
)
@pytest.mark.parametrize("delete", [True, False])
def test_only_changelogs_that_nothing_else_names(
    servers: MemoryServers,
    monkeypatch: pytest.MonkeyPatch,
    topics: Mapping[int, Sequence[str]],
    expected: Sequence[tuple[str, ...]],
    delete: bool,
) -> None:
    """The current layout, a layout that stays and the configuration protect a changelog, also one that its store has
    left."""
    log = Log(topics)
    config = servers.config
    assert config.stores["totals"].changelog_topic == "orders-1-totals-changelog"

    def collected(services: Services, log_: CheckpointLog, before_ms: int) -> None:
        log.topics = {number: one for number, one in log.topics.items() if number >= before_ms}

    monkeypatch.setattr(of_layouts, "collect_layouts", collected)
    with closing(servers.services(config)) as services:
        found = collect_old_layouts(services, log, 3, {}, delete=delete)  # type: ignore[arg-type]
    assert [one.changelogs for one in found] == list(expected)
    assert [one.collected for one in found] == [delete and one.collectable for one in found]


def test_a_layout_that_came_back_meanwhile_keeps_its_changelogs(
    servers: MemoryServers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Invariant 16: somebody goes back to the old layout right before it would be collected."""
    log = Log({0: ["a"], 5: ["b"]})

    def undone(*_: object) -> None:
        log.topics = {5: ["b"], 6: ["a"]}

    monkeypatch.setattr(of_layouts, "collect_layouts", undone)
    with closing(servers.services(servers.config)) as services:
        (found,) = collect_old_layouts(services, log, 3, {}, delete=True)  # type: ignore[arg-type]
    assert found.changelogs == ()


def test_the_commands_that_delete_changelogs(capsys: pytest.CaptureFixture[str]) -> None:
    """They can be run as they are: the tool takes a regular expression, in which a dot is any character."""
    _print_layout(RetiredReport(1, 2, 0, (), True, True, None, ("eu.orders-1", "orders-1")), "one:9092,two:9092")
    shown = capsys.readouterr().err.splitlines()
    assert "is collected" in shown[0]
    command = "  kafka-topics.sh --bootstrap-server one:9092,two:9092 --delete --topic"
    assert shown[2:] == [f"{command} 'eu\\.orders-1'", f"{command} orders-1"]
