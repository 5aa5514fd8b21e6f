"""`rescale_job`: other machines build the new stores. Here, calls of `rescale_unit` in this process stand for them, and
leave nothing on the disk."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path

import pytest
from click.testing import Result

from statemgr import JobConfig, StateManager
from statemgr.errors import FencedError, InvalidError, OutcomeUnknownError, RetryableError
from statemgr.ids import task_name
from statemgr.local import bulk_writer, durable
from statemgr.model.checkpoint import ChangelogMarker
from statemgr.operations.rescale.catch_up import CatchUp
from statemgr.operations.rescale.changelog import fenced_partition
from statemgr.operations.rescale.spread import RescaledJob, rescale_job, rescale_unit
from statemgr.phases import Phase, observed
from statemgr.wiring import open_services
from tests.commits import commit, write
from tests.jobs import DUAL, SEGMENTS
from tests.kafka_jobs import make_topic
from tests.operations.rescale.test_rescale import (
    check,
    cut_off_when_built,
    fill,
    job,
    keys_of,
    murmur2,
    run,
    some_state,
    written,
)
from tests.servers import KafkaServer, S3Server

__all__ = ["run"]  # a fixture
Run = Callable[..., Result]
LONG_DUAL = pytest.param(DUAL, marks=pytest.mark.long)


def rescaled(config: JobConfig, tasks: int, elsewhere: Callable[[str], str] = rescale_unit) -> RescaledJob:
    """Change the number of tasks of the job."""
    return rescale_job(config, tasks, elsewhere, parallel=2)


def nowhere(order: str) -> str:
    """Stand for another machine that must not be needed."""
    raise AssertionError(f"ordered again: {order}")


def cut_off(config: JobConfig, tasks: int) -> None:
    """Run a driver that dies when everything is built."""
    with cut_off_when_built(config):
        rescaled(config, tasks)


@pytest.mark.parametrize(
    ("before", "after", "backup"),
    [pytest.param(4, 6, DUAL, marks=pytest.mark.long), (3, 2, ("kafka-changelog",))],
)
def test_every_key_moves_to_its_task(
    kafka: KafkaServer, s3: S3Server, tmp_path: Path, run: Run, before: int, after: int, backup: tuple[str, ...]
) -> None:
    """Every key moves as with the command, which then only writes the configuration. Nothing is left on the disk."""
    config, state = job(kafka, tmp_path, before, s3, kind=SEGMENTS, backup=backup), some_state()
    fill(config, some_state(200), 3)
    fill(config, state)
    done = rescaled(config, after)
    assert (done.config.tasks, done.partitioner, done.keys) == (after, "murmur2", 2 * len(state))
    check(done.config, state, tmp_path / "other")
    assert {path.name for path in tmp_path.rglob("*rescale*/*")} == {"lock"}
    assert run(config, "--tasks", str(after), "--write").exit_code == 0
    assert written(tmp_path) == done.config
    again = rescaled(config, after, nowhere)
    assert (again.config, again.checkpoints) == (done.config, done.checkpoints)


@pytest.mark.parametrize("backup", [LONG_DUAL, ("blob-store",)], ids=["dual", "blobs"])
def test_a_running_owner(
    kafka: KafkaServer, tmp_path: Path, backup: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The owner commits while the stores are built and while the driver catches up. The new stores have these changes,
    and the owner's next commit fails."""
    config, state = job(kafka, tmp_path, 2, kind=SEGMENTS, backup=backup), some_state()
    fill(config, state)
    gone = list(keys_of(0, 2, state))[100]
    late = dict.fromkeys(keys_of(0, 2, {**some_state(60), **some_state(600, "late-")}), b"late")
    last = dict.fromkeys(keys_of(0, 2, some_state(50, "last-")), b"last")
    steps: list[Phase] = []
    monkeypatch.setattr(CatchUp, "_compared", None)
    with StateManager(config) as manager, manager.open_task("Partition 0") as task:
        turn = threading.Lock()

        def commits(phase: Phase, subject: str) -> None:
            steps.append(phase)
            if (phase, subject) not in [(Phase.STORED, "Partition 2/totals"), (Phase.CATCH_UP, "totals")]:
                return
            with turn:
                reached = task.last_checkpoint
                offset = 7 if reached is None else reached.input_offsets["orders-0"]
                if (phase, offset) in [(Phase.STORED, 7), (Phase.CATCH_UP, 8)]:
                    write(task, {**late, gone: None} if offset == 7 else last, list(config.stores))
                    task.commit({"orders-0": offset + 1})

        with observed(commits):
            done = rescaled(config, 3)
        with pytest.raises(FencedError):
            task.commit({"orders-0": 10})
    fenced = len(steps) - steps[::-1].index(Phase.BEGIN)
    assert steps[:fenced].count(Phase.CATCH_UP) == 4, "twice for each store"
    state = {**state, **late, **last}
    del state[gone]
    check(done.config, state, tmp_path / "other")
    fill(done.config, some_state(20, "more-"), 20)


@pytest.mark.parametrize("backup", [LONG_DUAL, ("blob-store",)], ids=["dual", "blobs"])
@pytest.mark.parametrize("again", [pytest.param("command", marks=pytest.mark.long), "elsewhere"])
def test_a_driver_that_died_continues(
    kafka: KafkaServer, tmp_path: Path, run: Run, backup: tuple[str, ...], again: str
) -> None:
    """Both ways use what other machines have built, and bring in what the job has committed since."""
    config, state = job(kafka, tmp_path, 2, kind=SEGMENTS, backup=backup), some_state()
    fill(config, state)
    cut_off(config, 3)
    late = some_state(60, "late-")
    fill(config, late, 9)
    steps: list[Phase] = []
    with observed(lambda phase, _: steps.append(phase)):
        if again == "command":
            assert run(config, "--tasks", "3", "--write", "--parallel", "2").exit_code == 0
        else:
            rescaled(config, 3, nowhere)
            assert run(config, "--tasks", "3", "--write").exit_code == 0
    assert Phase.CATCH_UP in steps
    assert {Phase.SPLIT, Phase.STORE}.isdisjoint(steps)
    check(written(tmp_path), {**state, **late}, tmp_path / "other")


def test_answers_of_another_version(kafka: KafkaServer, tmp_path: Path) -> None:
    """A driver of a version that cannot read what other machines have answered an earlier one orders it again."""
    config, state = job(kafka, tmp_path, 2, kind=SEGMENTS, backup=("blob-store",)), some_state()
    fill(config, state)
    cut_off(config, 3)
    notes = [*config.state_dir.rglob("answer.note")]
    assert notes
    for note in notes:
        told = durable.read_note(note, 1 << 20)
        for store in told["stores"].values():
            store["commit"] = bytes(40).hex()
        durable.write_note(note, told)
    check(rescaled(config, 3).config, state, tmp_path / "other")


@pytest.mark.long
def test_a_command_that_died_continues_elsewhere(kafka: KafkaServer, tmp_path: Path, run: Run) -> None:
    """Stores that the command has built on this machine are not ordered again."""
    config, state = job(kafka, tmp_path, 2, kind=SEGMENTS), some_state()
    fill(config, state)

    with cut_off_when_built(config):
        run(config, "--tasks", "3", "--write", "--parallel", "2")
    check(rescaled(config, 3, nowhere).config, state, tmp_path / "other")


@pytest.mark.long
@pytest.mark.parametrize("backup", [DUAL, ("blob-store",)], ids=["dual", "blobs"])
def test_a_try_that_was_given_up_and_still_runs(kafka: KafkaServer, tmp_path: Path, backup: tuple[str, ...]) -> None:
    """An abandoned try does no harm with its blobs. If it writes to a changelog after the try that counts, nothing is
    published, and the next run builds the store again."""
    config, state = job(kafka, tmp_path, 2, kind=SEGMENTS, backup=backup), some_state()
    fill(config, state)

    def twice(order: str) -> str:
        counts = rescale_unit(order)
        rescale_unit(order)
        return counts

    if backup == DUAL:
        with pytest.raises(RetryableError, match="another try to build a new store"):
            rescaled(config, 3, twice)
        check(config, state, tmp_path / "not-yet")
        done = rescaled(config, 3)
    else:
        done = rescaled(config, 3, twice)
    check(done.config, state, tmp_path / "other")


def test_a_partition_is_looked_at_when_older_tries_are_fenced(kafka: KafkaServer, tmp_path: Path) -> None:
    """A newer try deletes what an older one has written until then, and the older one cannot write any more."""
    config = job(kafka, tmp_path, 1, backup=("kafka-changelog",))
    make_topic(config, topic := config.stores["totals"].changelog_topic, 1)
    with closing(open_services(config)) as services:
        info = services.changelog().describe(topic)
        empty = ChangelogMarker(topic, info.topic_id, 0, 0)
        with bulk_writer("rocksdb", tmp_path / "new", {}) as writer:
            writer.write([(b"a", b"1")])
        with fenced_partition(services, "totals", info, 0) as older:
            older.send(empty, [[(b"a", b"0"), (b"b", b"0")]])
            with fenced_partition(services, "totals", info, 0) as newer:
                with pytest.raises(FencedError):
                    older.send(empty, [[(b"c", b"0")]])
                marker = newer.fill(tmp_path / "new")
        found = dict[bytes, bytes | None]()
        for batch in services.changelog().read(topic, 0, 0, marker.offset):
            found.update((record.key, record.value) for record in batch)
    assert found == {b"a": b"1", b"b": None}


@pytest.mark.long
def test_two_tries_at_the_same_time(kafka: KafkaServer, tmp_path: Path) -> None:
    """Each try fences the other where it writes to a changelog later. The result is complete or not published."""
    config, state = job(kafka, tmp_path, 2, kind=SEGMENTS, backup=("kafka-changelog",)), some_state()
    fill(config, state)

    def both(order: str) -> str:
        answers: list[str] = []

        def one() -> None:
            with suppress(FencedError, RetryableError, OutcomeUnknownError):
                answers.append(rescale_unit(order))

        tries = [threading.Thread(target=one) for _ in range(2)]
        for started in tries:
            started.start()
        for started in tries:
            started.join()
        return answers[-1] if answers else rescale_unit(order)

    try:
        done = rescaled(config, 3, both)
    except RetryableError:
        done = rescaled(config, 3)
    check(done.config, state, tmp_path / "other")


def test_what_does_not_fit_is_refused(kafka: KafkaServer, tmp_path: Path) -> None:
    """Other machines look for the partitioner and check each key. Both errors come back with their type."""
    config = job(kafka, tmp_path, 2, backup=("blob-store",))
    for task in range(2):
        commit(config, {b"%d" % number: b"x" for number in range(50)}, {f"orders-{task}": 1}, task_name(task))
    with pytest.raises(InvalidError, match="no known partitioner put the keys"):
        rescaled(config, 3)
    other = job(kafka, tmp_path / "other", 2, backup=("blob-store",))
    fill(other, some_state(3000))
    odd = next(key for number in range(9) if murmur2(key := b"zz-%d" % number) % 2)
    commit(other, {odd: b"x"}, {"orders-0": 20})
    with pytest.raises(InvalidError, match=r"and murmur2 puts it into Partition 1"):
        rescaled(other, 3)
