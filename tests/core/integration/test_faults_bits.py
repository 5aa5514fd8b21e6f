"""Bits that flip on a broker's disk: a read returns what was written, or an error with its place."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka.admin import AdminClient, NewTopic

from statemgr import JobConfig, StateManager
from statemgr.errors import CorruptRecord
from statemgr.kafka.checkpoint_topic import CheckpointTopic
from statemgr.kafka.transactions.publisher import TransactionalPublisher
from statemgr.local.machine import SystemClock
from statemgr.model import codecs
from statemgr_tools.dev.kafka import KafkaBroker
from tests.commits import TASK
from tests.jobs import DUAL, elsewhere, job_mapping
from tests.kafka_jobs import a_record, job
from tests.log_segments import UNCOVERED, batches, flip, segment

ROOT = Path(__file__).parents[3]
#: The checkpoint with the damaged record, among many: a broker that starts checks only the last 4 KiB of a log.
_HIT, _LAST = 20, 40
#: Processes that read at the same time.
_READERS = 4


def _publish_all(configs: list[JobConfig]) -> None:
    """Publish the same checkpoints to the topic of each of these configurations."""
    publisher = TransactionalPublisher(configs[0], "bits", SystemClock())
    publisher.fence()
    try:
        for number in range(1, _LAST + 1):
            with publisher.transaction() as transaction:
                for config in configs:
                    for key, value in codecs.encode_record(a_record(config, number)):
                        transaction.send(config.checkpoint_topic, key, value, partition=0)
    finally:
        publisher.close()


def _make(broker: KafkaBroker, topics: list[str]) -> None:
    new = [NewTopic(topic, 1, 1, config={"cleanup.policy": "compact"}) for topic in topics]
    admin = AdminClient({"bootstrap.servers": broker.bootstrap_servers})
    for made in admin.create_topics(new, operation_timeout=60).values():
        made.result(60)


def read_elsewhere(whole: JobConfig, damaged: Sequence[JobConfig]) -> list[dict[str, Any] | None]:
    """Read topics in other processes. Return what each read gave, or None if librdkafka has ended the process."""
    answers: list[dict[str, Any] | None] = []
    while len(answers) < len(damaged):
        order = {"whole": whole.to_mapping(), "damaged": [one.to_mapping() for one in damaged[len(answers) :]]}
        command = [sys.executable, "-m", "tests.core.integration.read_child"]
        read = subprocess.run(command, input=json.dumps(order), cwd=ROOT, capture_output=True, text=True)
        answers += map(json.loads, read.stdout.splitlines())
        if len(answers) < len(damaged):
            assert read.returncode == -signal.SIGABRT, read.stderr
            answers.append(None)
    return answers


@pytest.mark.long
def test_a_flipped_bit_on_the_checkpoint_topic(own_kafka: Callable[..., KafkaBroker]) -> None:
    """FAULT 43: whichever bit of a record's batch flips, a read returns the same checkpoints or an error with the
    place, or the client ends the process. A bit that the batch's checksum covers is never read as it is.

    After a checksum that does not match, librdkafka (2.16) may continue at a wrong position in the received data, where
    one of its assertions fails. The same happens if a batch becomes shorter than its header.
    """
    broker = own_kafka()
    name = "bits"
    names = [f"bits-{n}" for n in range(41)]
    _make(broker, names)
    configs = [job(broker, name, task__checkpoint__topic=topic) for topic in names]
    _publish_all(configs)
    expected = CheckpointTopic(configs[0], SystemClock()).read()
    assert len(expected[TASK].checkpoints) == _LAST
    broker.stop()
    batch = batches(segment(broker, names[0]).read_bytes())[2 * (_HIT - 1)]
    some = random.Random(43)
    covered = [some.randrange(8 * UNCOVERED, 8 * batch.size) for _ in range(24)]
    # skip the sign bit of the batch's offset: librdkafka drops records before the beginning of the log
    uncovered = (bit for bit in range(0, 8 * UNCOVERED, 9) if bit != 7)
    bits = [*uncovered, *covered]
    for config, bit in zip(configs[1:], bits, strict=False):
        flip(segment(broker, config.checkpoint_topic), 8 * batch.start + bit)
    broker.start()
    assert CheckpointTopic(configs[0], SystemClock()).read() == expected
    hit = list(zip(configs[1:], bits, strict=False))
    assert len(hit) == len(bits)

    with ThreadPoolExecutor(_READERS) as pool:
        parts = [[config for config, _ in hit[number::_READERS]] for number in range(_READERS)]
        answers = list(pool.map(lambda part: read_elsewhere(configs[0], part), parts))
    ended = 0
    for number, (config, bit) in enumerate(hit):
        answer = answers[number % _READERS][number // _READERS]
        if answer is None:
            ended += 1
        elif "where" in answer:
            assert {"topic": config.checkpoint_topic, "partition": 0}.items() <= answer["where"].items()
            assert bit < 8 * UNCOVERED or answer["where"]["offset"] == batch.offset
        else:
            assert answer == {"same": True}
            assert bit < 8 * UNCOVERED, f"bit {bit} of the batch"
    assert ended < len(hit) / 2


@pytest.mark.long
def test_a_flipped_bit_of_the_newest_checkpoint(own_kafka: Callable[..., KafkaBroker]) -> None:
    """FAULT 43: a read of a damaged newest record fails and never returns the one before it."""
    broker = own_kafka()
    names = [f"newest-{n}" for n in range(12)]
    _make(broker, names)
    configs = [job(broker, "newest", task__checkpoint__topic=topic) for topic in names]
    _publish_all(configs)
    broker.stop()
    some = random.Random(44)
    for config in configs:
        path = segment(broker, config.checkpoint_topic)
        newest = batches(path.read_bytes())[2 * (_LAST - 1)]
        in_offset = config.checkpoint_topic == names[0]
        bit = 8 * 6 if in_offset else some.randrange(8 * UNCOVERED, 8 * newest.size)
        flip(path, 8 * newest.start + bit)
    broker.start()
    for config in configs:
        with pytest.raises(CorruptRecord) as refused:
            CheckpointTopic(config, SystemClock(), stall_s=3).read()
        assert refused.value.where["offset"] in (newest.offset, newest.offset - 1)


@pytest.mark.long
def test_a_flipped_bit_of_a_changelog(own_kafka: Callable[..., KafkaBroker], tmp_path: Path) -> None:
    """FAULT 43: the restore refuses a changelog with a damaged log and names the place, and the next factory restores
    the state."""
    broker = own_kafka()
    configs = []
    for number in range(6):
        directory = tmp_path / str(number)
        directory.mkdir()
        config = JobConfig.from_mapping(job_mapping(broker, directory, name=f"rot-{number}"))  # type: ignore[arg-type]
        configs.append(config)
        with StateManager(config) as manager, manager.open_task(TASK) as task:
            for n in range(3):
                task.store("totals").put(b"key-%d" % n, b"value" * 20)
                task.commit({"orders-0": n})
    state = {b"key-%d" % n: b"value" * 20 for n in range(3)}
    broker.stop()
    some = random.Random(45)
    offsets = []
    for config in configs:
        path = segment(broker, config.stores["totals"].changelog_topic)
        hit = batches(path.read_bytes())[some.choice((0, 2, 4))]
        offsets.append(hit.offset)
        flip(path, 8 * hit.start + some.randrange(8 * UNCOVERED, 8 * hit.size))
    broker.start()
    for number, (config, offset) in enumerate(zip(configs, offsets, strict=True)):
        there = elsewhere(config, tmp_path / f"alone-{number}", "kafka-changelog")
        with StateManager(there) as manager, pytest.raises(CorruptRecord) as refused:
            manager.open_task(TASK)
        place = {"topic": config.stores["totals"].changelog_topic, "partition": 0, "offset": offset}
        assert place.items() <= refused.value.where.items()
        there = elsewhere(config, tmp_path / f"both-{number}", list(DUAL))
        with StateManager(there) as manager, manager.open_task(TASK) as task:
            (restored,) = task.restored
            assert restored.factory == "blob-store"
            assert "CRC" in str(restored.reasons["kafka-changelog"])
            assert dict(task.store("totals").range()) == state
