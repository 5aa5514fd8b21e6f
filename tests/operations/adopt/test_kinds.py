"""``statemgr adopt`` of stores of Kafka Streams that are not plain, in changelogs that the tests write."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Message, Producer, TopicPartition
from confluent_kafka.admin import AdminClient

from statemgr import JobConfig, StateManager
from statemgr.kafka.reader import PartitionReader
from statemgr.operations.adopt import copying as adopt_copy
from statemgr.phases import Phase
from statemgr.serdes import SessionKey, WindowKey
from tests.old_jobs import Adopter, Changes, commit, make, whole, write
from tests.servers import KafkaServer

HOUR = 3_600_000
READ = PartitionReader.read


def ms(at: int) -> bytes:
    """Return a time as Kafka Streams writes it."""
    return at.to_bytes(8, "big")


def now_ms() -> int:
    """Return the time of the clock."""
    return time.time_ns() // 1_000_000


def window(key: bytes, start: int) -> bytes:
    """Return a window's key of Kafka Streams."""
    return key + ms(start) + bytes(4)


class OldJob:
    """A stopped application with one store, and an input of which it has read everything."""

    def __init__(self, kafka: KafkaServer, directory: Path, **settings: str) -> None:
        self.kafka, self.name = kafka, kafka.fresh_name("kinds")
        self.changelog, self.topic = f"{self.name}-hits-changelog", f"{self.name}-in"
        make(kafka, self.topic, cleanup__policy="delete")
        make(kafka, self.changelog, **settings)
        write(kafka, self.topic, 0, [(b"ann", b"row")])
        commit(kafka, self.name, {(self.topic, 0): 1})
        self.adopter = Adopter(kafka, directory, "--from", "kafka-streams", "--job", self.name)

    def write(self, records: Changes) -> None:
        """Write records of the store in task 0."""
        write(self.kafka, self.changelog, 0, records)

    def init(self, *arguments: str, name: str = "new") -> JobConfig:
        """Write the configuration of the new job."""
        return self.adopter.init(f"{self.name}-{name}", "--force", *arguments)

    def delete_before(self, offset: int) -> None:
        """Delete the first records of the changelog, as the broker does when their time has passed."""
        admin = AdminClient({"bootstrap.servers": self.kafka.bootstrap_servers})
        for deleted in admin.delete_records([TopicPartition(self.changelog, 0, offset)]).values():
            deleted.result(30)

    def refused(self, *arguments: str) -> str:
        """Return what ``--init`` says of a store that it does not take."""
        servers = f"kafka.bootstrap.servers={self.kafka.bootstrap_servers}"
        return self.adopter.run("--init", "--name", "new", "--set", servers, *arguments, status=2)


@pytest.fixture
def windowed(kafka: KafkaServer, tmp_path: Path) -> OldJob:
    """A store of windows with the settings that Kafka Streams gives it: 2 hours, and a day."""
    return OldJob(kafka, tmp_path, cleanup__policy="compact,delete", retention__ms=str(26 * HOUR))


def in_pairs(reader: PartitionReader, topic: str, partition: int, start: int, end: int) -> Iterator[list[Message]]:
    """Read a partition in batches of two records."""
    for batch in READ(reader, topic, partition, start, end):
        yield from (batch[at : at + 2] for at in range(0, len(batch), 2))


def live(config: JobConfig) -> dict[Any, bytes]:
    """Return the windows of task 0 that have not expired."""
    with StateManager(config) as manager, manager.open_task("Partition 0") as task:
        return dict(task.store("hits").range())


def test_windows_expire_by_the_time_of_the_old_job(windowed: OldJob) -> None:
    """E16: a window lives as long after its start as the changelog keeps it. One that has just expired is left out, and
    one that is about to expire is not."""
    newest = now_ms() - 1000  # the old job stopped a second ago
    ages = {"new": 0, "live": 2 * HOUR, "last": 26 * HOUR - 60_000, "gone": 26 * HOUR, "old": 30 * HOUR}
    windowed.write([(window(key.encode(), newest - age), key.encode()) for key, age in ages.items()])
    config = windowed.init()
    assert config.stores["hits"].key_serde == "kafka-streams-window"
    assert config.stores["hits"].ttl_ms == 26 * HOUR
    found = windowed.adopter.json()
    assert found["kinds"] == {"hits": "windows"}
    assert found["samples"]["hits"][0] == [f'["new", {newest}, 0]', "new"]
    assert [row["left_out_expired"] for row in found["changelogs"]] == [2, 0]
    said = windowed.adopter.run("--write")
    assert "store hits has windows: its cleanup.policy is compact,delete" in said
    assert "2 changes are of entries that have expired" in said
    expected = {WindowKey(key.encode(), newest - age): key.encode() for key, age in ages.items() if age < 26 * HOUR}
    assert live(config) == expected


def test_a_job_that_is_behind_loses_no_window(windowed: OldJob) -> None:
    """E16: the rows of the old job are of last year. Kafka Streams goes by the time of the rows, so windows are live.
    They are adopted, and expire as if their time had been now."""
    newest = now_ms() - 365 * 24 * HOUR
    windowed.write([(window(b"ann", newest), b"1"), (window(b"ann", newest - 25 * HOUR), b"2")])
    windowed.write([(window(b"ann", newest - 27 * HOUR), b"3")])
    config = windowed.init()
    windowed.adopter.run("--write")
    assert live(config) == {WindowKey(b"ann", newest): b"1", WindowKey(b"ann", newest - 25 * HOUR): b"2"}


def test_without_a_ttl_all_windows_are_kept(windowed: OldJob) -> None:
    """Who takes ``ttl.ms`` out of the configuration keeps also the windows that have expired. Other serdes of the keys
    are refused."""
    windowed.write([(window(b"ann", now_ms() - age * HOUR), b"%d" % age) for age in (0, 30)])
    windowed.init()
    text = windowed.adopter.file.read_text()
    plain = [line for line in text.splitlines() if "ttl.ms" not in line]
    windowed.adopter.file.write_text("\n".join(plain))
    for name in ("bytes", "kafka-streams-session"):
        assert "has windows, and stores.hits.key.serde is" in windowed.adopter.run(
            "--set", f"stores.hits.key.serde={name}", status=2
        )
    inner = JobConfig.from_mapping(
        JobConfig.from_file(windowed.adopter.file).to_mapping(),
        {"stores.hits.key.serde": "kafka-streams-window(string)"},
    )
    windowed.adopter.run("--write", "--set", "stores.hits.key.serde=kafka-streams-window(string)")
    assert sorted(live(inner).values()) == [b"0", b"30"]
    assert {key.key for key in live(inner)} == {"ann"}


@pytest.fixture
def interrupted(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Copies two records, and is killed then."""

    def copied(phase: Phase, *_: str) -> None:
        if phase is Phase.COPIED:
            raise KeyboardInterrupt

    def start(adopter: Adopter, *arguments: str) -> None:
        with monkeypatch.context() as patched:
            patched.setattr(adopt_copy, "_MOST_RECORDS", 2)
            patched.setattr(adopt_copy, "announce", copied)
            patched.setattr(PartitionReader, "read", in_pairs)
            adopter.run("--write", *arguments, status=130)

    return start


def test_the_oldest_records_may_be_gone(windowed: OldJob, interrupted: Callable[..., None]) -> None:
    """E16: Kafka has deleted old windows, and deletes more before an interrupted copy is continued."""
    now = now_ms()
    windowed.write([(window(b"ann", now - n), b"%d" % n) for n in range(10)])
    windowed.delete_before(3)
    config = windowed.init()
    interrupted(windowed.adopter)
    windowed.delete_before(7)
    windowed.adopter.run("--write")
    assert live(config) == {WindowKey(b"ann", now - n): b"%d" % n for n in (3, 4, 7, 8, 9)}


def test_a_compacted_changelog_of_windows_is_confirmed(kafka: KafkaServer, tmp_path: Path) -> None:
    """E17: the application has taken ``delete`` out of the changelog's policy. The user says what it has, and every
    record must be of that kind."""
    old = OldJob(kafka, tmp_path, retention__ms=str(26 * HOUR))
    now = now_ms()
    old.write([(window(b"ann", now), b"1"), (window(b"bob", now), None)])
    said = old.refused()
    assert "--confirm hits=windows` or `statemgr adopt --confirm hits=plain" in said
    assert "no stores of the kind 'hops'" in old.refused("--confirm", "hits=hops")
    assert "this record is none" in old.refused("--confirm", "hits=sessions")
    config = old.init("--confirm", "hits=windows")
    assert config.stores["hits"].ttl_ms == 26 * HOUR
    lag = ("--set", "stores.hits.changelog.min.compaction.lag.ms=0")
    in_place = ("--in-place", "--set", f"stores.hits.changelog.topic={old.changelog}", *lag)
    assert "a form of Kafka Streams" in old.adopter.run("--write", "--confirm", "hits=windows", *in_place, status=2)
    old.adopter.run("--write", "--confirm", "hits=windows")
    assert live(config) == {WindowKey(b"ann", now): b"1"}
    old.write([(b"plain", b"1")])
    other = old.init("--confirm", "hits", name="other")
    assert "offset=2" in old.adopter.run("--confirm", "hits=windows", status=2)
    assert other.stores["hits"].key_serde == "bytes"


def test_windows_or_sessions(kafka: KafkaServer, tmp_path: Path) -> None:
    """E17: the settings say that a store has windows or sessions, and its records can be both, or none: the user says
    which, but cannot call it plain. The time of the old job is that of the kind that was confirmed."""
    old = OldJob(kafka, tmp_path, cleanup__policy="compact,delete", retention__ms=str(26 * HOUR))
    assert "It has, for example, no records" in old.refused()
    old.write([(b"ann" + ms(1000) + ms(0), b"1")])
    assert "--confirm hits=windows` or `statemgr adopt --confirm hits=sessions" in old.refused("--confirm", "hits")
    assert "cannot have plain keys" in old.refused("--confirm", "hits=plain")
    config = old.init("--confirm", "hits=sessions")
    old.adopter.run("--write", "--confirm", "hits=sessions")
    assert live(config) == {SessionKey(b"ann", 0, 1000): b"1"}
    old.write([(b"plain", b"1")])
    assert "Kafka deletes old keys" in old.refused()


def test_the_newest_versions(kafka: KafkaServer, tmp_path: Path, interrupted: Callable[..., None]) -> None:
    """E18: a versioned store writes versions in any order. The newest by its time is adopted, also by a copy that was
    interrupted."""
    old = OldJob(kafka, tmp_path, min__compaction__lag__ms=str(26 * HOUR))
    producer = Producer({"bootstrap.servers": kafka.bootstrap_servers})
    versions = [
        (b"a", b"new", 9),
        (b"a", b"old", 5),
        (b"b", None, 9),
        (b"b", b"old", 5),
        (b"c", b"1", 5),
        (b"c", None, 9),
    ]
    for key, value, at in versions:
        producer.produce(old.changelog, value, key, 0, timestamp=1_700_000_000_000 + at)
    producer.flush(30)
    assert "--confirm hits=versioned` or" in old.refused()
    config = old.init("--confirm", "hits=versioned")
    interrupted(old.adopter, "--confirm", "hits=versioned")
    said = old.adopter.run("--write", "--confirm", "hits=versioned")
    assert "does not get the older versions" in said
    assert whole(config, "hits") == {b"a": b"new"}
