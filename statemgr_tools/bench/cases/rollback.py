"""``rollback``: the time of ``statemgr checkpoints rollback --write`` for 100 tasks with 100 checkpoints each."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from statemgr import StateManager
from statemgr.config import JobConfig
from statemgr.engine import open_attempt
from statemgr.flows.published import send_records
from statemgr.ids import CheckpointId
from statemgr.local.machine import SystemClock
from statemgr.model.checkpoint import CheckpointRecord
from statemgr.reader import JobReader
from statemgr_tools.bench.fresh import MeasurementFailed
from statemgr_tools.bench.kafka_operations import fill
from statemgr_tools.bench.measure import interleaved
from statemgr_tools.bench.registry import case
from statemgr_tools.bench.result import Line, Target, alone
from statemgr_tools.bench.seed import STORE
from statemgr_tools.bench.session import Session

_TASKS = _RETAINED = 100
#: Bytes of a task's state, and of the changes of its second commit, whose segment the record does not hold.
_STATE, _CHANGES = 100_000, 10_000


@case("rollback")
def rollback(session: Session) -> Iterator[Line]:
    """A rollback of all tasks to any retained checkpoint, from the start of the command to its end."""
    tasks, retained = session.count(_TASKS, least=4), session.count(_RETAINED, least=4)
    config = session.job(
        "rollback", s3=True, job__tasks=tasks, task__backup__factories="blob-store", task__checkpoint__retained=retained
    )
    session.report(f"committing {tasks} tasks")
    _commit(config)
    ids = _retain(config, retained)
    file = session.fresh("rollback") / "job.toml"
    file.write_text("\n".join(f"{json.dumps(key)} = {json.dumps(value)}" for key, value in config.to_mapping().items()))
    chosen = random.Random(1)
    found = interleaved(
        {"rollback": lambda number: _roll_back(file, chosen.choice(ids))}, session.rounds, session.report
    )
    unit = f"s, {tasks} tasks, {retained} checkpoints each"
    yield alone("rollback", found["rollback"].median(), unit, "the whole command", Target("at most", 2, of="value"))


def _commit(config: JobConfig) -> None:
    """Commit two micro-batches of all tasks as Spark does: a snapshot, then a segment of changes."""
    data = random.Random(2)
    with StateManager(config, "spark-hash(string)") as driver:
        epoch = driver.acquire()
        checkpoints = epoch.checkpoints
        for batch, size in enumerate((_STATE, _CHANGES)):
            prepared = []
            for task, checkpoint in checkpoints.items():
                with open_attempt(config, task, checkpoint, epoch) as attempt:
                    attempt.stores[STORE].put(b"%d" % batch, data.randbytes(size))
                    prepared.append(attempt.prepare({"orders-0": batch}))
            checkpoints = driver.publish(prepared)


def _retain(config: JobConfig, retained: int) -> list[str]:
    """Publish more checkpoints of the same state without the flows. Returns: the IDs of all retained checkpoints."""
    with JobReader(config) as reader:
        records: dict[str, CheckpointRecord] = dict(reader.records())
    layout, job_records = next(iter(records.values())).layout, {1, 2}
    for sequence in range(3, retained + 1):
        before, after = records, {}
        for task, record in before.items():
            checkpoint_id = CheckpointId(record.current.checkpoint_id.millis + 1, sequence)
            current = replace(
                record.current, checkpoint_id=checkpoint_id, sequence=sequence, input_offsets={"orders-0": sequence}
            )
            after[task] = record.followed_by(current)
        sent: list[tuple[bytes, bytes | None]] = []
        send_records(config, lambda *pair, to=sent: to.append(pair), layout, before, after, job_records)
        fill(config, config.checkpoint_topic, [sent])
        job_records.add(sequence)
        records = after
    return [str(checkpoint.checkpoint_id) for checkpoint in next(iter(records.values())).checkpoints]


def _roll_back(file: Path, checkpoint_id: str) -> float:
    """Return the seconds of the command. Raises: MeasurementFailed."""
    command = [sys.executable, "-m", "statemgr", "checkpoints", "rollback", "--config", str(file)]
    clock = SystemClock()
    started = clock.monotonic()
    run = subprocess.run([*command, "--to", checkpoint_id, "--write"], capture_output=True, text=True, check=False)
    seconds = clock.monotonic() - started
    if run.returncode != 0:
        raise MeasurementFailed(f"the rollback failed: {run.stderr.strip()[-2000:]}")
    if "is written again" in run.stdout:
        raise MeasurementFailed("the rollback copied data")
    return seconds
