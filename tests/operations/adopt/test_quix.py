"""``statemgr adopt --from quix``: adopts jobs that the real Quix Streams ran, in a Python environment of its own."""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Callable, Iterable
from itertools import chain
from pathlib import Path

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient

from statemgr import JobConfig, StateManager
from statemgr.local.machine import SystemClock
from statemgr.model.keys.partitioners import murmur2
from statemgr.operations.adopt.old_topics import OldTopics
from statemgr.serdes import QuixKey, serde
from tests.old_jobs import Adopter, await_empty, ends, make, state, whole
from tests.peers import environments
from tests.peers.environments import HERE, run
from tests.servers import KafkaServer

pytestmark = pytest.mark.long
KEYS = 40
#: The time of a row 0. Each row is a second later than the one with the number before.
NOW = time.time_ns() // 10**10 * 10**4


#: Deserializer → the key of message n.
MESSAGE_KEYS: dict[str, Callable[[int], bytes]] = {
    "bytes": lambda n: b"key-%d" % n,
    "str": lambda n: f'é|"{n}'.encode(),
    "int": lambda n: (n - 10).to_bytes(4, "big", signed=True),
    "double": lambda n: struct.pack(">d", n / 4),
    "json": lambda n: json.dumps({"é|": n, "list": [1, "a"]}).encode(),
}


class QuixJob:
    """A Quix Streams job with an input topic of two partitions. Key n is in partition n % 2; or, if ``keys`` names a
    deserializer, where producers put it by murmur2."""

    def __init__(self, kafka: KafkaServer, keys: str = "") -> None:
        self.kafka, self.group, self.keys = kafka, kafka.fresh_name("quix"), keys
        self.topic = f"{self.group}-in"
        make(kafka, self.topic, cleanup__policy="delete")
        self.rows: list[tuple[int, int]] = []

    def send(self, rows: Iterable[tuple[int, int]], topic: str = "") -> int:
        """Send rows of key and number, to the job's first topic unless another is given. Returns how many."""
        producer, rows = Producer({"bootstrap.servers": self.kafka.bootstrap_servers}), list(rows)
        for key, row in rows:
            message_key = MESSAGE_KEYS[self.keys or "bytes"](key)
            partition = murmur2([message_key])[0] % 2 if self.keys else key % 2
            value = row.to_bytes(4, "big", signed=True)
            producer.produce(topic or self.topic, value, message_key, partition, timestamp=NOW + 1000 * row)
        assert producer.flush(30) == 0
        self.rows += rows
        return len(rows)

    def run(self, kind: str, count: int, status: int = 0, view: str | Path = "") -> None:
        """Process this many rows. ``view``: where Quix Streams writes what it reads from its stores."""
        command = [environments.quix_python(), HERE / "quix_job.py", self.kafka.bootstrap_servers]
        run([*command, self.group, self.topic, kind, str(count), self.keys or "bytes", str(view)], status=status)

    def adopter(self, directory: Path) -> Adopter:
        return Adopter(self.kafka, directory, "--from", "quix", "--job", self.group)


def expected(rows: Iterable[tuple[int, int]]) -> list[dict[bytes, bytes]]:
    """The state that the job keeps: per partition, the number of rows of each key, and the key's last row."""
    found: list[dict[bytes, bytes]] = [{}, {}]
    for key, row in rows:
        of = found[key % 2]
        rows_key, last = b'key-%d|"rows"' % key, b'key-%d|"last"' % key
        if row == 0:
            of.pop(rows_key, None)
        else:
            of[rows_key] = json.dumps(int(of.get(rows_key, b"0")) + 1).encode()
            of[last] = b"row %d" % row
    return found


def some_rows(seed: int) -> list[tuple[int, int]]:
    """Rows of all keys, and rows that delete every fifth key."""
    rows = [(key, key + turn + seed) for turn in range(1, 4) for key in range(KEYS)]
    return rows + [(key, 0) for key in range(0, KEYS, 5)] + [(0, 77)]


@pytest.fixture
def job(kafka: KafkaServer) -> QuixJob:
    """A job that has not run."""
    return QuixJob(kafka)


@pytest.mark.parametrize(
    "keys", [*(pytest.param(keys, marks=pytest.mark.heavy) for keys in MESSAGE_KEYS if keys != "str"), "str"]
)
def test_every_deserializer_of_keys_can_be_rescaled(kafka: KafkaServer, tmp_path: Path, keys: str) -> None:
    """E19: Quix Streams begins the keys of its state with what the deserializer has read, and producers partition by
    the bytes of the message. The adoption finds out how, and the job can be rescaled and rolled back."""
    job = QuixJob(kafka, keys)
    job.run("plain", job.send(some_rows(0)))
    adopter = job.adopter(tmp_path)
    config = adopter.init(f"{job.group}-new")
    (store,) = config.stores
    adopter.run("--write")
    adopted = state(config)[0]
    with StateManager(config) as manager, manager.open_task("Partition 0") as task:
        first = task.last_checkpoint
        assert first is not None
        task.store(store).put(b"wrong", b"")
        task.commit({f"{job.topic}-0": ends(kafka, job.topic)[job.topic, 0][1]})
    adopter.command("checkpoints rollback", "--task", "0", "--to", str(first.checkpoint_id), "--write")
    assert state(config)[0] == adopted
    looked = json.loads(adopter.command("rescale", "--tasks", "4", "--json"))
    done = json.loads(adopter.command("rescale", "--tasks", "4", "--write", "--json"))
    name = f"quix-{'' if keys == 'bytes' else f'{keys}-'}murmur2"
    assert (looked["partitioner"], looked["keys"]) == (done["partitioner"], done["keys"]) == (name, 2 * KEYS - 7)
    assert whole(adopter.config, store) == {key: value for of in adopted for key, value in of[store].items()}
    tasks = {b"row %d" % (n + 3 if n else 77): murmur2([MESSAGE_KEYS[keys](n)])[0] % 4 for n in range(KEYS)}
    for number, of in enumerate(state(adopter.config)[0]):
        last = {value for key, value in of[store].items() if key.endswith(b'|"last"')}
        assert last == {row for row, task in tasks.items() if task == number}


@pytest.mark.parametrize("kind", ["plain", "exactly-once", "ttl"])
def test_a_stopped_job_is_adopted_key_by_key(job: QuixJob, tmp_path: Path, kind: str) -> None:
    """The new job gets every key and value as the application wrote it (without the expiry), and the group's offsets.
    The command writes nothing to the old topics."""
    job.run(kind, job.send(some_rows(0)))
    job.run(kind, job.send(some_rows(100)))
    adopter = job.adopter(tmp_path)
    config = adopter.init(f"{job.group}-new")
    (store,) = config.stores
    before = ends(job.kafka, f"changelog__{job.group}--{job.topic}--default", job.topic)
    found = adopter.json()
    converted = sum(row["converted"] for row in found["changelogs"])
    assert (converted > 0) == (kind == "ttl")
    assert sum(row["left_out_uncommitted"] for row in found["changelogs"]) == 0
    assert found["doubled_at_most"] == 0
    adopter.run("--write")
    states, offsets = state(config)
    assert [of[store] for of in states] == expected(job.rows)
    assert offsets == [{f"{job.topic}-{n}": ends(job.kafka, job.topic)[job.topic, n][1]} for n in (0, 1)]
    assert ends(job.kafka, f"changelog__{job.group}--{job.topic}--default", job.topic) == before


def test_changes_that_were_not_committed_are_left_out(job: QuixJob, tmp_path: Path) -> None:
    """The old job died after it wrote its changelog and before it committed. The new job gets the state at the
    committed offsets, as Quix Streams itself would recover it, so that nothing is counted twice."""
    job.run("plain", job.send(some_rows(0)))
    rows = list(job.rows)
    job.run("crash", job.send([(key, 1000) for key in range(100, 130)]), status=9)
    await_empty(job.kafka, job.group)
    adopter = job.adopter(tmp_path)
    config = adopter.init(f"{job.group}-new")
    found = adopter.json()
    assert sum(row["left_out_uncommitted"] for row in found["changelogs"]) == 60
    assert (found["input_records_after_the_offsets"], found["doubled_at_most"]) == (30, 0)
    assert "60 changes were made from input" in adopter.run("--write")
    (store,) = config.stores
    states, offsets = state(config)
    assert [of[store] for of in states] == expected(rows)
    assert sum(of[f"{job.topic}-{n}"] for n, of in enumerate(offsets)) == len(rows)


View = list[tuple[int, QuixKey, str]]


def view_of(file: Path, family: str) -> View:
    """The entries of a column family, as Quix Streams itself reads them: task, key and value."""
    found = []
    for task, name, key, *numbers, value in json.loads(file.read_text()):
        if name == family == "__latest-timestamps__":
            prefix, _, rest = bytes.fromhex(key).rpartition(b"|")
            found += [(task, QuixKey(prefix, -1, -1), value)] if rest == b"__latest_timestamp__" and prefix else []
        elif name == family:
            found.append((task, QuixKey(bytes.fromhex(key), *numbers), value))
    return found


def entries_of(config: JobConfig, store: str) -> View:
    """The same of the new job."""
    read = serde(config.stores[store].key_serde).deserialize
    return [
        (task, read(key), value.decode())
        for task, of in enumerate(state(config)[0])
        for key, value in of[store].items()
    ]


OTHER_WINDOWS = ("hopping", "sliding", "session", "final", "partition")


@pytest.mark.parametrize("kind", ["window", *(pytest.param(kind, marks=pytest.mark.heavy) for kind in OTHER_WINDOWS)])
def test_windows_are_adopted_key_by_key(kafka: KafkaServer, tmp_path: Path, kind: str) -> None:
    """E21: every window that Quix Streams has, and the newest time of each key, are in the new store. Its windows go
    on, move with the keys of their messages, and come back."""
    job = QuixJob(kafka, "str")
    rows = [(key, 7 * turn + key % 5) for turn in range(6) for key in range(KEYS)]
    job.run(kind, job.send(rows), view=tmp_path / "view.json")
    adopter = job.adopter(tmp_path)
    config = adopter.init(f"{job.group}-new")
    (store,) = config.stores
    found = adopter.json("--write")
    assert found["kinds"] == {store: "windows"}
    view = view_of(tmp_path / "view.json", "default")
    assert len(view) >= (KEYS if kind != "partition" else 1)
    newest = view_of(tmp_path / "view.json", "__latest-timestamps__")
    assert {value for _, _, value in newest} >= {str(NOW + 1000 * (35 + of)) for of in range(5)}
    assert sorted(entries_of(config, store)) == sorted(view + newest)
    task, key, value = max(view)
    with StateManager(config) as manager, manager.open_task(f"Partition {task}") as opened:
        windows = opened.store(store, key_serde="quix-window")
        of_key = list(windows.range(QuixKey(key.key, 0, 0), QuixKey(key.key, key.start_ms + 1, 0)))
        assert of_key[-1] == (key, value.encode())
        assert of_key == [(one, text.encode()) for _, one, text in sorted(view) if one.key == key.key]
        windows.put(key, b"changed")
        opened.commit({f"{job.topic}-{task}": ends(kafka, job.topic)[job.topic, task][1]})
    after = sorted((one, "changed" if one == key else text) for _, one, text in view + newest)
    done = json.loads(adopter.command("rescale", "--tasks", "4", "--write", "--json"))
    assert done["partitioner"] == "quix-str-murmur2"
    moved = entries_of(adopter.config, store)
    assert sorted((one, text) for _, one, text in moved) == after
    assert all(murmur2([json.loads(one.key).encode()])[0] % 4 == task for task, one, _ in moved)
    adopter.command("rescale", "--undo", "--write")
    assert sorted((one, text) for _, one, text in entries_of(adopter.config, store)) == after


@pytest.mark.heavy
def test_rows_with_times_are_adopted(kafka: KafkaServer, tmp_path: Path) -> None:
    """E21: the rows of windows that collect them are a store of their own, next to that of the windows, and so are the
    rows by time of a join. Which stores there are, the command says."""
    job = QuixJob(kafka, "str")
    job.run("collect", job.send([(key, 7 * turn) for turn in range(4) for key in range(KEYS)]), view=tmp_path / "view")
    topics = AdminClient({"bootstrap.servers": kafka.bootstrap_servers}).list_topics(timeout=60).topics
    (changelog,) = [name for name in topics if name.startswith(f"changelog__{job.group}--")]
    servers = ("--set", f"kafka.bootstrap.servers={kafka.bootstrap_servers}")
    adopter = job.adopter(tmp_path)
    refused = adopter.run("--init", "--name", "new", *servers, status=2)
    assert "windows and the rows that windows collect, which are 2 stores" in refused
    both = ("--changelog", f"windows={changelog}", "--changelog", f"rows={changelog}")
    both += ("--confirm", "windows=windows", "--confirm", "rows=rows")
    config = adopter.init(f"{job.group}-new", *both)
    adopter.run("--write", *both)
    newest = view_of(tmp_path / "view", "__latest-timestamps__")
    windows = view_of(tmp_path / "view", "default")
    assert sorted(entries_of(config, "windows")) == sorted(windows + newest)
    rows = view_of(tmp_path / "view", "__values__")
    assert len(rows) >= KEYS
    assert sorted(entries_of(config, "rows")) == sorted(rows)


@pytest.mark.heavy
def test_rows_by_time_are_adopted(kafka: KafkaServer, tmp_path: Path) -> None:
    """E21: the rows of the right side of a join, by their times."""
    job = QuixJob(kafka, "str")
    make(kafka, f"{job.topic}-right", cleanup__policy="delete")
    count = job.send([(key, turn) for turn in range(4) for key in range(KEYS)], topic=f"{job.topic}-right")
    job.run("timestamped", count + job.send([(key, 9) for key in range(KEYS)]), view=tmp_path / "view")
    adopter = job.adopter(tmp_path)
    config = adopter.init(f"{job.group}-new")
    (store,) = config.stores
    assert adopter.json("--write")["kinds"] == {store: "timestamped"}
    view = view_of(tmp_path / "view", "default")
    assert len(view) == 4 * KEYS
    assert sorted(entries_of(config, store)) == sorted(view)
    done = json.loads(adopter.command("rescale", "--tasks", "4", "--write", "--json"))
    assert (done["partitioner"], done["keys"]) == ("quix-str-murmur2", 4 * KEYS)


@pytest.mark.heavy
def test_windows_of_a_number_of_rows_are_plain(kafka: KafkaServer, tmp_path: Path) -> None:
    """E21: Quix Streams keeps them under one plain key for each key of a message."""
    job = QuixJob(kafka, "int")
    job.run("count", job.send(some_rows(0)), view=tmp_path / "view")
    adopter = job.adopter(tmp_path)
    config = adopter.init(f"{job.group}-new")
    (store,) = config.stores
    assert adopter.json("--write")["kinds"] == {store: "plain"}
    entries = json.loads((tmp_path / "view").read_text())
    view = {bytes.fromhex(key): value.encode() for _, family, key, value in entries if family == "default"}
    assert len(view) == KEYS
    assert whole(config, store) == view
    looked = json.loads(adopter.command("rescale", "--tasks", "3", "--json"))
    assert (looked["partitioner"], looked["keys"]) == ("quix-int-murmur2", KEYS)


@pytest.mark.heavy
def test_values_keep_their_expiry(job: QuixJob, tmp_path: Path) -> None:
    """E22: in a store with a TTL, each value has the expiry that the old job gave it."""
    job.run("ttl", job.send(some_rows(0)))
    adopter = job.adopter(tmp_path)
    config = adopter.init(f"{job.group}-new", "--set", f"stores.{job.topic}.ttl.ms=1 days")
    adopter.run("--write")
    (store,) = config.stores
    assert [of[store] for of in state(config)[0]] == expected(job.rows)
    with OldTopics(config, SystemClock()) as topics:
        newest = [
            dict(chain.from_iterable(topics.pairs(topic, 0, 0, topics.bounds(topic, 0).end)))
            for topic in (f"changelog__{job.group}--{job.topic}--default", config.stores[store].changelog_topic)
        ]
    stamps = [{key: value[:8] for key, value in of.items() if value and key.endswith(b'"last"')} for of in newest]
    assert stamps[0] == stamps[1]
    assert len(stamps[0]) == KEYS // 2


@pytest.mark.parametrize("kind", ["plain", "ttl"])
def test_in_place_needs_plain_records(job: QuixJob, tmp_path: Path, kind: str) -> None:
    """A changelog without expiries can be continued in place; a changelog with expiries cannot."""
    job.run(kind, job.send(some_rows(0)))
    adopter = job.adopter(tmp_path)
    config = adopter.init(f"{job.group}-new", "--in-place")
    (store,) = config.stores
    lag = f"stores.{store}.changelog.min.compaction.lag.ms"
    if kind == "ttl":
        assert "without `--in-place`" in adopter.run("--write", "--in-place", "--set", f"{lag}=0", status=2)
        return
    adopter.run("--write", "--in-place", "--set", f"{lag}=0")
    mine = JobConfig.from_mapping(config.to_mapping(), {lag: 0})
    assert [of[store] for of in state(mine)[0]] == expected(job.rows)
