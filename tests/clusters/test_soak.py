"""A consumer loop and a query on Spark for as long as asked, with faults of all kinds, and a check of their history.

``make soak MINUTES=30 SEED=1`` runs it. ``SPARK=0`` leaves Spark out. ``INPUT=rows.csv.gz KEY=column`` takes real keys.
"""

from __future__ import annotations

import csv
import gzip
import itertools
import os
import random
import shutil
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Protocol
from zlib import crc32

import psutil
import pytest
from confluent_kafka import Producer

from statemgr import JobConfig
from statemgr.errors import MissingError, PermissionNeeded, StatemgrError
from statemgr.kafka.checkpoint_topic import CheckpointTopic
from statemgr.operations.gc.gc import BlobStatus, GarbageReport, collect_garbage
from statemgr.wiring import open_services
from tests.blob_ages import time_passes
from tests.clusters.checker import History
from tests.clusters.measures import Measures, disk_bytes
from tests.clusters.recording import read_all, read_in_the_end, recorded
from tests.clusters.soak_loops import PARTITIONS, Loops
from tests.clusters.soak_servers import Servers
from tests.clusters.soak_spark import Query
from tests.jobs import DUAL, elsewhere
from tests.kafka_jobs import committed, wait_until
from tests.loop_members import make_topic, published
from tests.servers import KafkaServer

MINUTES = float(os.environ.get("STATEMGR_TEST_SOAK_MINUTES") or 0)
WITH_SPARK = (os.environ.get("STATEMGR_TEST_SOAK_SPARK") or "1") != "0"
_PER_SECOND = 60
#: Seconds after which a producer of the input is given up. No fault of the soak takes so long.
_STALLED_S = 300


class Job(Protocol):
    """A job of the soak."""

    config: JobConfig
    ended: Counter[str]

    def look(self) -> None:
        """Start what has ended."""

    def faults(self, chance: random.Random, over: threading.Event) -> list[Callable[[], Any]]:
        """Return what can go wrong."""

    def processes(self) -> list[psutil.Process]:
        """Return its processes."""


class Background:
    """Work in a thread of its own."""

    def __init__(self, name: str) -> None:
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._run, name=name)
        self.thread.start()

    def work(self) -> None:
        """Do it."""
        raise NotImplementedError

    def _run(self) -> None:
        try:
            self.work()
        except BaseException as error:
            self.error = error

    def check(self) -> None:
        """Raise what the thread has raised."""
        if self.error is not None:
            raise self.error


class Input(Background):
    """Sends named messages, the same number to each topic.

    A producer that has sent nothing for minutes is given up, with what it has not sent, and its last statistics are
    printed. What the topics have is the input.
    """

    def __init__(self, kafka: KafkaServer, topics: Mapping[str, int]) -> None:
        self._kafka, self._topics = kafka, topics
        self.sent = 0
        self._stop = threading.Event()
        self._statistics = ""
        super().__init__("input")

    def stop(self) -> None:
        """Stop, and wait until everything has arrived."""
        self._stop.set()
        self.thread.join()

    def work(self) -> None:
        """Send until it is stopped."""
        producer = self._producer()
        for number, key in enumerate(keys()):
            if number % (_PER_SECOND // 10) == 0 and self._stop.wait(0.1):
                break
            for topic, partitions in self._topics.items():
                name, partition = f"{topic}:{number}", crc32(key.encode()) % partitions
                try:
                    producer.produce(topic, key=key, value=name, partition=partition)
                except BufferError:
                    print(f"the producer of the input has sent nothing for minutes: {self._statistics}", flush=True)
                    producer.purge()
                    producer = self._producer()
                    producer.produce(topic, key=key, value=name, partition=partition)
                self.sent += 1
            producer.poll(0)
        assert producer.flush(300) == 0

    def _producer(self) -> Producer:
        def keep(statistics: str) -> None:
            self._statistics = statistics

        return Producer(
            {
                "bootstrap.servers": self._kafka.bootstrap_servers,
                "enable.idempotence": True,
                "message.timeout.ms": 0,
                "queue.buffering.max.messages": _STALLED_S * _PER_SECOND * len(self._topics),
                "log_level": 2,
                "statistics.interval.ms": 10_000,
                "stats_cb": keep,
            }
        )


def keys() -> Iterator[str]:
    """Return the keys of the input: a column of a file, repeated without end, or generated keys."""
    if not (path := os.environ.get("STATEMGR_TEST_SOAK_INPUT")):
        return (f"key-{random.Random(number).randrange(500)}" for number in itertools.count())
    column = os.environ["STATEMGR_TEST_SOAK_KEY"]
    with gzip.open(path, "rt", encoding="utf-8", errors="replace", newline="") as file:
        found = [row[column] or "(null)" for row in csv.DictReader(file)]
    return itertools.cycle(found)


class Chaos(Background):
    """Causes faults of one kind after the other."""

    def __init__(
        self,
        name: str,
        faults: Sequence[Callable[[], Any]],
        chance: random.Random,
        pause_s: float,
        over: threading.Event,
    ) -> None:
        self.over = over
        self.happened: Counter[str] = Counter()
        self.doing = threading.Lock()
        self._faults, self._chance, self._pause_s = faults, chance, pause_s
        super().__init__(name)

    def work(self) -> None:
        """Cause faults until it is over."""
        while not self.over.wait(self._chance.uniform(0, self._pause_s)):
            fault = self._chance.choice(self._faults)
            self.happened[fault.__name__] += 1
            with self.doing:
                fault()

    def stop(self) -> None:
        """End the fault in progress, and wait."""
        self.over.set()
        self.thread.join(300)


class Soak:
    """The jobs, what is done to them, and what is known of them."""

    def __init__(self, directory: Path, servers: Servers, seed: int) -> None:
        self.directory, self.servers = directory, servers
        self.measures = Measures()
        self.refused: Counter[str] = Counter()
        #: the names of each partition's messages; known when all of them are there
        self.input_of_loops: list[list[str]] = []
        kafka = servers.kafka()
        topics = {"loop-in": PARTITIONS, "loop-out": PARTITIONS, "query-in": 2, "query-out": 1}
        for topic, partitions in topics.items():
            make_topic(kafka, topic, partitions)
        self.loops = Loops(servers, directory / "loops", "loop-in", "loop-out")
        self.query = Query(servers, directory / "query", "query-in", "query-out", f"{seed}") if WITH_SPARK else None
        self.jobs: list[Job] = [self.loops, *([self.query] if self.query else [])]
        self.input = Input(kafka, {"loop-in": PARTITIONS, **({"query-in": 2} if self.query else {})})
        over = threading.Event()
        self.chaos = []
        for name, of, pause_s in [
            ("servers", servers, 30.0),
            *((type(job).__name__, job, 20.0 if job is self.loops else 60.0) for job in self.jobs),
        ]:
            chance = random.Random(f"{seed} {name}")
            self.chaos.append(Chaos(name, of.faults(chance, over), chance, pause_s, over))

    def run(self, seconds: float) -> None:
        """Look, read and measure until the time is over."""
        ends = time.monotonic() + seconds
        report = time.monotonic() + 60
        while time.monotonic() < ends:
            for one in (*self.chaos, self.input):
                one.check()
            for chaos, job in zip(self.chaos[1:], self.jobs, strict=True):
                if chaos.doing.acquire(blocking=False):  # otherwise it is a fault that ended a process
                    try:
                        job.look()
                    finally:
                        chaos.doing.release()
                for process in job.processes():
                    self.measures.sample(process)
            self._read()
            if time.monotonic() > report:
                report += 60
                print(f"{(ends - time.monotonic()) / 60:.0f} min left: {self.done()}", flush=True)
            time.sleep(2)

    def _read(self) -> None:
        """Clients that only read: each backend must give what is published. What they cannot reach is counted."""
        for job, factory in itertools.product(self.jobs, DUAL):
            directory = self.directory / "reads"
            try:
                read_all(elsewhere(job.config, directory, factory), self.directory / "reader", factory)
                report = garbage(job.config)
                assert not report.missing, report
                kept = report.counts[BlobStatus.KEPT]
                self.measures.sizes[f"needed blobs of {job.config.job_name}"].append(kept.size)
            except StatemgrError as error:
                if error.exit_status != 3 and not isinstance(error, (MissingError, PermissionNeeded)):
                    raise
                self.refused[f"reader: {type(error).__name__}"] += 1
            shutil.rmtree(directory, ignore_errors=True)
        for name in ("loops", "query"):
            states = [Path(path) for path, _, _ in os.walk(self.directory / name) if path.endswith("/state")]
            self.measures.sizes[f"local state of {name}"].append(sum(map(disk_bytes, states)))

    def done(self) -> str:
        """Return what has happened so far."""
        happened = sum((chaos.happened for chaos in self.chaos), Counter[str]())
        ended = sum((job.ended for job in self.jobs), Counter[str]()) + self.refused
        return f"{self.input.sent} messages, {sum(happened.values())} faults {dict(happened)}, {dict(ended)}"

    def finish(self) -> None:
        """Heal everything, and let the jobs process the rest of the input."""
        for chaos in self.chaos:
            chaos.over.set()
        for chaos in self.chaos:
            chaos.stop()
        self.input.stop()
        self.input.check()
        for job in self.jobs:
            job.look()
        self.input_of_loops = [_values(self.loops.config, "loop-in", p) for p in range(PARTITIONS)]
        expected = {f"loop-in-{p}": len(names) for p, names in enumerate(self.input_of_loops)}
        wait_until(lambda: self._loops_reached(expected), 600)
        self.loops.stop()
        if self.query:
            self.query.finish(900)

    def _loops_reached(self, expected: Mapping[str, int]) -> bool:
        self.loops.look()
        return published(self.loops.config) == expected

    def kill(self) -> None:
        """End everything at once."""
        for chaos in self.chaos:
            chaos.stop()
        self.input.stop()
        self.loops.kill()
        if self.query:
            self.query.kill()

    def histories(self) -> dict[str, History]:
        """Return the history of each job, with what there is in the end."""
        found = {}
        for job in self.jobs:
            last = self.directory / f"end-{job.config.job_name}"
            machines = self.directory / f"machines-{job.config.job_name}"
            if job is self.loops:
                read_in_the_end(job.config, machines, last, DUAL)
            else:  # only its engine can open a query, because it has assigned the keys to tasks
                for factory in DUAL:
                    read_all(elsewhere(job.config, machines / factory, factory), last, factory)
            found[job.config.job_name] = recorded([*self.directory.glob(f"{job.config.job_name}/**/history"), last])
        reads = recorded([self.directory / "reader"]).reads
        for history in found.values():
            tried = {commit.name for commit in history.commits}
            history.reads += [read for read in reads if read.found in tried]
        tasks = [f"Partition {number}" for number in range(PARTITIONS)]
        of_loops, config = found["loops"], self.loops.config
        of_loops.inputs = dict(zip(tasks, self.input_of_loops, strict=True))
        of_loops.outputs = {task: _values(config, "loop-out", p) for p, task in enumerate(tasks)}
        if self.query:
            sent = [record for p in range(2) for record in committed(config, "query-in", p)]
            _of_query(found["query"], sent, _values(self.query.config, "query-out", 0))
        return found


def _of_query(history: History, sent: Sequence[tuple[Any, Any]], outputs: Sequence[str]) -> None:
    """Spark groups rows by key, so a task has the rows of the keys that it has."""
    task_of = {key: read.task for read in history.reads for key in read.content}
    inputs, sent_by = defaultdict(list), defaultdict(list)
    for key, name in sent:
        inputs[task_of.get(key.decode(), "a task without a read")].append(name.decode())
    for output in outputs:
        task, _, rest = output.partition("|")
        sent_by[task].append(f"{task}|{rest}")
    history.inputs, history.outputs = inputs, sent_by


def _values(config: JobConfig, topic: str, partition: int) -> list[str]:
    return [value.decode() for _, value in committed(config, topic, partition) if value is not None]


def garbage(config: JobConfig, *, delete: bool = False) -> GarbageReport:
    """Collect garbage, or only look for it."""
    with (
        closing(open_services(config)) as services,
        closing(CheckpointTopic(config, services.clock)) as log,
    ):
        return collect_garbage(services, log, lambda *_: None, delete=delete)


@pytest.mark.heavy
@pytest.mark.skipif(not MINUTES, reason="`make soak` runs it")
@pytest.mark.timeout(int(MINUTES * 60) + 2400)
def test_soak(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the faults were, each message counts once in state and output, and nothing grows."""
    seed = int(os.environ.get("STATEMGR_TEST_SOAK_SEED") or time.time())
    print(f"\nseed {seed}", flush=True)
    servers = Servers(tmp_path)
    with servers.running():
        soak = Soak(tmp_path, servers, seed)
        try:
            soak.run(MINUTES * 60)
            soak.finish()
        finally:
            soak.kill()
        print(soak.done(), flush=True)
        histories = soak.histories()
        problems = []
        for name, history in histories.items():
            found = history.problems()
            problems += [f"{name}: {problem}" for problem in found]
            steps, reads, outputs = (
                len(history.commits),
                len(history.reads),
                sum(map(len, (history.outputs or {}).values())),
            )
            print(f"{name}: {steps} steps, {reads} reads, {outputs} outputs, {len(found)} differences", flush=True)
        time_passes(monkeypatch)
        for job in soak.jobs:
            report = garbage(job.config, delete=True)
            kept = report.counts[BlobStatus.KEPT]
            print(f"{job.config.job_name}: {report.deleted} were garbage, {kept} are needed", flush=True)
            assert not report.missing
            assert not report.failed
            left = garbage(job.config).counts
            assert [status for status, count in left.items() if count.blobs] == [BlobStatus.KEPT]
        told, grown = soak.measures.growth()
        print("\n".join(told), flush=True)
        assert problems == []
        assert grown == []
