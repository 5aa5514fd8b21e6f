"""What ``statemgr adopt`` proves before it takes a job over: topics are written here as Kafka Streams and Quix Streams
write them. ``test_adopt_kafka_streams.py`` has the real ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from statemgr import StateManager
from statemgr.config.loading import MASK
from statemgr.local.machine import SystemClock
from statemgr.model.keys.partitioners import Hashes, crc32, murmur2
from statemgr.operations.adopt.old_topics import OldTopics
from tests.kafka_jobs import plain_producer
from tests.old_jobs import Adopter, Changes, commit, make, member, state, write
from tests.servers import KafkaServer

#: Origin → how it calls the changelog of a store and a topic of its own, of a job, and how the records are marked.
NAMES: dict[str, tuple[str, str]] = {
    "kafka-streams": ("{job}-totals-changelog", "{job}-by-city-repartition"),
    "quix": ("changelog__{job}--{job}-in--totals", "repartition__{job}--{job}-in--by-city"),
}
LONG = pytest.mark.long
#: One origin for `make test`, and both for the long tests.
OF_STREAMS = ["kafka-streams", pytest.param("quix", marks=LONG)]
OF_QUIX = [pytest.param("kafka-streams", marks=LONG), "quix"]

#: A time as Java writes it, in milliseconds.
NOW = (1_795_580_512_272).to_bytes(8, "big")


@pytest.fixture
def name(kafka: KafkaServer) -> str:
    """The name of an old job that has an input topic with ten rows in each of two partitions, and has read them."""
    name = kafka.fresh_name("old")
    make(kafka, f"{name}-in", cleanup__policy="delete")
    for partition in (0, 1):
        write(kafka, f"{name}-in", partition, [(b"key-%d" % (2 * n + partition), b"row") for n in range(10)])
    commit(kafka, name, {(f"{name}-in", 0): 10, (f"{name}-in", 1): 10})
    return name


def streams(kafka: KafkaServer, directory: Path, name: str, *arguments: str) -> Adopter:
    """Return the command for a job of Kafka Streams."""
    return Adopter(kafka, directory, "--from", "kafka-streams", "--job", name, *arguments)


@pytest.mark.parametrize("origin", OF_STREAMS)
def test_rows_that_wait_in_a_topic_of_the_old_job(kafka: KafkaServer, name: str, tmp_path: Path, origin: str) -> None:
    """E7: rows that have left the input and are in no store yet are not dropped: the job is refused until it has
    read them, or the new job reads them."""
    changelog, internal = (text.format(job=name) for text in NAMES[origin])
    make(kafka, changelog)
    make(kafka, internal, cleanup__policy="delete")
    write(kafka, internal, 1, [(b"key-1", b"row")] * 5)
    commit(kafka, name, {(internal, 1): 2})
    old = Adopter(kafka, tmp_path, "--from", origin, "--job", name)
    servers = f"kafka.bootstrap.servers={kafka.bootstrap_servers}"
    waiting = old.run("--init", "--name", "new", "--set", servers, status=2)
    assert "3 rows wait" in waiting
    assert f"topic={internal}" in waiting
    both = f"task.inputs={name}-in,{internal}"
    offset = ("--offset", f"{internal}-0=0")
    config = old.init(f"{name}-new", "--set", both, *offset)
    assert "3 rows wait" in old.run("--write", "--set", f"task.inputs={name}-in", status=2)
    old.run("--write", *offset)
    assert state(config)[1] == [{f"{name}-in-0": 10, f"{internal}-0": 0}, {f"{name}-in-1": 10, f"{internal}-1": 2}]


def test_the_marks_of_transactions_are_no_rows(kafka: KafkaServer, name: str, tmp_path: Path) -> None:
    """An exactly-once job has committed the offset before the last mark of its own topic: nothing waits there. A topic
    whose rows are not those of the job is skipped when its end is given."""
    internal = f"{name}-by-city-repartition"
    make(kafka, f"{name}-totals-changelog")
    make(kafka, internal, cleanup__policy="delete")
    old = streams(kafka, tmp_path, name)
    old.init(f"{name}-new")
    producer = plain_producer(old.config, f"{name}-tx")
    producer.begin_transaction()
    producer.produce(internal, b"row", None, 0)
    producer.commit_transaction(30)
    assert "1 rows wait" in old.run(status=2)
    commit(kafka, name, {(internal, 0): 1})
    old.run()
    producer.begin_transaction()
    producer.produce(internal, b"row", None, 0)
    producer.flush()
    assert "a transaction is open" in old.run(status=2)
    producer.commit_transaction(30)
    assert "1 rows wait" in old.run(status=2)
    old.run("--offset", f"{internal}-0=4")


@pytest.mark.parametrize("protocol", ["classic", "consumer"])
def test_a_running_job_of_any_group_protocol(kafka: KafkaServer, name: str, tmp_path: Path, protocol: str) -> None:
    """E8: a running job is refused whatever the protocol of its group is, also if offsets are given by hand."""
    make(kafka, f"{name}-totals-changelog")
    old = streams(kafka, tmp_path, name)
    config = old.init(f"{name}-new")
    offsets = [option for n in (0, 1) for option in ("--offset", f"{name}-in-{n}=10")]
    with OldTopics(config, SystemClock()) as topics:
        assert not topics.has_members(f"{name}-nobody", f"{name}-in")
        with member(kafka, name, f"{name}-in", protocol):
            assert topics.has_members(name, f"{name}-in")
            assert "is not stopped" in old.run("--write", status=2)
            assert "is not stopped" in old.run("--write", *offsets, status=2)
        assert not topics.has_members(name, f"{name}-in")
        assert topics.committed(name) == {f"{name}-in-0": 10, f"{name}-in-1": 10}
    old.run("--write")


#: Store → the settings of its topic, its records, and what the command says of it.
NOT_PLAIN: dict[str, tuple[dict[str, str], Changes, str]] = {
    "hops": ({}, [(b"key-%d" % n + NOW + bytes(4), b"5") for n in range(1200)], "looks like one of windows"),
    "visits": ({}, [(b"key-%d" % n + NOW + NOW, b"5") for n in range(5)], "looks like one of sessions"),
    "fk-subscription-store": ({}, [(b"a", b"b")], "foreign-key join"),
    "versions": ({"min.compaction.lag.ms": "0"}, [(b"a", b"b")], "several versions of each value"),
    "kept": ({"retention.ms": "86460000"}, [], "windows or sessions"),
}


@pytest.mark.parametrize(
    "store", [pytest.param(store, marks=() if store in ("hops", "versions") else LONG) for store in sorted(NOT_PLAIN)]
)
def test_stores_that_may_not_be_plain(kafka: KafkaServer, name: str, tmp_path: Path, store: str) -> None:
    """E9: users choose names and settings, so the records count. The command shows some, and adopts the store only if
    the user has confirmed it by name."""
    settings, records, said = NOT_PLAIN[store]
    changelog = f"{name}-{store}-changelog"
    make(kafka, changelog, **settings)
    write(kafka, changelog, 1, records)
    old = streams(kafka, tmp_path, name)
    servers = f"kafka.bootstrap.servers={kafka.bootstrap_servers}"
    refused = old.run("--init", "--name", "new", "--set", servers, status=2)
    assert said in refused
    assert f"--confirm {store}" in refused
    old.init(f"{name}-new", "--confirm", store)
    assert said in old.run("--write", status=2)
    old.run("--write", "--confirm", store)
    assert state(old.config)[0] == [{store: {}}, {store: dict(records)}]


def test_one_record_proves_a_plain_store(kafka: KafkaServer, name: str, tmp_path: Path) -> None:
    """A store whose keys only sometimes end like a window is plain. The dry run shows some of its records."""
    changelog = f"{name}-totals-changelog"
    make(kafka, changelog)
    write(kafka, changelog, 0, [(b"key-%d" % n + NOW + bytes(4), b"5") for n in range(1200)])
    write(kafka, changelog, 1, [(b"gone", None), (b"plain", b"\xff\1")])
    old = streams(kafka, tmp_path, name)
    old.init(f"{name}-new")
    assert old.json()["samples"] == {"totals": [["0x" + (b"key-%d" % n + NOW + bytes(4)).hex(), "5"] for n in range(3)]}
    assert "store totals has, for example: " in old.run()


@pytest.mark.parametrize("origin", OF_QUIX)
def test_a_store_with_other_keys_than_the_input(kafka: KafkaServer, name: str, tmp_path: Path, origin: str) -> None:
    """E10: the old job filled a store from a topic of its own. A new job that reads the old input does not find the
    keys. It is adopted with an input that has them, or if the user confirms the store."""
    changelog, internal = (text.format(job=name) for text in NAMES[origin])
    make(kafka, changelog)
    make(kafka, internal, cleanup__policy="delete")
    make(kafka, f"{name}-by-city", cleanup__policy="delete")
    cities = [b"city-%d" % n for n in range(9)]
    rows = [(city + (b'|"rows"' if origin == "quix" else b""), b"5") for city in cities]
    write(kafka, changelog, 1, rows, headers=[("__column_family__", b"default")] if origin == "quix" else None)
    write(kafka, internal, 1, [(city, b"row") for city in cities])
    write(kafka, f"{name}-by-city", 1, [(city, b"row") for city in cities])
    commit(kafka, name, {(internal, 1): 9})
    old = Adopter(kafka, tmp_path, "--from", origin, "--job", name)
    servers = f"kafka.bootstrap.servers={kafka.bootstrap_servers}"
    refused = old.run("--init", "--name", "new", "--set", servers, status=2)
    assert "other keys than the input" in refused
    assert f"filled it from {internal}" in refused
    old.init(f"{name}-new", "--confirm", "totals")
    old.run("--confirm", "totals")
    by_city = ("--offset", f"{name}-by-city-0=0", "--offset", f"{name}-by-city-1=9")
    old.run("--write", "--set", f"task.inputs={name}-by-city", *by_city)
    assert state(old.config)[0] == [{"totals": {}}, {"totals": dict(rows)}]


def test_a_table_whose_changelog_is_its_source(kafka: KafkaServer, name: str, tmp_path: Path) -> None:
    """E10: no changelog has the keys and values of a compacted input. The command offers to adopt the topic as a store:
    its state is that of the adopted offsets, also if somebody goes on to write to it."""
    names = f"{name}-names"
    make(kafka, names)
    make(kafka, f"{name}-totals-changelog")
    rows = [(b"key-%d" % (2 * n + 1), b"name %d" % n) for n in range(10)]
    write(kafka, names, 1, [(b"key-1", b"older"), *rows])
    write(kafka, f"{name}-totals-changelog", 1, [(key, b"5") for key, _ in rows])
    commit(kafka, name, {(names, 1): 11})
    write(kafka, names, 1, [(b"key-1", b"newer")])
    old = streams(kafka, tmp_path, name)
    servers = f"kafka.bootstrap.servers={kafka.bootstrap_servers}"
    both = ("--changelog", f"totals={name}-totals-changelog", "--changelog", f"names={names}")
    refused = old.run("--init", "--name", "new", "--set", servers, status=2)
    assert " ".join((*both[:3], f"TABLE={names}")) in refused
    old.init(f"{name}-other", "--confirm", names)
    config = old.init(f"{name}-new", *both, "--force")
    assert "the new job would read what it writes" in old.run(*both, "--in-place", status=2)
    old.run("--write", *both)
    states, offsets = state(config)
    assert states[1] == {"names": dict(rows), "totals": {key: b"5" for key, _ in rows}}
    assert offsets[1] == {f"{name}-in-1": 10, f"{names}-1": 11}


def test_an_input_that_no_store_has_keys_of_is_named(kafka: KafkaServer, name: str, tmp_path: Path) -> None:
    """The old job has read an input, and left no state of it: the command says so."""
    changelog = f"{name}-totals-changelog"
    make(kafka, changelog)
    old = streams(kafka, tmp_path, name)
    write(kafka, changelog, 1, [(b"other", b"5")])
    old.init(f"{name}-new")
    assert f"no store has the newest keys of {name}-in" in old.run()
    write(kafka, changelog, 1, [(b"key-1", b"5")])
    assert "no store has the newest keys" not in old.run()


@pytest.mark.parametrize("origin", OF_STREAMS)
def test_names_that_begin_alike(kafka: KafkaServer, name: str, tmp_path: Path, origin: str) -> None:
    """E11: the new job and another job may have the old one's name with an ending. Their topics are not the old job's,
    also when the adoption has created its own, and in a second adoption."""
    other = f"{name}-eu" if origin == "kafka-streams" else f"{name}--eu"
    for job in (name, other):
        changelog, internal = (text.format(job=job) for text in NAMES[origin])
        make(kafka, changelog)
        make(kafka, internal, cleanup__policy="delete")
    write(kafka, internal, 0, [(b"key", b"row")])
    make(kafka, f"{other}-in", cleanup__policy="delete")
    commit(kafka, other, {(f"{other}-in", 0): 0})
    old = Adopter(kafka, tmp_path, "--from", origin, "--job", name)
    for new in (f"{name}-new", name):
        config = old.init(new, "--force")
        assert set(config.stores) == {"totals"}
        assert f"topics of other jobs, whose names begin alike, are left out: {NAMES[origin][0].format(job=other)}" in (
            old.run("--write")
        )
        assert state(config)[0] == [{"totals": {}}, {"totals": {}}]


def test_names_that_a_configuration_cannot_have(kafka: KafkaServer, name: str, tmp_path: Path) -> None:
    """E13: stores get names that keys can have, and the command says which old store became which. Two stores that
    would get one name are refused with both, and adopted with other names."""
    long = "v" * 150
    wanted = {"a_b": "a.b", "store-x": "-x", "store_x": "_x", "v" * 128: long, "plain": "plain"}
    topics = {store: f"{name}-{old}-changelog" for store, old in wanted.items()}
    for store, topic in topics.items():
        make(kafka, topic)
        write(kafka, topic, 1, [(b"key-1", store.encode())])
    old = streams(kafka, tmp_path, name)
    config = old.init(f"{name}-new")
    assert set(config.stores) == set(wanted)
    assert old.json("--write")["old_names"] == {new: of for new, of in wanted.items() if new != "plain"}
    assert state(config)[0][1] == {store: {b"key-1": store.encode()} for store in wanted}
    make(kafka, f"{name}-store-x-changelog")
    servers = ("--set", f"kafka.bootstrap.servers={kafka.bootstrap_servers}")
    refused = old.run("--init", "--name", "other", "--force", *servers, status=2)
    assert f"'-x' ({topics['store-x']}) and 'store-x' ({name}-store-x-changelog) would both be called" in refused
    both = ("--changelog", f"store-x={topics['store-x']}", "--changelog", f"x={name}-store-x-changelog")
    assert set(old.init(f"{name}-other", *both, "--force").stores) == {"store-x", "x"}
    assert "cannot be called '-x'" in old.run("--changelog", f"-x={topics['store-x']}", status=2)


def test_names_of_stores_in_checkpoints(kafka: KafkaServer, name: str, tmp_path: Path) -> None:
    """E13: the same rule holds for the stores that Samza's checkpoints name."""
    make(kafka, f"{name}-log")
    make(kafka, f"{name}-checkpoints", 1)
    changelog = "org.apache.samza.storage.KafkaChangelogStateBackendFactory"
    for task in (0, 1):
        write(kafka, f"{name}-log", task, [(b"key-%d" % task, b"5")])
        place = {"stream": f"{name}-log", "partition": str(task)}
        marker = json.dumps({"changelog-ssp": place, "changelog-offset": "0"})
        content = {
            "checkpoint-id": "1795580512272-1",
            "input-offsets": {f"kafka.{name}-in.{task}": "9"},
            "state-checkpoint-markers": {changelog: {"a.b": marker}},
        }
        key = {"type": "checkpoint-v2", "taskName": f"Partition {task}", "systemstreampartition-grouper-factory": "any"}
        record = (json.dumps(key).encode(), json.dumps(content).encode())
        write(kafka, f"{name}-checkpoints", 0, [record])
    old = Adopter(kafka, tmp_path, "--from", "samza", "--job", name, "--checkpoint-topic", f"{name}-checkpoints")
    config = old.init(f"{name}-new")
    assert "store a_b is the one that the old job calls 'a.b'" in old.run("--write")
    assert state(config)[0] == [{"a_b": {b"key-0": b"5"}}, {"a_b": {b"key-1": b"5"}}]


@pytest.mark.parametrize(
    ("hashes", "keys", "recorded", "said"),
    [
        (murmur2, 30, "kafka-partition(quix-str-murmur2)", "the partitioner quix-str-murmur2 chooses"),
        pytest.param(
            crc32, 30, "kafka-partition(quix-str-crc32)", "the partitioner quix-str-crc32 chooses", marks=LONG
        ),
        (lambda keys: range(len(keys)), 30, "kafka-partition", "`statemgr rescale` will refuse the job"),
        (murmur2, 9, "kafka-partition", "no input record is processed twice"),
    ],
)
def test_how_producers_choose_a_partition(
    kafka: KafkaServer, tmp_path: Path, hashes: Hashes, keys: int, recorded: str, said: str
) -> None:
    """E19: the keys of the state, which Quix Streams has written as JSON, and those of the input show how producers
    choose a partition. The checkpoint records it if there are enough of them, and the job opens with that."""
    job = kafka.fresh_name("old")
    topic, changelog = f"{job}-in", f"changelog__{job}--{job}-in--totals"
    make(kafka, topic, cleanup__policy="delete")
    make(kafka, changelog)
    messages = [b"key-%d" % n for n in range(keys)]
    in_task = [[key for key, number in zip(messages, hashes(messages), strict=True) if number % 2 == n] for n in (0, 1)]
    for n, mine in enumerate(in_task):
        write(kafka, topic, n, [(key, b"row") for key in mine])
        rows = [(b'"%s"|"rows"' % key, b"1") for key in mine]
        write(kafka, changelog, n, rows, headers=[("__column_family__", b"default")])
    commit(kafka, job, {(topic, n): len(mine) for n, mine in enumerate(in_task)})
    old = Adopter(kafka, tmp_path, "--from", "quix", "--job", job)
    config = old.init(f"{job}-new")
    assert said in old.run("--write")
    found = json.loads(old.command("checkpoints list", "--current", "--json"))
    assert {one["layout"]["partitioner"] for one in found} == {recorded}
    with StateManager(config) as manager, manager.open_task("Partition 0") as task:
        task.commit({f"{topic}-0": len(in_task[0])})
    found = json.loads(old.command("checkpoints list", "--current", "--json"))
    assert {one["layout"]["partitioner"] for one in found} == {recorded}


def test_a_secret_is_only_in_the_file(kafka: KafkaServer, name: str, tmp_path: Path) -> None:
    """What is printed has a mask in its place."""
    make(kafka, f"{name}-totals-changelog")
    old = streams(kafka, tmp_path, name)
    settings = [f"kafka.bootstrap.servers={kafka.bootstrap_servers}", "kafka.sasl.password=hunter22"]
    said = old.json("--init", "--name", f"{name}-new", *(option for one in settings for option in ("--set", one)))
    assert old.file.read_text() == said["configuration"].replace(MASK, "hunter22")
    assert "hunter22" not in said["configuration"]
