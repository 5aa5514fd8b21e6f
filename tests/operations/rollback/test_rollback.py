"""``statemgr checkpoints rollback`` makes a retained checkpoint current again, under a new record, in every backend."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from statemgr import JobConfig, StateManager, __version__
from statemgr.cli.main import cli
from statemgr.engine import MicroBatch
from statemgr.errors import FencedError, UnavailableError
from statemgr.flows.owner import Owner
from statemgr.health.overview import JobMonitor
from statemgr.kafka import topics
from statemgr.kafka.metadata import TopicMetadata
from statemgr.local.machine import this_process
from statemgr.model.chain import SegmentChain
from statemgr.model.checkpoint import BlobMarker
from statemgr.model.codecs import decode_key
from statemgr.phases import Phase, observed
from statemgr.reader import JobReader
from tests.blob_ages import names
from tests.cli.test_running_job import write_toml
from tests.commits import TASK, attempt, blob_files, commit, current, published, referenced, totals
from tests.core.integration.test_compacted_past import forget, forgetful
from tests.histories import OTHER, check_state, history, identity_of, job
from tests.jobs import DUAL, SEGMENTS, SNAPSHOTS, contents, elsewhere, with_changes
from tests.kafka_jobs import EAGER, committed, make_topic, send, transactions
from tests.servers import KafkaServer, S3Server

Run = Callable[..., Result]
#: Phases in which a rollback fails, and those of `make test`: before it writes, before and after it publishes.
FAILURES = [
    Phase.FENCE, Phase.READ_TOPIC, Phase.PLAN, Phase.OPEN, Phase.FLUSH, Phase.PREPARED, Phase.BEGIN,
    Phase.SEND_CHANGELOG, Phase.SEND_CHECKPOINT, Phase.COMMIT_TRANSACTION, Phase.ACKNOWLEDGED,
]  # fmt: skip
QUICK = (Phase.OPEN, Phase.SEND_CHECKPOINT, Phase.ACKNOWLEDGED)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run `statemgr checkpoints rollback … --json` with the job in `job.toml`, or `tag` if that comes first."""
    monkeypatch.chdir(tmp_path)

    def run_(config: JobConfig, *arguments: str) -> Result:
        write_toml(config, tmp_path / "job.toml")
        command = arguments if arguments[0] == "tag" else ("rollback", *arguments)
        return CliRunner().invoke(cli, ["checkpoints", *command, "--json"], catch_exceptions=False)

    return run_


def chain_at(config: JobConfig, number: int) -> tuple[SegmentChain, BlobMarker]:
    """Return the chain of blobs of the ``number``-th newest checkpoint, and its marker."""
    record = current(config)
    assert record is not None
    marker = record.checkpoints[number].marker("blob-store", "totals")
    assert isinstance(marker, BlobMarker)
    with JobReader(config) as reader:
        return reader.chain(TASK, "totals", marker), marker


@pytest.mark.parametrize(
    ("backup", "kind"),
    [
        pytest.param(("kafka-changelog",), SNAPSHOTS, id="changelog", marks=pytest.mark.long),
        pytest.param(("blob-store",), SNAPSHOTS, id="snapshots"),
        pytest.param(("blob-store",), SEGMENTS, id="segments", marks=pytest.mark.long),
        pytest.param(DUAL, SEGMENTS, id="dual"),
    ],
)
def test_goes_back_in_every_backend_and_continues(
    kafka: KafkaServer, tmp_path: Path, run: Run, backup: tuple[str, ...], kind: str
) -> None:
    """The older state becomes current under a new record, with its offsets, and the job continues from it. Without
    --write, nothing changes."""
    config = job(kafka, tmp_path, backup=backup, kind=kind)
    states = history(config)
    target = identity_of(config, 2)
    before = committed(config, config.checkpoint_topic)
    looked = run(config, "--to", target)
    assert looked.exit_code == 0
    assert json.loads(looked.stdout)["written"] is False
    assert committed(config, config.checkpoint_topic) == before
    done = json.loads(run(config, "--to", target, "--write").stdout)
    assert done["input_offsets"] == {"orders-0": 1}
    assert [len(task["taken_back"]) for task in done["tasks"]] == [2]
    ways = {store["factory"]: store["way"] for store in done["tasks"][0]["stores"]}
    assert ways == {factory: "fill" if factory == "kafka-changelog" else "reference" for factory in backup}
    record = current(config)
    assert record is not None
    assert str(record.current.checkpoint_id) == done["tasks"][0]["published"]
    assert record.current.sequence == 5, "the topic is not rewound"
    assert len(record.checkpoints) == 5, "nothing is evicted"
    check_state(config, states[1])
    for number, factory in enumerate(backup):
        there = elsewhere(config, tmp_path / f"other-{number}", factory)
        assert contents(there) == ({"totals": states[1]}, {"orders-0": 1})
    commit(config, {b"after": b"1", b"same": None}, 9)
    expected = {k: v for k, v in states[1].items() if k != b"same"} | {b"after": b"1"}
    check_state(config, expected)
    again = elsewhere(config, tmp_path / "again", backup[-1])
    assert contents(again) == ({"totals": expected}, {"orders-0": 9})


def test_refuses_a_checkpoint_that_only_its_location_continues(kafka: KafkaServer, tmp_path: Path, run: Run) -> None:
    """A query that reads files cannot go back, because Spark's location of the last batch is ahead. Tags are possible,
    and so is a checkpoint from before the query read them."""
    config = job(kafka, tmp_path, task__checkpoint__retained=4)
    ends = ['{"orders":{"0":1}}', '{"orders":{"0":1},"source 1":"{\\"logOffset\\":0}"}', '{"source 1":"1"}']
    with StateManager(config, "spark-hash(string)") as driver:
        epoch = driver.acquire()
        checkpoints = epoch.checkpoints
        for batch, end in enumerate(ends):
            prepared = [attempt(config, epoch, TASK, {b"by": b"%d" % batch}, batch, {}, checkpoints)]
            checkpoints = driver.publish(prepared, MicroBatch("query", batch, "{}", end))
        before = committed(config, config.checkpoint_topic)
        for more in ((), ("--write",)):
            refused = run(config, "--to", identity_of(config, 1), *more)
            assert refused.exit_code == 2
            assert "only the location of its last batch can continue it" in " ".join(refused.stderr.split())
        assert committed(config, config.checkpoint_topic) == before
        driver.confirm()
    assert run(config, "tag", identity_of(config, 1), "--keep").exit_code == 0
    assert run(config, "--to", identity_of(config, 3), "--write").exit_code == 0
    check_state(config, {b"by": b"0"})


def test_copies_no_data_where_blobs_hold_the_state(kafka: KafkaServer, tmp_path: Path, run: Run) -> None:
    """The rollback moves between retained checkpoints, back and forth. It adds no blob, and each state is exact."""
    config = job(kafka, tmp_path, backup=("blob-store",), kind=SEGMENTS, task__checkpoint__retained=9)
    states = history(config, 5)
    record, before = current(config), blob_files(tmp_path)
    assert record is not None
    targets = [str(checkpoint.checkpoint_id) for checkpoint in record.checkpoints[::-1]]
    for number in (0, 4, 2, 3):
        assert run(config, "--to", targets[number], "--write").exit_code == 0
        assert blob_files(tmp_path) == before
        check_state(config, states[number])


def test_all_tasks_go_back_together(kafka: KafkaServer, tmp_path: Path, run: Run) -> None:
    """All tasks go back in one transaction and under one new checkpoint ID, with the micro-batch and the output of the
    older checkpoint."""
    config = job(kafka, tmp_path, tasks=2, task__checkpoint__retained=4)
    with StateManager(config, "spark-hash(string)") as driver:
        epoch = driver.acquire()
        checkpoints = epoch.checkpoints
        for batch in range(3):
            prepared = [
                attempt(config, epoch, task, {b"by": b"%d" % batch}, batch, {"output": b"%d" % batch}, checkpoints)
                for task in (TASK, OTHER)
            ]
            checkpoints = driver.publish(prepared, MicroBatch("query", batch, str(batch), str(batch + 1)))
        alone = run(config, "--to", identity_of(config, 1), "--task", "0")
        assert alone.exit_code == 2
        assert "for all tasks" in alone.stderr
        target, before = identity_of(config, 1), transactions(config, config.checkpoint_topic)
        for wrong in (("--to", target), ("--to", target, "--write"), ("tag", target, "--keep")):
            refused = run(with_changes(config, job__tasks=1), *wrong)  # one task of two would go back
            assert "set job.tasks = 2" in refused.stderr
        driver.confirm()
        done = run(config, "--to", target, "--write")
        assert done.exit_code == 0
        *earlier, rollback = transactions(config, config.checkpoint_topic)
        assert earlier == before
        assert len(before) == 3, "one for each batch"
        assert {TASK, OTHER} <= {decode_key(key).task for key, _ in rollback if key is not None}
        with pytest.raises(FencedError, match=r"another owner \(.*, a command that has ended, .*start the job again"):
            driver.confirm()
    with JobMonitor(config) as monitor:
        owners = {task.owner for task in monitor.overview().tasks}
    assert owners == {f"{this_process()}, a command that has ended (v{__version__})"}
    for task in (TASK, OTHER):
        check_state(config, {b"by": b"1"}, task)
        record = current(config, task)
        assert record is not None
        assert record.current.batch == MicroBatch("query", 1, "1", "2")
        assert (record.current.sequence, record.current.output_sequence) == (4, 2)
        assert [a.inline for a in record.current.attachments if a.name == "output"] == [b"1"]
    assert identity_of(config, 0, TASK) == identity_of(config, 0, OTHER)


@pytest.mark.long
def test_tasks_that_commit_one_by_one(kafka: KafkaServer, tmp_path: Path, run: Run) -> None:
    """Each task has its own IDs. One task goes back alone, or all go back to one checkpoint each; a refusal shows
    how."""
    config = job(kafka, tmp_path, tasks=2)
    for number in range(3):
        commit(config, {b"a": b"%d" % number}, {"orders-0": number}, TASK)
        commit(config, {b"b": b"%d" % number}, {"orders-1": number}, OTHER)
    first, second = identity_of(config, 1), identity_of(config, 2, OTHER)
    refused = run(config, "--to", first, "--write")
    assert refused.exit_code == 4
    assert f"--to {first} --to {second}" in refused.stderr
    assert run(config, "--to", first, "--task", "0", "--write").exit_code == 0
    check_state(config, {b"a": b"1"}, TASK)
    check_state(config, {b"b": b"2"}, OTHER)
    done = json.loads(run(config, "--to", first, "--to", second, "--write").stdout)
    assert done["input_offsets"] == {"orders-0": 1, "orders-1": 0}
    check_state(config, {b"a": b"1"}, TASK)
    check_state(config, {b"b": b"0"}, OTHER)
    together, own = identity_of(config, 0), identity_of(config, 1)
    several = run(config, "--to", together, "--to", own)
    assert several.exit_code == 2
    assert "--task" in several.stderr, "both tasks retain the one of the rollback: only --task can tell them apart"
    assert run(config, "--to", own, "--task", "0").exit_code == 0


def test_a_task_that_never_had_input_stays_as_it_is(kafka: KafkaServer, tmp_path: Path, run: Run) -> None:
    """One partition never had a message, so its task has no checkpoint. The other tasks go back together, and keep a
    checkpoint together; the task starts empty afterwards. If it lost its checkpoint, the command refuses, also without
    --write."""
    config = job(kafka, tmp_path, tasks=3)
    for number in range(2):
        commit(config, {b"a": b"%d" % number}, {"orders-0": number}, TASK)
        commit(config, {b"b": b"%d" % number}, {"orders-1": number}, OTHER)
    first, second = identity_of(config, 1), identity_of(config, 1, OTHER)
    incomplete = run(config, "--to", first)
    assert incomplete.exit_code == 4
    assert f"--to {first} --to {second}" in incomplete.stderr
    for more in ((), ("--write",)):
        done = json.loads(run(config, "--to", first, "--to", second, *more).stdout)
        assert done["input_offsets"] == {"orders-0": 0, "orders-1": 0}
    check_state(config, {b"a": b"0"}, TASK)
    check_state(config, {b"b": b"0"}, OTHER)
    assert json.loads(run(config, "--before", "2099-01-01").stdout)["input_offsets"] == done["input_offsets"]
    together = identity_of(config, 0)
    assert together == identity_of(config, 0, OTHER)
    kept = json.loads(run(config, "tag", together, "--keep").stdout)
    assert kept == [{"task": TASK, "kept": [together]}, {"task": OTHER, "kept": [together]}]
    commit(config, {b"c": b"1"}, {"orders-2": 1}, "Partition 2")
    check_state(config, {b"c": b"1"}, "Partition 2")
    lost = with_changes(config, task__checkpoint__topic=kafka.fresh_name("others"))
    commit(lost, {b"a": b"1"}, 1, allow_empty_start=True, overwrite_changelog=True)
    for more in ((), ("--write",)):
        refused = run(lost, "--to", identity_of(lost, 0), *more)
        assert refused.exit_code == 2
        assert "no checkpoint of the task" in refused.stderr


def test_a_running_owner_is_fenced(kafka: KafkaServer, tmp_path: Path, run: Run) -> None:
    """Protocol 2: the owner's next commit fails, and the state of the rollback stays."""
    config = job(kafka, tmp_path)
    states = history(config)
    with StateManager(config) as manager, manager.open_task(TASK) as task:
        assert run(config, "--to", identity_of(config, 1), "--write").exit_code == 0
        task.store("totals").put(b"late", b"1")
        with pytest.raises(FencedError):
            task.commit({"orders-0": 9})
    check_state(config, states[2])


def test_a_compacted_changelog_is_rebuilt_from_blobs(
    kafka: KafkaServer, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FAULT 53: a key was deleted since, and compaction removed its delete. The changelog alone cannot supply the older
    state, and the command refuses. With blobs it rebuilds the changelog: lost keys come back, and later keys are
    deleted."""
    monkeypatch.setattr(topics, "DELETE_RETENTION_MS", int(EAGER["delete.retention.ms"]))
    config = job(kafka, tmp_path, stores__totals__changelog__min__compaction__lag__ms=0, task__checkpoint__retained=99)
    forgetful(config)
    then = {b"a": b"1", b"gone": b"1"}
    commit(config, dict(then), 1)
    target = identity_of(config, 0)
    commit(config, {b"a": b"2", b"gone": None, b"late": b"x"}, 2)
    forget(config, b"gone")
    elsewhere_ = with_changes(config, state__dir=str(tmp_path / "elsewhere"))
    only_changelog = with_changes(elsewhere_, task__restore__factories=["kafka-changelog"])
    impossible = run(only_changelog, "--to", target, "--write")
    assert impossible.exit_code == 4
    assert "exact rewind is impossible" in impossible.stderr
    assert contents(elsewhere(config, tmp_path / "unchanged", "blob-store"))[0]["totals"][b"late"] == b"x"
    with_blobs = with_changes(elsewhere_, task__restore__factories=["blob-store", "kafka-changelog"])
    assert run(with_blobs, "--to", target, "--write").exit_code == 0
    check_state(config, then)


def test_an_impossible_rewind_is_refused_before_the_fence(kafka: KafkaServer, tmp_path: Path, run: Run) -> None:
    """Only a changelog has the state, and compaction may have changed it. The command refuses, also without --write,
    and the running owner commits on."""
    lag = {"stores__totals__changelog__min__compaction__lag__ms": 0}
    config = job(kafka, tmp_path, backup=("kafka-changelog",), **lag)
    history(config)
    target, there = identity_of(config, 1), with_changes(config, state__dir=str(tmp_path / "there"))
    with StateManager(config) as manager, manager.open_task(TASK) as task:
        for more in ((), ("--write",)):
            refused = run(there, "--to", target, *more)
            assert refused.exit_code == 4
            assert "exact rewind is impossible" in refused.stderr
        task.store("totals").put(b"on", b"1")
        task.commit({"orders-0": 9})


@pytest.mark.parametrize("kind", [pytest.param(SNAPSHOTS, marks=pytest.mark.long), SEGMENTS])
def test_a_backend_that_was_added_since_is_filled(kafka: KafkaServer, tmp_path: Path, run: Run, kind: str) -> None:
    """The checkpoint has no marker for blobs, so the command fills them with the complete state. The next commit
    continues from there, and the blobs alone give its state."""
    config = job(kafka, tmp_path, backup=("kafka-changelog",), kind=kind)
    states = history(config, 2)
    target = identity_of(config, 1)
    both = with_changes(config, task__backup__factories=list(DUAL), task__restore__factories=list(DUAL))
    commit(both, {b"late": b"1"}, 7)
    done = json.loads(run(both, "--to", target, "--write").stdout)
    assert {store["way"] for store in done["tasks"][0]["stores"]} == {"fill"}
    check_state(both, states[0])
    commit(both, {b"after": b"1", b"same": None}, 9)
    expected = {key: value for key, value in states[0].items() if key != b"same"} | {b"after": b"1"}
    check_state(both, expected)
    alone = elsewhere(both, tmp_path / "alone", "blob-store")
    assert contents(alone) == ({"totals": expected}, {"orders-0": 9})


def test_a_state_that_no_listed_factory_has_is_refused_at_the_look(
    kafka: KafkaServer, tmp_path: Path, run: Run
) -> None:
    """Only the changelog has the state, and the job lists only blobs. The command refuses even without --write, and
    says what to add."""
    config = job(kafka, tmp_path, backup=("kafka-changelog",))
    states = history(config, 2)
    target = identity_of(config, 1)
    both = with_changes(config, task__backup__factories=list(DUAL))
    commit(both, {b"late": b"1"}, 7)
    blobs = with_changes(config, task__backup__factories=["blob-store"], task__restore__factories=["blob-store"])
    for more in ((), ("--write",)):
        refused = run(blobs, "--to", target, *more)
        assert refused.exit_code == 4
        assert "factory that the checkpoint has: kafka-changelog" in refused.stderr
    listed = with_changes(blobs, task__restore__factories=list(DUAL))
    assert run(listed, "--to", target, "--write").exit_code == 0
    assert totals(listed, "blob-store") == {TASK: states[0]}


def test_a_damaged_checkpoint(kafka: KafkaServer, tmp_path: Path, run: Run) -> None:
    """If no backend has the complete state, the command refuses, and nothing changes. A machine that has a copy of the
    state fills the backend."""
    config = job(kafka, tmp_path, backup=("blob-store",), kind=SNAPSHOTS)
    state = history(config)[-1]
    with StateManager(config) as owner:
        state |= {b"kept": b"1"}
        with owner.open_task(TASK) as task:
            task.store("totals").put(b"kept", b"1")
            task.commit({"orders-0": 8})
        commit(config, {b"newest": b"1"}, 9)  # the local copy stays, since its owner still runs
        record = current(config)
        assert record is not None
        marker = record.checkpoints[1].marker("blob-store", "totals")
        assert marker is not None
        with JobReader(config) as reader:
            gone = reader.chain(TASK, "totals", marker).snapshot.index.blob_id
        (tmp_path / "blobs" / gone).unlink()
        target = identity_of(config, 1)
        for more in ((), ("--write",)):
            refused = run(elsewhere(config, tmp_path / "elsewhere", "blob-store"), "--to", target, *more)
            assert refused.exit_code == 4
        assert identity_of(config, 0) == str(record.current.checkpoint_id)
        assert run(config, "--to", target, "--write").exit_code == 0
    assert totals(config, "blob-store") == {TASK: state}


def test_stores_must_be_those_of_the_checkpoint(kafka: KafkaServer, tmp_path: Path, run: Run) -> None:
    """A store was added since. The rollback needs the configuration without it, and goes back across the change."""
    config = job(kafka, tmp_path)
    states = history(config, 2)
    target = identity_of(config, 0)
    wider = with_changes(config, **{"stores.more.value.serde": "bytes"})
    commit(wider, {b"k": b"v"}, 7, allow_new_stores=True)
    refused = run(wider, "--to", target, "--write")
    assert refused.exit_code == 2
    assert "configure the stores of that checkpoint" in refused.stderr
    assert run(config, "--to", target, "--write").exit_code == 0
    assert published(config, "blob-store")[TASK] == {"totals": states[1]}


def test_input_that_is_gone_is_reported(
    kafka: KafkaServer, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything is written, the command reports that the job could not continue from these offsets. If no broker
    leads the partition for now, it reports that, and the state comes back all the same."""
    config = job(kafka, tmp_path)
    history(config)
    name = kafka.fresh_name("orders")
    make_topic(config, name)
    send(config, name, [(b"k", b"v")])
    commit(config, {b"a": b"1"}, {f"{name}-0": 5})
    found = json.loads(run(config, "--to", identity_of(config, 0)).stdout)
    assert found["input_problems"] == [f"{name}-0 ends at offset 1 now, before 5"]
    bounds = TopicMetadata.bounds

    def without_a_leader(self: TopicMetadata, topic: str, *args: Any, **more: Any) -> tuple[int, int]:
        if topic == name:
            raise UnavailableError("the partition has no leader")
        return bounds(self, topic, *args, **more)

    monkeypatch.setattr(TopicMetadata, "bounds", without_a_leader)
    found = json.loads(run(config, "--to", identity_of(config, 0), "--write").stdout)
    assert found["input_problems"] == ["this could not be checked: the partition has no leader"]


@pytest.mark.long
def test_on_s3_with_chains_in_blobs(kafka: KafkaServer, s3: S3Server, tmp_path: Path, run: Run) -> None:
    """Long chains do not fit into the record. A rollback on S3 stores the chain again and nothing else. New changes do
    not mix with those taken back."""
    more = {"task__checkpoint__retained": 20, "task__commit__snapshot__interval": ["1000 commits"]}
    config = job(kafka, tmp_path, backup=("blob-store",), s3=s3, **more)
    chance = random.Random(3)
    state: dict[bytes, bytes] = {}
    states = []
    with StateManager(config) as manager, manager.open_task(TASK) as task:
        for number in range(120):
            items = {b"%d" % number: chance.randbytes(2100)}  # each segment needs a blob
            state = state | items
            task.store("totals").put_many(list(items.items()))
            task.commit({"orders-0": number})
            states.append(state)
    (target, old), before = chain_at(config, 19), names(config)
    assert run(config, "--to", identity_of(config, 19), "--write").exit_code == 0
    chain, marker = chain_at(config, 0)
    assert old.blob is not None
    assert marker.blob is not None
    assert names(config) - before == {marker.blob.blob_id}
    assert before <= names(config)
    assert (chain.snapshot, chain.segments) == (target.snapshot, target.segments)
    assert len(chain.segments) == 100
    check_state(config, states[100])
    commit(config, {b"100": b"branch"}, 101)
    check_state(config, states[100] | {b"100": b"branch"})


@pytest.mark.parametrize(
    "phase",
    [pytest.param(phase, id=str(phase), marks=() if phase in QUICK else pytest.mark.long) for phase in FAILURES],
)
def test_a_failure_leaves_the_old_or_the_new_checkpoint(
    kafka: KafkaServer, tmp_path: Path, run: Run, phase: Phase
) -> None:
    """Wherever the command fails, exactly one of the two states is current in both backends, and a second try works."""
    config = job(kafka, tmp_path, kind=SEGMENTS)
    states = history(config)
    target = identity_of(config, 2)

    def fail(announced: Phase, subject: str) -> None:
        if announced is phase:
            raise OSError(f"told to, {subject}")

    with observed(fail):
        assert run(config, "--to", target, "--write").exit_code != 0
    check_state(config, states[1 if phase is Phase.ACKNOWLEDGED else 3])
    assert run(config, "--to", target, "--write").exit_code == 0
    check_state(config, states[1])


@pytest.mark.parametrize("kind", [pytest.param(SNAPSHOTS, marks=pytest.mark.long), SEGMENTS])
def test_a_tagged_checkpoint_outlives_retention_and_gc(kafka: KafkaServer, tmp_path: Path, run: Run, kind: str) -> None:
    """Later commits keep the tag, clean-up and gc leave its blobs, and the job can go back to it. After its release,
    the next commit drops the checkpoint and deletes what only that one needed."""
    config = job(kafka, tmp_path, kind=kind, task__checkpoint__retained=2)
    states = history(config, 2)
    kept = identity_of(config, 1)
    assert run(config, "tag", kept).exit_code == 2
    assert json.loads(run(config, "tag", kept, "--keep").stdout) == [{"task": TASK, "kept": [kept]}]
    check_state(config, states[1])
    history(config, 5)
    record = current(config)
    assert record is not None
    assert len(record.checkpoints) == 3
    assert identity_of(config, 2) == kept
    collected = CliRunner().invoke(cli, ["gc", "--json", "--write"], catch_exceptions=False)
    assert json.loads(collected.stdout)["missing"] == []
    with (
        JobReader(elsewhere(config, tmp_path / "else", "blob-store")) as reader,
        reader.open_store(TASK, "totals", kept) as store,
    ):
        assert dict(store.scan(None, None)) == states[0]
    assert run(elsewhere(config, tmp_path / "other", "blob-store"), "--to", kept, "--write").exit_code == 0
    check_state(config, states[0])
    dropped = json.loads(run(config, "tag", kept, "--drop").stdout)
    assert dropped == [{"task": TASK, "kept": []}]
    for number in range(2):
        commit(config, {b"after": b"%d" % number}, 10 + number)
    record = current(config)
    assert record is not None
    assert len(record.checkpoints) == 2
    check_state(config, states[0] | {b"after": b"1"})
    assert blob_files(tmp_path, expiring=False) == referenced(config), "nothing else is left"
    assert run(config, "tag", kept, "--keep").exit_code == 4


def test_a_checkpoint_that_is_dropped_before_it_is_kept(
    kafka: KafkaServer, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job commits between the look at the topic and the fence. Nothing is kept, so that is no success."""
    config = job(kafka, tmp_path, task__checkpoint__retained=2)
    history(config, 2)
    oldest, fence = identity_of(config, 1), Owner.take.__func__  # type: ignore[attr-defined]

    def late(cls: type[Owner], *args: Any, **more: Any) -> Owner:
        monkeypatch.undo()
        commit(config, {b"meanwhile": b"1"}, 9)
        return fence(cls, *args, **more)  # type: ignore[no-any-return]

    write_toml(config, tmp_path / "job.toml")
    monkeypatch.setattr(Owner, "take", classmethod(late))
    arguments = ["checkpoints", "tag", oldest, "--keep", "--config", str(tmp_path / "job.toml")]
    refused = CliRunner().invoke(cli, arguments, catch_exceptions=False)
    assert refused.exit_code == 4
    assert "not retained any more" in refused.stderr


def test_a_tag_of_a_whole_job(kafka: KafkaServer, tmp_path: Path, run: Run) -> None:
    """All tasks keep the tagged checkpoint, and the driver's later publishes carry it on."""
    config = job(kafka, tmp_path, tasks=2, task__checkpoint__retained=1)

    def publish(batches: range) -> None:
        with StateManager(config) as driver:
            epoch = driver.acquire()
            checkpoints = epoch.checkpoints
            for batch in batches:
                items: dict[bytes, bytes | None] = {b"by": b"%d" % batch}
                prepared = [attempt(config, epoch, t, items, batch, None, checkpoints) for t in (TASK, OTHER)]
                checkpoints = driver.publish(prepared)
                epoch = epoch.after_publish()

    publish(range(1))
    kept = identity_of(config, 0)
    assert len(json.loads(run(config, "tag", kept, "--keep").stdout)) == 2
    publish(range(1, 4))
    for task in (TASK, OTHER):
        check_state(config, {b"by": b"3"}, task)
        assert identity_of(config, 1, task) == kept
    assert run(config, "--to", kept, "--write").exit_code == 0
    for task in (TASK, OTHER):
        check_state(config, {b"by": b"0"}, task)
