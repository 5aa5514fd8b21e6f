"""Jobs of other software are adopted, moved to blobs, given another number of tasks, rolled back, and moved back.

Oracle: the totals of every key, computed from the rows alone. ``make journeys`` runs the same with a million keys.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import tomlkit
from confluent_kafka.admin import AdminClient, NewPartitions

from statemgr import JobConfig, StateManager
from statemgr.config.factories import BLOB_STORE, KAFKA_CHANGELOG
from statemgr.ids import task_name
from statemgr.model.keys.partitioners import murmur2
from tests.jobs import elsewhere
from tests.project.test_examples import example
from tests.servers import KafkaServer

pytestmark = [pytest.mark.integration, pytest.mark.long, pytest.mark.timeout(3600)]
KEYS = int(os.environ.get("STATEMGR_TEST_JOURNEY_KEYS", "5000"))
ROOT = Path(__file__).resolve().parents[2]

Totals = dict[str, int]


class Journey:
    """The new job, and the state that it must have.

    Args:
        key_of: maps a message's key to the store's key.
    """

    def __init__(self, file: Path, store: str, key_of: Callable[[str], str]) -> None:
        self.file, self._store, self._key_of = file, store, key_of
        self.expected = {key_of(f"key-{number}"): 2 for number in range(KEYS)}
        self._started = time.monotonic()
        self._elsewhere = 0

    @property
    def config(self) -> JobConfig:
        return JobConfig.from_file(self.file)

    def statemgr(self, *arguments: str) -> str:
        """Run a command on the job, which must succeed."""
        command = [sys.executable, "-m", "statemgr", *arguments, "--config", str(self.file)]
        ran = subprocess.run(command, capture_output=True, text=True, check=False)
        assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-3000:]
        self._log(" ".join(arguments))
        return ran.stdout

    def process(self, step: int) -> None:
        """Give every 97th key another row and delete every 1,009th, with one commit for each task."""
        config = self.config
        changes: list[dict[str, int | None]] = [{} for _ in range(config.tasks)]
        for number in range(step, KEYS, 97):
            message = f"key-{number}"
            key = self._key_of(message)
            value = None if number % 1009 == 0 else self.expected.get(key, 0) + 1
            changes[murmur2([message.encode()])[0] % config.tasks][key] = value
            if value is None:
                self.expected.pop(key, None)
            else:
                self.expected[key] = value
        with StateManager(config) as manager:
            for number, of_task in enumerate(changes):
                with manager.open_task(task_name(number)) as task:
                    store = task.store(self._store)
                    kind = type(next(value for _, value in store.range()))  # text or a number, depending on the serde
                    for key, value in of_task.items():
                        if value is None:
                            store.delete(key)
                        else:
                            store.put(key, kind(value))
                    assert task.last_checkpoint is not None
                    task.commit(task.last_checkpoint.input_offsets)
        self._log(f"rows {step}")

    def check(self, *factories: str) -> None:
        """Check that another machine that restores from each of these backends has exactly the expected totals."""
        for factory in factories:
            self._elsewhere += 1
            config = elsewhere(self.config, self.file.parent / f"elsewhere-{self._elsewhere}", factory)
            found: Totals = {}
            with StateManager(config) as manager:
                for number in range(config.tasks):
                    with manager.open_task(task_name(number)) as task:
                        of_task = {key: int(value) for key, value in task.store(self._store).range()}
                    assert not found.keys() & of_task.keys(), "a key is in two tasks"
                    found |= of_task
            assert found == self.expected, list(found.items() ^ self.expected.items())[:10]
            self._log(f"{factory}: {len(found):,} keys are equal")

    def set(self, table: str, key: str, value: object) -> None:
        """Edit the configuration as a user does."""
        document = tomlkit.parse(self.file.read_text())
        section: Any = document
        for name in table.split("."):
            section = section.setdefault(name, tomlkit.table())
        section[key] = value
        self.file.write_text(tomlkit.dumps(document))

    def move(self, command: str, stage: int, *factories: str) -> None:
        """Move one stage, with a restart and rows in between."""
        self.statemgr("migrate", command, "--write")
        self.process(stage)
        self.statemgr("migrate", command, "--wait", "--timeout", "60")
        if len(factories) > 1:
            self.statemgr("migrate", "verify")
        self.check(*factories)

    def older_checkpoints(self) -> Sequence[str]:
        """The checkpoint of each task before its current one."""
        found: dict[str, list[Any]] = {}
        for one in json.loads(self.statemgr("checkpoints", "list", "--json")):
            found.setdefault(one["task"], []).append(one)
        return [sorted(of_task, key=lambda one: one["offset"])[-2]["checkpoint_id"] for of_task in found.values()]

    def _log(self, what: str) -> None:
        print(f"{time.monotonic() - self._started:7.1f} s  {what}", flush=True)


@pytest.mark.parametrize(
    "name",
    [
        "from-kafka-streams",
        pytest.param("from-quix", marks=pytest.mark.heavy),
        pytest.param("from-samza", marks=pytest.mark.heavy),
    ],
)
def test_the_whole_way_of_an_adopted_job(kafka: KafkaServer, tmp_path: Path, name: str) -> None:
    """The job moves through stages 1 to 4, from 2 tasks to 3, to an older checkpoint and back to stage 1, and its
    totals are exact at each step."""
    begun = time.monotonic()
    with example(kafka, name, "--keys", str(KEYS), "--each", "1") as printed:
        print(f"{time.monotonic() - begun:7.1f} s  the old job, its adoption, and as many rows with the new one")
        file = Path(printed.splitlines()[-1].partition(": ")[2])
        assert f"{KEYS} keys, and each has counted 2 rows" in printed
        config = JobConfig.from_file(file)
        (store,) = config.stores
        quix = name == "from-quix"
        journey = Journey(file, store, (lambda key: f'{key}|"rows"') if quix else lambda key: key)
        journey.check(KAFKA_CHANGELOG)
        journey.set("blob.store", "uri", (tmp_path / "blobs").as_uri())
        journey.move("advance", 2, KAFKA_CHANGELOG, BLOB_STORE)
        journey.move("advance", 3, BLOB_STORE, KAFKA_CHANGELOG)
        journey.move("advance", 4, BLOB_STORE)

        done = json.loads(journey.statemgr("rescale", "--tasks", "3", "--write", "--json"))
        assert (done["partitioner"], done["keys"]) == ("quix-murmur2" if quix else "murmur2", len(journey.expected))
        journey.check(BLOB_STORE)
        (topic,) = config.inputs
        admin = AdminClient({"bootstrap.servers": kafka.bootstrap_servers})
        admin.create_partitions([NewPartitions(topic, 3)])[topic].result(30)
        journey.process(5)
        journey.check(BLOB_STORE)

        before = dict(journey.expected)
        journey.process(6)
        to = [word for checkpoint in journey.older_checkpoints() for word in ("--to", checkpoint)]
        journey.statemgr("checkpoints", "rollback", *to, "--write")
        journey.expected = before
        journey.check(BLOB_STORE)

        journey.move("rollback", 3, BLOB_STORE, KAFKA_CHANGELOG)
        journey.move("rollback", 2, KAFKA_CHANGELOG, BLOB_STORE)
        journey.move("rollback", 1, KAFKA_CHANGELOG)
