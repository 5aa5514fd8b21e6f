"""Owners that lose or nearly lose a task: brokers that forget quickly, and suspended processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from confluent_kafka import Consumer, TopicPartition

from statemgr import JobConfig, StateManager
from statemgr.errors import StatemgrError
from statemgr.phases import Phase, add_observer
from statemgr_tools.dev.kafka import KafkaBroker
from tests.jobs import job_mapping
from tests.kafka_jobs import wait_until
from tests.servers import KafkaServer

#: Settings of a broker that aborts a transaction soon after its timeout.
STRICT = {"transaction.abort.timed.out.transaction.cleanup.interval.ms": "200"}


def job(broker: KafkaBroker | KafkaServer, directory: Path, **more: object) -> JobConfig:
    """Return a dual-commit job on the test's own broker. Keys use ``__`` for ``.``."""
    server = KafkaServer(bootstrap_servers=broker.bootstrap_servers, kind="local")
    return JobConfig.from_mapping(job_mapping(server, directory, **more))  # type: ignore[arg-type]


def forgotten(broker: KafkaServer, *transactional_ids: str) -> None:
    """Wait until the broker has forgotten transactional IDs. It records that with a tombstone on its own topic."""
    reader = Consumer(
        {"bootstrap.servers": broker.bootstrap_servers, "group.id": "look", "auto.offset.reset": "earliest"}
    )
    topic = "__transaction_state"
    partitions = reader.list_topics(topic, timeout=60).topics[topic].partitions
    reader.assign([TopicPartition(topic, partition, 0) for partition in partitions])
    known: dict[bytes, bool] = {}

    def are_gone() -> bool:
        for message in reader.consume(500, 0.1):
            key = message.key()
            if message.error() is None and isinstance(key, bytes):
                known[key[4:]] = message.value() is not None  # a version, then the length of the ID
        return all(known.get(one.encode()) is False for one in transactional_ids)

    try:
        wait_until(are_gone)
    finally:
        reader.close()


class Suspended:
    """A process that commits a task and suspends itself at a phase of its second commit."""

    def __init__(self, config: JobConfig, phase: Phase) -> None:
        order = json.dumps({"config": dict(config.to_mapping()), "phase": phase.value})
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.owners", order], stdout=subprocess.PIPE, text=True
        )
        _, status = os.waitpid(self._process.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status), "it ended before it was suspended"

    def go_on(self) -> list[dict[str, Any]]:
        """Wake the process up. Return the outcomes of its commits from then on."""
        self._process.send_signal(signal.SIGCONT)
        out, _ = self._process.communicate(timeout=300)
        return [json.loads(line) for line in out.splitlines()]


def killed_in_all_commits(config: JobConfig) -> None:
    """Run a process that opens every task of a job and dies by SIGKILL while each task has an open transaction."""
    order = json.dumps({"config": dict(config.to_mapping())})
    ended = subprocess.run([sys.executable, "-m", "tests.owners", order], check=False, timeout=600)
    assert ended.returncode == -signal.SIGKILL


def _commit_all_and_die(config: JobConfig) -> None:
    together = threading.Barrier(config.tasks)

    def die(phase: Phase, _: str) -> None:
        if phase is not Phase.COMMIT_TRANSACTION:
            return
        if together.wait(60) == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        threading.Event().wait()  # no task continues

    manager = StateManager(config)
    tasks = [manager.open_task(f"Partition {index}") for index in range(config.tasks)]
    for task in tasks:
        task.store("totals").put(b"number", b"1")
        task.commit({f"orders-{task.name.split()[1]}": 1})
        task.store("totals").put(b"number", b"2")
    add_observer(die)
    for task in tasks:
        task.commit_async({f"orders-{task.name.split()[1]}": 2})
    threading.Event().wait()


def _main() -> None:
    """Run the process: one commit, then four more, each tried once. The first of the four suspends the process."""
    order = json.loads(sys.argv[1])
    if "phase" not in order:
        _commit_all_and_die(JobConfig.from_mapping(order["config"]))
    with StateManager(JobConfig.from_mapping(order["config"])) as manager, manager.open_task("Partition 0") as task:
        task.store("totals").put(b"number", b"1")
        task.commit({"orders-0": 1})
        waiting = [Phase(order["phase"])]

        def suspend(phase: Phase, _: str) -> None:
            if phase in waiting:
                waiting.clear()
                # sent to this thread: if another thread got the signal, this one could reach the next phase
                signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)

        add_observer(suspend)
        for number in range(2, 6):
            try:
                task.store("totals").put(b"number", b"%d" % number)
                found: dict[str, Any] = {"sequence": task.commit({"orders-0": number}).sequence}
            except StatemgrError as error:
                found = {"error": type(error).__name__, "message": str(error)}
            print(json.dumps(found), flush=True)


if __name__ == "__main__":
    _main()
