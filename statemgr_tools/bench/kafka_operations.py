"""Measurements on a broker that run in their own processes: opening jobs, commits, plain consumption.

Each function takes and returns JSON. ``alive`` counts from the start of the process, ``seconds`` is the time of the
operation.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any

from confluent_kafka import Consumer, Producer, TopicPartition

from statemgr import StateManager
from statemgr.config import JobConfig
from statemgr.kafka.checkpoint_topic import CheckpointTopic
from statemgr.operations.adopt.adopt import adopt
from statemgr.operations.adopt.found import Request
from statemgr.operations.adopt.old_topics import OldTopics
from statemgr.operations.adopt.origins import ORIGINS
from statemgr.operations.materialize.tasks import materialize_task
from statemgr.operations.migrate.verify import StoreToVerify, Verifier, hash_parts
from statemgr.ports import no_progress
from statemgr.reader import JobReader
from statemgr.wiring import WorkerProcesses, open_services
from statemgr_tools.bench import records
from statemgr_tools.bench.fresh import seconds_alive
from statemgr_tools.bench.memory import let_go
from statemgr_tools.bench.seed import STORE, TASK

_BATCH = 10_000
_COMMIT_BATCH = 1000
_TIMEOUT_S = 60.0
_PROCESSES = 2


def open_task(config: dict[str, Any], count: int, held: str) -> dict[str, Any]:
    """Open task 0 and read its first keys, whichever backend it restores from."""
    parsed = JobConfig.from_mapping(config)
    let_go(held)
    start = time.perf_counter()
    with StateManager(parsed) as manager, manager.open_task(TASK) as task:
        store = task.store(STORE)
        assert store.get(records.key(0)) is not None
        took, alive = time.perf_counter() - start, seconds_alive()
        assert None not in store.get_many([records.key(n) for n in range(0, count, max(count // 1000, 1))])
        (restored,) = task.restored
        return {
            "seconds": took,
            "alive": alive,
            "factory": restored.factory,
            "records": restored.records,
            "restoring": restored.seconds,
        }


def materialize(config: dict[str, Any], held: str) -> dict[str, Any]:
    """Build the first snapshot of task 0 and offer it."""
    parsed = JobConfig.from_mapping(config)
    let_go(held)
    start = time.perf_counter()
    (done,) = materialize_task(parsed, TASK, again=True)  # an earlier round's offer may still wait
    took, alive = time.perf_counter() - start, seconds_alive()
    return {"seconds": took, "alive": alive, "records": done.records, "uploaded": done.uploaded}


def adopt_and_open(config: dict[str, Any], count: int, held: str, topic: str, source: str) -> dict[str, Any]:
    """Adopt a changelog of one partition in place, as ``statemgr adopt`` does, and open task 0."""
    parsed = JobConfig.from_mapping(config)
    request = Request(ORIGINS["raw"], None, {STORE: topic}, {f"{source}-0": 0}, [source], 1, settle_s=0)
    services = open_services(parsed)
    log = CheckpointTopic(parsed, services.clock, owned=True)
    try:
        with OldTopics(parsed, services.clock) as old:
            adopt(services, log, old, request, in_place=True, progress=no_progress)
    finally:
        log.close()
        services.close()
    return open_task(config, count, held)


def commits(config: dict[str, Any], count: int, each: int) -> dict[str, Any]:
    """Make ``count`` updates, with a commit after each ``each``."""
    batches = list(records.batches(count, size=_COMMIT_BATCH))
    with StateManager(JobConfig.from_mapping(config)) as manager, manager.open_task(TASK) as task:
        store = task.store(STORE)
        start, written = time.perf_counter(), 0
        for batch in batches:
            store.put_many(batch)
            written += len(batch)
            if written % each == 0:
                task.commit({})
        return {"seconds": time.perf_counter() - start}


def read_records(config: dict[str, Any]) -> dict[str, Any]:
    """Read the newest checkpoint of every task from the checkpoint topic."""
    with JobReader(JobConfig.from_mapping(config)) as reader:
        start = time.perf_counter()
        found = reader.records()
        return {"seconds": time.perf_counter() - start, "tasks": len(found)}


def consume(config: dict[str, Any], topic: str, batch: int = _BATCH) -> dict[str, Any]:
    """Consume partition 0 to its end: read every key and value, and do nothing with them."""
    settings = JobConfig.from_mapping(config).kafka_client("consumer")
    # librdkafka's default of one second starves a fast reader
    client = Consumer({**settings, "group.id": "bench", "enable.auto.commit": False, "fetch.queue.backoff.ms": 2})
    start = time.perf_counter()
    low, high = client.get_watermark_offsets(TopicPartition(topic, 0), timeout=_TIMEOUT_S)
    client.assign([TopicPartition(topic, 0, low)])
    position, count = low, 0
    while position < high:
        messages = client.consume(batch, 1.0)
        pairs = [(message.key(), message.value()) for message in messages]
        if messages:
            position = (messages[-1].offset() or 0) + 1
            count += len(pairs)
    took, alive = time.perf_counter() - start, seconds_alive()
    client.close()
    return {"seconds": took, "alive": alive, "records": count}


def fill(config: JobConfig, topic: str, batches: Iterable[Sequence[tuple[bytes, bytes | None]]]) -> None:
    """Write records to partition 0 as fast as possible, without a transaction."""
    producer = Producer(
        {
            **config.kafka_client("producer"),
            "linger.ms": 50,
            "enable.idempotence": True,
            "queue.buffering.max.messages": 1_000_000,
        }
    )
    for batch in batches:
        for key, value in batch:
            while True:
                try:
                    producer.produce(topic, value, key, 0)
                    break
                except BufferError:
                    producer.poll(0.05)
        producer.poll(0)
    assert producer.flush(_TIMEOUT_S) == 0


def hash_backend(config: dict[str, Any], factory: str, held: str = "") -> dict[str, Any]:
    """Hash task 0's store in one backend as ``statemgr migrate verify`` does, on two processes."""
    parsed = JobConfig.from_mapping(config)
    services = open_services(parsed)
    with JobReader(parsed) as reader, WorkerProcesses(parsed, _PROCESSES) as workers:
        (record,) = reader.retaining()
        # as in every measurement, the start of processes does not count
        for started in [workers.submit(hash_parts, ()) for _ in range(_PROCESSES)]:
            started.result()
        let_go(held)
        verifier = Verifier(services, workers.submit, no_progress, processes=_PROCESSES, differences=0)
        start = time.perf_counter()
        found = verifier.verify(StoreToVerify(record, record.current, STORE, (factory,)))
        took = time.perf_counter() - start
    services.close()
    (content,) = found.contents.values()
    return {"seconds": took, "keys": content.keys, "hash": content.hash}
