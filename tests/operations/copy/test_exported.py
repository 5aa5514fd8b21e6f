"""``statemgr export`` writes the checkpoints of a job to a file, and ``statemgr copy --from`` makes a job from it."""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from statemgr import JobConfig, StateManager
from statemgr.cli.main import cli
from statemgr.engine import MicroBatch
from statemgr.errors import MissingState
from statemgr.ids import task_name
from statemgr.model.checkpoint import Checkpoint
from statemgr.operations.copy.exported import decode_export, export
from statemgr.reader import JobReader
from statemgr.wiring import open_services
from tests.cli.test_running_job import write_toml
from tests.commits import TASK, attempt, blob_files, commit, current
from tests.histories import OTHER, check_state, history, identity_of, job
from tests.jobs import DUAL, SEGMENTS, SNAPSHOTS, contents, with_changes
from tests.kafka_jobs import committed, make_topic, make_topics, send
from tests.operations.copy.test_copy import new_job
from tests.servers import KafkaServer

Run = Callable[..., Result]
#: Nobody listens there.
NOWHERE = "127.0.0.1:1"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run a command of a job; for `copy`, from a job whose Kafka cluster is gone."""
    monkeypatch.chdir(tmp_path)

    def run_(config: JobConfig, command: str, *arguments: str, to: JobConfig | None = None) -> Result:
        if to is not None:
            write_toml(to, tmp_path / "new.toml")
            config = with_changes(config, kafka__bootstrap__servers=NOWHERE)
            arguments = ("--from", "export.jsonl", "--to", "new.toml", *arguments)
        write_toml(config, tmp_path / "job.toml")
        return CliRunner().invoke(cli, [command, *arguments, "--json"])

    return run_


def check_nothing_was_published(target: JobConfig) -> None:
    """Check that the job has no checkpoint, and perhaps no topic."""
    with suppress(MissingState), JobReader(target) as reader:
        assert reader.records() == {}


@pytest.mark.parametrize("kind", [SNAPSHOTS, SEGMENTS])
@pytest.mark.parametrize("backup", [("blob-store",), DUAL], ids=["blobs", "dual"])
def test_a_job_goes_on_when_its_cluster_is_lost(
    kafka: KafkaServer, tmp_path: Path, run: Run, backup: tuple[str, ...], kind: str
) -> None:
    """The file and the blobs are enough. The new job has the exact state, and begins its input where it is told to, in
    a topic that has another ID than the old one. An older checkpoint of the file will do, too."""
    source = job(kafka, tmp_path, backup=backup, kind=kind)
    states = history(source)
    before = committed(source, source.checkpoint_topic)
    done = run(source, "export", "export.jsonl")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout) == {"file": "export.jsonl", "tasks": 1, "checkpoints": 4}
    assert committed(source, source.checkpoint_topic) == before
    assert (tmp_path / "export.jsonl").stat().st_mode & 0o777 == 0o600

    target = new_job(source, tmp_path, task__backup__factories=list(DUAL))
    looked = run(source, "copy", to=target)
    assert looked.exit_code == 0, looked.output
    assert json.loads(looked.stdout)["input_offsets"] == {"orders-0": 3}
    copied = run(source, "copy", "--input", "orders-0=70", "--write", to=target)
    assert copied.exit_code == 0, copied.output
    assert json.loads(copied.stdout)["input_offsets"] == {"orders-0": 70}
    record = current(target)
    assert record is not None
    assert record.current.input_topic_ids == {}
    assert contents(target) == ({"totals": states[3]}, {"orders-0": 70})
    check_state(target, states[3])

    older = with_changes(new_job(source, tmp_path), job__id="older", state__dir=str(tmp_path / "older"))
    assert run(source, "copy", "--checkpoint", identity_of(source, 2), "--write", to=older).exit_code == 0
    assert contents(older) == ({"totals": states[1]}, {"orders-0": 1})


def test_an_export_goes_to_standard_output(kafka: KafkaServer, tmp_path: Path, run: Run) -> None:
    """For a pipe to another place. Nothing else is written there."""
    source = job(kafka, tmp_path, backup=("blob-store",))
    history(source, 2)
    done = run(source, "export", "-")
    header, *lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert (header["job"], header["records"], len(lines)) == (source.job_name, 2, 2)


def test_what_only_kafka_has_is_named(kafka: KafkaServer, tmp_path: Path, run: Run) -> None:
    """The export of a job without blobs warns, and a copy from it fails and writes nothing."""
    source = job(kafka, tmp_path, backup=("kafka-changelog",))
    make_topics(source)
    empty = run(source, "export", "export.jsonl")
    assert empty.exit_code != 0
    assert "no checkpoint to export" in empty.stderr
    assert not (tmp_path / "export.jsonl").exists()
    history(source)
    done = run(source, "export", "export.jsonl")
    assert "the state of totals is only in a changelog" in done.stderr
    target = new_job(source, tmp_path)
    failed = run(source, "copy", "--write", to=target)
    assert failed.exit_code == 4, failed.output
    assert "lacks the state of totals" in failed.stderr
    check_nothing_was_published(target)


def test_blobs_that_are_gone_since_the_export(kafka: KafkaServer, tmp_path: Path, run: Run) -> None:
    """If no checkpoint is whole, the copy is refused, also without --write."""
    source = job(kafka, tmp_path, backup=("blob-store",), kind=SNAPSHOTS)
    commit(source, {b"%05d" % number: b"v" * 100 for number in range(3000)}, 1)
    assert run(source, "export", "export.jsonl").exit_code == 0
    for path in blob_files(tmp_path):
        (tmp_path / "blobs" / path).unlink()
    target = new_job(source, tmp_path)
    for arguments in ((), ("--write",)):
        failed = run(source, "copy", *arguments, to=target)
        assert failed.exit_code == 4, failed.output
        assert "no checkpoint of the export has all of its blobs" in failed.stderr
    check_nothing_was_published(target)


@pytest.mark.parametrize(
    ("inputs", "status", "text"),
    [
        (("orders-1=5",), 2, "no checkpoint has an offset of orders-1"),
        (("src.orders-0=5",), 2, "add it to task.inputs of the new job"),
        (("orders-0=-5",), 2, "give TOPIC-PARTITION=OFFSET"),
        (("orders=5",), 2, "is not a source partition"),
        (("more-0=5",), 2, "there is no offset for more-1"),
        (("orders-0=5", "orders-0=6"), 2, "give one offset for each partition"),
        (("orders-0=5",), 2, "orders-0 ends at offset 2 now, before 5"),
    ],
)
def test_offsets_that_cannot_be(
    kafka: KafkaServer, tmp_path: Path, run: Run, inputs: tuple[str, ...], status: int, text: str
) -> None:
    """A topic has offsets of one cluster."""
    source = job(kafka, tmp_path, backup=("blob-store",))
    topic = kafka.fresh_name("orders")
    inputs = tuple(text.replace("orders", topic, 1) for text in inputs)
    commit(source, {b"a": b"1"}, {f"{topic}-0": 1, "more-0": 2, "more-1": 3})
    make_topic(source, topic)
    send(source, topic, [(b"a", b"1"), (b"b", b"2")])
    run(source, "export", "export.jsonl")
    target = new_job(source, tmp_path)
    options = [word for one in inputs for word in ("--input", one)]
    failed = run(source, "copy", *options, "--write", to=target)
    assert failed.exit_code == status, failed.output
    assert text.replace("orders", topic) in failed.stderr
    check_nothing_was_published(target)


def test_the_topics_have_other_names_in_the_new_cluster(kafka: KafkaServer, tmp_path: Path, run: Run) -> None:
    """As MirrorMaker 2 names them. Each task begins at the offset of its partition, and what the new job does not read
    is left out. A partition without an offset would begin at its first one, so all are needed."""
    source = job(kafka, tmp_path, backup=("blob-store",), tasks=2)
    for number in range(2):
        offsets = {f"orders-{number}": 7, f"rates-{number}": 8, f"old-{number}": 9}
        commit(source, {b"a": b"1"}, offsets, task_name(number))
    run(source, "export", "export.jsonl")
    target = new_job(source, tmp_path, task__inputs=["src.orders", "rates"])
    failed = run(source, "copy", "--input", "src.orders-0=3", to=target)
    assert failed.exit_code == 2
    assert "there is no offset for src.orders-1" in failed.stderr
    done = run(source, "copy", "--input", "src.orders-0=3", "--input", "src.orders-1=4", "--write", to=target)
    assert done.exit_code == 0, done.output
    with JobReader(target) as reader:
        assert [record.current.input_offsets for record in reader.records().values()] == [
            {"src.orders-0": 3, "rates-0": 8},
            {"src.orders-1": 4, "rates-1": 8},
        ]


def test_a_task_without_a_checkpoint(kafka: KafkaServer, tmp_path: Path, run: Run) -> None:
    """It never had input. Its partition cannot have an offset, and the hint does not ask for what is there already."""
    source = job(kafka, tmp_path, backup=("blob-store",), tasks=3)
    for number in range(2):
        commit(source, {b"a": b"1"}, {f"orders-{number}": 7}, task_name(number))
    run(source, "export", "export.jsonl")
    for topic in ("orders", "src.orders"):
        target = new_job(source, tmp_path, task__inputs=["src.orders"])
        options = [word for number in range(3) for word in ("--input", f"{topic}-{number}=0")]
        failed = run(source, "copy", *options, to=target)
        assert f"no checkpoint has an offset of {topic}-2" in failed.stderr
        assert "leave it out" in failed.stderr
        assert run(source, "copy", *options[:-2], to=target).exit_code == 0


def test_a_task_that_has_no_offset_of_a_topic(kafka: KafkaServer, tmp_path: Path, run: Run) -> None:
    """The topic has its name in both clusters: an offset may be given and need not, and other topics keep theirs."""
    source = job(kafka, tmp_path, backup=("blob-store",), tasks=2)
    commit(source, {b"a": b"1"}, {"orders-0": 7, "rates-0": 8})
    commit(source, {b"a": b"1"}, {"rates-1": 9}, task_name(1))
    run(source, "export", "export.jsonl")
    target = new_job(source, tmp_path, task__inputs=["orders"])
    for more in ({}, {"orders-1": 4}):
        options = [word for of, offset in {"orders-0": 3, **more}.items() for word in ("--input", f"{of}={offset}")]
        looked = run(source, "copy", *options, to=target)
        assert json.loads(looked.stdout)["input_offsets"] == {"orders-0": 3, "rates-0": 8, "rates-1": 9, **more}


def test_a_query_has_gone_on_since_the_export(kafka: KafkaServer, tmp_path: Path, run: Run) -> None:
    """Its outputs have sequence numbers beyond those of the export, and skip what has a lower one."""
    source = job(kafka, tmp_path, backup=("blob-store",))

    def published(config: JobConfig, number: int) -> int:
        with StateManager(config, "spark-hash(string)") as driver:
            rows = {"output-0": b"rows"}
            prepared = attempt(config, driver.acquire(), TASK, {b"a": b"1"}, number, attachments=rows)
            (made,) = driver.publish([prepared], MicroBatch("query", number, "{}", "{}")).values()
            return made.output_sequence

    published(source, 0)
    run(source, "export", "export.jsonl")
    delivered = [published(source, number) for number in (1, 2, 3)]
    target = new_job(source, tmp_path)
    assert run(source, "copy", "--write", to=target).exit_code == 0
    assert published(target, 1) > max(delivered)


def test_spark_has_its_offsets_in_the_batch(kafka: KafkaServer, tmp_path: Path, run: Run) -> None:
    """Other offsets would contradict the micro-batch."""
    source = job(kafka, tmp_path, backup=("blob-store",))
    with StateManager(source, "spark-hash(string)") as driver:
        prepared = attempt(source, driver.acquire(), TASK, {b"a": b"1"}, 0)
        driver.publish([prepared], MicroBatch("query", 0, "0", "1"))
    run(source, "export", "export.jsonl")
    failed = run(source, "copy", "--input", "src.orders-0=1", "--write", to=new_job(source, tmp_path))
    assert "the job runs on Spark" in failed.stderr


def test_the_job_went_on_for_a_while_after_the_export(kafka: KafkaServer, tmp_path: Path, run: Run) -> None:
    """The newest checkpoints of the file have lost their blobs by then. The copy takes the newest one that is whole,
    and does not take a damaged one that somebody names."""
    retained = {"task__checkpoint__retained": 3, "task__commit__snapshot__interval": ["1 commit"]}
    source = job(kafka, tmp_path, backup=("blob-store",), kind=SNAPSHOTS, **retained)
    states, ids = [], []
    for number in range(3):
        states.append({b"%05d" % key: b"%d" % number * 100 for key in range(3000)})
        commit(source, dict(states[-1]), number)
        ids.append(identity_of(source, 0))
    assert run(source, "export", "export.jsonl").exit_code == 0
    tag = CliRunner().invoke(cli, ["checkpoints", "tag", ids[1], "--keep"])
    assert tag.exit_code == 0, tag.output
    for number in range(3, 7):
        commit(source, {b"%05d" % key: b"%d" % number * 100 for key in range(3000)}, number)
    target = new_job(source, tmp_path)
    refused = run(source, "copy", "--checkpoint", ids[2], to=target)
    assert refused.exit_code == 4, refused.output
    assert f"checkpoint {ids[2]} lacks the state of totals" in refused.stderr
    looked = run(source, "copy", to=target)
    assert json.loads(looked.stdout)["tasks"][0]["checkpoint_id"] == ids[1]
    assert run(source, "copy", "--write", to=target).exit_code == 0
    assert contents(target) == ({"totals": states[1]}, {"orders-0": 1})


def test_all_tasks_of_a_spark_job_take_the_same_batch(kafka: KafkaServer, tmp_path: Path, run: Run) -> None:
    """Their records share what they have in common. If one task has lost a blob, all go to the batch before."""
    source = job(kafka, tmp_path, tasks=2, backup=("blob-store",), kind=SNAPSHOTS)
    rows = {b"%05d" % key: b"v" * 100 for key in range(3000)}
    with StateManager(source, "spark-hash(string)") as driver:
        for number in range(2):
            epoch = driver.acquire()
            items = {key: b"%d" % number + value for key, value in rows.items()}
            prepared = [attempt(source, epoch, task, items, number) for task in (TASK, OTHER)]
            driver.publish(prepared, MicroBatch("query", number, str(number), str(number + 1)))
    assert run(source, "export", "export.jsonl").exit_code == 0
    lines = (tmp_path / "export.jsonl").read_bytes()
    assert json.loads(lines.splitlines()[0])["records"] == 6, "a job record and two of tasks for each batch"
    newest = current(source, OTHER)
    assert newest is not None
    older = set(needed(source, newest.checkpoints[1]))
    lost = next(blob for blob in needed(source, newest.current) if blob not in older)
    (tmp_path / "blobs" / lost).unlink()
    looked = json.loads(run(source, "copy", to=new_job(source, tmp_path)).stdout)
    assert {one["checkpoint_id"] for one in looked["tasks"]} == {str(newest.checkpoints[1].checkpoint_id)}


def test_tasks_that_share_their_input_take_one_publish(kafka: KafkaServer, tmp_path: Path, run: Run) -> None:
    """An engine publishes without micro-batches. One task has changed nothing since, and keeps its blobs."""
    source = job(kafka, tmp_path, tasks=2, backup=("blob-store",), kind=SNAPSHOTS)
    with StateManager(source, "spark-hash(string)") as driver:
        for number in range(2):
            epoch = driver.acquire()
            items = {b"%05d" % key: b"%d" % number * 100 for key in range(3000)}
            changed = [(TASK, {b"a": b"1"} if number == 0 else {}), (OTHER, items)]
            driver.publish(
                [attempt(source, epoch, task, some, number, {}, epoch.checkpoints) for task, some in changed]
            )
    assert run(source, "export", "export.jsonl").exit_code == 0
    newest = current(source, OTHER)
    assert newest is not None
    older = set(needed(source, newest.checkpoints[1]))
    lost = next(blob for blob in needed(source, newest.current) if blob not in older)
    (tmp_path / "blobs" / lost).unlink()
    looked = json.loads(run(source, "copy", to=new_job(source, tmp_path)).stdout)
    assert {one["checkpoint_id"] for one in looked["tasks"]} == {str(newest.checkpoints[1].checkpoint_id)}


def test_a_task_that_went_back_alone_stays_there(kafka: KafkaServer, tmp_path: Path, run: Run) -> None:
    """On Spark, with the input partitions as tasks, one task has a newer checkpoint, of the same micro-batch."""
    source = job(kafka, tmp_path, tasks=2, backup=("blob-store",))
    with StateManager(source, "kafka-partition") as driver:
        for number in range(2):
            epoch = driver.acquire()
            prepared = [
                attempt(source, epoch, task, {b"a": b"%d" % number}, number, {}, epoch.checkpoints)
                for task in (TASK, OTHER)
            ]
            inputs = [{f"orders-{partition}": number} for partition in range(2)]
            commits = [replace(one, input_offsets=read) for one, read in zip(prepared, inputs, strict=True)]
            driver.publish(commits, MicroBatch("query", number, "{}", "{}"))
    command = ["checkpoints", "rollback", "--task", "1", "--to", identity_of(source, 1, OTHER), "--write"]
    assert run(source, "export", "before.jsonl").exit_code == 0  # writes the configuration
    back = CliRunner().invoke(cli, command)
    assert back.exit_code == 0, back.output
    assert run(source, "export", "export.jsonl").exit_code == 0
    looked = json.loads(run(source, "copy", to=new_job(source, tmp_path)).stdout)
    assert [one["checkpoint_id"] for one in looked["tasks"]] == [identity_of(source, 0), identity_of(source, 0, OTHER)]


def needed(config: JobConfig, checkpoint: Checkpoint) -> list[str]:
    """Return the blobs that the second task needs at a checkpoint."""
    marker = checkpoint.marker("blob-store", "totals")
    assert marker is not None
    with closing(open_services(config)) as services:
        manager = services.backup_manager("blob-store")
        return list(manager.referenced_blobs(services.identity(OTHER, "totals"), marker) or ())


@pytest.mark.parametrize("kind", ["directory", "link", "missing parent"])
def test_places_that_are_no_files(kafka: KafkaServer, tmp_path: Path, run: Run, kind: str) -> None:
    """Nothing there changes, and nothing else is left."""
    source = job(kafka, tmp_path, backup=("blob-store",))
    history(source, 1)
    place = tmp_path / "place"
    if kind == "directory":
        place.mkdir()
    elif kind == "link":
        place.symlink_to(tmp_path / "other")
    else:
        place = place / "more"
    write_toml(source, tmp_path / "job.toml")
    before = sorted(tmp_path.iterdir())
    failed = run(source, "export", str(place))
    assert failed.exit_code == 2
    assert "hint:" in failed.stderr
    assert sorted(tmp_path.iterdir()) == before


def test_only_an_export_of_the_job_is_replaced(kafka: KafkaServer, tmp_path: Path, run: Run) -> None:
    """A mistyped path must not cost the configuration, or the export of another job."""
    source = job(kafka, tmp_path, backup=("blob-store",))
    history(source, 1)
    (tmp_path / "empty").touch()
    assert run(source, "export", "empty").exit_code == 0  # such as one of mktemp
    assert run(source, "export", "empty").exit_code == 0
    exported = (tmp_path / "empty").read_bytes()
    other = exported.replace(source.job_name.encode(), b"other")
    (tmp_path / "other.jsonl").write_bytes(other)
    for name in ("job.toml", "other.jsonl"):
        failed = run(source, "export", name)
        assert failed.exit_code == 2, failed.output
        assert f"{name} has something else than an export of this job" in failed.stderr
    assert (tmp_path / "other.jsonl").read_bytes() == other
    assert run(source, "export", "empty").exit_code == 0  # with the configuration that is still there


def test_damaged_exports(kafka: KafkaServer, tmp_path: Path, run: Run) -> None:
    """Each is refused with what is wrong."""
    source = job(kafka, tmp_path, backup=("blob-store",))
    history(source, 2)
    with JobReader(source) as reader:
        records = reader.records()
    name, number = source.job_name, source.job_id
    data = b"".join(export(source, records, 1))
    found = decode_export(data, name, number)
    assert [c.checkpoint_id for c in found["Partition 0"].checkpoints] == [
        c.checkpoint_id for c in records["Partition 0"].checkpoints
    ]
    header, first, second = data.splitlines()
    line = json.loads(second)
    value = bytearray(b64decode(line["value"]))
    value[7] ^= 1
    flipped = json.dumps({**line, "value": b64encode(bytes(value)).decode()}).encode()
    target = new_job(source, tmp_path)
    for damaged, text in [
        (b"\n".join([header, first]), "it has 1 of 2 records"),
        (b"\n".join([header, first, second[:-9]]), "it is no export of checkpoints"),
        (b"\n".join([header, first, flipped]), "its checksum does not match"),
        (header.replace(b'"records": 2', b'"records": 0'), "the job has no checkpoint to copy"),
        (b"", "it is no export of checkpoints"),
        (b"\xff\xfe", "it is no export of checkpoints"),
        (b"[]\n[]", "it is no export of checkpoints"),
        (data.replace(b'"statemgr_export": 1', b'"statemgr_export": 2'), "use the release that wrote it"),
        (data.replace(b'"id": "1"', b'"id": "7"'), f"not of {name}/1"),
    ]:
        (tmp_path / "export.jsonl").write_bytes(damaged)
        failed = run(source, "copy", "--write", to=target)
        assert failed.exit_code in (2, 4)
        assert text in " ".join(failed.stderr.split())
    (tmp_path / "export.jsonl").unlink()
    assert "export.jsonl" in run(source, "copy", to=target).stderr
    check_nothing_was_published(target)
