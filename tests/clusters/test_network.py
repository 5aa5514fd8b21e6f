"""The network between an owner and its servers is cut, in one direction or both, slow, or reset in the middle.

What an owner is told must be right, and it must end within its time. Afterwards it goes on.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from statemgr import JobConfig
from tests.clusters.proxies import TcpProxy
from tests.clusters.recording import TaskClient, read_in_the_end, recorded
from tests.clusters.soak_servers import Servers
from tests.jobs import DUAL
from tests.kafka_jobs import wait_until

pytestmark = pytest.mark.heavy
#: What happens to a connection.
FAULTS: dict[str, Callable[[TcpProxy], None]] = {
    "cut": TcpProxy.cut,
    "requests are lost": lambda proxy: proxy.cut("up"),
    "answers are lost": lambda proxy: proxy.cut("down"),
    "slow": lambda proxy: proxy.slow(3000),
    "reset": TcpProxy.reset,
}


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    """A broker and an S3 server behind proxies."""
    found = Servers(tmp_path_factory.mktemp("servers"))
    with found.running():
        yield found


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("to", ["broker", "s3"])
def test_an_owner_behind_a_bad_network(servers: Servers, tmp_path: Path, to: str, fault: str) -> None:
    """FAULTS 4, 8, 9 and 15 at random moments of commits and restores: each call ends in time, with a right answer."""
    name = servers.kafka().fresh_name("job")
    changes = {"task.commit.timeout.ms": 5000, "task.commit.snapshot.interval": ["3 commits"]}
    config = JobConfig.from_mapping(servers.mapping("LOOPS", name, 1, tmp_path / "state") | changes)
    proxy = servers.broker.proxies["LOOPS"] if to == "broker" else servers.s3_proxies["LOOPS"]
    chance = random.Random(f"{to} {fault}")
    client = TaskClient(config, tmp_path / "log")
    wait_until(client.commit)
    for _ in range(3):
        for _ in range(chance.randrange(4)):
            client.commit()
        FAULTS[fault](proxy)
        began = time.monotonic()
        client.commit()
        # an opening has a minute for the topic, and each upload its retries within the time of the commit
        assert time.monotonic() - began < 120, client.errors
        proxy.heal()
        wait_until(client.commit, 120)
    client.close()
    assert all(error.exit_status in (1, 3) for error in client.errors), client.errors
    direct = JobConfig.from_mapping(servers.mapping(None, name, 1, tmp_path / "direct"))
    read_in_the_end(direct, tmp_path, tmp_path / "log", DUAL)
    history = recorded([tmp_path / "log"])
    assert history.problems() == []


def test_a_commit_that_was_published_although_its_answer_is_lost(servers: Servers, tmp_path: Path) -> None:
    """Connections to the broker hang open for longer than every timeout, with the answer to a commit in them."""
    name = servers.kafka().fresh_name("job")
    changes = {"task.commit.timeout.ms": 4000}
    config = JobConfig.from_mapping(servers.mapping("LOOPS", name, 1, tmp_path / "state") | changes)
    client = TaskClient(config, tmp_path / "log")
    wait_until(client.commit)
    proxy = servers.broker.proxies["LOOPS"]
    sent = proxy.passed["up"]
    lost = 0
    for _ in range(6):
        proxy.cut("down")
        lost += not client.commit()
        proxy.heal()
        wait_until(client.commit, 120)
    client.close()
    assert lost
    assert proxy.passed["up"] > sent
    direct = JobConfig.from_mapping(servers.mapping(None, name, 1, tmp_path / "direct"))
    read_in_the_end(direct, tmp_path, tmp_path / "log", DUAL)
    assert recorded([tmp_path / "log"]).problems() == []
