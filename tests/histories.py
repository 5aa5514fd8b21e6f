"""Histories of one task with several checkpoints to go back to."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from statemgr import JobConfig
from tests.commits import TASK, check_blobs, commit, current, totals
from tests.jobs import job_mapping
from tests.servers import KafkaServer

OTHER = "Partition 1"


def job(kafka: KafkaServer, directory: Path, **more: object) -> JobConfig:
    """Create a job that retains five checkpoints."""
    return JobConfig.from_mapping(job_mapping(kafka, directory, **{"task__checkpoint__retained": 5, **more}))  # type: ignore[arg-type]


def history(config: JobConfig, count: int = 4) -> list[dict[bytes, bytes]]:
    """Commit some states of one task, and return all of them, oldest first. Each deletes, changes and adds keys."""
    states: list[dict[bytes, bytes]] = []
    state: dict[bytes, bytes] = {}
    for number in range(count):
        items: dict[bytes, bytes | None] = {
            b"new-%d" % number: b"%d" % number * 300,
            b"same": b"%d" % number,
            b"new-%d" % (number - 1): None,
        }
        commit(config, items, number)
        state = {k: v for k, v in (state | items).items() if v is not None}
        states.append(state)
    return states


def identity_of(config: JobConfig, number: int, task: str = TASK) -> str:
    """Return the ID of the ``number``-th newest checkpoint; 0 is the current one."""
    record = current(config, task)
    assert record is not None
    return str(record.checkpoints[number].checkpoint_id)


def check_state(config: JobConfig, expected: Mapping[bytes, bytes], task: str = TASK) -> None:
    """Check that every backend has exactly this state of the task, and that every needed blob exists without a TTL."""
    for factory in config.stores["totals"].backup_factories:
        assert totals(config, factory)[task] == expected, factory
    check_blobs(config)
