"""State that a changelog no longer has: older checkpoints, and replays on machines whose clocks are off by days."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from click.testing import CliRunner

from statemgr import JobConfig, StateManager
from statemgr.cli.main import cli
from statemgr.errors import MissingState
from statemgr.kafka import topics
from statemgr.reader import JobReader
from tests.commits import TASK, commit
from tests.jobs import DUAL, elsewhere, job_mapping, with_changes
from tests.kafka_jobs import EAGER, committed, make_topic, wait_until
from tests.servers import KafkaServer

_DAY_NS = 24 * 3600 * 1_000_000_000
_FACTORY = "kafka-changelog"
SKEWS = [-3, 0, 3]
#: Days by which the clocks of the committing and of the restoring machine are off; the long tests take every pair.
PAIRS = [
    pytest.param(committing, restoring, marks=() if committing + restoring == 0 else pytest.mark.long)
    for committing in SKEWS
    for restoring in SKEWS
]
#: The same for tests that wait for the cleaner.
SLOW_PAIRS = [pytest.param(*pair.values, marks=() if pair.values == (-3, 3) else pytest.mark.long) for pair in PAIRS]


@contextmanager
def clock(monkeypatch: pytest.MonkeyPatch, days: int) -> Iterator[None]:
    """A block in which this machine's wall clock is off by some days."""
    real = time.time_ns
    with monkeypatch.context() as patch:
        patch.setattr(time, "time_ns", lambda: real() + days * _DAY_NS)
        yield


def job(kafka: KafkaServer, directory: Path, *factories: str, **more: object) -> JobConfig:
    """A job that retains its checkpoints."""
    backup = factories or (_FACTORY,)
    return JobConfig.from_mapping(
        job_mapping(kafka, directory, backup=backup, **{"task__checkpoint__retained": 30, **more})  # type: ignore[arg-type]
    )


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    """Settings for a job whose changelog forgets deletes within a second; :func:`forgetful` makes its topic."""
    monkeypatch.setattr(topics, "DELETE_RETENTION_MS", int(EAGER["delete.retention.ms"]))
    return {"stores__totals__changelog__min__compaction__lag__ms": 0}


def forgetful(config: JobConfig) -> None:
    """Make the changelog with a quick cleaner."""
    make_topic(config, config.stores["totals"].changelog_topic, **EAGER)


def forget(config: JobConfig, key: bytes) -> None:
    """Commit until the cleaner has removed all records of a key, including its delete."""
    topic = config.stores["totals"].changelog_topic
    number = 100
    with StateManager(config) as manager, manager.open_task(TASK) as task:

        def is_forgotten() -> bool:
            nonlocal number
            time.sleep(0.6)  # a later record closes the active segment once it is older than segment.ms
            number += 1
            task.store("totals").put(b"other", b"%d" % number)
            task.commit({"orders-0": number})
            return key not in dict(committed(config, topic))

        wait_until(is_forgotten)


def at(config: JobConfig, checkpoint: object) -> dict[bytes, bytes]:
    """The state at a checkpoint, read without disturbing the job."""
    with JobReader(config) as reader, reader.open_store(TASK, "totals", str(checkpoint)) as store:
        return dict(store.scan(None, None))


def newest(config: JobConfig) -> object:
    """The ID of the current checkpoint."""
    with JobReader(config) as reader:
        return reader.checkpoint(TASK).checkpoint_id


@pytest.mark.parametrize("factories", [pytest.param((_FACTORY,), marks=pytest.mark.long), DUAL])
def test_an_older_checkpoint_whose_deletes_were_compacted(
    kafka: KafkaServer, tmp_path: Path, quick: dict[str, object], factories: tuple[str, ...]
) -> None:
    """FAULT 53: a key that an older checkpoint had was deleted later, and its delete is gone too. The changelog refuses
    that checkpoint and still serves the newest one; the next factory in the list has the older state."""
    config = job(kafka, tmp_path, *factories, **quick)
    forgetful(config)
    first = commit(config, {b"deleted": b"1", b"kept": b"1"}, 1).checkpoint_id
    commit(config, {b"deleted": None}, 2)
    forget(config, b"deleted")
    changelog = with_changes(config, task__restore__factories=[_FACTORY])
    with JobReader(changelog) as reader:
        with pytest.raises(MissingState, match="exact rewind is impossible") as refused:
            reader.restore(TASK, tmp_path / "target", str(first))
        assert not list((tmp_path / "target").iterdir())
    assert ("put blob-store first" if "blob-store" in factories else "choose a newer checkpoint") in str(
        refused.value.hint
    )
    assert set(at(changelog, newest(config))) == {b"kept", b"other"}
    if len(factories) > 1:
        assert at(config, first) == {b"deleted": b"1", b"kept": b"1"}
    path = tmp_path / "job.toml"
    path.write_text("\n".join(f'"{key}" = {_toml(value)}' for key, value in changelog.to_mapping().items()))
    asked = CliRunner().invoke(
        cli, ["store", "get", "totals", "deleted", "--config", str(path), "--task", TASK, "--checkpoint", str(first)]
    )
    assert asked.exit_code == 4, asked.output


def _toml(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else repr(value)


@pytest.mark.parametrize(("committing", "restoring"), PAIRS)
def test_an_older_checkpoint_while_clocks_are_off(
    kafka: KafkaServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, committing: int, restoring: int
) -> None:
    """FAULTS 53 and 54: the broker's time decides, so a wrong clock on the restoring machine does not change the
    answer. Records that the cleaner has not touched are served exactly, unless the committing clock was days behind."""
    config = job(kafka, tmp_path)
    with clock(monkeypatch, committing):
        first = commit(config, {b"deleted": b"1", b"kept": b"1"}, 1).checkpoint_id
        commit(config, {b"deleted": None}, 2)
    with clock(monkeypatch, restoring):
        if committing < 0:
            with pytest.raises(MissingState, match="exact rewind is impossible"):
                at(config, first)
        else:
            assert at(config, first) == {b"deleted": b"1", b"kept": b"1"}
        assert at(config, newest(config)) == {b"kept": b"1"}


@pytest.mark.parametrize(("committing", "restoring"), SLOW_PAIRS)
def test_a_replay_onto_an_older_directory_while_clocks_are_off(
    kafka: KafkaServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    quick: dict[str, object],
    committing: int,
    restoring: int,
) -> None:
    """FAULT 54: a machine has the directory of an older checkpoint, another machine has since deleted a key, and the
    delete is compacted away. Whatever their clocks say, the key does not come back."""
    config = job(kafka, tmp_path, **quick)
    forgetful(config)
    with clock(monkeypatch, committing):
        commit(config, {b"deleted": b"1", b"kept": b"1"}, 1)
        other = elsewhere(config, tmp_path / "other", _FACTORY)
        commit(other, {b"deleted": None}, 2)
        forget(other, b"deleted")
    with clock(monkeypatch, restoring), StateManager(config) as manager, manager.open_task(TASK) as task:
        assert set(dict(task.store("totals").range())) == {b"kept", b"other"}
        assert task.restored[0].bytes_reused == 0


@pytest.mark.parametrize("days", SKEWS)
def test_a_tail_is_replayed_where_the_clocks_agree(
    kafka: KafkaServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, days: int
) -> None:
    """FAULT 54: a machine whose clocks agree with each other replays only the tail; a machine whose wall clock was set
    in between replays everything. Both are exact."""
    config = job(kafka, tmp_path)
    model = {b"%03d" % n: b"1" for n in range(500)}
    commit(config, dict(model), 1)
    commit(elsewhere(config, tmp_path / "other", _FACTORY), {b"000": None, b"001": b"2"}, 2)
    with clock(monkeypatch, days), StateManager(config) as manager, manager.open_task(TASK) as task:
        expected = {**model, b"001": b"2"}
        del expected[b"000"]
        assert dict(task.store("totals").range()) == expected
        restored = task.restored[0]
        assert (restored.records, restored.bytes_reused > 0) == ((502, False) if days else (2, True))
