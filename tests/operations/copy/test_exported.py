"""``statemgr export`` writes the checkpoints of a job to a file, and ``statemgr copy --from`` makes a job from it."""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from statemgr import JobConfig, StateManager
from statemgr.cli.main import cli
from statemgr.engine import MicroBatch
from statemgr.errors import MissingState
from statemgr.operations.copy.exported import decode_export, encode_export
from statemgr.reader import JobReader
from tests.cli.test_running_job import write_toml
from tests.commits import TASK, attempt, blob_files, commit, current
from tests.histories import check_state, history, identity_of, job
from tests.jobs import DUAL, SEGMENTS, SNAPSHOTS, contents, with_changes
from tests.kafka_jobs import committed, make_topics
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
    assert [line["checkpoint_id"] for line in lines] == [identity_of(source, 1), identity_of(source, 0)]


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
    assert "only Kafka had the state of totals" in failed.stderr
    check_nothing_was_published(target)


def test_blobs_that_are_gone_since_the_export(kafka: KafkaServer, tmp_path: Path, run: Run) -> None:
    """The error names a blob, and nothing is published."""
    source = job(kafka, tmp_path, backup=("blob-store",), kind=SNAPSHOTS)
    commit(source, {b"%05d" % number: b"v" * 100 for number in range(3000)}, 1)
    assert run(source, "export", "export.jsonl").exit_code == 0
    for path in blob_files(tmp_path):
        (tmp_path / "blobs" / path).unlink()
    target = new_job(source, tmp_path)
    failed = run(source, "copy", "--write", to=target)
    assert failed.exit_code == 4, failed.output
    assert "blob=" in failed.stderr
    check_nothing_was_published(target)


@pytest.mark.parametrize(
    ("inputs", "status", "text"),
    [
        (("orders-1=5",), 2, "no checkpoint has an offset of orders-1"),
        (("orders-0=-5",), 2, "give TOPIC-PARTITION=OFFSET"),
        (("orders=5",), 2, "is not a source partition"),
        (("more-0=5",), 2, "there is no offset for more-1"),
    ],
)
def test_offsets_that_cannot_be(
    kafka: KafkaServer, tmp_path: Path, run: Run, inputs: tuple[str, ...], status: int, text: str
) -> None:
    """A topic has offsets of one cluster."""
    source = job(kafka, tmp_path, backup=("blob-store",))
    commit(source, {b"a": b"1"}, {"orders-0": 1, "more-0": 2, "more-1": 3})
    run(source, "export", "export.jsonl")
    target = new_job(source, tmp_path)
    options = [word for one in inputs for word in ("--input", one)]
    failed = run(source, "copy", *options, "--write", to=target)
    assert failed.exit_code == status, failed.output
    assert text in failed.stderr
    check_nothing_was_published(target)


def test_spark_has_its_offsets_in_the_batch(kafka: KafkaServer, tmp_path: Path, run: Run) -> None:
    """Other offsets would contradict the micro-batch."""
    source = job(kafka, tmp_path, backup=("blob-store",))
    with StateManager(source, "spark-hash(string)") as driver:
        prepared = attempt(source, driver.acquire(), TASK, {b"a": b"1"}, 0)
        driver.publish([prepared], MicroBatch("query", 0, "0", "1"))
    run(source, "export", "export.jsonl")
    failed = run(source, "copy", "--input", "orders-0=1", "--write", to=new_job(source, tmp_path))
    assert "the job runs on Spark" in failed.stderr


def test_damaged_exports(kafka: KafkaServer, tmp_path: Path, run: Run) -> None:
    """Each is refused with what is wrong."""
    source = job(kafka, tmp_path, backup=("blob-store",))
    history(source, 2)
    with JobReader(source) as reader:
        records = reader.records()
    name, number = source.job_name, source.job_id
    data = encode_export(records, 1)
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
        (b"", "it is no export of checkpoints"),
        (b"\xff\xfe", "it is no export of checkpoints"),
        (b"[]\n[]", "it is no export of checkpoints"),
        (data.replace(b'"statemgr_export": 1', b'"statemgr_export": 2'), "use the version of statemgr that wrote it"),
        (data.replace(b'"id": "1"', b'"id": "7"'), f"not of {name}/1"),
    ]:
        (tmp_path / "export.jsonl").write_bytes(damaged)
        failed = run(source, "copy", "--write", to=target)
        assert failed.exit_code in (2, 4)
        assert text in " ".join(failed.stderr.split())
    (tmp_path / "export.jsonl").unlink()
    assert "export.jsonl" in run(source, "copy", to=target).stderr
    check_nothing_was_published(target)
