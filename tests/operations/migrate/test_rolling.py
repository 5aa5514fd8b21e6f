"""Rolling restarts of a migration: members of both stages run in one group while tasks move between them."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from click.testing import CliRunner

from statemgr import JobConfig, StateManager
from statemgr.cli.main import cli
from statemgr.errors import MissingState
from statemgr.ids import task_name
from statemgr.model.jobs.stages import stage_of
from statemgr.reader import JobReader
from tests.cli.test_running_job import write_toml
from tests.commits import totals
from tests.jobs import DUAL, SEGMENTS, job_mapping, with_changes
from tests.kafka_jobs import wait_until
from tests.loop_members import make_topic, member, produce
from tests.operations.migrate.test_migrate import STAGES
from tests.servers import KafkaServer

PARTITIONS = 4
Stop = tuple[Callable[[], None], list[Exception]]


class Rows:
    """Rows that arrive all the time, produced on a separate thread."""

    def __init__(self, kafka: KafkaServer, topic: str) -> None:
        self._kafka, self._topic = kafka, topic
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.count = 0

    def _run(self) -> None:
        while not self._end.wait(0.1):
            produce(self._kafka, self._topic, PARTITIONS, range(self.count, self.count + 50))
            self.count += 50

    @contextmanager
    def arriving(self) -> Iterator[None]:
        """Produce rows while the block runs."""
        self._thread.start()
        try:
            yield
        finally:
            self._end.set()
            self._thread.join(60)


def stages(config: JobConfig) -> list[int]:
    """Return the stage of each task's current checkpoint; empty before the first member has created the topic."""
    with JobReader(config) as reader:
        found = []
        try:
            records = reader.records()
        except MissingState:
            return []
        for record in records.values():
            current = record.current
            stage = stage_of(current.backup_factories["totals"], current.restore_factories["totals"])
            assert stage is not None
            found.append(int(stage))
        return found


@pytest.mark.long
@pytest.mark.parametrize(
    ("old", "new"),
    [(1, 2), (2, 3), (3, 4), (4, 3), (3, 2), (2, 1)],
)
def test_old_and_new_members_side_by_side(kafka: KafkaServer, tmp_path: Path, old: int, new: int) -> None:
    """Tasks move from old members to new ones, back to an old one, and forward again, while rows arrive."""
    topic, group = kafka.fresh_name("in"), kafka.fresh_name("group")
    make_topic(kafka, topic, PARTITIONS)
    config = JobConfig.from_mapping(
        job_mapping(kafka, tmp_path, tasks=PARTITIONS, kind=SEGMENTS, task__commit__ms=200, task__inputs=[topic])
    )
    errors: list[list[Exception]] = []

    def of_stage(stage: int, machine: str) -> JobConfig:
        backup, restore = STAGES[stage]
        return with_changes(
            config,
            task__backup__factories=backup,
            task__restore__factories=restore,
            state__dir=str(tmp_path / machine),
        )

    def start(stage: int, machine: str) -> Callable[[], None]:
        stop, raised = member(of_stage(stage, machine), group, topic)
        errors.append(raised)
        return stop

    def wait_for(wanted: Callable[[list[int]], bool]) -> None:
        def reached() -> bool:
            assert not any(errors), errors
            found = stages(config)
            return len(found) == PARTITIONS and wanted(found)

        wait_until(reached)

    rows = Rows(kafka, topic)
    running: dict[str, Callable[[], None]] = {}
    try:
        running["a"], running["b"] = start(old, "a"), start(old, "b")
        with rows.arriving():
            wait_for(lambda found: set(found) == {old})
            running["c"] = start(new, "c")
            wait_for(lambda found: set(found) == {old, new})
            running.pop("a")()
            running.pop("b")()
            wait_for(lambda found: set(found) == {new})
            running["a"] = start(old, "a")  # its local copies are older than the checkpoints
            wait_for(lambda found: set(found) == {old, new})
            running["d"] = start(new, "d")
            running.pop("a")()
            wait_for(lambda found: set(found) == {new})
        wait_until(lambda: processed(config, topic) == rows.count)
    finally:
        for stop in running.values():
            stop()
    assert not any(errors), errors
    expected = Counter(f"k{number % 50}".encode() for number in range(rows.count))
    for factory in STAGES[new][0]:
        check(of_stage(new, "there"), factory, expected)
    # whatever the last stage was, continue with dual commits; then both backends are equal
    dual = with_changes(of_stage(3 if new >= 3 else 2, "dual"), task__backup__factories=list(DUAL))
    for index in range(PARTITIONS):
        with StateManager(dual) as manager, manager.open_task(task_name(index)) as task:
            assert task.last_checkpoint is not None
            task.commit(task.last_checkpoint.input_offsets)
    for factory in DUAL:
        check(dual, factory, expected)
    write_toml(dual, tmp_path / "job.toml")
    verified = CliRunner().invoke(cli, ["migrate", "verify", "--config", str(tmp_path / "job.toml"), "--json"])
    assert verified.exit_code == 0, verified.output


def processed(config: JobConfig, topic: str) -> int:
    """Return the number of rows below the published input offsets."""
    with JobReader(config) as reader:
        offsets = {name: o for r in reader.records().values() for name, o in r.current.input_offsets.items()}
    return sum(offset for name, offset in offsets.items() if name.startswith(f"{topic}-"))


def check(config: JobConfig, factory: str, expected: Counter[bytes]) -> None:
    """Check that a backend has exactly the expected count of every key, over all tasks."""
    found: Counter[bytes] = Counter()
    for contents in totals(config, factory).values():
        found.update({key: int(value) for key, value in contents.items()})
    assert found == expected
