"""Disks of brokers that fill: one broker of three, and the only one.

The directory of a broker is a file system of its own in memory. Another file fills it, as other software would.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from statemgr import JobConfig
from tests.clusters.brokers import ProxiedBroker, running_cluster
from tests.clusters.recording import TaskClient
from tests.clusters.test_brokers import check, commits, own_topics, replicated
from tests.jobs import job_mapping
from tests.kafka_jobs import wait_until
from tests.servers import KafkaServer
from tests.small_disks import fill, mounted

pytestmark = pytest.mark.heavy
#: What the files of a broker take, with space to spare.
_SIZE = "size=96m"


@contextmanager
def full(directory: Path) -> Iterator[None]:
    """Leave no byte free below a directory while the block runs."""
    other = directory / "other-software"
    fill(other)
    assert shutil.disk_usage(directory).free == 0
    try:
        yield
    finally:
        other.unlink()


def test_the_disk_of_one_of_three_brokers_fills(tmp_path: Path) -> None:
    """FAULT 16: the other two brokers go on, and the third one comes back when its disk has space again."""
    disk = tmp_path / "cluster" / "broker-2"
    with mounted(disk, _SIZE), running_cluster(tmp_path / "cluster") as cluster:
        config, broker = replicated(cluster, tmp_path), cluster.brokers[1]
        client = TaskClient(config, tmp_path / "log")
        commits(client, 2)
        with full(disk):
            wait_until(lambda: client.commit() and cluster.in_sync(config.checkpoint_topic) < 3, 120)
            commits(client, 3)
        broker.kill()
        broker.start()
        cluster.settled(*own_topics(config))
        commits(client, 2)
        client.close()
        check(config, tmp_path)


def test_the_disk_of_the_only_broker_fills(tmp_path: Path) -> None:
    """Commits fail with an error that may pass, and after the broker's restart nothing is lost or doubled."""
    disk = tmp_path / "kafka"
    with mounted(disk, _SIZE):
        broker = ProxiedBroker(directory=disk)
        broker.start()
        try:
            kafka = KafkaServer(bootstrap_servers=broker.bootstrap_servers, kind="local")
            config = JobConfig.from_mapping(job_mapping(kafka, tmp_path, task__commit__timeout__ms=6000))
            client = TaskClient(config, tmp_path / "log")
            commits(client, 2)
            with full(disk):
                wait_until(lambda: not client.commit(), 120)
                assert client.errors[-1].exit_status == 3, client.errors
            broker.kill()
            broker.start()
            commits(client, 3)
            client.close()
            check(config, tmp_path)
        finally:
            broker.stop(2.0)
