"""What the examples of adoptions share: the input, the old job's programs, the adoption, and the job that goes on."""

from __future__ import annotations

import argparse
import shutil
import signal
import subprocess
import sys
import time
import venv
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from confluent_kafka import Message, Producer
from confluent_kafka.admin import AdminClient, NewTopic

from statemgr import JobConfig, StateManager, Task

PARTITIONS = 2


class Example:
    """One run of an example. ``directory`` keeps what was installed and built; everything else is new in each run."""

    def __init__(self, origin: str) -> None:
        parser = argparse.ArgumentParser()
        parser.add_argument(
            "--broker", default="localhost:9092", help="a Kafka broker, such as that of `statemgr dev up --no-s3`"
        )
        parser.add_argument("--directory", type=Path, default=Path(".statemgr/examples") / origin)
        parser.add_argument("--keys", type=int, default=50)
        parser.add_argument("--each", type=int, default=10, help="rows of each key in one half of the input")
        given = parser.parse_args()
        self.broker: str = given.broker
        self.keys: int = given.keys
        self.each: int = given.each
        #: Rows in one half of the input.
        self.half = self.keys * self.each
        self.directory: Path = given.directory.resolve()
        self.name = f"counts-{time.time_ns() // 1_000_000}"
        self.topic = f"{self.name}-rows"
        self.work = self.directory / self.name
        self.work.mkdir(parents=True)
        self._origin = origin
        topic = NewTopic(self.topic, PARTITIONS, 1)
        admin = AdminClient({"bootstrap.servers": self.broker})
        admin.create_topics([topic])[self.topic].result(30)

    def send_half(self) -> None:
        """Send rows. A key's partition is the one that Kafka's Java clients choose."""
        producer = Producer({"bootstrap.servers": self.broker, "partitioner": "murmur2_random"})
        for number in range(self.half):
            producer.produce(self.topic, b"1", b"key-%d" % (number % self.keys))
            if number % 10_000 == 0:
                producer.flush(30)
        producer.flush(30)

    def built_java(self, here: Path, main: str) -> list[str]:
        """Build an example's Java sources with the jars of its pom.xml, once. Returns: how a command line begins."""

        def build(made: Path) -> None:
            copy = ["dependency:copy-dependencies", f"-DoutputDirectory={made / 'lib'}"]
            run("mvn", "-q", "-B", "-f", here / "pom.xml", *copy)
            sources = (here / "src/main/java").glob("*.java")
            run("javac", "-cp", f"{made / 'lib'}/*", "-d", made / "classes", *sources)

        made = self._built("java", build)
        classes = f"{made / 'classes'}:{here / 'src/main/resources'}:{made / 'lib'}/*"
        return ["java", "-Xmx256m", "-cp", classes, main]

    def built_python(self, package: str) -> Path:
        """Make a virtual environment with a package, once. Returns: its interpreter."""

        def build(made: Path) -> None:
            venv.create(made, with_pip=True)
            run(made / "bin" / "python", "-m", "pip", "install", "-q", package)

        return self._built("python", build) / "bin" / "python"

    def _built(self, name: str, build: Callable[[Path], None]) -> Path:
        """A directory that gets its name when it is complete, so that an interrupted build begins again."""
        target, made = self.directory / name, self.directory / f"{name}.new"
        if not target.exists():
            shutil.rmtree(made, ignore_errors=True)
            build(made)
            made.rename(target)
        return target

    def await_stopped(self, group: str) -> None:
        """Wait until no member of the old job's consumer group is left."""
        admin = AdminClient({"bootstrap.servers": self.broker})
        while admin.describe_consumer_groups([group])[group].result(30).members:
            time.sleep(0.5)

    def adopt(self, *options: str, **settings: str) -> JobConfig:
        """Write job.toml, look at the old job, and adopt it (``__`` for ``.`` in the names of settings)."""
        file = self.work / "job.toml"
        common = ["--from", self._origin, "--job", self.name, "--config", str(file), "--settle", "3", *options]
        settings |= {"kafka__bootstrap__servers": self.broker, "state__dir": str(self.work / "state")}
        given = [part for key, value in settings.items() for part in ("--set", f"{key.replace('__', '.')}={value}")]
        statemgr = [sys.executable, "-m", "statemgr", "adopt", *common]
        run(*statemgr, "--init", "--name", f"{self.name}-new", *given)
        run(*statemgr)
        run(*statemgr, "--write")
        return JobConfig.from_file(file)

    def go_on(self, config: JobConfig, store: str, key_of: Callable[[str], str]) -> None:
        """Send the other half, count it with the new job, and check the totals: every row counts exactly once."""

        def count(task: Task, row: Message) -> None:
            counts, key = task.store(store), key_of((row.key() or b"").decode())
            before = counts.get(key)  # text or a number, as the serde has it
            counts.put(key, type(before)(int(before) + 1))

        totals = {key: int(value) for key, value in self.continued(config, store, count)}
        self.check(totals, {key_of(f"key-{number}"): 2 * self.each for number in range(self.keys)})

    def continued(
        self, config: JobConfig, store: str, count: Callable[[Task, Message], None]
    ) -> Iterator[tuple[Any, Any]]:
        """Send the other half, let the new job count it, and yield what its store has then."""
        self.send_half()
        left = self.half

        def process(task: Task, row: Message) -> None:
            nonlocal left
            count(task, row)
            left -= 1
            if left == 0:
                signal.raise_signal(signal.SIGTERM)

        consumer = config.consumer(f"{self.name}-group")
        with StateManager(config) as manager:
            manager.run(consumer, process)
        consumer.close()
        with StateManager(config) as manager:
            for number in range(PARTITIONS):
                with manager.open_task(f"Partition {number}") as task:
                    yield from task.store(store).range()

    def check(self, totals: dict[str, int], expected: dict[str, int]) -> None:
        """End with an error if the totals are others."""
        if totals != expected:
            sys.exit(f"wrong totals: {dict(islice(totals.items(), 100))}")
        print(f"{len(totals)} keys, and each has counted {2 * self.each} rows: half of them with the old job")
        print(f"the new job: {self.work / 'job.toml'}")


def run(*command: object) -> None:
    """Run a program, and show how it was called."""
    texts: Sequence[str] = [str(part) for part in command]
    print("$", *(Path(text).name if number == 0 else text for number, text in enumerate(texts)), flush=True)
    subprocess.run(texts, check=True)
