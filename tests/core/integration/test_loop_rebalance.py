"""Rebalances during restores, between members that run in separate processes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from statemgr import JobConfig
from tests.commits import commit
from tests.core.integration.s3_proxy import Fault, S3Proxy
from tests.jobs import contents, elsewhere, job_mapping, with_changes
from tests.loop_members import Process, make_topic, produce
from tests.servers import KafkaServer, S3Server

PARTITIONS = 4


@pytest.fixture
def processes() -> Iterator[list[Process]]:
    """Kill the members that a failed test leaves behind."""
    started: list[Process] = []
    yield started
    for process in started:
        process.kill()


@pytest.mark.parametrize("strategy", ["range", pytest.param("cooperative-sticky", marks=pytest.mark.long)])
def test_partitions_that_come_and_go_during_their_restore(
    kafka: KafkaServer, s3: S3Server, tmp_path: Path, processes: list[Process], strategy: str
) -> None:
    """FAULT 40: members join and leave while restores run. No member ends by itself, and every row is counted once. The
    same holds for a strategy that takes partitions away one by one."""
    topic, group = kafka.fresh_name("in"), kafka.fresh_name("group")
    make_topic(kafka, topic, PARTITIONS)
    config = JobConfig.from_mapping(
        job_mapping(
            kafka,
            tmp_path,
            tasks=PARTITIONS,
            backup=("blob-store",),
            s3=s3,
            task__commit__ms=300,
            kafka__consumer__session__timeout__ms=6000,
            kafka__consumer__heartbeat__interval__ms=500,
            kafka__consumer__partition__assignment__strategy=strategy,
        )
    )
    rows = {b"old%d" % number: b"0" for number in range(2000)}
    for index in range(PARTITIONS):
        commit(config, rows, {f"{topic}-{index}": 0}, task=f"Partition {index}")
    produce(kafka, topic, PARTITIONS, range(400))
    with S3Proxy(s3.endpoint) as proxy:
        proxy.faults.append(Fault("GET", times=10_000, wait=1.0))

        def start(number: int) -> Process:
            own = elsewhere(config, tmp_path / f"machine-{number}", "blob-store")
            slow = with_changes(own, blob__store__s3__endpoint=proxy.endpoint)
            processes.append(Process.start(slow, group, topic, tmp_path / f"{number}.log"))
            return processes[-1]

        first = start(0)
        first.wait_for(_is_restoring)
        second = start(1)
        second.wait_for(_is_restoring)
        seconds, error = second.terminate()
        assert error is None
        assert seconds < 8
        # the partitions return to the first member while it may still be restoring them, and then leave it again
        third = start(2)
        third.wait_for(_is_restoring)
        proxy.faults[0].times = 0

        def all_processed(_: list[str]) -> bool:
            return len({line for process in processes for line in process.processed()}) == 400

        first.wait_for(all_processed)
        for process in (first, third):
            assert process.child.poll() is None, "no member ended by itself"
            _, error = process.terminate()
            assert error is None, error
    found = [contents(config, f"Partition {index}") for index in range(PARTITIONS)]
    assert sum(offsets[f"{topic}-{index}"] for index, (_, offsets) in enumerate(found)) == 400
    counts: Counter[bytes] = Counter()
    for state, _ in found:
        counts.update({key: int(value) for key, value in state["totals"].items() if key.startswith(b"k")})
    assert counts == {b"k%d" % key: 8 for key in range(50)}


def _is_restoring(lines: list[str]) -> bool:
    return "phase restore.plan" in lines
