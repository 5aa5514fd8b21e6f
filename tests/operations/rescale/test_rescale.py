"""``statemgr rescale`` changes the number of tasks, key by key, in every backend. It can undo that, and may refuse."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from statemgr import JobConfig, StateManager
from statemgr.backends.blobs.names import is_index_blob
from statemgr.cli.main import cli
from statemgr.engine import attempts, open_attempt, read_attachment
from statemgr.errors import FencedError, LayoutMismatch
from statemgr.ids import task_name
from statemgr.kafka.checkpoint_topic import CheckpointTopic
from statemgr.local.machine import SystemClock
from statemgr.model.keys.partitioners import candidates
from statemgr.operations.rescale.catch_up import CatchUp
from statemgr.operations.rescale.undo import undo
from statemgr.phases import Phase, observed
from statemgr.ports import no_progress
from statemgr.reader import JobReader
from statemgr.services import Services
from statemgr.wiring import open_services
from tests.blob_ages import names, time_passes
from tests.cli.test_running_job import write_toml
from tests.commits import attempt, check_blobs, commit, referenced, totals, write
from tests.jobs import DUAL, SEGMENTS, SNAPSHOTS, contents, elsewhere, job_mapping, with_changes
from tests.kafka_jobs import client, make_topic, plain_producer, send, wait_until
from tests.kafka_jobs import job as kafka_job
from tests.servers import KafkaServer, S3Server

Run = Callable[..., Result]
State = dict[bytes, bytes]


def murmur2(key: bytes) -> int:
    """Kafka's murmur2 as in ``org.apache.kafka.common.utils.Utils``, without the sign bit; one key at a time."""
    m, mask, length = 0x5BD1E995, 0xFFFFFFFF, len(key)
    h = 0x9747B28C ^ length
    for at in range(0, length - length % 4, 4):
        k = int.from_bytes(key[at : at + 4], "little") * m & mask
        k = (k ^ k >> 24) * m & mask
        h = h * m & mask ^ k
    rest = key[length - length % 4 :]
    if rest:
        h = (h ^ int.from_bytes(rest, "little")) * m & mask
    h = (h ^ h >> 13) * m & mask
    return (h ^ h >> 15) & 0x7FFFFFFF


def keys_of(task: int, tasks: int, state: Mapping[bytes, bytes]) -> State:
    """Return the part of a state that belongs to one task."""
    return {key: value for key, value in state.items() if murmur2(key) % tasks == task}


def some_state(count: int = 500, salt: str = "") -> State:
    """Return keys of many lengths, including the empty key, and values of several sizes, including empty values."""
    state = {f"{salt}key-{'x' * (n % 9)}{n}".encode(): b"%d" % n * (n % 40) for n in range(count)}
    return {b"": b"the empty key", **state}


def fill(config: JobConfig, state: Mapping[bytes, bytes], offset: int = 7) -> None:
    """Commit a state to all tasks of a job, as a consumer loop does: each task has its own partition of the input."""
    for task in range(config.tasks):
        mine = keys_of(task, config.tasks, state)
        commit(config, {**mine, b"gone": None}, {f"orders-{task}": offset + task}, task_name(task))


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run `statemgr rescale … --json` with the job in `job.toml`, or `gc` or `doctor` if that comes first."""
    monkeypatch.chdir(tmp_path)

    def run_(config: JobConfig | None, *arguments: str) -> Result:
        if config is not None:
            write_toml(config, tmp_path / "job.toml")
        command = arguments if arguments[0] in ("gc", "doctor") else ("rescale", *arguments)
        return CliRunner().invoke(cli, [*command, "--json"], catch_exceptions=False)

    return run_


def written(tmp_path: Path) -> JobConfig:
    """Return the configuration that the command has written."""
    return JobConfig.from_file(tmp_path / "job.toml")


def job(kafka: KafkaServer, directory: Path, tasks: int, s3: S3Server | None = None, **more: object) -> JobConfig:
    """Create a job with two stores."""
    return JobConfig.from_mapping(
        job_mapping(kafka, directory, tasks=tasks, s3=s3, stores=("counts", "totals"), **more)  # type: ignore[arg-type]
    )


@contextmanager
def cut_off_when_built(config: JobConfig) -> Iterator[None]:
    """Make a rescale die inside the block when everything is built, before it fences the job."""

    def fence(phase: Phase, subject: str) -> None:
        if (phase, subject) == (Phase.FENCE, config.job_name):
            raise RuntimeError("cut off")

    with observed(fence), pytest.raises(RuntimeError, match="cut off"):
        yield


def check(config: JobConfig, state: Mapping[bytes, bytes], directory: Path) -> None:
    """Check that every backend has exactly this state on another machine, key by key, in the right tasks."""
    for factory in config.stores["totals"].backup_factories:
        for task in range(config.tasks):
            found, _ = contents(elsewhere(config, directory / factory, factory), task_name(task))
            expected = keys_of(task, config.tasks, state)
            assert found == dict.fromkeys(config.stores, expected), (factory, task)
    check_blobs(config)


@pytest.mark.parametrize(
    ("before", "after", "where"),
    [
        (3, 1, "s3"),
        *(
            pytest.param(*one, marks=pytest.mark.long)
            for one in [
                (4, 6, "file"),
                (4, 6, "s3"),
                (6, 4, "file"),
                (6, 4, "s3"),
                (1, 3, "file"),
                (1, 3, "s3"),
                (3, 1, "file"),
            ]
        ),
    ],
)
def test_every_key_moves_to_its_task(
    kafka: KafkaServer, s3: S3Server, tmp_path: Path, run: Run, before: int, after: int, where: str
) -> None:
    """With dual commits, the new tasks have all keys in both backends, and the input offsets. The job continues."""
    config = job(kafka, tmp_path, before, s3 if where == "s3" else None, kind=SEGMENTS)
    state = some_state()
    fill(config, some_state(200), 3)
    fill(config, state)
    chosen = ("--partitioner", "murmur2") if before == 1 else ()
    checks = before == 3
    looked = json.loads(run(config, "--tasks", str(after), *chosen, *([] if checks else ["--no-check"])).stdout)
    assert (looked["written"], looked["before"], looked["tasks"]) == (False, before, after)
    expected = ("murmur2", 2 * len(state)) if checks else (None, None)
    assert (looked["partitioner"], looked["keys"]) == expected
    assert written(tmp_path) == config, "a dry run changes nothing"
    done = json.loads(run(config, "--tasks", str(after), "--write", "--parallel", "2", *chosen).stdout)
    assert done["written"] is True
    assert done["partitioner"] == "murmur2"
    assert done["keys"] == 2 * len(state), "of both stores"
    assert done["input_offsets"] == {f"orders-{task}": 7 + task for task in range(before)}
    new = written(tmp_path)
    assert new.tasks == after
    assert new.to_mapping() == {**config.to_mapping(), **done["configuration"]}
    check(new, state, tmp_path / "other")
    with pytest.raises(LayoutMismatch, match=f"made with {after} tasks"), StateManager(config) as manager:
        manager.open_task("Partition 0")
    more = some_state(50, "more-")
    fill(new, more, 20)
    check(new, {**state, **more}, tmp_path / "later")


@pytest.mark.long
def test_undo_goes_back_and_continues(kafka: KafkaServer, tmp_path: Path, run: Run) -> None:
    """Undo makes the old layout current again, at its last checkpoint. Another undo does so for the new layout, but not
    one that was begun at the same time as the first one."""
    config = job(kafka, tmp_path, 4, kind=SEGMENTS)
    state, more = some_state(), some_state(20, "more-")
    fill(config, state)
    assert run(config, "--tasks", "6", "--write").exit_code == 0
    new = written(tmp_path)
    fill(new, more, 20)
    assert json.loads(run(None, "--undo").stdout)["written"] is False
    assert written(tmp_path) == new
    first: list[Result] = []

    def meanwhile(config: JobConfig) -> Services:
        if not first:
            first.append(run(None, "--undo", "--write"))
        return open_services(config)

    with (
        closing(open_services(new)) as services,
        closing(CheckpointTopic(new, services.clock, owned=True)) as log,
        pytest.raises(FencedError, match="somebody else has changed the number of tasks"),
    ):
        undo(services, log, meanwhile, no_progress)
    with closing(CheckpointTopic(new, SystemClock())) as log:
        assert log.read(generation=1) == {}, "its records were deleted"
    done = json.loads(first[0].stdout)
    assert (done["before"], done["tasks"]) == (6, 4)
    assert done["input_offsets"] == {f"orders-{task}": 7 + task for task in range(4)}
    old = written(tmp_path)
    assert old.tasks == 4
    assert old.stores["totals"].changelog_topic == config.stores["totals"].changelog_topic
    check(old, state, tmp_path / "back")
    later = some_state(30, "later-")
    fill(old, later, 30)
    check(old, {**state, **later}, tmp_path / "on")
    assert run(None, "--undo", "--write").exit_code == 0
    check(written(tmp_path), {**state, **more}, tmp_path / "forth")


def test_garbage_collection_collects_the_old_layout(
    kafka: KafkaServer, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The old layout's blobs stay for the grace period. Then two runs delete them, and --undo is no longer possible."""
    config = job(kafka, tmp_path, 2, kind=SNAPSHOTS, backup=("blob-store",))
    fill(config, some_state())
    assert run(config, "--tasks", "3", "--write").exit_code == 0
    new = written(tmp_path)
    before = names(new)
    young = json.loads(run(None, "gc", "--write").stdout)
    assert [(layout["tasks"], layout["collected"]) for layout in young["layouts"]] == [(2, False)]
    assert (young["orphans"]["blobs"], young["young"]["blobs"]) == (0, 0), "all are needed"
    with monkeypatch.context() as later:
        time_passes(later)
        would = json.loads(run(None, "gc").stdout)
        assert [(layout["collectable"], layout["collected"]) for layout in would["layouts"]] == [(True, False)]
        told = CliRunner().invoke(cli, ["gc"], catch_exceptions=False)
        assert "--write collects it, and `statemgr rescale --undo` cannot go back" in " ".join(told.stderr.split())
        collected = json.loads(run(None, "gc", "--write").stdout)
        assert [layout["collected"] for layout in collected["layouts"]] == [True]
        assert collected["deleted"]["blobs"] == 0
        assert names(new) == before
        swept = json.loads(run(None, "gc", "--write").stdout)
        assert swept["layouts"] == []
        assert swept["deleted"]["blobs"] > 0
    check(new, some_state(), tmp_path / "other")
    refused = run(None, "--undo", "--write")
    assert refused.exit_code == 4
    assert "no earlier layout" in refused.stderr


@pytest.mark.parametrize("is_index", [True, pytest.param(False, marks=pytest.mark.long)])
def test_a_replaced_layout_that_has_lost_a_blob_stops_no_garbage_collection(
    kafka: KafkaServer, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch, is_index: bool
) -> None:
    """Nothing repairs a layout that no owner opens. Other garbage is deleted, and later this layout, too."""
    config = job(kafka, tmp_path, 2, kind=SNAPSHOTS, backup=("blob-store",))
    state = {b"%d" % n: random.Random(n).randbytes(1000) for n in range(500)}
    fill(config, state)
    of_old = referenced(config, task_name(0)) | referenced(config, task_name(1))
    lost = next(name for name in sorted(of_old) if is_index_blob(name) == is_index)
    assert run(config, "--tasks", "3", "--write").exit_code == 0
    new = written(tmp_path)
    store = open_services(new).blobs()
    store.delete(lost)
    orphan = f"{config.job_name}/1/Partition_2/totals/killed/index"
    store.put(orphan, b"x", ttl_days=30)
    of_new = names(new) - of_old - {orphan}

    found = run(None, "gc", "--write")
    assert [layout["lost"] for layout in json.loads(found.stdout)["layouts"]] == [lost]
    assert (found.exit_code, json.loads(found.stdout)["missing"]) == (1, [])
    with monkeypatch.context() as later:
        time_passes(later)
        assert run(None, "gc", "--write").exit_code == 0
        assert names(new) == of_new | of_old - {lost}, "the records of the layout are deleted first"
        assert json.loads(run(None, "gc", "--write").stdout)["layouts"] == []
        assert names(new) == of_new
    check(new, state, tmp_path / "other")


@pytest.mark.parametrize(
    "backup",
    [
        pytest.param(DUAL, id="dual"),
        pytest.param(("kafka-changelog",), id="changelog", marks=pytest.mark.long),
        pytest.param(("blob-store",), id="blobs", marks=pytest.mark.long),
    ],
)
def test_a_running_owner_is_fenced(
    kafka: KafkaServer, tmp_path: Path, run: Run, backup: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The owner may commit until it is fenced. The command brings only the changes since the build into the new layout,
    once while the owner runs and once when it is fenced. The owner's next commit fails."""
    config = job(kafka, tmp_path, 2, kind=SEGMENTS, backup=backup)
    state = some_state()
    fill(config, state)
    mine = list(keys_of(0, 2, state))
    late = dict.fromkeys(keys_of(0, 2, {**some_state(60), **some_state(6000, "late-")}), b"late")
    last = dict.fromkeys([*list(late)[:20], *mine[150:160], *keys_of(0, 2, some_state(50, "last-"))], b"last")
    gone, gone_last = dict.fromkeys(mine[100:140]), dict.fromkeys([*mine[140:145], *list(late)[20:30], b"no key"])
    steps: list[Phase] = []
    monkeypatch.setattr(CatchUp, "_compared", None)  # the time must depend on the changes only
    with StateManager(config) as manager, manager.open_task("Partition 0") as task:

        def commits(phase: Phase, subject: str) -> None:
            steps.append(phase)
            reached = task.last_checkpoint
            offset = 7 if reached is None else reached.input_offsets["orders-0"]
            if (phase, subject, offset) == (Phase.STORED, "Partition 2/totals", 7):
                write(task, {**late, **gone}, list(config.stores))
                task.commit({"orders-0": 8})
            elif (phase, subject, offset) == (Phase.CATCH_UP, "totals", 8):
                write(task, {**last, **gone_last}, list(config.stores))
                task.commit({"orders-0": 9})

        with observed(commits):
            done = run(config, "--tasks", "3", "--write")
        assert done.exit_code == 0
        assert json.loads(done.stdout)["input_offsets"]["orders-0"] == 9
        task.store("totals").put(b"lost", b"1")
        with pytest.raises(FencedError):
            task.commit({"orders-0": 10})
    fenced = steps.index(Phase.FENCE)
    assert Phase.SPLIT not in steps[fenced:], "what was built before is used"
    assert steps[:fenced].count(Phase.CATCH_UP) == steps[fenced:].count(Phase.CATCH_UP) == 2, "for each store"
    new = written(tmp_path)
    state = {**state, **late, **last}
    check(new, {key: value for key, value in state.items() if key not in gone | gone_last}, tmp_path / "other")
    fill(new, some_state(20, "more-"), 20)


@pytest.mark.long
@pytest.mark.parametrize("backup", [pytest.param(DUAL, id="dual"), pytest.param(("blob-store",), id="blobs")])
def test_a_build_that_was_cut_off_continues(
    kafka: KafkaServer, tmp_path: Path, run: Run, backup: tuple[str, ...]
) -> None:
    """The next run uses what was built, even if the job has committed since, and brings in the changes."""
    config = job(kafka, tmp_path, 2, kind=SEGMENTS, backup=backup)
    state = some_state()
    fill(config, state)
    steps: list[Phase] = []

    with cut_off_when_built(config):
        run(config, "--tasks", "3", "--write")
    late = some_state(60, "late-")
    fill(config, late, 9)
    with observed(lambda phase, _: steps.append(phase)):
        assert run(config, "--tasks", "3", "--write").exit_code == 0
    assert Phase.CATCH_UP in steps
    assert {Phase.SPLIT, Phase.STORE}.isdisjoint(steps)
    check(written(tmp_path), {**state, **late}, tmp_path / "other")


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("kafka-changelog", "blob-store"),
        pytest.param("blob-store", "kafka-changelog", marks=pytest.mark.long),
    ],
)
def test_the_backend_changes_between_two_runs(
    kafka: KafkaServer, tmp_path: Path, run: Run, first: str, second: str
) -> None:
    """What a run that was cut off has stored in another backend is not published. It is gone from the new changelog,
    so that the job can come back to it without a permission."""
    config = job(kafka, tmp_path, 2, backup=(first,), restore=DUAL)
    state = some_state()
    fill(config, state)

    with cut_off_when_built(config):
        run(config, "--tasks", "3", "--write")
    other = with_changes(config, task__backup__factories=[second])
    assert run(other, "--tasks", "3", "--write").exit_code == 0
    with JobReader(written(tmp_path)) as reader:
        assert {*reader.records()["Partition 0"].current.state_checkpoint_markers} == {second}
    both = with_changes(written(tmp_path), task__backup__factories=[*DUAL])
    more = {b"more-%d" % n: b"1" for n in range(30)}
    fill(both, more, 30)
    check(both, {**state, **more}, tmp_path / "other")


def test_a_running_owner_that_makes_snapshots(kafka: KafkaServer, tmp_path: Path, run: Run) -> None:
    """No backend has the changes, so the command compares states, but it does so while the job still runs."""
    config = job(kafka, tmp_path, 2, kind=SNAPSHOTS, backup=("blob-store",))
    state = some_state()
    fill(config, state)
    late = dict.fromkeys(keys_of(0, 2, {**some_state(60), **some_state(300, "late-")}), b"late")
    steps: list[Phase] = []
    with StateManager(config) as manager, manager.open_task("Partition 0") as task:

        def commits(phase: Phase, subject: str) -> None:
            steps.append(phase)
            reached = task.last_checkpoint
            first = reached is not None and reached.input_offsets["orders-0"] == 7
            if (phase, subject) == (Phase.STORED, "Partition 2/totals") and first:
                write(task, late, list(config.stores))
                task.commit({"orders-0": 8})

        with observed(commits):
            assert run(config, "--tasks", "3", "--write").exit_code == 0
    assert Phase.CATCH_UP not in steps[steps.index(Phase.FENCE) :], "everything was there when it was fenced"
    check(written(tmp_path), {**state, **late}, tmp_path / "other")


@pytest.mark.parametrize("backup", [("kafka-changelog",), pytest.param(("blob-store",), marks=pytest.mark.long)])
def test_a_retained_checkpoint_of_one_backend(
    kafka: KafkaServer, tmp_path: Path, run: Run, backup: tuple[str, ...]
) -> None:
    """--checkpoint starts from an older checkpoint that all tasks retain. A store in memory is split as well."""
    config = JobConfig.from_mapping(
        job_mapping(kafka, tmp_path, tasks=2, backup=backup, stores__totals__type="memory", kind=SEGMENTS)
    )
    states = [some_state(300), some_state(400, "b-")]
    with StateManager(config) as manager:
        ids = [commit_all(config, manager, state, number) for number, state in enumerate(states)]
    done = json.loads(run(config, "--tasks", "5", "--checkpoint", ids[0], "--write").stdout)
    assert set(done["checkpoints"].values()) == {ids[0]}
    new = written(tmp_path)
    assert {factory: merged(totals(new, factory)) for factory in backup} == dict.fromkeys(backup, states[0])


def commit_all(config: JobConfig, manager: StateManager, state: State, number: int) -> str:
    """Commit a state to all tasks at once, as an engine does. Returns: the ID of the checkpoint."""
    epoch = manager.acquire()
    commits = [
        attempt(config, epoch, task_name(task), keys_of(task, config.tasks, state), number)
        for task in range(config.tasks)
    ]
    return str(next(iter(manager.publish(commits).values())).checkpoint_id)


def merged(states: Mapping[str, State]) -> State:
    """Return all keys of all tasks, and check that no two tasks have the same key."""
    found = {key: value for state in states.values() for key, value in state.items()}
    assert len(found) == sum(map(len, states.values()))
    return found


# --- refusals -----------------------------------------------------------------------------------------------------


def test_keys_that_no_partitioner_explains(kafka: KafkaServer, tmp_path: Path, run: Run) -> None:
    """The keys of a state are not those of the input: the command refuses, and nothing changes. It also refuses the
    state of a single task until the user names a partitioner."""
    config = job(kafka, tmp_path, 2)
    for task in range(2):
        commit(config, {b"%d" % number: b"x" for number in range(50)}, {f"orders-{task}": 1}, task_name(task))
    for arguments in ((), ("--write",)):
        refused = run(config, "--tasks", "3", *arguments)
        assert refused.exit_code == 2
        assert "no known partitioner put the keys" in refused.stderr
    assert run(config, "--tasks", "3", "--no-check").exit_code == 0
    assert contents(config, "Partition 1")[1] == {"orders-1": 1}
    alone = job(kafka, tmp_path / "alone", 1)
    commit(alone, {b"a": b"1"}, {"orders-0": 1})
    for arguments in ((), ("--write",)):
        asked = run(alone, "--tasks", "3", *arguments)
        assert asked.exit_code == 2
        assert "--partitioner" in asked.stderr
        assert "murmur2 and crc32 fit" in asked.stderr
    assert contents(alone)[1] == {"orders-0": 1}


@pytest.mark.long
def test_keys_that_quix_streams_wrote(kafka: KafkaServer, tmp_path: Path, run: Run) -> None:
    """Keys that Quix Streams wrote stay with the key of their message. A key that does not show it is refused, even in
    the right task."""
    config = job(kafka, tmp_path, 2, backup=("blob-store",))
    state = {b'order-%d|"%s"' % (number, name): b"1" for number in range(50) for name in (b"rows", b"sum")}

    def of_task(task: int, tasks: int) -> State:
        return {key: value for key, value in state.items() if murmur2(key.partition(b"|")[0]) % tasks == task}

    for task in range(2):
        commit(config, of_task(task, 2), {f"orders-{task}": 1}, task_name(task))
    unclear = b'a|b|"rows"'
    commit(config, {unclear: b"1"}, {"orders-0": 2}, task_name(murmur2(b"a") % 2))
    refused = run(config, "--tasks", "3", "--write")
    assert (refused.exit_code, "no known partitioner" in refused.stderr) == (2, True)
    commit(config, {unclear: None}, {"orders-0": 2}, task_name(murmur2(b"a") % 2))
    assert json.loads(run(config, "--tasks", "3", "--write").stdout)["partitioner"] == "quix-murmur2"
    for task in range(3):
        assert contents(written(tmp_path), task_name(task))[0] == dict.fromkeys(config.stores, of_task(task, 3))


@pytest.mark.long
def test_rows_that_were_written_for_the_old_tasks(kafka: KafkaServer, tmp_path: Path, run: Run) -> None:
    """Invariant 17, FAULT 51: the command refuses if unprocessed rows have keys that belong to another task now. Rows
    whose keys stay do not count, and neither does processed input."""
    topic, state = kafka.fresh_name("in"), some_state(100)
    make_topic(kafka_job(kafka), topic, 4)
    config = job(kafka, tmp_path, 2)
    rows = {key: murmur2(key) % 2 for key in state}
    produced = plain_producer(kafka_job(kafka))
    for key, partition in rows.items():
        produced.produce(topic, b"row", key, partition)
    moving = next(key for key in rows if murmur2(key) % 4 == 3)
    staying = next(key for key in rows if murmur2(key) % 4 == 1)
    produced.produce(topic, b"row", moving, 1)
    produced.produce(topic, b"row", staying, 1)
    assert produced.flush(30) == 0
    counts = [sum(partition == task for partition in rows.values()) for task in range(2)]
    for task in range(2):
        commit(config, keys_of(task, 2, state), {f"{topic}-{task}": counts[task]}, task_name(task))
    for arguments in ((), ("--write",)):
        refused = run(config, "--tasks", "4", *arguments)
        assert refused.exit_code == 2
        assert f"{topic}-1 has rows from offset {counts[1]} to {counts[1] + 2}" in refused.stderr
    commit(config, {}, {f"{topic}-1": counts[1] + 1}, "Partition 1")
    assert run(config, "--tasks", "4", "--write").exit_code == 0
    assert contents(written(tmp_path), "Partition 1")[1] == {f"{topic}-1": counts[1] + 1}
    assert contents(written(tmp_path), "Partition 3")[1] == {}


def test_rows_in_a_partition_without_an_offset(kafka: KafkaServer, tmp_path: Path, run: Run) -> None:
    """Invariant 17: rows count, too, in a partition that no task has read yet."""
    topic = kafka.fresh_name("in")
    make_topic(kafka_job(kafka), topic, 4)
    state = some_state(20)
    config = with_changes(job(kafka, tmp_path, 2), **{"task.inputs": [topic]})
    for task in range(2):
        commit(config, keys_of(task, 2, state), {}, task_name(task))
    moving = next(key for key in state if murmur2(key) % 4 == 3)
    produced = plain_producer(kafka_job(kafka))
    produced.produce(topic, b"row", moving, 1)
    assert produced.flush(30) == 0
    for arguments in ((), ("--write",)):
        refused = run(config, "--tasks", "4", *arguments)
        assert (refused.exit_code, f"{topic}-1 has rows from offset 0 to 1" in refused.stderr) == (2, True)
    commit(config, {}, {f"{topic}-1": 1}, "Partition 1")
    assert run(config, "--tasks", "4", "--write").exit_code == 0


def test_rows_in_a_topic_that_is_no_input_any_more(kafka: KafkaServer, tmp_path: Path, run: Run) -> None:
    """The checkpoints still have its offsets, but nobody will process its rows."""
    config, topics = job(kafka, tmp_path, 2), [kafka.fresh_name("left"), kafka.fresh_name("in")]
    for topic in topics:
        make_topic(config, topic, 2)
    for task in range(2):
        commit(config, keys_of(task, 2, some_state(20)), {f"{topic}-{task}": 0 for topic in topics}, task_name(task))
    send(config, topics[0], [(key, b"row") for key in some_state(20)])
    both = with_changes(config, **{"task.inputs": topics})
    assert f"{topics[0]}-0 has rows from offset 0" in run(both, "--tasks", "4").stderr
    for wrong in ([f"{topics[0]}x"], []):  # with these alone, the job may read any topic
        mistyped = with_changes(config, **{"task.inputs": wrong})
        assert f"{topics[0]}-0 has rows from offset 0" in run(mistyped, "--tasks", "4").stderr
    without = with_changes(config, **{"task.inputs": topics[1:]})
    done = run(without, "--tasks", "4", "--write")
    assert (done.exit_code, f"the rows that are left in {topics[0]} do not count" in done.stderr) == (0, True)


def test_a_task_that_never_had_input(kafka: KafkaServer, tmp_path: Path, run: Run) -> None:
    """It has no checkpoint. The command says how it gets one without a message, and then splits the job. No single ID
    names a checkpoint of all tasks: the hint names what this command can do."""
    config = job(kafka, tmp_path, 2)
    commit(config, keys_of(0, 2, some_state(20)), {"orders-0": 7})
    refused = run(config, "--tasks", "3")
    assert refused.exit_code == 4
    assert "commit the offsets at which they begin" in " ".join(refused.stderr.split())
    with StateManager(config) as manager, manager.open_task("Partition 1") as task:
        task.commit({"orders-1": 0})
        own = str(task.last_checkpoint.checkpoint_id)  # type: ignore[union-attr]
    refused = run(config, "--tasks", "3", "--checkpoint", own)
    assert refused.exit_code == 4
    assert "leave the checkpoint out" in " ".join(refused.stderr.split())
    assert "rollback" not in refused.stderr
    assert run(config, "--tasks", "3", "--write").exit_code == 0
    check(written(tmp_path), keys_of(0, 2, some_state(20)), tmp_path / "other")


@pytest.mark.long
def test_run_again_after_the_publish(kafka: KafkaServer, tmp_path: Path, run: Run) -> None:
    """A command died between the publish and the configuration, and the next one only writes the configuration. Until
    then, the job is refused, and the hint names the command; so does doctor's."""
    config = job(kafka, tmp_path, 2)
    fill(config, some_state(100))
    assert run(config, "--tasks", "3", "--write").exit_code == 0
    new = written(tmp_path)
    with StateManager(config) as manager, pytest.raises(LayoutMismatch) as refused:
        manager.open_task("Partition 0")
    assert "`statemgr rescale --tasks`" in refused.value.hint
    found = json.loads(run(config, "doctor").stdout)
    assert "`statemgr rescale --tasks 2`" in json.dumps(found)
    again = json.loads(run(config, "--tasks", "3", "--write").stdout)
    assert again["written"] is False
    assert written(tmp_path) == new
    check(new, some_state(100), tmp_path / "other")


def test_a_file_that_cannot_be_written_after_the_publish(kafka: KafkaServer, tmp_path: Path, run: Run) -> None:
    """Somebody has changed the configuration file meanwhile. The command says so, that the new layout is published, and
    which keys to change."""
    config = job(kafka, tmp_path, 2)
    fill(config, some_state(100))

    def edit(phase: Phase, subject: str) -> None:
        if phase is Phase.FENCE:
            with (tmp_path / "job.toml").open("a") as file:
                file.write("# mine\n")

    with observed(edit):
        result = run(config, "--tasks", "3", "--write")
    assert result.exit_code == 0
    assert "the configuration file was changed meanwhile" in result.stderr
    done = json.loads(result.stdout)
    assert done["written"]
    assert done["saved_as"] is None
    assert len(done["published"]) == 3
    assert written(tmp_path).tasks == 2
    new = JobConfig.from_mapping(config.to_mapping(), done["configuration"])
    check(new, some_state(100), tmp_path / "other")


def test_a_job_without_stores(kafka: KafkaServer, tmp_path: Path, run: Run) -> None:
    """It has nothing that could move."""
    config = job(kafka, tmp_path, 2, stores__totals__backup__factories=[], stores__counts__backup__factories=[])
    fill(config, some_state(10))
    refused = run(config, "--tasks", "3", "--write")
    assert refused.exit_code == 2
    assert "no store that is backed up" in refused.stderr


@pytest.mark.long
@pytest.mark.parametrize("undo", [False, True])
def test_back_to_changelogs_after_a_rescale_on_blobs(
    kafka: KafkaServer, tmp_path: Path, run: Run, *, undo: bool
) -> None:
    """The changelog of an earlier stage has the old number of partitions, so the way back uses a new changelog."""
    config = job(kafka, tmp_path, 2)
    fill(config, some_state(50))
    blobs = config.to_mapping() | {"task.backup.factories": ["blob-store"], "task.restore.factories": ["blob-store"]}
    config = JobConfig.from_mapping(blobs)
    fill(config, some_state(50), 10)
    assert run(config, "--tasks", "3", "--write").exit_code == 0
    state = some_state(50)
    if undo:
        assert run(None, "--undo", "--write").exit_code == 0
    both = written(tmp_path).to_mapping() | {"task.backup.factories": list(DUAL)}
    back = JobConfig.from_mapping(both)
    assert back.stores["totals"].changelog_topic != config.stores["totals"].changelog_topic
    fill(back, state, 20)
    check(back, state, tmp_path / "back")


@pytest.mark.long
def test_one_rescale_at_a_time(kafka: KafkaServer, tmp_path: Path, run: Run) -> None:
    """While one rescale runs, another on this machine is refused. A changelog with foreign records stops a rescale."""
    config = job(kafka, tmp_path, 2)
    fill(config, some_state(50))
    second: list[Result] = []

    first = threading.Lock()  # two stores are split at the same time

    def another(phase: Phase, subject: str) -> None:
        if phase is Phase.SPLIT and first.acquire(blocking=False):
            second.append(run(config, "--tasks", "3", "--write"))

    topic = f"{config.stores['totals'].changelog_topic}-g2"
    make_topic(config, topic, 3)
    send(config, topic, [(b"a", b"1")])
    foreign = run(config, "--tasks", "3", "--write")
    assert foreign.exit_code == 2
    assert "has records that no rescale on this machine wrote" in foreign.stderr
    admin = client(config)
    admin.delete_topics([topic])[topic].result(30)
    wait_until(lambda: topic not in admin.list_topics(timeout=60).topics)
    with observed(another):
        assert run(config, "--tasks", "3", "--write").exit_code == 0
    assert second[0].exit_code == 3, second[0].output + second[0].stderr  # it can run later
    check(written(tmp_path), some_state(50), tmp_path / "other")


@pytest.mark.parametrize("inline", [pytest.param(True, marks=pytest.mark.long), False])
def test_the_state_of_a_processor_moves_by_its_grouping_key(
    kafka: KafkaServer, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch, inline: bool
) -> None:
    """Keys of all forms move by Spark's hash. The attachment with the grouping columns stays, even if it is a blob."""
    recorded, config = "spark-hash(string,int)", job(kafka, tmp_path, 2, kind=SEGMENTS)
    columns = [{"name": "a", "type": "string"}, {"name": "b", "type": "integer"}]
    record = json.dumps({"format": 1, "store": "totals", "key": {"type": "struct", "fields": columns}}).encode()
    if not inline:
        monkeypatch.setattr(attempts, "inline_attachments_limit", lambda tasks: 0)
    state: State = {}
    for n in range(200):
        key = (b"\x01key-%d\x00\x01" % n if n % 7 else b"\x00") + b"\x01" + (n % 5).to_bytes(4, "big")
        places = [b"svalue\x00\x01" + key, b"slist\x00\x01" + key + bytes(8)]
        places += [b"x\x00\x00\x01\x00\x01\x00\x00s" + places[0], b"t" + bytes(7) + b"s" + key, b"k" + key + bytes(8)]
        state.update((place, b"%d" % n) for place in places)
    types = json.dumps([column["type"] for column in columns])
    hashes = candidates(recorded, "bytes", None, types)[recorded]

    def of_task(task: int, tasks: int) -> State:
        places = list(state)
        return {
            place: state[place] for place, number in zip(places, hashes(places), strict=True) if number % tasks == task
        }

    with StateManager(config, recorded) as manager:
        epoch = manager.acquire()
        made = []
        for task in range(2):
            with open_attempt(config, task_name(task), None, epoch) as opened:
                for place, value in of_task(task, 2).items():
                    opened.store("totals").put(place, value)
                for name, data in {"output-0": b"rows", **({} if task else {"processor-state": record})}.items():
                    opened.attach(name, data)
                made.append(opened.prepare({"orders-0": 7}))
        manager.publish(made)
    for tasks in (3, 1):
        done = json.loads(run(config, "--tasks", str(tasks), "--write", "--parallel", "2").stdout)
        assert (done["partitioner"], done["keys"]) == (recorded, len(state))
        config = written(tmp_path)
        for factory in DUAL:
            assert totals(config, factory) == {task_name(task): of_task(task, tasks) for task in range(tasks)}
        with JobReader(config) as reader:
            attached = {one.name: one for one in reader.records()["Partition 0"].current.attachments}
        assert (attached["processor-state"].blob is None) == inline
        assert read_attachment(config, attached["processor-state"]) == record
    assert json.loads(run(None, "--undo", "--write").stdout)["tasks"] == 3
