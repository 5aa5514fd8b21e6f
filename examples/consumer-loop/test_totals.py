"""Tests the job in memory: ``pytest examples/consumer-loop`` needs no servers and takes a few seconds."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from totals import process

from statemgr import JobConfig
from statemgr.testing import JobTester


@pytest.fixture
def tester() -> Iterator[JobTester]:
    """The job with its real configuration, on servers in memory."""
    config = JobConfig.from_file(Path(__file__).with_name("job.toml"))
    with JobTester(config, process) as tester:
        yield tester


def test_quantities_add_up(tester: JobTester) -> None:
    """The store has a change as soon as its message was processed."""
    tester.send("orders", key="mug", value="2", partition=0)
    tester.send("orders", key="mug", value="3", partition=0)
    assert tester.store("totals", task="Partition 0").get("mug") == 5


def test_output_appears_with_the_commit(tester: JobTester) -> None:
    """Output belongs to the transaction of the commit."""
    tester.send("orders", key="mug", value="2", partition=0)
    assert tester.output("totals-out") == []
    tester.advance(seconds=60)  # task.commit.ms
    assert [record.value for record in tester.output("totals-out")] == [b"2"]


@pytest.mark.parametrize("backend", ["blob-store", "kafka-changelog"])
def test_a_crash_loses_nothing(tester: JobTester, backend: str) -> None:
    """Each order counts once, whichever backend restores the state."""
    tester.send("orders", key="mug", value="2", partition=0)
    tester.commit()
    tester.send("orders", key="mug", value="3", partition=0)
    tester.crash()
    tester.restore(backend)  # and process the second order again
    assert tester.store("totals", task="Partition 0").get("mug") == 5
    tester.commit()
    assert [record.value for record in tester.output("totals-out")] == [b"2", b"5"]
