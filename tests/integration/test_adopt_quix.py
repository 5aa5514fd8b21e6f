"""``statemgr adopt --from quix``: adopts jobs that the real Quix Streams ran, in a Python environment of its own."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import pytest
from confluent_kafka import Producer

from statemgr import JobConfig
from tests.old_jobs import Adopter, await_empty, ends, make, state
from tests.peers import environments
from tests.peers.environments import HERE, run
from tests.servers import KafkaServer

pytestmark = pytest.mark.long
KEYS = 40


class QuixJob:
    """A Quix Streams job with an input topic of two partitions: key n is in partition n % 2."""

    def __init__(self, kafka: KafkaServer) -> None:
        self.kafka, self.group = kafka, kafka.fresh_name("quix")
        self.topic = f"{self.group}-in"
        make(kafka, self.topic, cleanup__policy="delete")
        self.rows: list[tuple[int, int]] = []

    def send(self, rows: Iterable[tuple[int, int]]) -> int:
        """Send rows of key and number. Returns how many."""
        producer, rows = Producer({"bootstrap.servers": self.kafka.bootstrap_servers}), list(rows)
        for key, row in rows:
            producer.produce(self.topic, row.to_bytes(4, "big", signed=True), b"key-%d" % key, key % 2)
        assert producer.flush(30) == 0
        self.rows += rows
        return len(rows)

    def run(self, kind: str, count: int, status: int = 0) -> None:
        """Process this many rows."""
        command = [environments.quix_python(), HERE / "quix_job.py", self.kafka.bootstrap_servers]
        run([*command, self.group, self.topic, kind, str(count)], status=status)

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


def test_stores_of_windows_are_refused(job: QuixJob, tmp_path: Path) -> None:
    """The command refuses window stores and says why."""
    job.run("window", job.send(some_rows(0)))
    adopter = job.adopter(tmp_path)
    adopter.init(f"{job.group}-new")
    assert "one of windows" in adopter.run(status=2)
    assert "one of windows" in adopter.run("--write", status=2)


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
