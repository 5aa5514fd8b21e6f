"""Jobs of other software for the adoption tests: topics, groups, and the state that a new job takes over."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

from click.testing import CliRunner, Result
from confluent_kafka import Consumer, KafkaError, Message, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from statemgr import JobConfig, StateManager
from statemgr.cli.main import cli
from tests.kafka_jobs import wait_until
from tests.servers import KafkaServer

Changes = Sequence[tuple[bytes, bytes | None]]


def make(kafka: KafkaServer, topic: str, partitions: int = 2, **settings: str) -> None:
    """Create a topic, compacted unless the settings say otherwise (``__`` for ``.``)."""
    config = {"cleanup.policy": "compact"} | {key.replace("__", "."): value for key, value in settings.items()}
    admin = AdminClient({"bootstrap.servers": kafka.bootstrap_servers})
    admin.create_topics([NewTopic(topic, partitions, 1, config=config)])[topic].result(30)
    wait_until(lambda: topic in admin.list_topics(timeout=60).topics)


def write(kafka: KafkaServer, topic: str, partition: int, changes: Changes, headers: Any = None) -> None:
    """Write records without a transaction."""
    producer = Producer({"bootstrap.servers": kafka.bootstrap_servers})
    for key, value in changes:
        producer.produce(topic, value, key, partition, headers=headers)
    assert producer.flush(30) == 0


def commit(kafka: KafkaServer, group: str, offsets: Mapping[tuple[str, int], int]) -> None:
    """Commit offsets as a group member would, and leave no member behind."""
    consumer = Consumer({"bootstrap.servers": kafka.bootstrap_servers, "group.id": group})
    places = [TopicPartition(topic, partition, offset) for (topic, partition), offset in offsets.items()]
    consumer.commit(offsets=places, asynchronous=False)
    consumer.close()


@contextmanager
def member(kafka: KafkaServer, group: str, topic: str, protocol: str = "classic") -> Any:
    """Run a live member of a group inside the block."""
    settings = {"bootstrap.servers": kafka.bootstrap_servers, "group.id": group, "group.protocol": protocol}
    consumer = Consumer(settings)
    consumer.subscribe([topic])
    wait_until(lambda: consumer.poll(0.2) is None and bool(consumer.assignment()))
    try:
        yield
    finally:
        consumer.close()


def await_empty(kafka: KafkaServer, group: str) -> None:
    """Wait until the broker has forgotten the dead members of a group."""
    admin = AdminClient({"bootstrap.servers": kafka.bootstrap_servers})
    wait_until(lambda: admin.describe_consumer_groups([group])[group].result(10).state.name == "EMPTY")


def ends(kafka: KafkaServer, *topics: str) -> dict[tuple[str, int], tuple[int, int]]:
    """Return the watermarks of every partition, to check that nobody wrote to them."""
    consumer = Consumer({"bootstrap.servers": kafka.bootstrap_servers, "group.id": "look"})
    found = {}
    for topic in topics:
        for partition in consumer.list_topics(topic, timeout=60).topics[topic].partitions:
            found[topic, partition] = consumer.get_watermark_offsets(TopicPartition(topic, partition), timeout=10)
    consumer.close()
    return found


def messages_of(kafka: KafkaServer, source: str, offset: int) -> Iterator[Message]:
    """Yield the committed messages of an input partition, as in ``orders-0``, from an offset on."""
    topic, _, partition = source.rpartition("-")
    settings = {"group.id": "rows", "enable.auto.commit": False, "enable.partition.eof": True}
    consumer = Consumer({"bootstrap.servers": kafka.bootstrap_servers, **settings})
    try:
        consumer.assign([TopicPartition(topic, int(partition), offset)])
        while True:
            (message,) = consumer.consume(1, 30)
            error = message.error()
            if error is not None:
                assert error.code() == KafkaError._PARTITION_EOF, error
                return
            yield message
    finally:
        consumer.close()


def topics_of(kafka: KafkaServer, job: str) -> set[str]:
    """Return the topics whose names contain a job's name. Other tests create topics on the broker at the same time."""
    found = AdminClient({"bootstrap.servers": kafka.bootstrap_servers}).list_topics(timeout=60).topics
    return {name for name in found if job in name}


class Adopter:
    """Runs ``statemgr adopt`` for one old job, with ``job.toml`` in its own directory."""

    def __init__(self, kafka: KafkaServer, directory: Path, *old: str) -> None:
        self.kafka, self.directory, self.old = kafka, directory, old
        self.file = directory / "job.toml"

    def _attempt(self, *arguments: str, old: Sequence[str] | None = None) -> Result:
        given = [
            "adopt",
            *(self.old if old is None else old),
            "--config",
            str(self.file),
            "--settle",
            "0.5",
            *arguments,
        ]
        return CliRunner().invoke(cli, given, catch_exceptions=False)

    def run(self, *arguments: str, status: int = 0, old: Sequence[str] | None = None) -> str:
        """Run the command. Return what it prints to both streams."""
        result = self._attempt(*arguments, old=old)
        assert result.exit_code == status, result.output
        return result.stdout if "--json" in arguments and status == 0 else result.output

    def command(self, name: str, *arguments: str, status: int = 0) -> str:
        """Run another command for the new job. Return its output, as :meth:`run`."""
        result = CliRunner().invoke(
            cli, [*name.split(), "--config", str(self.file), *arguments], catch_exceptions=False
        )
        assert result.exit_code == status, result.output
        return result.stdout if "--json" in arguments and status == 0 else result.output

    def json(self, *arguments: str) -> dict[str, Any]:
        """Run the command with ``--json``."""
        found: dict[str, Any] = json.loads(self.run(*arguments, "--json"))
        return found

    def init(self, name: str, *arguments: str) -> JobConfig:
        """Write the configuration, as a user would."""
        refused = self.refusal(name, *arguments)
        assert refused is None, refused
        return self.config

    def refusal(self, name: str, *arguments: str) -> str | None:
        """Write the configuration, as a user would. Return what the command says if it refuses the job."""
        state = f"state.dir={self.directory / 'state'}"
        servers = f"kafka.bootstrap.servers={self.kafka.bootstrap_servers}"
        settings = ("--set", servers, "--set", state, "--set", "task.commit.timeout.ms=30000")
        result = self._attempt("--init", "--name", name, *settings, *arguments)
        assert result.exit_code in (0, 2), result.output
        return result.output if result.exit_code else None

    @property
    def config(self) -> JobConfig:
        """Return the configuration from the file."""
        return JobConfig.from_file(self.file)


def state(config: JobConfig) -> tuple[list[dict[str, dict[bytes, bytes]]], list[Mapping[str, int]]]:
    """Return the state of every task by store, and its input offsets, as the new job opens them. What a local copy has
    must be what the backends have."""
    states, offsets, restored = opened(config)
    if "local" in restored:
        place = Path(str(config.state_dir)) / "elsewhere" / uuid4().hex
        elsewhere = opened(JobConfig.from_mapping(config.to_mapping(), {"state.dir": str(place)}))
        assert (states, offsets) == elsewhere[:2]
        assert "local" not in elsewhere[2]
    return states, offsets


def opened(config: JobConfig) -> tuple[list[dict[str, dict[bytes, bytes]]], list[Mapping[str, int]], set[str]]:
    """Return the state of every task by store, its input offsets, and what the stores were restored from."""
    states, offsets, restored = [], [], set()
    with StateManager(config) as manager:
        for number in range(config.tasks):
            with manager.open_task(f"Partition {number}") as task:
                assert task.last_checkpoint is not None
                restored.update(one.factory for one in task.restored)
                states.append(
                    {
                        name: dict(task.store(name, key_serde="bytes", value_serde="bytes").range())
                        for name in config.stores
                    }
                )
                offsets.append(dict(task.last_checkpoint.input_offsets))
    return states, offsets, restored


def whole(config: JobConfig, store: str) -> dict[bytes, bytes]:
    """Return the keys of a store over all tasks. Each key must be in exactly one task."""
    found: dict[bytes, bytes] = {}
    for of_task in state(config)[0]:
        assert not found.keys() & of_task[store].keys()
        found |= of_task[store]
    return found


Make = Callable[..., Adopter]
