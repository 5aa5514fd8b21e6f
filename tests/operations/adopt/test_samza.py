"""``statemgr adopt --from samza``: adopts jobs that the real Apache Samza ran."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from statemgr import JobConfig, StateManager
from statemgr.blobs.file import FileBlobStore
from statemgr.cli.main import cli
from statemgr.errors import UnavailableError
from statemgr.local.machine import SystemClock
from statemgr.model.content import of_pairs
from statemgr.operations.adopt.old_topics import OldTopics
from tests.commits import check_blobs
from tests.old_jobs import ends, make, opened, state, write
from tests.peers.samza import BLOBS, SamzaJob
from tests.servers import KafkaServer

pytestmark = pytest.mark.long
#: The job dies before its first commit that has rows.
CRASH = {"crash": "yes", "task__commit__ms": "3600000"}
Make = Callable[..., SamzaJob]


@pytest.fixture
def old(kafka: KafkaServer, tmp_path: Path) -> Make:
    """Makes Samza jobs."""
    return lambda partitions=2, **more: SamzaJob(kafka, tmp_path, partitions, **more)


def servers(job: SamzaJob) -> tuple[str, str]:
    """The option that names the broker."""
    return "--set", f"kafka.bootstrap.servers={job.kafka.bootstrap_servers}"


def some_rows(partitions: int = 2, keys: int = 30) -> dict[int, list[tuple[str, str]]]:
    """Every key once or more, and deletes."""
    rows = [(f"key-{n % keys}", "1") for n in range(4 * keys)] + [("key-1", "0"), ("key-2", "0"), ("key-2", "1")]
    return {partition: [(f"{partition}-{key}", value) for key, value in rows] for partition in range(partitions)}


def test_changelogs_and_offsets(old: Make) -> None:
    """The newest checkpoints name the stores and the last processed offsets. The command writes nothing to the old
    topics."""
    job = old()
    job.run(job.send(some_rows()))
    before = ends(job.kafka, job.topic, job.changelog, job.checkpoints)
    adopter = job.adopter()
    config = adopter.init(f"{job.name}-new")
    assert (config.tasks, config.inputs, list(config.stores)) == (2, [job.topic], ["counts"])
    found = adopter.json()
    assert found["input_offsets"] == {f"{job.topic}-0": 123, f"{job.topic}-1": 123}
    assert (found["input_records_after_the_offsets"], found["doubled_at_most"]) == (0, 0)
    assert [row["not_committed"] for row in found["changelogs"]] == [0, 0]
    adopter.run("--write")
    offsets = [{f"{job.topic}-{n}": 123} for n in (0, 1)]
    assert state(config) == ([{"counts": of} for of in job.expected], offsets)
    assert ends(job.kafka, job.topic, job.changelog, job.checkpoints) == before
    # the old job continues where it was, as if nothing had happened
    job.run(job.send({0: [("0-key-5", "1")]}))
    assert ends(job.kafka, job.changelog)[job.changelog, 0][1] == before[job.changelog, 0][1] + 1


def test_changes_that_were_not_committed_are_left_out(old: Make) -> None:
    """The old job died after it wrote its changelog and before its checkpoint. The checkpoint names the end of the
    changelog, so the new job gets the state at the offsets, as Samza itself would restore it."""
    job = old()
    job.run(job.send(some_rows()))
    job.run(job.send({0: [(f"0-key-{n}", "1") for n in range(40)]}, count=False), status=9, **CRASH)
    adopter = job.adopter()
    config = adopter.init(f"{job.name}-new")
    found = adopter.json()
    assert [row["not_committed"] for row in found["changelogs"]] == [40, 0]
    assert (found["input_records_after_the_offsets"], found["doubled_at_most"]) == (40, 0)
    assert "40 records after the old job's checkpoints were not committed" in adopter.run("--write")
    assert state(config)[0] == [{"counts": of} for of in job.expected]


def test_an_old_tail_is_adopted_and_may_count_twice(old: Make) -> None:
    """If compaction may have removed the committed values, the complete changelog is adopted, as Samza itself would
    restore it, and the command reports how many input records may be processed twice."""
    job = old()
    rows = job.send(some_rows())
    lag = {"stores__counts__changelog__min__compaction__lag__ms": "1"}
    job.run(rows, **lag)
    job.run(job.send({0: [(f"0-key-{n}", "1") for n in range(40)]}), status=9, **CRASH, **lag)
    adopter = job.adopter()
    config = adopter.init(f"{job.name}-new")
    found = adopter.json()
    assert (found["input_records_after_the_offsets"], found["doubled_at_most"]) == (40, 40)
    assert "older than min.compaction.lag.ms" in adopter.run("--write")
    assert state(config)[0] == [{"counts": of} for of in job.expected]


def test_tasks_have_other_partitions_of_the_changelog(old: Make) -> None:
    """Samza numbers the partitions of a changelog in the order of the task names, where 10 comes before 2."""
    job = old(12)
    job.run(job.send(some_rows(12, keys=5)))
    adopter = job.adopter()
    config = adopter.init(f"{job.name}-new")
    assert [row["partition"] for row in adopter.json()["changelogs"]] == [0, 1, 4, 5, 6, 7, 8, 9, 10, 11, 2, 3]
    in_place = ("--set", f"stores.counts.changelog.topic={job.changelog}", "--in-place")
    assert "has partition 4 of" in adopter.run("--write", *in_place, status=2)
    adopter.run("--write")
    assert state(config)[0] == [{"counts": of} for of in job.expected]


@pytest.mark.parametrize("version", ["1", "2"])
def test_one_version_of_checkpoints(old: Make, version: str) -> None:
    """Checkpoints of version 1 do not name the stores, so the user gives them. They still contain the offsets of the
    changelogs."""
    job = old()
    job.run(job.send(some_rows()), task__checkpoint__write__versions=version)
    named = () if version == "2" else ("--changelog", f"counts={job.changelog}")
    adopter = job.adopter(*named)
    if named:
        assert f"its changelogs are {job.changelog}" in job.adopter().run("--init", *servers(job), status=2)
    config = adopter.init(f"{job.name}-new")
    assert adopter.json()["doubled_at_most"] == 0
    adopter.run("--write")
    assert state(config)[0] == [{"counts": of} for of in job.expected]


def shapes(old: Make, **more: object) -> SamzaJob:
    """A job with the stores ``counts`` and ``last``."""
    return old(program="SamzaShapes", stores=("counts", "last"), **more)


def plain_rows(partitions: int = 2) -> dict[int, list[tuple[str, str]]]:
    """Rows without deletes."""
    return {n: [(f"{n}-{key % 7}", f"value {key}") for key in range(20)] for n in range(partitions)}


def last_of(rows: dict[int, list[tuple[str, str]]]) -> list[dict[bytes, bytes]]:
    """The last value of each key, by partition."""
    return [{key.encode(): value.encode() for key, value in of} for of in rows.values()]


@pytest.mark.parametrize(
    ("grouper", "partitions"),
    [
        ("GroupBySystemStreamPartitionFactory", 2),
        pytest.param("GroupBySystemStreamPartitionFactory", 12, marks=pytest.mark.heavy),
        pytest.param("GroupByPartitionFactory", 12, marks=pytest.mark.heavy),
    ],
)
def test_several_stores_and_groupers(old: Make, grouper: str, partitions: int) -> None:
    """Every store of every task is adopted, also if the job makes a task of each partition of its topic."""
    job, rows = shapes(old, partitions=partitions), plain_rows(partitions)
    factory = f"org.apache.samza.container.grouper.stream.{grouper}"
    job.run(job.send(rows), job__systemstreampartition__grouper__factory=factory)
    adopter = job.adopter()
    config = adopter.init(f"{job.name}-new")
    adopter.run("--write")
    states, offsets = state(config)
    assert states == [
        {"counts": counts, "last": last} for counts, last in zip(job.expected, last_of(rows), strict=True)
    ]
    assert offsets == [{f"{job.topic}-{n}": 20} for n in range(partitions)]


@pytest.mark.heavy
def test_a_grouper_with_tasks_of_several_topics(old: Make) -> None:
    """A job that makes a task of each partition of two topics has no task N for the partitions N: refused."""
    job = shapes(old)
    make(job.kafka, f"{job.name}-more", 2, cleanup__policy="delete")
    write(job.kafka, f"{job.name}-more", 0, [(b"k", b"v")])
    factory = "org.apache.samza.container.grouper.stream.GroupBySystemStreamPartitionFactory"
    inputs = f"kafka.{job.topic},kafka.{job.name}-more"
    job.run(job.send(plain_rows()) + 1, job__systemstreampartition__grouper__factory=factory, task__inputs=inputs)
    said = job.adopter().run("--init", *servers(job), status=2)
    assert "a task of each partition of several topics" in said
    assert f"{job.name}-more" in said


def test_a_store_with_a_time_to_live(old: Make) -> None:
    """Its changelog has no expiry, and Kafka deletes its old records. So the user confirms it, and its entries live as
    long as the new store says, from the time of their records; without a TTL they live for ever."""
    job, rows = shapes(old), plain_rows()
    job.run(job.send(rows), stores__counts__rocksdb__ttl__ms="86400000")
    adopter = job.adopter()
    assert "--confirm counts=ttl" in adopter.run("--init", *servers(job), status=2)
    confirmed = ("--confirm", "counts=ttl")
    config = adopter.init(f"{job.name}-new", *confirmed)
    assert config.stores["counts"].ttl_ms == 86_400_000
    assert "The records have no expiry" in adopter.run(*confirmed)
    adopter.run("--write", *confirmed)
    expected = [{"counts": counts, "last": last} for counts, last in zip(job.expected, last_of(rows), strict=True)]
    assert state(config)[0] == expected
    with OldTopics(config, SystemClock()) as topics:
        written, adopted = (
            [record for batch in topics.records(topic, 0, 0, topics.bounds(topic, 0).end) for record in batch]
            for topic in (f"{job.name}-counts", config.stores["counts"].changelog_topic)
        )
    expiries = [int.from_bytes((record.value or b"")[:8], "big") for record in adopted]
    assert expiries == [record.timestamp_ms + 86_400_000 for record in written]


def test_side_inputs(old: Make) -> None:
    """Checkpoints do not name the store of a side input. The command says so, and takes its topic as the changelog of
    the store, up to offsets that the user gives; the new job reads the topic from there."""
    job, rows = shapes(old), plain_rows()
    names = f"{job.name}-names"
    make(job.kafka, names)
    write(job.kafka, names, 0, [(b"a", b"old"), (b"a", b"Anna")])
    write(job.kafka, names, 1, [(b"b", b"Ben")])
    side = {
        "stores.names.side.inputs": f"kafka.{names}",
        "stores.names.side.inputs.processor.factory": "SamzaShapes$Names",
    }
    settings = {key.replace(".", "__"): value for key, value in (job.store("names") | side).items()}
    job.run(job.send(rows), **settings)
    without = job.adopter()
    without.init(f"{job.name}-new")
    assert "do not name stores without a changelog" in without.run()
    stores = {"names": names, **{store: f"{job.name}-{store}" for store in job.stores}}
    told = [part for store, topic in stores.items() for part in ("--changelog", f"{store}={topic}")]
    adopter = job.adopter(*told, "--offset", f"{names}-0=2", "--offset", f"{names}-1=1")
    config = adopter.init(f"{job.name}-new", "--force")
    adopter.run("--write")
    states, offsets = state(config)
    assert [of["names"] for of in states] == [{b"a": b"Anna"}, {b"b": b"Ben"}]
    assert [of["counts"] for of in states] == job.expected
    assert offsets == [{f"{job.topic}-0": 20, f"{names}-0": 2}, {f"{job.topic}-1": 20, f"{names}-1": 1}]


def test_in_place(old: Make) -> None:
    """A changelog that Samza made has suitable settings and becomes the new job's own."""
    job = old()
    job.run(job.send(some_rows()))
    adopter = job.adopter()
    config = adopter.init(f"{job.name}-new", "--in-place")
    before = ends(job.kafka, job.changelog)
    adopter.run("--write", "--in-place")
    assert ends(job.kafka, job.changelog) == before
    assert state(config)[0] == [{"counts": of} for of in job.expected]


def test_in_place_leaves_out_what_was_not_committed(old: Make) -> None:
    """Samza died after it had written changes, and before their checkpoint. The new job reads their input again, so the
    copy that the first opening here takes does not have them, nor does what it publishes."""
    job = old()
    job.run(job.send(some_rows()))
    write(job.kafka, job.changelog, 0, [(b"not committed", b"1")])
    adopter = job.adopter()
    config = adopter.init(f"{job.name}-new", "--in-place")
    adopter.run("--write", "--in-place")
    states, _, restored = opened(config)
    assert (states, restored) == ([{"counts": of} for of in job.expected], {"local"})


def test_what_is_refused(old: Make) -> None:
    """A store with a time to live, an unknown job, a task without a checkpoint, input that is not grouped by partition,
    and a broken record are refused."""
    job = old()
    job.run(job.send(some_rows()), stores__counts__rocksdb__ttl__ms="86400000")
    adopter = job.adopter()
    assert "as that of a store with rocksdb.ttl.ms" in adopter.run("--init", *servers(job), status=2)
    assert "checkpoint topic does not exist" in adopter.run(
        "--init", *servers(job), old=["--from", "samza", "--job", f"{job.name}-other"], status=4
    )
    topic = f"{job.name}-checkpoints"
    make(job.kafka, topic, 1)
    key = b'{"systemstreampartition-grouper-factory":"G","taskName":"Partition 1","type":"checkpoint-v2"}'
    by_topic = ["--from", "samza", "--checkpoint-topic", topic, "--changelog", f"counts={job.changelog}"]
    write(job.kafka, topic, 0, [(key, b'{"checkpoint-id":"1-1","input-offsets":{},"state-checkpoint-markers":{}}')])
    assert "none of Partition 0" in adopter.run("--init", *servers(job), old=by_topic, status=2)
    write(job.kafka, topic, 0, [(key.replace(b"Partition 1", b"Task-0"), b"{}")])
    assert "does not group its input by partition" in adopter.run("--init", *servers(job), old=by_topic, status=2)
    write(job.kafka, topic, 0, [(key.replace(b"Partition 1", b"Task-0"), None), (key, b"[")])
    assert "is not a checkpoint of Samza" in adopter.run("--init", *servers(job), old=by_topic, status=4)


# --- snapshots --------------------------------------------------------------------------------------------


def snapshot_rows(keys: int = 3000) -> dict[int, list[tuple[str, str]]]:
    """Enough keys that RocksDB's table does not fit into an index."""
    return {n: [(f"{n}-{key}-{(key * 2654435761 + n) % 2**32:x}", "1") for key in range(keys)] for n in (0, 1)}


def blob_files(directory: Path) -> dict[str, bytes]:
    """Maps the name of every file below a directory to its content."""
    return {str(file.relative_to(directory)): file.read_bytes() for file in directory.rglob("*") if file.is_file()}


def test_snapshots_are_uploaded(old: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The new job's first snapshot has the state of Samza's, in blobs of its own. Samza's blobs stay as they are. If
    the TTL of the new ones cannot be removed, the adoption is in force all the same, and the first opening does it."""
    job = old(backends=(BLOBS,))
    job.run(job.send(snapshot_rows()))
    job.run(job.send(some_rows()))
    assert "only in its blob store" in job.adopter().run("--init", *servers(job), status=2)
    adopter = job.adopter("--blobs", job.blobs.as_uri())
    config = adopter.init(f"{job.name}-new", "--set", f"blob.store.uri={(tmp_path / 'blobs').as_uri()}")
    before = blob_files(job.blobs)
    found = adopter.json()
    wanted = [of_pairs(iter(of.items())) for of in job.expected]
    assert [(row["keys"], row["hash"]) for row in found["snapshots"]] == [(of.keys, of.hash) for of in wanted]
    assert (found["changelogs"], found["doubled_at_most"]) == ([], 0)
    assert not (tmp_path / "blobs").exists()
    remove_ttl = FileBlobStore.remove_ttl

    def refused(self: FileBlobStore, blob_id: str) -> None:
        raise UnavailableError("refused", blob=blob_id)

    monkeypatch.setattr(FileBlobStore, "remove_ttl", refused)
    assert "adopted: checkpoint" in adopter.run("--write")
    monkeypatch.setattr(FileBlobStore, "remove_ttl", remove_ttl)
    assert "already adopted" in adopter.run("--write")
    assert blob_files(job.blobs) == before
    offsets = [{f"{job.topic}-{n}": 3123} for n in (0, 1)]
    assert state(config) == ([{"counts": of} for of in job.expected], offsets)
    check_blobs(config)
    elsewhere = {"state.dir": str(tmp_path / "elsewhere")}
    mine = JobConfig.from_mapping(config.to_mapping(), elsewhere)
    with StateManager(mine) as manager, manager.open_task("Partition 0") as task:
        task.store("counts").put(b"new", b"1")
        task.commit({f"{job.topic}-0": 3124})
    assert state(JobConfig.from_mapping(config.to_mapping(), {"state.dir": str(tmp_path / "third")}))[0] == [
        {"counts": job.expected[0] | {b"new": b"1"}},
        {"counts": job.expected[1]},
    ]


def test_snapshots_in_place_are_not_uploaded(old: Make, tmp_path: Path) -> None:
    """The tables stay where Samza put them and belong to the new job from then on: a check, garbage collection and a
    restore find them."""
    job = old(backends=(BLOBS,))
    job.run(job.send(snapshot_rows()))
    adopter = job.adopter("--blobs", job.blobs.as_uri())
    elsewhere = ("--set", f"blob.store.uri={(tmp_path / 'blobs').as_uri()}")
    config = adopter.init(job.name, "--in-place")
    assert config.blob_uri == job.blobs.as_uri()
    before = blob_files(job.blobs)
    assert "garbage collection would delete it" in adopter.run("--write", status=2)
    assert "is in another blob store" in adopter.run("--write", "--in-place", *elsewhere, status=2)
    adopter.run("--write", "--in-place")
    after = blob_files(job.blobs)
    assert before.items() <= after.items()
    assert len([body for body in before.values() if len(body) > 16 * 1024]) >= 2, "a table for each task at least"
    added = after.keys() - before
    assert len(added) == 2
    assert all(name.endswith("/index") for name in added)
    assert state(config)[0] == [{"counts": of} for of in job.expected]
    verified = CliRunner().invoke(cli, ["snapshots", "verify", "--read-data", "--config", str(adopter.file)])
    assert verified.exit_code == 0, verified.output
    collected = CliRunner().invoke(cli, ["gc", "--config", str(adopter.file), "--write"])
    assert collected.exit_code == 0, collected.output
    mine = JobConfig.from_mapping(config.to_mapping(), {"state.dir": str(tmp_path / "elsewhere")})
    assert state(mine)[0] == [{"counts": of} for of in job.expected]


def test_what_is_refused_of_snapshots(old: Make, tmp_path: Path) -> None:
    """A damaged blob, a missing blob and a store with a time to live are refused."""
    job = old(backends=(BLOBS,))
    job.run(job.send(snapshot_rows()))
    adopter = job.adopter("--blobs", job.blobs.as_uri())
    adopter.init(f"{job.name}-new", "--set", f"blob.store.uri={(tmp_path / 'blobs').as_uri()}")
    table = max(job.blobs.rglob("*"), key=lambda file: file.stat().st_size if file.is_file() else 0)
    whole = table.read_bytes()
    table.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert "another checksum" in adopter.run("--write", status=4)
    table.write_bytes(whole + b"x")
    assert "more bytes" in adopter.run(status=4)
    table.unlink()
    assert table.name in adopter.run("--write", status=4)
    table.write_bytes(whole)
    adopter.run()
    expiring = old(backends=(BLOBS,))
    expiring.run(expiring.send(some_rows()), stores__counts__rocksdb__ttl__ms="86400000")
    adopter = expiring.adopter("--blobs", expiring.blobs.as_uri())
    adopter.init(f"{expiring.name}-new", "--force", "--set", f"blob.store.uri={(tmp_path / 'blobs').as_uri()}")
    assert "has a time to live" in adopter.run(status=2)
