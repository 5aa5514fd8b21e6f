"""A process that has closed a job keeps nothing of it: it may open thousands, one after the other."""

from __future__ import annotations

import threading
from pathlib import Path

import psutil

from statemgr import JobConfig, StateManager
from statemgr.reader import JobReader
from tests.commits import TASK
from tests.jobs import SEGMENTS, elsewhere, job_mapping
from tests.kafka_jobs import wait_until
from tests.servers import KafkaServer, S3Server


def test_no_thread_and_no_connection_is_left(kafka: KafkaServer, s3: S3Server, tmp_path: Path) -> None:
    """An owner commits, another one restores, and a reader reads: each closes its threads and its connections."""
    port = int(s3.endpoint.rpartition(":")[2].strip("/"))

    def connections() -> int:
        return sum(1 for one in psutil.Process().net_connections("tcp") if one.raddr and one.raddr.port == port)

    before, connected = set(threading.enumerate()), connections()
    config = JobConfig.from_mapping(job_mapping(kafka, tmp_path, s3=s3, kind=SEGMENTS))
    with StateManager(config) as manager, manager.open_task(TASK) as task:
        for number in range(500):
            task.store("totals").put(b"%d" % number, bytes(5000))
        task.commit({"orders-0": 1})
    there = elsewhere(config, tmp_path / "there", "blob-store")
    with StateManager(there) as manager, manager.open_task(TASK) as task:
        assert len(list(task.store("totals").range())) == 500
    away = elsewhere(config, tmp_path / "reader", "blob-store")
    with JobReader(away) as reader, reader.open_store(TASK, "totals") as store:
        assert len(list(store.scan(None, None))) == 500
    wait_until(lambda: set(threading.enumerate()) <= before, 60)
    assert connections() <= connected
