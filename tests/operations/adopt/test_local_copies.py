"""The local copies that ``statemgr adopt`` leaves for the first opening of the new job on the same machine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Message

from statemgr import JobConfig, StateManager
from statemgr.kafka.changelog_topic import ChangelogTopics
from statemgr.operations.adopt import adopt as flow
from statemgr.wiring import open_services
from tests.old_jobs import Adopter, commit, ends, make, opened, state, write
from tests.operations.adopt.test_again import TOTALS, stopped
from tests.servers import KafkaServer

TASK = "Partition 0"


@pytest.fixture
def name(kafka: KafkaServer) -> str:
    """The name of the old job."""
    return kafka.fresh_name("old")


def copies(config: JobConfig) -> list[Path]:
    """The finished local directories of the new job."""
    return [found for found in Path(str(config.state_dir)).glob("**/committed/*") if found.is_dir()]


@pytest.mark.parametrize("how", [(), ("--in-place",)], ids=["copied", "in-place"])
def test_the_first_opening_reads_no_changelog(
    kafka: KafkaServer, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: tuple[str, ...]
) -> None:
    """E26: the adoption leaves each store as a local copy, and the first opening on the machine reads no record of a
    changelog. Elsewhere, the changelogs have the same state."""
    old = stopped(kafka, tmp_path, name)
    write(kafka, f"{name}-totals", 0, [(b"gone", b"1"), (b"gone", None)])
    config = old.init(f"{name}-new", *how)
    old.run(*how)
    assert not copies(config), "a dry run leaves nothing"
    old.run("--write", *how)
    assert len(copies(config)) == 2
    read: list[int] = []
    messages = ChangelogTopics._messages

    def counted(self: ChangelogTopics, *place: Any) -> Iterator[list[Message]]:
        for batch in messages(self, *place):
            read.append(len(batch))
            yield batch

    with monkeypatch.context() as counting:
        counting.setattr(ChangelogTopics, "_messages", counted)
        states, _, restored = opened(config)
        assert (states, restored, read) == ([{"totals": TOTALS}] * 2, {"local"}, [])
        elsewhere = JobConfig.from_mapping(config.to_mapping(), {"state.dir": str(tmp_path / "elsewhere")})
        assert opened(elsewhere)[::2] == (states, {"kafka-changelog"})
        assert sum(read) == 6
    with StateManager(config) as manager, manager.open_task(TASK) as task:
        task.store("totals").put(b"new", b"1")
        task.commit({f"{name}-in-0": 11})
    assert state(config)[0][0] == {"totals": TOTALS | {b"new": b"1"}}


def test_without_local_copies(kafka: KafkaServer, name: str, tmp_path: Path) -> None:
    """E26: ``--no-local-copy`` leaves nothing on the machine. Without ``--write`` it means nothing."""
    old = stopped(kafka, tmp_path, name)
    config = old.init(f"{name}-new")
    assert "belongs to --write" in old.run("--no-local-copy", status=2)
    old.run("--write", "--no-local-copy")
    assert not copies(config)
    assert opened(config)[::2] == ([{"totals": TOTALS}] * 2, {"kafka-changelog"})


@pytest.mark.parametrize("how", [pytest.param((), marks=pytest.mark.long), ("--in-place",)], ids=["copied", "in-place"])
def test_without_room(kafka: KafkaServer, name: str, tmp_path: Path, small_disk: Path, how: tuple[str, ...]) -> None:
    """E26: the disk has no room for the second copy. The adoption goes on without copies, removes the first one, and
    says so."""
    values = {b"%04d" % n: b"%04d" % n * 5_000 for n in range(1000)}
    make(kafka, f"{name}-totals", min__compaction__lag__ms="14400000")
    make(kafka, f"{name}-in")
    write(kafka, f"{name}-totals", 0, list(TOTALS.items()))
    write(kafka, f"{name}-totals", 1, list(values.items()))
    commit(kafka, name, {(f"{name}-in", 0): 0, (f"{name}-in", 1): 0})
    old = Adopter(kafka, tmp_path, "--from", "raw", "--job", name, "--changelog", f"totals={name}-totals")
    config = old.init(f"{name}-new", *how)
    full = ("--set", f"state.dir={small_disk}", "--set", "stores.totals.rocksdb.compression=none")
    said = old.run("--write", *how, *full)
    assert "no local copy" in said
    here = JobConfig.from_mapping(config.to_mapping(), {"state.dir": str(small_disk)})
    assert not copies(here)
    assert not [*small_disk.glob("**/staging/*")]
    assert opened(config)[::2] == ([{"totals": TOTALS}, {"totals": values}], {"kafka-changelog"})


def test_an_adoption_that_fails_leaves_no_copy(
    kafka: KafkaServer, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """E26: the second look finds that the old job goes on. The copies of the state that is not published are removed,
    and the next run makes others."""
    old = stopped(kafka, tmp_path, name)
    config = old.init(f"{name}-new", "--in-place")
    made: list[int] = []

    def going_on(*_: object, **__: object) -> object:
        made.append(len(copies(config)))
        write(kafka, f"{name}-totals", 0, [(b"a", b"2")])
        return recorded(*_, **__)

    recorded = flow.recorded
    with monkeypatch.context() as first:
        first.setattr(flow, "recorded", going_on)
        assert "is not stopped" in old.run("--write", "--in-place", status=2)
    assert (made, copies(config)) == ([2], [])
    before = ends(kafka, f"{name}-totals")
    old.run("--write", "--in-place")
    assert len(copies(config)) == 2
    assert state(config)[0] == [{"totals": TOTALS | {b"a": b"2"}}, {"totals": TOTALS}]
    assert ends(kafka, f"{name}-totals") == before


def test_a_process_that_uses_the_directory_keeps_its_own(kafka: KafkaServer, name: str, tmp_path: Path) -> None:
    """E26: another process has directories of the job on the same machine. The adoption leaves them alone, and the next
    opening uses the copy."""
    old = stopped(kafka, tmp_path, name)
    config = old.init(f"{name}-new", "--in-place")
    services = open_services(config)
    try:
        live = services.directories(TASK, "totals").clone(None)
        (live / "file").write_bytes(b"theirs")
        old.run("--write", "--in-place")
        assert (live / "file").read_bytes() == b"theirs"
        assert opened(config)[2] == {"local"}
        assert (live / "file").read_bytes() == b"theirs"
    finally:
        services.close()
