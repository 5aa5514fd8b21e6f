"""Runs the service's code in memory, and crashes it: ``pytest`` (``pip install pytest``). It needs no broker."""

from __future__ import annotations

import pytest
from service import process

from statemgr import JobConfig
from statemgr.testing import JobTester


@pytest.mark.parametrize("backend", ["blob-store", "kafka-changelog"])
def test_each_order_counts_once_also_after_a_crash(backend: str) -> None:
    """What was committed comes back from either backend; the order after it is read again."""
    config = JobConfig.from_file("job.toml")
    (topic,) = config.inputs
    with JobTester(config, process) as tester:
        tester.send(topic, "ada", '{"amount": 5}', partition=0)
        tester.send(topic, "ada", '{"amount": 7}', partition=0)
        tester.commit()
        tester.send(topic, "ada", '{"amount": 100}', partition=0)
        tester.crash(lose_disk=True)
        tester.restore(backend)
        assert tester.store("totals", task="Partition 0").get("ada") == {"orders": 3, "amount": 112}
